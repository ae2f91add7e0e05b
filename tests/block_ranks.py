"""A model whose parameters are shared out as tensor parallelism will do it, for the tests of blocks over ranks.

Joined query, key and value with key-value rows of several ranks, gate and up in blocks that a slice cuts, columns, a padded
vocabulary, slices of experts, and parameters that every rank has.
"""

import itertools
import math
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.checkpoint.writer import collect
from octavo.collectives.blocks import declare, indices, local_of, parameters_of, part_of, share_out, with_block
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError
from octavo.models.weight_files import InMemoryWeights
from octavo.models.weight_loader import WeightLoader
from octavo.parallel import world
from octavo.parallel.coordination import all_ranks
from octavo.parallel.deferred_init import CounterInit, FromRank0, Loaded, counter_normal_, materialise
from octavo.parallel.fsdp import check_same_weights
from octavo.parallel.module_init import OwnInit
from octavo.parallel.shards import like, local_shard, named_tensors

HIDDEN, HEAD, QUERIES, INNER, BLOCK, WORDS, EXPERTS = 5, 2, 12, 18, 8, 11, 3
SHAPES = {
    "embedding.weight": (WORDS, HIDDEN),
    "qkv.weight": ((QUERIES + 2 * 2) * HEAD, HIDDEN),
    "qkv.bias": ((QUERIES + 2 * 2) * HEAD,),
    "proj.weight": (HIDDEN, QUERIES * HEAD),
    "proj.bias": (HIDDEN,),
    "gate_up.weight": (2 * INNER, HIDDEN),
    "experts.weight": (EXPERTS, INNER, HIDDEN),
    "norm.weight": (HIDDEN,),
    "router.weight": (1, HIDDEN),
    "overlapping.weight": (10, HIDDEN),
}
"""Of the router's one row the second of two shards has none."""


class Experts(nn.Module):
    def __init__(self, shape, device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device))

    def reset_parameters(self):
        nn.init.uniform_(self.weight)


class Scale(nn.Module):
    def __init__(self, shape, device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device))

    def reset_parameters(self):
        nn.init.normal_(self.weight)


def held(rank, ranks):
    """Of each parameter the indices of each dimension that a tensor rank holds."""

    def span(size):
        return size * rank // ranks, size * (rank + 1) // ranks

    hidden = indices((0, HIDDEN))
    first, last = span(QUERIES)
    head = rank * 2 // ranks  # of two key-value heads, each of which several of more ranks hold
    queries = QUERIES * HEAD
    rows = [(first * HEAD, last * HEAD)]
    for joined in (queries, queries + 2 * HEAD):
        rows.append((joined + head * HEAD, joined + (head + 1) * HEAD) if ranks > 1 else (joined, joined + 2 * HEAD))
    inner = span(INNER)
    gate_up = []
    for begin in range(0, INNER, BLOCK):  # gate rows of a block, then its up rows
        size = min(BLOCK, INNER - begin)
        start, stop = max(begin, inner[0]), min(begin + size, inner[1])
        if start < stop:
            gate_up += [(begin + start, begin + stop), (begin + size + start, begin + size + stop)]
    words = math.ceil(WORDS / ranks)
    own = min(words * rank, WORDS), min(words * (rank + 1), WORDS)
    return {
        "embedding.weight": (indices(own, padding=words - (own[1] - own[0])), hidden),
        "qkv.weight": (indices(*rows), hidden),
        "qkv.bias": (indices(*rows),),
        "proj.weight": (hidden, indices((first * HEAD, last * HEAD))),
        "proj.bias": (hidden,),
        "gate_up.weight": (indices(*gate_up), hidden),
        "experts.weight": (indices((0, EXPERTS)), indices(span(INNER)), hidden),
        "norm.weight": (hidden,),
        "router.weight": (indices((0, 1)), hidden),
        "overlapping.weight": (indices((max(0, span(10)[0] - 2), span(10)[1])), hidden),
    }


