"""What the tests of gradients that are summed in each micro-batch run on every rank."""

import contextlib
import hashlib
import io

import torch
import torch.distributed as dist
from llamas import SHAPES, llama
from torch import nn

import octavo
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError
from octavo.fp8 import scaling
from octavo.fp8.autocast import microbatch
from octavo.parallel import offload, world
from octavo.parallel.fsdp import accumulate, sharded_modules
from octavo.parallel.fsdp2.adapter import groups_of

MICRO_BATCHES = 3


def whole_gradients(model):
    """Bytes of gradients of gathered weights that this rank holds."""
    found = 0
    for group in groups_of(sharded_modules(model)):
        for parameter in group.parameters:
            gradient = parameter.gradient()
            found += 0 if gradient is None else gradient.untyped_storage().nbytes()
    return found


def prepared(degrees, shape, *, sync, dtype=torch.float32, freeze=(), **options):
    offload.SMALLEST_BYTES = 0  # of this rank alone
    world.init({**degrees, "sync_each_micro_batch": sync})
    source = llama(**SHAPES[shape])
    for name, parameter in source.named_parameters():
        parameter.requires_grad_(not any(part in name for part in freeze))
    return octavo.transform(source, dtype=dtype, params_dtype=torch.float32, **options)


def train(degrees, shape, dtype, recipe, *, sync, own_loop=False, steps=2, skip=None, **options):
    """Of each step: losses, the norm, whole gradients by name, FP8 records, bytes between micro-batches; then the weights."""
    model = prepared(degrees, shape, sync=sync, dtype=dtype, **options)
    optimizer = torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=1e-3, eps=1e-4, fused=True)
    draw, found = torch.Generator().manual_seed(1), []
    scaler = octavo.recipe.DelayedScaling() if recipe == "delayed" else octavo.recipe.CurrentScaling()
    for step in range(steps):
        ids = torch.randint(6, 97, (world.state.dp_size * MICRO_BATCHES, 16), generator=draw)
        mine = ids.chunk(world.state.dp_size)[world.state.dp_rank].chunk(MICRO_BATCHES)
        losses, between = [], []
        for index, part in enumerate(mine):
            last = index == MICRO_BATCHES - 1
            if own_loop:
                model.set_requires_gradient_sync(last)
            else:
                accumulate(model, last=last)
            with microbatch(first=index == 0), octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=scaler):
                loss = model(input_ids=part, labels=part, num_items_in_batch=ids.numel()).loss
            loss.backward()
            losses.append(loss.item())
            between.append(whole_gradients(model))
        norm = octavo.clip_grad_norm_(model, 0.5)
        gradients = {name: whole_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        records = scaling.state_records(model).values()
        digest = hashlib.sha256(b"".join(record.numpy().tobytes() for record in records)).hexdigest()
        if step != skip:
            optimizer.step()
        optimizer.zero_grad()
        found.append((losses, norm.item(), gradients, digest, between))
    return found, {name: whole_tensor(p).clone() for name, p in model.named_parameters()}


class Branches(nn.Module):
    """A model whose second matrix not every forward uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, both):
        x = self.first(x)
        return self.second(x) if both else x


def branches(degrees, used, *, sync):
    """Whole gradients after micro-batches that use the second matrix or not, or the refusal."""
    world.init({**degrees, "sync_each_micro_batch": sync})
    torch.manual_seed(3)
    model = octavo.transform(Branches(), dtype=torch.float32)
    draw = torch.Generator().manual_seed(dist.get_rank())
    try:
        for index, both in enumerate(used):
            accumulate(model, last=index == len(used) - 1)
            model(torch.randn(2, 4, generator=draw), both).square().sum().backward()
    except InputError as error:
        return str(error)
    return {name: whole_tensor(p.grad) for name, p in model.named_parameters()}


def interrupted(*, sync):
    """The warning after a backward that an exception ended, and gradients of the step that follows, and of another model."""
    model = prepared({}, "plain", sync=sync)
    ids = torch.arange(6, 38)[None]

    def step():
        for index in range(2):
            accumulate(model, last=index == 1)
            model(input_ids=ids, labels=ids, num_items_in_batch=31).loss.backward()

    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            model.layers[0].register_full_backward_pre_hook(_Once())
            step()
        except RuntimeError as error:
            assert "planned" in str(error)  # noqa: PT017
        model.zero_grad()
        step()
    own = {name: whole_tensor(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    step()
    return said.getvalue(), own, {name: whole_tensor(p.grad) for name, p in model.named_parameters()}


class _Once:
    """Fails in the second backward that it sees."""

    def __init__(self):
        self.seen = 0

    def __call__(self, *_):
        self.seen += 1
        if self.seen == 2:
            raise RuntimeError("planned")
