"""What the tests of tensor parallelism run on every rank: a decoder whose matrices are split beside one that is whole."""

import torch
from llamas import SHAPES, VOCABULARY, llama

import octavo
from octavo.collectives.whole import whole_tensor
from octavo.collectives.blocks import parameters_of, with_block
from octavo.parallel import world

SAMPLES = 4


def batch(tokens=12, documents=False, seed=5):
    """Arguments of the forward for all samples: ids, labels, some of them without a target."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (SAMPLES, tokens), generator=draw)
    given = {"input_ids": ids, "labels": ids.where(torch.rand(ids.shape, generator=draw) < 0.9, -100)}
    if documents:
        given["position_ids"] = torch.arange(tokens).remainder(tokens // 2 + 1)[None].expand(SAMPLES, -1)
    return given


def own_samples(given):
    """Those of this rank among the data-parallel ones."""
    size, rank = world.state.dp_size, world.state.dp_rank
    return {name: value.chunk(size)[rank] for name, value in given.items()}


def whole(model, values):
    """`values(parameter)` of each parameter by name, whole."""
    blocks = parameters_of(model)
    found = {}
    for name, parameter in model.named_parameters():
        value = values(parameter)
        found[name] = None if value is None else whole_tensor(with_block(value, blocks[parameter])).detach().clone()
    return found


def trained(shape, given, *, degrees=None, steps=3, dtype=torch.float32, micro_batches=1, recipe=None, **options):
    """Loss and gradients of the first step, norms, and the parameters after some steps, whole."""
    octavo.shutdown() if degrees is None else octavo.init(degrees)
    changes = SHAPES[shape] if isinstance(shape, str) else shape
    model = octavo.transform(llama(**changes), recipe, dtype=dtype, **options)
    optimizer = torch.optim.AdamW(
        octavo.parameter_groups(model, 0.1), lr=1e-2, eps=1e-3
    )  # a gradient that is 0 but for rounding moves nothing
    found = {"losses": [], "norms": []}
    for step in range(steps):
        count = (given["labels"][:, 1:] != -100).sum().item()
        mine = own_samples(given) if degrees is not None else given
        parts = [
            dict(zip(mine, row, strict=True)) for row in zip(*(x.chunk(micro_batches) for x in mine.values()), strict=True)
        ]
        for part in parts:
            with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                loss = model(**part, num_items_in_batch=count).loss if micro_batches > 1 else model(**part).loss
            loss.backward()
        found["losses"].append(loss.item())
        if step == 0:
            found["gradients"] = whole(model, lambda p: p.grad)
        found["norms"].append(float(octavo.clip_grad_norm_(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = whole(model, lambda p: p)
    return found


def both(shape, degrees, tokens=12, **how):
    """`trained` over the ranks."""
    return trained(shape, batch(tokens), degrees=degrees, **how)


def cells(degrees, cells):
    """`trained` of each (shape, options) over the ranks."""
    return [trained(shape, batch(), degrees=degrees, **options) for shape, options in cells]
