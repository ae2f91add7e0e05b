"""What the tests of the first cast run on every rank: models of tiny weights that have never trained in FP8."""

import sharded
import split_sequences
import torch
from spread_experts import EXPERTS

from octavo.config import MoeConfig
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import RECIPES
from octavo.fp8.scaling import state_records, states_of
from octavo.parallel import world
from octavo.parallel.shards import local_shard

SMALL = {"initializer_range": 1e-4}


def evaluate(degrees, recipe, *, experts=False):
    """The loss and the logits of an evaluation before the first step, of the same batch on every rank, and what has begun."""
    if world.state.world_size > 1 or degrees:
        world.init(degrees)
    options = {"sizes": sharded.SIZES | SMALL | (EXPERTS if experts else {}), "moe": MoeConfig() if experts else None}
    model = sharded.build(torch.float32, RECIPES[recipe](), **options)
    ids = torch.randint(0, 17, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), fp8_autocast(fp8_recipe=RECIPES[recipe]()):
        logits = model(input_ids=ids).logits
    return logits, any(slot.begun.any() for _, state in states_of(model) for slot in state.slots.values())


def step(degrees, recipe, *, experts=False):
    """Gradients of a first step, whose micro-batch is a share of one batch, and the records behind it."""
    options = {"sizes": sharded.SIZES | SMALL | (EXPERTS if experts else {}), "moe": MoeConfig() if experts else None}
    found, records, _ = sharded.train.__wrapped__(degrees, torch.float32, recipe, 1, steps=1, **options)
    return found[0][0], found[0][2], records


def experts_step(degrees, scales):
    """Logits of an evaluation, and gradients of a first step, of the same batch on every rank.

    scales: of each expert's matrices, so that the amaxes of the experts of different ranks differ.
    """
    if degrees:
        world.init(degrees)
    model = sharded.build(torch.float32, RECIPES["delayed"](), sizes=sharded.SIZES | EXPERTS, moe=MoeConfig())
    with torch.no_grad():
        for layer in model.layers:
            for weight in (layer.moe.experts.fc1_weight, layer.moe.experts.fc2_weight):
                whole = sharded.full(weight)
                local_shard(weight).copy_from(
                    whole * torch.tensor(scales).repeat_interleave(len(whole) // len(scales))[:, None]
                )
    ids = torch.randint(0, 17, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), fp8_autocast():
        logits = model(input_ids=ids).logits
    with fp8_autocast():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return logits, {name: sharded.full(p.grad) for name, p in model.named_parameters()}


def sequences(strategy, *, experts=False):
    """Largest error of gradients of a first step whose sequences are split, beside a whole model's, and the records of both."""
    world.init({"context_parallel_degree": 2})
    given = split_sequences.inputs("experts" if experts else "plain")
    how = {"family": "mixtral"} if experts else {}
    gradients, records = [], []
    for split in (False, True):
        model = split_sequences.build(strategy, split=split, recipe=RECIPES["delayed"]() if split else None, **how)
        with fp8_autocast():
            loss = model(**given).loss
        loss.backward()
        gradients.append(split_sequences.gradients(model))
        records.append(state_records(model))
    whole, split = gradients
    return split_sequences.largest_error(split, whole), records
