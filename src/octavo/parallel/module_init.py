"""Initial values as a model's own code draws them, reproducible on any number of ranks, a few parameters in memory at a time.

A module that keeps its code keeps its initialisation: `reset_parameters` of PyTorch's modules, `_init_weights` of Hugging
Face's models. These are the steps, in the order in which building the model runs them. A first run on the meta device finds
out which parameters each step writes (a step may write its children's: GPT-2's attention scales its output product).
Parameters that share a step are then drawn together, on the CPU, in float32 at least, each step under a random state of its
own that comes from the seed and the module's name. The price is time: every rank draws the whole and keeps its part. What a
module's constructor does outside of these methods is not repeated.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.errors import InputError
from octavo.parallel.deferred_init import key_of, refuse_buffers
from octavo.parallel.shards import LocalShard, local_shard

_DRAWS = {"normal_", "uniform_", "fill_", "zero_"}
"""Operations that leave nothing of what was there, and do not look at it."""


@dataclass(frozen=True)
class OwnInit:
    """The initialisation of the model's own modules."""

    seed: int

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Refuse buffers without a value, and parameters that no module would initialise."""
        refuse_buffers(model, names)
        _plan(model, names)

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of each named parameter."""
        groups = _plan(model, names)
        parts = {name: local_shard(tensor) for name, tensor in model.named_parameters() if name in names}
        if not groups:
            return
        with _StandIns(model) as stand_ins:
            for group in groups:
                _draw(model, stand_ins, group, self.seed, parts)


@dataclass
class _Step:
    """A method that initialises.

    Attributes:
        name: what its random state is named by.
        module: of which it is a method, or to which it is applied.
        run: calls it.
        writes: the parameters that it writes, by their first name; true where it first draws all of the parameter.
    """

    name: str
    module: nn.Module
    run: Callable[[], Any]
    writes: dict[str, bool] = field(default_factory=dict)


@dataclass
class _Group:
    """Steps that write common parameters, in order, and these parameters."""

    steps: list[_Step]
    names: list[str]

    @property
    def unsure(self) -> set[str]:
        """Parameters that no step draws wholly, so that a part may be left without a value."""
        return set(self.names) - {name for step in self.steps for name, whole in step.writes.items() if whole}


def _steps(model: nn.Module) -> Iterator[_Step]:
    """Children first, as they are built; Hugging Face's come when the whole model stands."""
    modules = list(_children_first(model))
    for name, module, _ in modules:
        for method in ("reset_parameters", "_reset_parameters"):
            reset = getattr(module, method, None)
            if reset is not None and _takes_nothing(reset):
                yield _Step(f"{name}.{method}", module, reset)
                break
    for name, module, owner in modules:
        if owner is not None:
            yield _Step(f"{name}._init_weights", module, _applied(owner, module))


def _takes_nothing(method: Any) -> bool:
    if not callable(method):
        return False
    wanted = inspect.signature(method).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in wanted)


def _applied(owner: Any, module: nn.Module) -> Callable[[], Any]:
    return lambda: owner._init_weights(module)


def _children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, module, the innermost Hugging Face model around it), each module once."""
    from transformers import PreTrainedModel

    seen: set[int] = set()

    def walk(module: nn.Module, name: str, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name, owner)
        yield name, module, owner

    return walk(model, "", None)


class _StandIns:
    """Plain tensors in the place of a model's parameters and buffers, which come back afterwards.

    A tied parameter has its stand-in where it is first; elsewhere is one that nobody looks at, since a model initialises its
    modules before it ties them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._real: list[tuple[dict[str, Any], str, Tensor]] = []
        self._tensors: dict[str, Tensor] = {}
        first: set[int] = set()
        for prefix, module in model.named_modules():
            for slots in (module._parameters, module._buffers):
                for key, tensor in slots.items():
                    if tensor is None:
                        continue
                    self._real.append((slots, key, tensor))
                    if slots is module._parameters and id(tensor) not in first:
                        first.add(id(tensor))
                        self._places[f"{prefix}.{key}" if prefix else key] = slots, key

    def __enter__(self) -> _StandIns:
        for slots, key, tensor in self._real:
            slots[key] = _stand_in(tensor, "meta")
        self._tensors = {name: slots[key] for name, (slots, key) in self._places.items()}
        return self

    def __exit__(self, *exc: object) -> None:
        for slots, key, tensor in self._real:
            slots[key] = tensor

    def by_storage(self) -> dict[int, str]:
        """Which parameter a storage belongs to."""
        return {tensor.untyped_storage()._cdata: name for name, tensor in self._tensors.items()}

    def replaced(self) -> list[str]:
        """Parameters that a step has registered anew; the stand-ins are put back."""
        new = [name for name, (slots, key) in self._places.items() if slots.get(key) is not self._tensors[name]]
        for name in new:
            slots, key = self._places[name]
            slots[key] = self._tensors[name]
        return new

    def below(self, module: nn.Module) -> list[str]:
        """The parameters of a module and its children."""
        mine = {id(child._parameters) for child in module.modules()}
        return [name for name, (slots, _) in self._places.items() if id(slots) in mine]

    @contextlib.contextmanager
    def drawn(self, group: _Group) -> Iterator[Callable[[str], Tensor]]:
        """Real tensors in the places of a group (NaN until they are written, where that is unsure), and how to get one.

        Buffers are the model's own meanwhile: an initialisation may compute with them.
        """
        buffers = [
            (slots, key, tensor, slots[key]) for slots, key, tensor in self._real if not isinstance(tensor, nn.Parameter)
        ]
        for slots, key, tensor, _ in buffers:
            slots[key] = tensor
        for name in group.names:
            slots, key = self._places[name]
            slots[key] = _stand_in(slots[key], "cpu")
            if name in group.unsure and slots[key].is_floating_point():
                slots[key].data.fill_(torch.nan)
        try:
            yield lambda name: self._places[name][0][self._places[name][1]]
        finally:
            for name in group.names:
                slots, key = self._places[name]
                slots[key] = self._tensors[name]
            for slots, key, _, stand_in in buffers:
                slots[key] = stand_in


