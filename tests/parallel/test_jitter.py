"""Noise of routers over tensor ranks: each token has its own, that of one rank where a group has all tokens."""

import itertools

import jitter_ranks
import pytest
import tensor_ranks
import torch
from jitter_ranks import JITTER, NOISE

import ranks

TENSOR = {"tensor_parallel_degree": 2}
GROUPS = {
    "slices": (2, TENSOR),
    "4 slices": (4, {"tensor_parallel_degree": 4}),
    "whole experts": (2, TENSOR | {"expert_parallel_degree": 2}),
    "whole experts, 4": (4, {"tensor_parallel_degree": 4, "expert_parallel_degree": 2}),
}
"""All tokens are those of one tensor group."""
BALANCED = tensor_ranks.MIXTURE | {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.long(lambda group: group != "slices")
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_trains_as_one_rank_with_the_same_noise(group):
    """Under recomputation, which draws it once more, and with micro-batches."""
    world, degrees = GROUPS[group]
    cells = [
        (shape, {"moe": NOISE, "seed": number} | options)
        for number, (shape, options) in enumerate(
            [
                ("mixtral", {}),
                (BALANCED, {"recompute": True}),
                ("qwen3-moe-mixed", {"recompute": "selective", "micro_batches": 2}),
                ("qwen3-moe", {"given": {"documents": True}, "offload": True}),
            ]
        )
    ]
    found, *_ = ranks.run(world, tensor_ranks.cells, degrees, cells)
    for (shape, options), each in zip(cells, found, strict=True):
        errors = tensor_ranks.errors(each, tensor_ranks.trained(shape, None, **options))
        assert max(errors.values()) < 3e-5, (shape, options, errors)
    quiet = tensor_ranks.trained("mixtral", None, seed=0)
    assert abs(quiet["losses"][0] - found[0]["losses"][0]) > 1e-4


LAYOUTS = GROUPS | {
    "context": (4, TENSOR | {"context_parallel_degree": 2}),
    "samples": (4, TENSOR),
    "replicas": (4, TENSOR | {"hybrid_shard_degree": 1}),
    "whole experts, samples": (4, TENSOR | {"expert_parallel_degree": 4}),
}


@pytest.mark.long(lambda layout, recompute: recompute is False or layout not in ("slices", "context", "samples"))
@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_has_noise_of_its_own_which_recomputation_repeats(layout, recompute):
    world, degrees = LAYOUTS[layout]
    of_ranks = ranks.run(world, jitter_ranks.noises, degrees, "mixtral", recompute)
    for forward, backward, in_evaluation in of_ranks:
        assert len(forward) == 2 * 2  # micro-batches and layers
        assert forward[0].numel() * world == tensor_ranks.SAMPLES * 12 * forward[0].shape[1]
        assert in_evaluation == 0
        calls = sorted(map(torch.Tensor.tolist, backward))
        assert calls == (sorted(forward.tolist()) if recompute else [])
    rows = torch.cat([forward.flatten(0, 1) for forward, _, _ in of_ranks])
    assert len(rows.unique(dim=0)) == len(rows)
    for one, other in itertools.combinations([forward for forward, _, _ in of_ranks], 2):
        assert (one == other).float().mean() < 1e-3
    values = rows.flatten()
    assert values.min() >= 1 - JITTER
    assert values.max() <= 1 + JITTER
    assert values.max() - values.min() > 1.98 * JITTER
    assert values.mean().item() == pytest.approx(1.0, abs=0.01)
    assert values.std().item() == pytest.approx(JITTER / 3**0.5, rel=0.03)


@pytest.mark.long(lambda layout: layout != "slices")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_continuation_draws_the_same_noise(tmp_path, layout):
    world, degrees = LAYOUTS[layout]
    wanted = ranks.run(world, jitter_ranks.saved, tmp_path / "one", degrees, "mixtral")
    for (steps, noise), (again, same) in zip(
        wanted, ranks.run(world, jitter_ranks.continued, tmp_path / "one", degrees, "mixtral"), strict=True
    ):
        assert again == steps
        assert torch.equal(same, noise)