def whole_values(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def build(tensor=1, *, shard=True, device="cpu", backwards=False):
    """A model on this rank: `tensor` ranks share each parameter out, and the ranks with the same part shard it by FSDP2.

    backwards: the first rank has the last part.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("shard", "tensor")) if size > 1 else None
    parts = [held(rank, tensor) for rank in range(tensor)][:: -1 if backwards else 1]
    group = None if tensor == 1 else mesh["tensor"].get_group()
    rank = 0 if group is None else dist.get_rank(group)
    blocks = {name: share_out(shape, [part[name] for part in parts], group, rank) for name, shape in SHAPES.items()}
    shapes = {name: block.local.local_shape for name, block in blocks.items()}
    model = nn.Module()
    model.embedding = nn.Embedding(*shapes["embedding.weight"], device=device)
    model.qkv = nn.Linear(*shapes["qkv.weight"][::-1], device=device)
    model.proj = nn.Linear(*shapes["proj.weight"][::-1], device=device)
    model.gate_up = nn.Linear(*shapes["gate_up.weight"][::-1], bias=False, device=device)
    model.experts = Experts(shapes["experts.weight"], device)
    for name in ("norm", "router", "overlapping"):
        model.register_module(name, Scale(shapes[f"{name}.weight"], device))
    if tensor > 1:
        for name, block in blocks.items():
            module, _, own = name.rpartition(".")
            declare(model.get_submodule(module), own, block)
    if shard and size // tensor > 1:
        fully_shard(model, mesh=mesh["shard"])
    return model


def fill_all(model, values):
    """Every parameter from whole values."""
    for name, tensor in named_tensors(model):
        local_shard(tensor).copy_from(values[name])


def give_gradients(model, values):
    """Every gradient from a whole one."""
    blocks = parameters_of(model)
    for name, parameter in model.named_parameters():
        tensor = with_block(parameter, blocks[parameter])
        gradient = like(tensor, torch.full_like(local_of(parameter), torch.nan))
        local_shard(gradient).copy_from(values[name])
        parameter.grad = getattr(gradient, "held", gradient)


def same_as(model, values):
    """Names whose parts, or padding, or gathered wholes, differ from whole values."""
    wrong = []
    for name, tensor in named_tensors(model):
        shard, wanted = local_shard(tensor), values[name].flatten()
        numbers = shard.numbers(0, shard.local.numel())
        if not torch.equal(shard.local.flatten(), torch.where(numbers < 0, 0, wanted[numbers])):
            wrong.append(name)
        if not torch.equal(whole_tensor(tensor), values[name]):
            wrong.append(f"whole {name}")
    return wrong


def start(tensor):
    if dist.is_initialized():
        world.init({})
    return build(tensor)


def initial(tensor):
    """(values of Octavo's initialisation, of the modules' own), of one rank; or what differs from them on several."""
    names = list(SHAPES)
    found = []
    for values in (CounterInit(5, 0.3), OwnInit(7)):
        model = build(tensor, device="meta")
        materialise(model, "cpu", values)
        found.append({name: whole_tensor(tensor).detach().clone() for name, tensor in named_tensors(model)})
        assert sorted(found[-1]) == sorted(names)
        assert same_as(model, found[-1]) == []
    return found


def initialised(tensor, wanted):
    """Names that differ from one rank's initial values."""
    start(tensor)
    found = initial(tensor)
    return [
        name for own, theirs in zip(found, wanted, strict=True) for name in theirs if not torch.equal(own[name], theirs[name])
    ]


def loaded(tensor):
    """Names that differ after weights were read, row by row and from rank 0."""
    world.init({})
    values, wrong = whole_values(), []
    model = build(tensor, device="meta")
    materialise(model, "cpu", Loaded(WeightLoader(model, InMemoryWeights(values))))
    wrong += same_as(model, values)
    model = build(tensor, device="meta")
    from_rank_0 = WeightLoader(model, InMemoryWeights(values)) if dist.get_rank() == 0 else None
    materialise(model, "cpu", FromRank0(from_rank_0, all_ranks()))
    wrong += same_as(model, values)
    other = build(tensor)
    other.load_state_dict(model.state_dict())
    return wrong + same_as(other, values)


def layout(tensor):
    """(numbers of elements, counted ones among them) of each parameter on this rank."""
    model = start(tensor)
    found = {}
    for name, each in named_tensors(model):
        part = part_of(each)
        whole = torch.arange(math.prod(SHAPES[name])).view(SHAPES[name])
        held_here, counted = ([whole[box.in_whole].flatten().tolist() for box in boxes] for boxes in (part.boxes, part.counted))
        found[name] = list(itertools.chain(*held_here)), list(itertools.chain(*counted))
    return found


def clipped(tensor, seed):
    """(norm, names whose clipped gradients differ by more than float32's rounding) beside float64's."""
    model = start(tensor)
    gradients = whole_values(seed)
    exact = torch.cat([value.double().flatten() for value in gradients.values()]).norm()
    give_gradients(model, gradients)
    norm = octavo.clip_grad_norm_(model, 1.5)
    blocks, wrong = parameters_of(model), []
    for name, parameter in model.named_parameters():
        found = whole_tensor(with_block(parameter.grad, blocks[parameter]))
        if not torch.allclose(found.double(), gradients[name].double() * (1.5 / exact), rtol=1e-5, atol=1e-7):
            wrong.append(name)
    return norm.item() / exact.item(), wrong


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(tensor):
    """A model with values and an optimizer with states, equal to one rank's after two steps from `whole_values`."""
    model = start(tensor)
    fill_all(model, whole_values())
    optimizer = optimizer_of(model)
    for seed in (8, 9):
        give_gradients(model, whole_values(seed))
        optimizer.step()
    return model, optimizer


def state_of(model, optimizer):
    """Every tensor of model and optimizer, whole, by the name in a checkpoint."""
    tensors = {name: whole_tensor(tensor).detach() for name, tensor in collect(model, optimizer).items()}
    return {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith("random.")}


def differences(found, wanted):
    names = sorted(found.keys() ^ wanted.keys())
    return names + [name for name in wanted if name in found and not torch.equal(found[name], wanted[name])]


def saved(path, tensor):
    """Save; what differs from one rank's state."""
    model, optimizer = trained(tensor)
    octavo.save(path, model, optimizer, epoch=3)
    return None if tensor == 1 and world.state.world_size == 1 else state_of(model, optimizer)


def restored(path, tensor, wanted):
    """Load into a model with other values; what differs from `wanted`, in wholes and in this rank's parts."""
    model = start(tensor)
    fill_all(model, whole_values(77))
    optimizer = optimizer_of(model)
    give_gradients(model, whole_values(78))
    optimizer.step()
    assert octavo.load(path, model, optimizer) == {"epoch": 3}
    wrong = differences(state_of(model, optimizer), wanted)
    wrong += same_as(model, {name: wanted[f"model.{name}"] for name in SHAPES})
    blocks = parameters_of(model)
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][key]
            assert type(state) is type(parameter.detach())  # what the optimizer steps
            shard = local_shard(with_block(state, blocks[parameter]))
            numbers = shard.numbers(0, shard.local.numel())
            theirs = wanted[f"optimizer.{key}.{name}"].flatten()
            if not torch.equal(shard.local.flatten(), torch.where(numbers < 0, 0, theirs[numbers])):
                wrong.append(f"{key} of {name}")
    give_gradients(model, whole_values(10))
    optimizer.step()
    return wrong, state_of(model, optimizer)


