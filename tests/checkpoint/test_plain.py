"""A state survives as bytes, to the bit and with its types; what would not is refused by name."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.checkpoint.plain import pack, unpack

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
        with pytest.raises(ValueError, match="no packed value"):
            unpack(other)
