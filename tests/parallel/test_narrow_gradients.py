"""Gradients in bf16 between the ranks of a host: the sums of float32, to the last bit, of half the bytes."""

import os

import pytest
import torch
import torch.distributed as dist
from sharded import build

import ranks
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate

pytestmark = ranks.alone


def gradients(recipe_name, micro_batches, layout, tied):
    """Shards of gradients as among ranks of one host and as among hosts, each with the dtypes that all sent to all."""
    found = []
    for local_size in (str(dist.get_world_size()), "1"):
        os.environ["LOCAL_WORLD_SIZE"] = local_size
        os.environ.pop("MASTER_ADDR", None)
        world.init(layout)
        recipe = None if recipe_name is None else RECIPES[recipe_name]()
        model = build(torch.bfloat16, recipe, sizes={"tie_word_embeddings": tied, "num_hidden_layers": 2})
        travelled, exchange = set(), dist.all_to_all_single

        def noted(output, given, *rest, exchange=exchange, travelled=travelled, **named):
            travelled.add(given.dtype)
            return exchange(output, given, *rest, **named)

        dist.all_to_all_single = noted
        ids = torch.randint(0, 17, (micro_batches, 2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
        try:
            for index, part in enumerate(ids):
                accumulate(model, last=index == micro_batches - 1)
                with microbatch(first=index == 0), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                    model(input_ids=part, labels=part, num_items_in_batch=100).loss.backward()
        finally:
            dist.all_to_all_single = exchange
        found.append(({name: p.grad.to_local().clone() for name, p in model.named_parameters()}, travelled))
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("recipe", [None, "delayed", "rowwise"])
def test_sums_are_those_of_float32(recipe, micro_batches, tied):
    for (narrow, by_narrow), (wide, by_wide) in ranks.run(2, gradients, recipe, micro_batches, {}, tied):
        assert narrow.keys() == wide.keys()
        for name, gradient in narrow.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, wide[name]), name
        assert by_wide == set()
        assert by_narrow == ({torch.bfloat16} if micro_batches == 1 else set())  # those of several are in float32


def test_replicas_of_shards_add_up_in_float32():
    for (narrow, by_narrow), (wide, _) in ranks.run(4, gradients, None, 1, {"hybrid_shard_degree": 2}, False):
        assert by_narrow == {torch.bfloat16}
        for name, gradient in narrow.items():
            assert torch.equal(gradient, wide[name]), name
