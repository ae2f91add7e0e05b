"""Experts that are whole on their rank: the gradients that FSDP2 would have copied, to the last bit."""

import pytest
import torch
from sharded import TOKENS, build
from spread_experts import EXPERTS
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import ranks
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate
from octavo.parallel.fsdp2 import single_rank


def gradients(recipe_name, dtype, micro_batches):
    """All gradients as they are kept and as FSDP2 copies them, each with the groups that it reduced in a step."""
    found = []
    for use in (single_rank.use, lambda modules: None):
        kept, single_rank.use = single_rank.use, use
        try:
            world.init({"expert_parallel_degree": 2})
            recipe = None if recipe_name is None else RECIPES[recipe_name]()
            model = build(dtype, recipe, sizes=EXPERTS)
        finally:
            single_rank.use = kept
        draw = torch.Generator().manual_seed(world.state.rank)
        ids = torch.randint(0, model.config.vocab_size, (2, micro_batches, 2, TOKENS), generator=draw)
        reduced, reduce = [], _fsdp_param_group.foreach_reduce
        _fsdp_param_group.foreach_reduce = lambda *given, reduce=reduce, reduced=reduced: (
            reduced.append(given) or reduce(*given)
        )
        for step in ids:  # the second adds to the first
            for index, part in enumerate(step):
                accumulate(model, last=index == micro_batches - 1)
                with microbatch(first=index == 0), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                    model(input_ids=part, labels=part, num_items_in_batch=100).loss.backward()
        _fsdp_param_group.foreach_reduce = reduce
        found.append(({name: p.grad.to_local().clone() for name, p in model.named_parameters()}, len(reduced) / len(ids)))
    return found


@pytest.mark.long(lambda recipe, micro_batches: micro_batches == 1 or recipe is None)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("recipe", "dtype"), [(None, torch.float32), (None, torch.bfloat16), ("delayed", torch.bfloat16)])
def test_gradients_are_those_that_a_copy_would_be(recipe, dtype, micro_batches):
    for (own, reduced), (copied, all_reduced) in ranks.run(2, gradients, recipe, dtype, micro_batches):
        assert own.keys() == copied.keys()
        assert any("experts" in name for name in own)
        for name, gradient in own.items():
            assert gradient.dtype == copied[name].dtype
            assert torch.equal(gradient, copied[name]), name
        assert all_reduced - reduced == 3  # one group of experts a block
