"""Replicas of a small model on the ranks of a pool: under `octavo.graphed` with a group, or DistributedDataParallel."""

import contextlib
import hashlib
import os
from typing import ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.checkpoint.shard_io import raw
from octavo.fp8 import buffers
from octavo.fp8.scaling import state_records
from octavo.kernels import algorithms
from octavo.parallel import averaging, graphed

RECIPES = {
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4),
    "current": octavo.recipe.CurrentScaling(),
    "bf16": None,
}
SHAPE = (64, 96, 2)


class Net(torch.nn.Module):
    """Two layers, a bias of three elements and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.layers = torch.nn.Sequential(
            *(octavo.nn.TransformerLayer(*SHAPE, self_attn_mask_type="no_mask") for _ in range(2))
        )
        self.head = torch.nn.Linear(SHAPE[0], 3)

    def forward(self, x):
        return self.head(self.layers(x).mean(1).float()) + self.frozen.mean()


def train(how, recipe, *, steps, large_bytes=averaging.LARGE_BYTES, warmup=graphed.WARM_UP):
    """(losses of this rank, gradients of each step, weights, digest of weights and FP8 state) of one rank."""
    averaging.LARGE_BYTES, averaging.BUCKET_BYTES, averaging.GROUP_BYTES = large_bytes, 10_000, 60_000
    rank, device = dist.get_rank(), own_device()
    torch.manual_seed(rank)  # other initial weights on every rank
    model = Net().to(device)
    called = DistributedDataParallel(model) if how == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(x, y):
        fp8 = octavo.fp8_autocast(enabled=RECIPES[recipe] is not None, fp8_recipe=RECIPES[recipe])
        with torch.autocast(device.type, torch.bfloat16), fp8:
            found = called(x)
        return torch.nn.functional.cross_entropy(found, y)

    def plain(x, y):
        found = loss(x, y)
        found.backward()
        return found.detach()

    groups = {"graphed": lambda: dist.group.WORLD, "graphed by gloo": lambda: dist.new_group(backend="gloo")}
    group = groups.get(how, lambda: None)()
    step = plain if how == "ddp" else octavo.graphed(loss, model.parameters(), warmup=warmup, group=group)
    torch.manual_seed(100 + rank)
    losses, gradients = [], []
    for _ in range(steps):
        x, y = torch.randn(4, 16, SHAPE[0]), torch.randint(3, (4,))
        losses.append(step(x.to(device), y.to(device)).item())
        gradients.append([p.grad.detach().to("cpu", copy=True) for p in model.parameters() if p.requires_grad])
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return losses, gradients, weights, digest(model)


def joins():
    """All-reduces for amaxes in a step of `octavo.graphed`, and in one of a plain loop, on this rank."""
    layer = octavo.nn.Linear(32, 32)

    def loss(x):
        with octavo.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
            return layer(x).square().mean()

    step = octavo.graphed(loss, layer.parameters(), group=dist.group.WORLD)
    found = []
    for way in (step, lambda x: loss(x).backward()):
        with mock.patch.object(buffers, "_join", wraps=buffers._join) as join:
            way(torch.randn(16, 32))
        found.append(join.call_count)
        layer.zero_grad(set_to_none=True)
    return found


def groups():
    """(names in each group of gradients before the first backward, behind it, and as agreed with another rank's) of a rank."""
    averaging.LARGE_BYTES, averaging.GROUP_BYTES = 10_000, 100_000
    model = Net()
    names = {parameter: name for name, parameter in model.named_parameters()}

    def loss(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).square().mean()

    step = octavo.graphed(loss, model.parameters(), group=dist.group.WORLD)
    average = step._average

    def named():
        ends = sorted(average._ends)
        large = [names[parameter] for parameter in average._large]
        return [large[first:end] for first, end in zip([0, *ends], ends, strict=False)]

    found = [named()]
    step(torch.randn(2, 16, SHAPE[0]))
    found.append(named())
    average._agree({0, 2} if dist.get_rank() == 0 else {3})
    return [*found, named()]


def kinds():
    """Ends of groups of two float32 gradients behind two bf16 ones."""
    averaging.LARGE_BYTES = 1024
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
    parameters = [torch.nn.Parameter(torch.ones(1024, dtype=dtype)) for dtype in dtypes]
    return averaging.Average(parameters, dist.group.WORLD)._ends


class Watched(torch.autograd.Function):
    """x · 2, which keeps whether products would expect collectives, and fails in the backward that `broken` asks for."""

    seen: ClassVar[list] = []
    broken = False

    @staticmethod
    def forward(ctx, x):
        Watched.seen.append(algorithms._has_collectives())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Watched.seen.append(algorithms._has_collectives())
        if Watched.broken:
            raise ValueError("broken")
        return grad * 2


def failing():
    """(products' expectation in forward and backward, gradients kept by a failed backward, gradients of the next, means)."""
    averaging.LARGE_BYTES = 1024
    first, second = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(2))

    def loss(x):
        return (Watched.apply(x @ first) @ second).square().mean()

    step = octavo.graphed(loss, [first, second], group=dist.group.WORLD)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    Watched.broken = True
    with contextlib.suppress(ValueError):
        step(x)
    kept = len(step._average._group)
    Watched.broken = False
    first.grad = second.grad = None
    step(x)
    found = [first.grad.clone(), second.grad.clone()]
    first.grad = second.grad = None
    loss(x).backward()
    means = [parameter.grad / dist.get_world_size() for parameter in (first, second)]
    for mean in means:
        dist.all_reduce(mean)
    return Watched.seen[:2], kept, found, means


