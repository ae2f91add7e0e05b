"""Initialisation by a model's original code, the same for any number of ranks, with few whole parameters in memory at a time.

The steps are `reset_parameters` of PyTorch's modules and `_init_weights` of Hugging Face's models, in the order of a model's
construction. A run on the meta device records the parameters that each step writes (GPT-2's attention scales the matrix of a
child). Steps with common parameters then run together on the CPU, in float32 at least, each under a random state from the seed
and the module's name. The cost is time: every rank draws whole parameters and stores its part. Other initialisation in the
constructor of a module is not repeated.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from octavo.collectives.blocks import Block, parameters_of
from octavo.errors import InputError
from octavo.parallel.deferred_init import key_of, refuse_buffers
from octavo.parallel.shards import LocalShard, local_shard, named_tensors

_DRAWS = {"normal_", "uniform_", "fill_", "zero_"}
"""Operations that overwrite a tensor without reading it."""


@dataclass(frozen=True)
class OwnInit:
    """Values from the initialisation of the model's modules."""

    seed: int

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Refuse buffers without a value, and parameters that no module would initialise."""
        refuse_buffers(model, names)
        _plan(model, names)

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of each named parameter."""
        parts = {name: local_shard(tensor) for name, tensor in named_tensors(model) if name in names}
        # Buffers stay: an initialisation may read them.
        buffers = {name: t for name, t in _tensors(model).items() if not isinstance(t, nn.Parameter)}
        tensors = _stand_ins(model) | buffers
        groups = _plan(model, names)

        def draw() -> None:
            for group in groups:
                _draw(model, group, self.seed, parts)

        _run_with(model, tensors, draw)


@dataclass
class _Step:
    """A method that initialises parameters.

    Attributes:
        name: key of its random state.
        module: the method's module, or its argument.
        run: calls the method.
        writes: first names of the parameters that it writes; True if its first write draws the whole parameter.
    """

    name: str
    module: nn.Module
    run: Callable[[], Any]
    writes: dict[str, bool] = field(default_factory=dict)


def _steps(model: nn.Module) -> Iterator[_Step]:
    """Steps of children before those of their parents; those of Hugging Face after all of PyTorch's."""
    modules: dict[nn.Module, tuple[str, Any]] = {}
    for name, module, owner in _children_first(model):
        modules.setdefault(module, (name, owner))
    for module, (name, _) in modules.items():
        for method in ("reset_parameters", "_reset_parameters"):
            reset: Any = getattr(module, method, None)
            if _takes_nothing(reset):
                yield _Step(f"{name}.{method}", module, reset)
                break
    for module, (name, owner) in modules.items():
        if owner is not None:
            yield _Step(f"{name}._init_weights", module, functools.partial(owner._init_weights, module))


def _children_first(module: nn.Module, name: str = "", owner: Any = None) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, module, the innermost Hugging Face model around it)."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name, owner)
    yield name, module, owner


def _takes_nothing(method: Any) -> bool:
    """True for a callable without required arguments."""
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    return True


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model, a tied one under each of its names."""
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():  # a shared module once, so that no tensor is swapped twice
        for members in (module.named_parameters, module.named_buffers):
            tensors.update(members(prefix, recurse=False, remove_duplicate=False))
    return tensors


def _stand_ins(model: nn.Module) -> dict[str, Tensor]:
    """A `_stand_in` on meta for each parameter and buffer."""
    blocks = parameters_of(model)
    return {name: _stand_in(t, blocks.get(t), "meta") for name, t in _tensors(model).items()}


def _stand_in(tensor: Tensor, block: Block | None, device: str) -> Tensor:
    """An unsharded tensor of the same kind, in float32 at least; NaN where it has values."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    shape = tensor.shape if block is None else block.shape
    data = torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


class _Around(nn.Module):
    """Parent of a module, for `functional_call`: its forward calls a given function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], Any]) -> None:
        run()


def _run_with(module: nn.Module, tensors: Mapping[str, Tensor], run: Callable[[], Any]) -> dict[str, Tensor]:
    """Run with `tensors` in place of the module's; returns them, including those that `run` has registered anew."""
    held = {f"module.{name}": tensor for name, tensor in tensors.items()}
    functional_call(_Around(module), held, (run,), tie_weights=False)
    return dict(zip(tensors, held.values(), strict=True))


