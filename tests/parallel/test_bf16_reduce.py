"""Gradients in bf16 between the ranks of a host: the sums of float32, to the last bit, of half the bytes."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from sharded import build, sharding
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import ranks
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate, shard
from octavo.parallel.fsdp2 import direct_reduce


@contextlib.contextmanager
def exchanged():
    """The dtypes that all ranks send to all in here, one an exchange."""
    travelled, exchange = [], dist.all_to_all_single

    def noted(output, given, *rest, **named):
        travelled.append(given.dtype)
        return exchange(output, given, *rest, **named)

    dist.all_to_all_single = noted
    try:
        yield travelled
    finally:
        dist.all_to_all_single = exchange


def gradients(recipe_name, micro_batches, layout, tied):
    """Shards of gradients as among ranks of one host and as among hosts, each with the dtypes that all sent to all."""
    found = []
    for local_size in (str(dist.get_world_size()), "1"):
        os.environ["LOCAL_WORLD_SIZE"] = local_size
        os.environ.pop("MASTER_ADDR", None)
        world.init(layout)
        recipe = None if recipe_name is None else RECIPES[recipe_name]()
        model = build(torch.bfloat16, recipe, sizes={"tie_word_embeddings": tied, "num_hidden_layers": 2})
        ids = torch.randint(0, 17, (micro_batches, 2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
        with exchanged() as travelled:
            for index, part in enumerate(ids):
                accumulate(model, last=index == micro_batches - 1)
                with microbatch(first=index == 0), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                    model(input_ids=part, labels=part, num_items_in_batch=100).loss.backward()
        found.append(({name: p.grad.to_local().clone() for name, p in model.named_parameters()}, set(travelled)))
    return found


@pytest.mark.long(
    lambda recipe, micro_batches, tied: (
        (tied == (micro_batches == 3) and recipe != "delayed") or (recipe == "delayed" and micro_batches == 1)
    )
)
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


class Parts(torch.nn.Module):
    """Blocks, and a part that only some samples go through."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.image = torch.nn.Linear(16, 16)

    def forward(self, x, image):
        x = self.image(x) if image else x
        for layer in self.layers:
            x = layer(x)
        return x


def of_other_parts():
    """Gradients of two micro-batches, of which the first has no image on rank 0: sharded, and of the whole model's sum."""
    world.init({})
    torch.manual_seed(0)
    whole, model = Parts(), Parts()
    model.load_state_dict(whole.state_dict())
    shard(model, list(model.layers), sharding(None, torch.bfloat16), summed=True)
    for i in range(2):
        accumulate(model, last=i == 1)
        for rank in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * i + rank))
            if rank == dist.get_rank():
                model(x.bfloat16(), bool(i or rank)).float().square().mean().backward()
            whole(x, bool(i or rank)).square().mean().backward()
    return [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), whole.parameters(), strict=True)]


def test_ranks_that_have_accumulated_nothing_reduce_as_the_others():
    for gradients_ in ranks.run(2, of_other_parts):
        for gradient, wanted in gradients_:
            assert (gradient - wanted).norm() < 0.02 * wanted.norm()


def after_an_error(direct):
    """Gradients and exchanges of a step, and those of a step behind one whose reduction had no memory."""
    module, name = (direct_reduce, "add_up") if direct else (_fsdp_collectives, "foreach_reduce_scatter_copy_in")
    world.init({})
    model = build(torch.bfloat16, None, sizes={"num_hidden_layers": 1, "vocab_size": 18 if direct else 17})
    ids = torch.randint(0, 17, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    works, found = getattr(module, name), []

    def fail(*_):
        raise torch.OutOfMemoryError

    for fails in (False, True, False):
        setattr(module, name, fail if fails else works)
        model.zero_grad()
        with exchanged() as travelled, contextlib.suppress(torch.OutOfMemoryError):
            model(input_ids=ids, labels=ids, num_items_in_batch=100).loss.backward()
        if not fails:
            found.append(([parameter.grad.to_local().clone() for parameter in model.parameters()], travelled))
    return found


@pytest.mark.parametrize("direct", [False, True])
def test_a_reduction_that_failed_does_not_change_the_next(direct):
    for (first, sent), (second, sent_then) in ranks.run(2, after_an_error, direct):
        assert all(map(torch.equal, first, second))
        assert sent == sent_then
        assert set(sent) == {torch.bfloat16}


def test_replicas_of_shards_add_up_in_float32():
    for (narrow, by_narrow), (wide, _) in ranks.run(4, gradients, None, 1, {"hybrid_shard_degree": 2}, False):
        assert by_narrow == {torch.bfloat16}
        for name, gradient in narrow.items():
            assert torch.equal(gradient, wide[name]), name
