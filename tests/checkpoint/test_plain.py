"""A state survives as bytes, to the bit and with its types; what would not is refused by name."""

import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.checkpoint.plain import from_json, pack, to_json, unpack

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(SCALARS, inner),
    max_leaves=20,
)


@given(VALUES)
def test_values_come_back_with_their_types(value):
    found = unpack(pack(value))
    assert repr(found) == repr(value)
    assert found == value


@given(VALUES)
def test_values_come_back_from_json_with_their_types(value):
    given = {1: value, "counted": Counter({3: 2})}
    assert repr(from_json(json.loads(json.dumps(to_json(given), allow_nan=False)))) == repr(given)


@pytest.mark.parametrize("stored", [{"unknown": []}, {"float": "x"}, {"dict": [1]}, {"a": 1, "b": 2}])
def test_json_that_is_no_stored_value_is_refused(stored):
    with pytest.raises(ValueError, match="not a stored value"):
        from_json(stored)


def test_tensors_come_back_to_the_bit():
    shared = torch.arange(6.0).view(2, 3)
    given = [
        shared,
        shared.t(),
        torch.tensor(True),
        torch.zeros(0),
        torch.tensor(math.nan),
        torch.ones(2).to(torch.float8_e4m3fn),
    ]
    parameter = torch.nn.Parameter(torch.rand(2, dtype=torch.bfloat16))
    found = unpack(pack(OrderedDict(given=given, parameter=parameter, nan=math.nan)))
    assert type(found) is OrderedDict
    assert math.isnan(found["nan"])
    for one, other in zip([*found["given"], found["parameter"]], [*given, parameter], strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one.float().nan_to_num(7.0), other.detach().float().nan_to_num(7.0))


def test_what_does_not_come_back_is_refused_with_its_place():
    cyclic = []
    cyclic.append(cyclic)
    for value, said in (
        (np.float64(1), "it is of type numpy.float64"),
        ({"a": [1, {2}]}, r"\['a'\]\[1\] is of type builtins.set"),
        (b"x", "builtins.bytes"),
        (torch.Size([1]), "torch.Size"),
        (cyclic, "contains itself"),
        (torch.ones(2, device="meta"), "tensor"),
        (torch.ones(2).to_sparse(), "tensor"),
    ):
        with pytest.raises(TypeError, match=said):
            pack(value)
    for other in (b"", b"x" * 30, pack(1)[:-1][:20]):
        with pytest.raises(ValueError, match="not a packed value"):
            unpack(other)