class Aliased(torch.nn.Module):
    """Parameters whose gradients autograd takes from others without a copy: of a batch of one, and of one another."""

    def __init__(self):
        super().__init__()
        self.weight, self.position = (torch.nn.Parameter(torch.randn(64, 64)) for _ in range(2))
        self.first, self.second = (torch.nn.Parameter(torch.randn(8, 512)) for _ in range(2))
        self.apart = False  # no gradient reaches `position`

    def forward(self, x):
        position = self.position.detach() if self.apart else self.position
        x = (x @ self.weight + position[None]) @ self.weight
        return x * (self.first.view(64, 64) + self.second.view(64, 64))


def means(fails):
    """Gradients of `Aliased` under `octavo.graphed`, and the means over the ranks of those of autograd alone.

    fails: a parameter gets no gradient in a first call; returns the refusal too.
    """
    averaging.LARGE_BYTES = 1024
    torch.manual_seed(0)
    model = Aliased()
    step = octavo.graphed(lambda x: model(x).square().mean(), model.parameters(), group=dist.group.WORLD)
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    refusal = None
    if fails:
        model.apart = True
        try:
            step(x)
        except octavo.errors.InputError as error:
            refusal = str(error)
        model.apart = False
        model.zero_grad()
    step(x)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    wanted = [parameter.grad / dist.get_world_size() for parameter in model.parameters()]
    for share in wanted:
        dist.all_reduce(share)
    return found, wanted, refusal


def own_device():
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def train_entry(name, case, *, steps):
    """(losses of this rank, digest of weights and FP8 state) of an entry of the vision suite."""
    from benchmarks.vision.replicas import REPLICAS
    from benchmarks.worker import labelled_batches

    device = own_device()
    training = REPLICAS[name].build(case, device, False)
    batches = labelled_batches(case, device, dist.get_rank())
    return [training.step(*batches[i % len(batches)]).item() for i in range(steps)], digest(training.model)


def digest(model):
    """A hash of all weights, and one of scales and histories."""
    weights = b"".join(raw(parameter.detach()) for parameter in model.parameters())
    scales = b"".join(raw(tensor) for _, tensor in sorted(state_records(model).items()))
    return hashlib.sha256(weights).hexdigest(), hashlib.sha256(scales).hexdigest() if scales else ""


def shards():
    """{kind: (gradients of two graphed calls, of the plain loop, the refusal with a group)} of a sharded model."""
    found = {}
    for kind, shard in (
        ("fsdp2", fully_shard),
        ("fsdp1", lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=own_device())),
        ("fsdp1 flat", lambda model: FullyShardedDataParallel(model, device_id=own_device())),
    ):
        torch.manual_seed(0)
        model = shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
        x = torch.ones(2, 4) * (1 + dist.get_rank())

        def loss(x, model=model):
            return model(x).square().sum()

        def gradients(run, model=model, x=x):
            kept = []
            for _ in range(2):
                model.zero_grad()
                run(x)
                kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in kept]

        theirs = gradients(lambda x, loss=loss: loss(x).backward())
        ours = gradients(octavo.graphed(loss, model.parameters()))
        try:
            octavo.graphed(loss, model.parameters(), group=dist.group.WORLD)
        except octavo.errors.InputError as error:
            found[kind] = ours, theirs, str(error)
    return found


def refusals():
    """Messages of the calls that are refused on several ranks, and the gradients of a plain call behind them."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    wrapped, x = DistributedDataParallel(model), torch.ones(2, 4)
    unused = torch.nn.Linear(4, 4)
    calls = {
        "ddp": lambda: octavo.graphed(lambda x: wrapped(x).sum(), wrapped.parameters(), group=dist.group.WORLD)(x),
        "ddp alone": lambda: octavo.graphed(lambda x: wrapped(x).sum(), wrapped.parameters())(x),
        "unused": lambda: octavo.graphed(
            lambda x: model(x).sum(), [*model.parameters(), *unused.parameters()], group=dist.group.WORLD
        )(x),
    }
    shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (dist.get_world_size(),))).requires_grad_()
    calls["shards"] = lambda: octavo.graphed(torch.sum, [shard], group=dist.group.WORLD)
    calls["part"] = lambda: octavo.graphed(lambda x: model(x).sum(), model[0].parameters(), group=dist.group.WORLD)(x)
    found = {}
    for name, call in calls.items():
        model.zero_grad()
        try:
            call()
        except octavo.errors.InputError as error:
            found[name] = str(error)
    model.zero_grad()
    wrapped(x).sum().backward()  # is itself again
    return found, [parameter.grad.mean().item() for parameter in model.parameters()]