def _stand_in(tensor: Tensor, device: str) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    data = torch.empty(tensor.shape, dtype=dtype, device=device)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


class _Writes(TorchDispatchMode):
    """Notes which parameters are written, and whether the first thing written is a draw of all of it."""

    def __init__(self, parameter_of: dict[int, str]) -> None:
        super().__init__()
        self.parameter_of = parameter_of
        self.writes: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in written if isinstance(written, list | tuple) else [written]:
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    storage = tensor.untyped_storage()
                    name = self.parameter_of.get(storage._cdata)
                    if name is not None:
                        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
                        self.writes.setdefault(name, whole and func._schema.name.removeprefix("aten::") in _DRAWS)
        return out


@torch.no_grad()
def _plan(model: nn.Module, names: Collection[str]) -> list[_Group]:
    """What has to run for the named parameters, in groups that share no parameter.

    Raises:
        InputError: no step writes one of them.
    """
    if not names:
        return []
    steps: list[_Step] = []
    with _StandIns(model) as stand_ins, torch.random.fork_rng(devices=[]):
        storages = stand_ins.by_storage()
        for step in _steps(model):
            mode = _Writes(storages)
            try:
                with mode:
                    step.run()
                step.writes = mode.writes | dict.fromkeys(stand_ins.replaced(), False)
            except Exception:  # the code of a user, which looks at values and cannot run without: any of these may be written
                stand_ins.replaced()
                step.writes = dict.fromkeys(stand_ins.below(step.module), False)
            if step.writes:
                steps.append(step)
    _refuse_forgotten(model, set(names) - {name for step in steps for name in step.writes})
    return [group for group in _groups(_last_draws(steps)) if not set(names).isdisjoint(group.names)]


def _last_draws(steps: Sequence[_Step]) -> list[_Step]:
    """The steps without those of which later ones leave nothing."""
    kept: list[_Step] = []
    drawn: set[str] = set()
    for step in reversed(steps):
        if not drawn.issuperset(step.writes):
            kept.append(step)
        drawn.update(name for name, whole in step.writes.items() if whole)
    return kept[::-1]


def _groups(steps: Sequence[_Step]) -> list[_Group]:
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while (above := leader.setdefault(name, name)) != name:
            name = above
        return name

    for step in steps:
        first = find(next(iter(step.writes)))
        for name in step.writes:
            leader[find(name)] = first
    groups: dict[str, _Group] = defaultdict(lambda: _Group([], []))
    for step in steps:
        groups[find(next(iter(step.writes)))].steps.append(step)
    for name in leader:
        groups[find(name)].names.append(name)
    return list(groups.values())


def _draw(model: nn.Module, stand_ins: _StandIns, group: _Group, seed: int, parts: Mapping[str, LocalShard]) -> None:
    """Run a group's steps on whole parameters and keep this rank's parts."""
    with torch.random.fork_rng(devices=[]), stand_ins.drawn(group) as tensor_of:
        for step in group.steps:
            # Not `torch.manual_seed`, which would move the GPUs' generators too.
            torch.default_generator.manual_seed(key_of(seed, step.name))
            step.run()
        for name in group.names:
            if name in parts:
                whole = tensor_of(name).detach()
                if name in group.unsure and whole.is_floating_point() and bool(whole.isnan().any()):
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
