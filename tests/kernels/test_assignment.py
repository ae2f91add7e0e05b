"""Assignments of tokens to experts: beside Megatron-LM's rule restated in float64, where it ends and where it cannot."""

import pytest
import torch

from octavo.kernels.experts import assignment
from octavo.kernels.experts.assignment import round_robin, sinkhorn, sinkhorn_factors


def published(logits, limit=assignment.LIMIT):
    """Factors of the experts by the published rule in float64, without a shift of the logits, and its steps: [E], number."""
    cost = logits.double().exp()
    tokens, experts = cost.shape
    columns, change, steps = torch.ones(experts, dtype=torch.float64), 1.0, 0
    while change > 1e-4 and steps < limit:
        rows = 1 / (tokens * (cost @ columns + 1e-8))
        before, columns = columns, 1 / (experts * (rows @ cost + 1e-8))
        change, steps = (columns - before).abs().mean().item(), steps + 1
    return columns, steps


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(64, 4, 1), (50, 8, 2), (37, 16, 5), (1, 3, 2), (9, 2, 2)])
@pytest.mark.parametrize("shift", [0.0, 30.0, -30.0])
def test_factors_and_experts_are_those_of_the_published_rule(tokens, experts, top_k, shift):
    logits = torch.randn(tokens, experts) + torch.linspace(-1, 1, experts) + shift
    wanted, _ = published(logits)
    torch.testing.assert_close(sinkhorn_factors(logits).double().exp(), wanted, rtol=1e-3, atol=1e-9)
    transported = logits.double() + wanted.log()
    found = transported.gather(1, sinkhorn(logits, top_k))
    best = transported.topk(top_k).values
    torch.testing.assert_close(found.sort(descending=True).values, best, rtol=0, atol=2e-4)  # ties may go either way


def test_experts_that_plain_probabilities_would_overload_get_equal_loads():
    logits = torch.randn(4096, 8) + torch.linspace(0, 2, 8)
    loads = [torch.bincount(chosen.flatten(), minlength=8) for chosen in (logits.topk(1).indices, sinkhorn(logits, 1))]
    assert loads[0].max() > 2 * 512
    assert (loads[1] - 512).abs().max() < 0.2 * 512


def test_logits_beyond_the_range_of_exp_have_the_factors_of_smaller_ones():
    logits = torch.randn(40, 4)
    far = logits + 1000 * torch.randint(-1, 2, (40, 1))
    far[0] = logits[0] + 1000
    high = sinkhorn_factors(far[far.amax(1) > -500])
    torch.testing.assert_close(high, sinkhorn_factors(logits[far.amax(1) > -500]), rtol=1e-3, atol=1e-3)
    assert sinkhorn_factors(far).isfinite().all()


def test_tokens_that_do_not_count_change_nothing():
    logits, counted = torch.randn(30, 4), torch.arange(30) < 21
    wanted = sinkhorn_factors(logits[:21])
    torch.testing.assert_close(sinkhorn_factors(logits, counted), wanted, rtol=1e-5, atol=1e-6)
    noise = torch.where(counted[:, None], logits, float("nan"))  # padding of any value
    torch.testing.assert_close(sinkhorn_factors(noise, counted), wanted, rtol=1e-5, atol=1e-6)
    assert not sinkhorn_factors(logits, torch.zeros(30, dtype=torch.bool)).any()
    assert sinkhorn(logits[:0], 2).shape == (0, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, 1e30])
def test_any_logits_end_the_iteration_with_experts_that_exist(value):
    logits = torch.randn(20, 4)
    logits[3] = value
    for given in (logits, torch.full((20, 4), value)):
        chosen = sinkhorn(given, 2)
        assert ((chosen >= 0) & (chosen < 4)).all()
        assert (chosen[:, 0] != chosen[:, 1]).all()


def test_factors_that_the_rule_scales_on_and_on_are_those_of_the_limit():
    torch.manual_seed(0)
    logits = torch.randn(512, 8) * 5 + torch.randn(8) * 5
    assert published(logits, limit=4000)[1] == 4000
    wanted, _ = published(logits)
    torch.testing.assert_close(sinkhorn_factors(logits).double().exp(), wanted, rtol=1e-3, atol=1e-9)
    best = (logits.double() + wanted.log()).topk(2).indices
    assert torch.equal(sinkhorn(logits, 2).sort().values, best.sort().values)


def test_more_steps_than_the_rule_takes_change_no_bit(monkeypatch):
    """As in a CUDA graph, where all steps run."""
    logits = torch.randn(64, 4)
    early = sinkhorn_factors(logits)
    looked = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda flag: looked.append(flag) is not None)
    assert torch.equal(sinkhorn_factors(logits).view(torch.int32).__eq__(early.view(torch.int32)).sum(), torch.tensor(4))
    assert len(looked) == assignment.LIMIT


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(12, 4, 2), (7, 4, 3), (5, 8, 1), (0, 4, 2), (3, 3, 3)])
def test_round_robin_has_loads_that_differ_by_one_at_most(tokens, experts, top_k):
    chosen = round_robin(torch.randn(tokens, experts), top_k)
    assert chosen.tolist() == [[(token * top_k + i) % experts for i in range(top_k)] for token in range(tokens)]
    loads = torch.bincount(chosen.flatten(), minlength=experts)
    assert loads.max() - loads.min() <= 1