class _Writes(TorchDispatchMode):
    """Records which parameters are written, and whether the first write draws the whole parameter."""

    def __init__(self, parameter_of: Mapping[int, str]) -> None:
        super().__init__()
        self.parameter_of = parameter_of
        self.writes: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        kwargs = kwargs or {}
        values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [values.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for tensor in tree_leaves(written):
            name = self.parameter_of.get(_storage(tensor)) if isinstance(tensor, Tensor) else None
            if name is not None:
                whole = tensor.nbytes == tensor.untyped_storage().nbytes()
                self.writes.setdefault(name, whole and schema.name.removeprefix("aten::") in _DRAWS)
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.no_grad()
def _plan(model: nn.Module, names: Collection[str]) -> list[list[_Step]]:
    """The steps that the named parameters need, in groups without common parameters.

    Raises:
        InputError: no step writes one of them.
    """
    if not names:
        return []
    stand_ins = _stand_ins(model)
    # Of a tied parameter's stand-ins, those after the first are ignored: a model initialises its modules before it ties them.
    parameter_of = {_storage(stand_ins[name]): name for name, _ in model.named_parameters()}
    steps = list(_steps(model))

    def record() -> None:
        for step in steps:
            step.writes = _writes_of(step, parameter_of)

    with torch.random.fork_rng(devices=[]):
        _run_with(model, stand_ins, record)
    steps = [step for step in steps if step.writes]
    _refuse_forgotten(model, set(names) - {name for step in steps for name in step.writes})
    return [group for group in _groups(_last_draws(steps)) if any(not step.writes.keys().isdisjoint(names) for step in group)]


def _writes_of(step: _Step, parameter_of: Mapping[int, str]) -> dict[str, bool]:
    """The parameters that a step writes on meta tensors."""
    before = dict(step.module.named_parameters())
    mode = _Writes(parameter_of)
    try:
        with mode:
            after = _run_with(step.module, before, step.run)
    except Exception:  # a user's code that reads values cannot run without them: it may write any of these
        changed = list(before)
        mode.writes = {}
    else:
        changed = [name for name in before if after[name] is not before[name]]
    first_names = (parameter_of.get(_storage(before[name])) for name in changed)
    return mode.writes | {name: False for name in first_names if name is not None}


def _last_draws(steps: Sequence[_Step]) -> list[_Step]:
    """The steps, except those whose parameters are all redrawn later."""
    last: list[_Step] = []
    drawn: set[str] = set()
    for step in reversed(steps):
        if not drawn.issuperset(step.writes):
            last.append(step)
        drawn.update(name for name, whole in step.writes.items() if whole)
    return last[::-1]


def _groups(steps: Sequence[_Step]) -> list[list[_Step]]:
    """Steps with common parameters together, in order."""
    together: dict[str, set[str]] = {}  # one set for all the names of a group
    for step in steps:
        names = set(step.writes).union(*(together.get(name, ()) for name in step.writes))
        together.update(dict.fromkeys(names, names))
    groups: dict[int, list[_Step]] = defaultdict(list)
    for step in steps:
        groups[id(together[next(iter(step.writes))])].append(step)
    return list(groups.values())


def _draw(model: nn.Module, group: Sequence[_Step], seed: int, parts: Mapping[str, LocalShard]) -> None:
    """Run a group's steps on whole parameters, and copy this rank's parts."""

    def run() -> None:
        for step in group:
            # Not `torch.manual_seed`, which would move the GPUs' generators too.
            torch.default_generator.manual_seed(key_of(seed, step.name))
            step.run()

    # The model has whole stand-ins in place of its parameters here.
    empty = {name: _stand_in(model.get_parameter(name), None, "cpu") for step in group for name in step.writes}
    with torch.random.fork_rng(devices=[]):
        drawn = _run_with(model, empty, run)
    for name in drawn.keys() & parts.keys():
        whole = drawn[name].detach()
        if whole.is_floating_point() and bool(whole.isnan().any()):
            _refuse_forgotten(model, {name})
        parts[name].copy_from(whole)


def _refuse_forgotten(model: nn.Module, names: Collection[str]) -> None:
    for name, parameter in model.named_parameters():
        if name in names and parameter.numel():
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise InputError(
                f"parameter {name} has no value: {owner} has no reset_parameters() that sets it, and there is no _init_weights"
                f" of a Hugging Face model that does. Give {owner} a reset_parameters() that does, or load weights (load_from)."
            )
