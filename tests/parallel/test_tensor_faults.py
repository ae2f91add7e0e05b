"""Faults planted in tensor parallelism: the comparison with one rank finds each."""

import pytest
import tensor_ranks
import torch
from tensor_faults import FAULTS, found

import ranks

LIMIT = {None: 1e-5, "rowwise": 0.1, "current": 1e-12}
"""Largest relative error of what is right, by recipe: the last in float64 (`test_float64.py`); rows of a rank are finer."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    fault = FAULTS[name]
    every = ranks.run(fault.world, found, name)
    if fault.options is None:
        ((hidden, scales),), ((wanted, theirs),) = every[0], tensor_ranks.scaled(None, [("delayed", "all")])
        assert not torch.equal(hidden, wanted) or any(not torch.equal(scales[key], scale) for key, scale in theirs.items())
        return
    options = {"steps": 1} | fault.options
    with tensor_ranks.attention_by_streams(2 if "seed" in options else 1):
        errors = tensor_ranks.errors(every[0], tensor_ranks.trained(fault.shape, None, **options))
    assert max(errors.values()) > 3 * LIMIT[options.get("recipe")], errors
