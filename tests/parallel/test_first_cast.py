"""The first cast of delayed scaling over ranks: of a tensor that ranks hold parts of, by the amax of the whole."""

import first_cast
import pytest
import torch
from sharded import LAYOUTS

import ranks


@pytest.mark.long(lambda layout, experts: layout == "replicate 2" or experts == (layout == "shard 2"))
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evaluation_before_the_first_step_has_the_bits_of_one_rank(layout, experts):
    """No rank holds a whole weight, and each casts it by the amax of the whole; nothing begins by it."""
    count, degrees = LAYOUTS[layout]
    one, current = (first_cast.evaluate({}, recipe, experts=experts)[0] for recipe in ("delayed", "current"))
    assert torch.equal(one, current)
    assert one.abs().max() > 0
    for logits, begun in ranks.run(count, first_cast.evaluate, degrees, "delayed", experts=experts):
        assert torch.equal(logits, one)
        assert not begun


@pytest.mark.long(lambda degrees: degrees == {"expert_parallel_degree": 4})
@pytest.mark.parametrize("degrees", [{"expert_parallel_degree": 2}, {"expert_parallel_degree": 4}], ids=str)
def test_experts_over_ranks_are_cast_by_the_largest_amax_of_all(degrees):
    """Not by that of a rank's own experts, of which each has others: no number depends on where an expert is."""
    scales = [0.3, 1.0, 0.7, 1.7]
    one, expected = first_cast.experts_step({}, scales)
    alone = first_cast.experts_step({}, [0.3, 1.0, 0.7, 0.1])[0]  # the experts' part of the logits is no rounding
    assert (alone - one).norm() > 1e-2 * one.norm()
    for logits, gradients in ranks.run(4, first_cast.experts_step, degrees, scales):
        torch.testing.assert_close(logits, one, rtol=1e-5, atol=1e-5 * one.abs().max().item())
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_first_step_trains_as_under_current_scaling(layout):
    """Its gradients have no zeros of a scale of 1; the records behind it are the same on all ranks."""
    count, degrees = LAYOUTS[layout]
    delayed, current = (ranks.run(count, first_cast.step, degrees, recipe) for recipe in ("delayed", "current"))
    for (loss, gradients, records), (want, wanted, _) in zip(delayed, current, strict=True):
        assert loss == want
        assert gradients.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in gradients.items() if "lm_head" not in name)
        first = delayed[0][2]
        assert records.keys() == first.keys()
        assert all(torch.equal(value, first[name]) for name, value in records.items())
        assert all(value.all() for name, value in records.items() if name.endswith("begun"))


@pytest.mark.long(lambda strategy, experts: experts == (strategy == "p2p"))
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("strategy", ["all_gather", "p2p", "a2a"])
def test_ranks_of_a_sequence_cast_its_parts_by_one_scale(strategy, experts):
    for error, (whole, split) in ranks.run(2, first_cast.sequences, strategy, experts=experts):
        assert error < 1e-5
        assert whole.keys() == split.keys()
        for name, value in whole.items():
            torch.testing.assert_close(split[name].double(), value.double(), rtol=1e-5, atol=1e-7)