def by_pytorch(path, tensor):
    """Save the model by PyTorch's own distributed checkpoint."""
    model, _ = trained(tensor)
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)


def read_by_pytorch(path, tensor, wanted):
    """Load such a checkpoint; what differs."""
    model = start(tensor)
    fill_all(model, whole_values(77))
    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id=path)
    wrong = same_as(model, wanted)
    model.load_state_dict(state["model"])
    return wrong + same_as(model, wanted)


def begun(tensor, changed):
    """What `check_same_weights` says where rank 2 has another value of one element, before FSDP2."""
    world.init({})
    model = build(tensor, shard=False)
    fill_all(model, whole_values())
    if changed is not None and dist.get_rank() == 2:
        local_of(dict(named_tensors(model))[changed[0]]).flatten()[changed[1]] += 1
    try:
        check_same_weights(model, all_ranks())
    except InputError as error:
        return str(error)
    return None


def random_model(seed, tensor):
    """(a model on meta with parameters in random ranges of random dimensions, sharded over further ranks; its values)."""
    draw = random.Random(seed)
    size = dist.get_world_size() if tensor > 1 else 1
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("shard", "tensor")) if size > 1 else None
    group = None if mesh is None else mesh["tensor"].get_group()
    model, values = nn.Module(), {}
    for number in range(6):
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
        dim = draw.randrange(len(shape))
        module = Scale(shape, "meta")
        if tensor > 1:
            own = random.Random(seed + number)
            edges = sorted({0, shape[dim], *(own.randint(0, shape[dim]) for _ in range(4))})
            parts = [[] for _ in range(tensor)]
            for one in itertools.pairwise(edges):
                for rank in own.sample(range(tensor), own.randint(1, tensor)):
                    parts[rank].append(one)
            for each in parts:
                own.shuffle(each)
            padding = [own.randint(0, 2) for _ in range(tensor)]
            held_by = [
                [indices(*each, padding=pad) if d == dim else indices((0, n)) for d, n in enumerate(shape)]
                for each, pad in zip(parts, padding, strict=True)
            ]
            block = share_out(shape, held_by, group)
            module = Scale(block.local.local_shape, "meta")
            declare(module, "weight", block)
        model.register_module(f"m{number}", module)
        values[f"m{number}.weight"] = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    if size > tensor:
        fully_shard(model, mesh=mesh["shard"])
    return model, values


