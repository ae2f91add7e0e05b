"""Gradients summed over the shards in each micro-batch: the sums of whole ones, without them between the micro-batches."""

import each_micro_batch
import pytest
import torch

import ranks

LAYOUTS = {
    "shard": (2, {}, "plain"),
    "hybrid": (4, {"hybrid_shard_degree": 2}, "plain"),
    "replicas": (2, {"hybrid_shard_degree": 1}, "neox"),
    "context": (2, {"context_parallel_degree": 2}, "qwen3"),
    "context and shards": (4, {"context_parallel_degree": 2}, "tied"),
    "experts": (2, {"expert_parallel_degree": 2}, "mixtral"),
    "experts and replicas": (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, "mixtral"),
}


def near(found, expected, bound):
    """Names of tensors that differ by more than `bound` of their norm."""
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if (tensor - expected[name]).norm() > bound * expected[name].norm() + 1e-12]


def both(layout, dtype=torch.float32, recipe=None, **options):
    count, degrees, shape = LAYOUTS[layout]
    plain = ranks.run(count, each_micro_batch.train, degrees, shape, dtype, recipe, **options, sync=False)
    return plain, ranks.run(count, each_micro_batch.train, degrees, shape, dtype, recipe, **options, sync=True)


def check(plain, each, *, bound=1e-6, steps=2, whole=True):
    for (expected, weights), (found, own_weights) in zip(plain, each, strict=True):
        for step in range(steps):
            losses, norm, gradients, digest, kept = expected[step]
            own_losses, own_norm, own_gradients, own_digest, between = found[step]
            slack = 10 if step else 1  # of later steps the weights differ by the rounding of AdamW
            assert near(own_gradients, gradients, slack * bound) == []
            assert own_norm == pytest.approx(norm, rel=slack * bound)
            assert own_losses == pytest.approx(losses, rel=slack * 1e-6)
            assert own_digest == digest
            assert between == [0] * each_micro_batch.MICRO_BATCHES
            assert not whole or kept[0] == kept[1] > 0 == kept[2]
        assert near(own_weights, weights, 1e-5) == []


@pytest.mark.long(lambda layout: layout not in ("shard", "context and shards"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_gradients_are_those_of_one_sum(layout):
    check(*both(layout))


@pytest.mark.long(lambda layout, recipe: (layout, recipe) not in (("shard", "current"), ("shard", "delayed")))
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("layout", ["shard", "hybrid", "experts"])
def test_bf16_and_fp8_share_casts_between_micro_batches(layout, recipe):
    """Gradients arrive as bf16 and are summed in float32 either way; FP8 weights are those of the first micro-batch."""
    check(*both(layout, torch.bfloat16, recipe, steps=1), steps=1)


@pytest.mark.long(lambda layout, options: layout == "hybrid" or bool(options.keys() & {"own_loop", "offload"}))
@pytest.mark.parametrize(
    "options",
    [{"own_loop": True}, {"freeze": ("layers.0", "embed")}, {"skip": 0}, {"recompute": True}, {"offload": True}],
    ids=str,
)
@pytest.mark.parametrize("layout", ["shard", "hybrid"])
def test_own_loops_frozen_parts_skipped_steps_and_recomputation(layout, options):
    plain, each = both(layout, **options)
    check(plain, each)
    if "freeze" in options:
        assert not any("layers.0" in name for name in each[0][0][0][2])


@pytest.mark.long(lambda used: used in ((True, True, True), (True, False)))
@pytest.mark.parametrize("used", [(True, True, True), (False, True), (True, False), (False, False, True)], ids=str)
def test_parts_that_only_some_micro_batches_use(used):
    """Of shards alone each micro-batch adds what it has; for replicas one that differs is refused."""
    degrees = {"hybrid_shard_degree": 2}
    for found, expected in zip(
        ranks.run(2, each_micro_batch.branches, {}, used, sync=True),
        ranks.run(2, each_micro_batch.branches, {}, used, sync=False),
        strict=True,
    ):
        assert near(found, expected, 1e-6) == []
    for found in ranks.run(4, each_micro_batch.branches, degrees, used, sync=True):
        if len(set(used)) == 1:
            assert isinstance(found, dict)
        else:
            assert found.startswith("second.weight has a gradient in some micro-batches")
            assert "others, and parallel.sync_each_micro_batch = true" in found
            assert "parallel.sync_each_micro_batch = false" in found


def test_a_backward_that_fails_says_that_the_step_begins_anew():
    for said, own, expected in ranks.run(2, each_micro_batch.interrupted, sync=True):
        assert said.count("ended in an exception") == 1
        assert "call optimizer.zero_grad()" in said
        assert near(own, expected, 1e-6) == []
