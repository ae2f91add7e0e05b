"""Large gradients that are reduced where they lie: those that FSDP2 copies first, to the last bit."""

import pytest
import torch
from sharded import TOKENS, build
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import ranks
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate
from octavo.parallel.fsdp2 import direct_reduce


def gradients(recipe_name, dtype, micro_batches, sizes, layout, large_bytes=direct_reduce.LARGE_BYTES):
    """All gradients as they are reduced and as FSDP2 does it, each with the groups and gradients that it reduced in a step."""
    found = []
    direct_reduce.LARGE_BYTES = large_bytes
    for use in (direct_reduce.use, lambda modules, dtype, one_host: None):
        own, direct_reduce.use = direct_reduce.use, use
        try:
            world.init(layout)
            recipe = None if recipe_name is None else RECIPES[recipe_name]()
            model = build(dtype, recipe, sizes={"num_hidden_layers": 2} | sizes)
        finally:
            direct_reduce.use = own
        draw = torch.Generator().manual_seed(world.state.rank)
        ids = torch.randint(0, sizes["vocab_size"], (2, micro_batches, 2, TOKENS), generator=draw)
        reduced, reduce = [], _fsdp_param_group.foreach_reduce
        _fsdp_param_group.foreach_reduce = lambda *given, reduce=reduce, reduced=reduced: (
            reduced.append(len(given[0])) or reduce(*given)
        )
        seen = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, seen=seen: seen.append(name))
        for step in ids:  # the second adds to the first
            for index, part in enumerate(step):
                accumulate(model, last=index == micro_batches - 1)
                with microbatch(first=index == 0), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                    model(input_ids=part, labels=part, num_items_in_batch=100).loss.backward()
        _fsdp_param_group.foreach_reduce = reduce
        grads = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
        assert sorted(seen) == sorted([*grads, *grads])
        found.append((grads, len(reduced) / len(ids), sum(reduced) / len(ids)))
    return found


CASES = {  # sizes, layout, ranks, groups that FSDP2 does not reduce
    "embedding and head": ({"vocab_size": 18}, {}, 2, 2),
    "tied, beside the norm alone": ({"vocab_size": 18, "tie_word_embeddings": True}, {}, 2, 2),
    "rows that the ranks do not divide": ({"vocab_size": 17}, {}, 2, 0),
    "replicas of shards": ({"vocab_size": 18}, {"hybrid_shard_degree": 2}, 4, 0),
}


@pytest.mark.long(
    lambda recipe, micro_batches, case: (
        micro_batches == 1 or (case != "tied, beside the norm alone" if not recipe else case == "embedding and head")
    )
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("recipe", "dtype"), [(None, torch.float32), (None, torch.bfloat16), ("delayed", torch.bfloat16)])
def test_gradients_are_those_of_fsdp2(recipe, dtype, micro_batches, case):
    sizes, layout, size, spared = CASES[case]
    for (own, reduced, _), (copied, all_reduced, _) in ranks.run(size, gradients, recipe, dtype, micro_batches, sizes, layout):
        assert_same(own, copied)
        assert all_reduced - reduced == spared


@pytest.mark.long(lambda recipe, dtype, micro_batches: micro_batches == 1 or (recipe is None and dtype == torch.bfloat16))
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("recipe", "dtype"), [(None, torch.float32), (None, torch.bfloat16), ("delayed", torch.bfloat16)])
def test_a_large_gradient_of_a_block_is_reduced_apart(recipe, dtype, micro_batches):
    # fc1 [144, 40] of both blocks, in the dtype in which a step of one micro-batch or of several reduces it.
    several = micro_batches > 1 or dtype == torch.float32
    large = 144 * 40 * (4 if several or recipe is not None else 2)
    for (own, reduced, parts), (copied, all_reduced, all_parts) in ranks.run(
        2, gradients, recipe, dtype, micro_batches, {"vocab_size": 18}, {}, large
    ):
        assert_same(own, copied)
        assert all_reduced - reduced == 2  # embedding and head
        assert all_parts - parts == 3 + 2  # those with the norm, and fc1 twice


def assert_same(own, copied):
    assert own.keys() == copied.keys()
    for name, gradient in own.items():
        assert gradient.dtype == copied[name].dtype
        assert torch.equal(gradient, copied[name]), name