def random_ranges(seed, tensor, folder):
    """What differs of tensors in random ranges: initial values, loaded ones, wholes, the norm. Saved to a folder."""
    world.init({})
    model, values = random_model(seed, tensor)
    wrong = []
    materialise(model, "cpu", CounterInit(seed, 0.5))
    initial = {name: whole_tensor(tensor).detach() for name, tensor in named_tensors(model)}
    for name, whole in initial.items():
        wanted = counter_normal_(torch.empty(whole.shape), torch.arange, seed=seed, name=name, std=0.5)
        if not torch.equal(whole, wanted if whole.dim() > 1 else torch.ones(whole.shape)):
            wrong.append(f"initial {name}")
    wrong += same_as(model, initial)
    model.load_state_dict(values)
    wrong += same_as(model, values)
    give_gradients(model, values)
    exact = torch.cat([value.double().flatten() for value in values.values()]).norm().item()
    if abs(octavo.clip_grad_norm_(model, 0).item() / exact - 1) > 1e-6:
        wrong.append("norm")
    optimizer = optimizer_of(model)
    optimizer.step()
    octavo.save(folder, model, optimizer)
    fill_all(model, initial)
    optimizer.state.clear()
    octavo.load(folder, model, optimizer)
    return wrong, state_of(model, optimizer)


def random_on_one_rank(seed, folder):
    """The state that `random_ranges` has saved, as one rank computes it and as one rank loads it."""
    states = []
    for loads in (False, True):
        model, values = random_model(seed, 1)
        materialise(model, "cpu", CounterInit(seed, 0.5))
        if not loads:
            model.load_state_dict(values)
        optimizer = optimizer_of(model)
        if loads:
            octavo.load(folder, model, optimizer)
        else:
            give_gradients(model, values)
            optimizer.step()
        states.append(state_of(model, optimizer))
    return states
