"""The state of delayed scaling: scales and amax histories of all tensors in a few flat buffers, outside parameters and buffers.

A kernel takes one element of a buffer (a `Slot`). One kernel updates the state of a whole model, one all-reduce for each
direction joins it over ranks, and sharding, `state_dict` and `.to()` never see it. Scales of forward are updated when the
outermost `fp8_autocast` ends; those of backward before they are read: by the next autocast, `inspect`, a save, or backward.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8.recipe import History, Operand, Recipe
from octavo.kernels.quantize.cast import CastResults, cast, fake_results, operator_results
from octavo.kernels.quantize.cast_scaled import amax, scale_from_amax
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer, of_one_scale
from octavo.kernels.scales import update_scales_

_FIRST_CAPACITY = 64
_ROUNDING = 1 + 2.0**-20
"""An amax times the scale that was made from it may round to just above the maximum: that loses nothing."""
_buffers: list[ScaleBuffer] = []


class Slot:
    """One tensor's scale and history in a buffer."""

    def __init__(self, buffer: ScaleBuffer, index: int, fp8_max: float) -> None:
        self.buffer = buffer
        self.index = index
        self.fp8_max = fp8_max
        self.begun = False
        """The scale is no longer the first one, 1: `ModuleState.begin` or `fill` has set it."""
        self.position = torch.tensor([buffer.number, index])
        """Number of the buffer and index in it, for `cast_delayed`: int64 [2] on the CPU."""

    @property
    def scale(self) -> Tensor:
        """The scale of the next cast: a view, float32 []."""
        return self.buffer.scale[self.index]

    @property
    def amax(self) -> Tensor:
        """Entry 0 of the history, in which casts record: a view, float32 []."""
        return self.buffer.history[0, self.index]

    @property
    def history(self) -> Tensor:
        """This tensor's history, oldest after entry 0: float32 [L]."""
        return self.buffer.history[:, self.index]


def _several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


class ScaleBuffer:
    """Scales [n] and histories [L, n] of all tensors of one direction, one `History` policy and one device."""

    @torch.inference_mode(False)  # here and in `allocate`: training goes on with the buffers of an evaluation
    def __init__(self, device: torch.device, policy: History) -> None:
        self.policy = policy
        self.device = device
        self.number = len(_buffers)
        _buffers.append(self)
        self.scale = torch.ones(_FIRST_CAPACITY, device=device)
        self.history = torch.zeros(policy.length, _FIRST_CAPACITY, device=device)
        self.fp8_max = torch.ones(_FIRST_CAPACITY, device=device)
        self.saturated = torch.zeros(_FIRST_CAPACITY, dtype=torch.bool, device=device)
        self._free: list[int] = []
        self._used = 0

    @torch.inference_mode(False)
    def allocate(self, fp8_max: float) -> Slot:
        """A fresh slot: scale 1, history of zeros."""
        if self._free and not _several_ranks():  # several collect garbage at different times, and join slots by index
            index = self._free.pop()
        else:
            index, self._used = self._used, self._used + 1
            if index == len(self.scale):
                self._grow()
        with torch.no_grad():
            self.scale[index] = 1
            self.history[:, index] = 0
            self.saturated[index] = False
            self.fp8_max[index] = fp8_max
        slot = Slot(self, index, fp8_max)
        weakref.finalize(slot, self._free.append, index)
        return slot

    def _grow(self) -> None:
        self.scale = torch.cat([self.scale, torch.ones_like(self.scale)])
        self.history = torch.cat([self.history, torch.zeros_like(self.history)], 1)
        self.fp8_max = torch.cat([self.fp8_max, torch.ones_like(self.fp8_max)])
        self.saturated = torch.cat([self.saturated, torch.zeros_like(self.saturated)])

    @torch.no_grad()
    def update(self) -> None:
        """Roll every history in which something was recorded and compute its scale; see `reference.update_scales`."""
        if _state.reduce_amax and _several_ranks(_state.group):
            dist.all_reduce(self.history[0], op=dist.ReduceOp.MAX, group=_state.group)
        update_scales_(
            self.history, self.scale, self.fp8_max, self.saturated,
            algo=self.policy.algo, margin=self.policy.margin, rounding=_ROUNDING,
        )  # fmt: skip


def cast_delayed(
    x: Tensor, position: Tensor, dtype: torch.dtype, fp8_max: float, record: bool, columnwise: bool
) -> QuantizedTensor:
    """Cast a matrix in compiled code by the scale of the slot at `position`, rowwise and if asked columnwise."""
    q, q_t, scale_inv = _cast_delayed(x, position, dtype, fp8_max, record, columnwise)
    return of_one_scale(q, q_t if columnwise else None, scale_inv)


# A compiler is given the position of a slot, not its tensors: as inputs of a graph they would be views of one buffer, one of
# them written, which functionalisation copies and autograd's version counters refuse. Nothing in a graph reads the amax.
# The position is a tensor, because a number would be compiled in: each layer would have code of its own.
@torch.library.custom_op("octavo::cast_delayed", mutates_args=())
def _cast_delayed(
    x: Tensor, position: Tensor, dtype: torch.dtype, fp8_max: float, record: bool, columnwise: bool
) -> CastResults:
    number, index = position.tolist()
    buffer = _buffers[number]
    amax = buffer.history[0, index] if record else None
    return operator_results(cast(x, Quantizer(dtype, fp8_max, buffer.scale[index], amax, columnwise=columnwise)))


@_cast_delayed.register_fake
def _(x: Tensor, position: Tensor, dtype: torch.dtype, fp8_max: float, record: bool, columnwise: bool) -> CastResults:
    return fake_results(x, dtype, columnwise)


@dataclass
class _State:
    """The buffers of the process by direction, and how the current autocast joins their amaxes over ranks."""

    forward: dict[tuple[torch.device, History], ScaleBuffer] = field(default_factory=dict)
    backward: dict[tuple[torch.device, History], ScaleBuffer] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    reduce_amax: bool = True
    pending: bool = False  # a backward may have recorded amaxes since the last update
    task: int = -1  # autograd's number of that backward


_state = _State()
_numbers = itertools.count()
_modules: weakref.WeakValueDictionary[int, ModuleState] = weakref.WeakValueDictionary()
_prepared: set[Recipe] = set()


class ModuleState:
    """FP8 state of one weight of a module: slots, the FP8 weight that micro-batches share, and the layer's own recipe.

    A plain attribute of the module. A deep copy gets slots of its own with the same values.
    """

    def __init__(self, module: nn.Module, weight_name: str = "weight") -> None:
        self.slots: dict[Operand, Slot] = {}
        self.weight_cache: QuantizedTensor | None = None
        self.gathered: QuantizedTensor | None = None  # the weight of a sharded parameter, gathered in FP8
        self.observed: dict[Operand, Tensor] = {}
        self.recipe: Recipe | None = None  # of the last use
        self.skipped = ""  # the reason, if this layer stays out of FP8
        self.override: Recipe | None = None  # replaces an autocast's recipe
        self.override_by = ""  # the reason
        self._module = weakref.ref(module)
        self.weight_name = weight_name
        self._register()

    def _register(self) -> None:
        _modules[next(_numbers)] = self
        _prepared.clear()

    @property
    def weight(self) -> Tensor | None:
        """The module's weight [N, K]; None when the module is gone."""
        module = self._module()
        return getattr(module, self.weight_name, None) if module is not None else None

    @property
    def device(self) -> torch.device | None:
        """The device of the module's weight; None when the module is gone or on the meta device."""
        weight = self.weight
        return None if weight is None or weight.is_meta else weight.device

    def under(self, recipe: Recipe | None) -> Recipe | None:
        """The layer's recipe inside an autocast of `recipe`: its own if it has one; None for high precision."""
        if recipe is None or self.skipped:
            return None
        return recipe if self.override is None else self.override

    def prepare(self, recipe: Recipe, device: torch.device) -> None:
        """Allocate a slot for each operand with a delayed scale in `recipe`; an earlier history is carried over."""
        policy = recipe.history
        if policy is None:
            return
        for operand, how in recipe.casts.items():
            old = self.slots.get(operand)
            buffers = _state.backward if operand is Operand.GRAD_OUTPUT else _state.forward
            buffer = buffers.get((device, policy)) or buffers.setdefault((device, policy), ScaleBuffer(device, policy))
            if old is None or old.buffer is not buffer or old.fp8_max != how.format.max:
                new = buffer.allocate(how.format.max)
                if old is not None:
                    # The same amaxes in another format: its scale differs by a power of two. An unused one stays 1.
                    used = (old.history != 0).any()
                    fill(new, torch.where(used, old.scale * (how.format.max / old.fp8_max), old.scale), old.history)
                self.slots[operand] = new

    def slot(self, operand: Operand, recipe: Recipe, device: torch.device) -> Slot:
        """The slot of an operand, made on first use."""
        slot = self.slots.get(operand)
        fp8_max = recipe.casts[operand].format.max
        if slot is None or slot.fp8_max != fp8_max or slot.buffer.policy != recipe.history or slot.buffer.device != device:
            torch.compiler.disable(self.prepare)(recipe, device)
            slot = self.slots[operand]
        return slot

    def begin(self, operand: Operand, recipe: Recipe, matrix: Tensor) -> None:
        """Take an operand's first delayed scale from its own amax, in place of 1; without effect once there is a history."""
        slot = self.slot(operand, recipe, matrix.device)
        if not slot.begun:
            if not (slot.history != 0).any():
                largest = amax(matrix.detach().flatten(0, -2))
                slot.scale.copy_(scale_from_amax(largest, slot.fp8_max / 2.0**slot.buffer.policy.margin, False))
            slot.begun = torch.is_grad_enabled()  # an evaluation leaves the choice to training

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        twin = copy.copy(self)
        twin.slots, twin.observed = {}, {}
        twin.weight_cache = twin.gathered = None
        module = self._module()
        if module is not None:
            twin._module = weakref.ref(memo.get(id(module), module))
        for operand, slot in self.slots.items():
            twin.slots[operand] = slot.buffer.allocate(slot.fp8_max)
            fill(twin.slots[operand], slot.scale, slot.history)
        twin._register()
        return twin


@torch.no_grad()
def fill(slot: Slot, scale: Tensor, history: Tensor) -> None:
    """Set a slot's scale and history; of a longer history the newest entries are kept, a shorter one is padded with zeros."""
    kept = min(len(history), slot.buffer.policy.length) - 1
    slot.begun = True
    slot.scale.copy_(scale)
    slot.history.zero_()
    slot.amax.copy_(history[0])
    if kept > 0:
        slot.history[-kept:] = history[-kept:].to(slot.scale.device)


def prepare_all(recipe: Recipe) -> None:
    """Give every new FP8 module its slots for an autocast of `recipe`, outside of anything that is traced or compiled.

    A module that has slots keeps them: it moves to another recipe only when it is used under one.
    """
    if recipe in _prepared:
        return
    if _several_ranks() and next(_without_slots(recipe), None) is not None:
        gc.collect()  # a model that is gone on one rank and lingers on another would take slots there
    for state, own, device in _without_slots(recipe):
        state.prepare(own, device)
    if all(state.device is not None for state in _modules.values()):
        _prepared.clear()
        _prepared.add(recipe)


def _without_slots(recipe: Recipe) -> Iterator[tuple[ModuleState, Recipe, torch.device]]:
    """In order of creation: a slot needs the same number on every rank, or an all-reduce would join different tensors."""
    for state in list(_modules.values()):
        own, device = state.under(recipe), state.device
        if own is not None and own.history is not None and device is not None and not state.slots:
            yield state, own, device


def begin(group: dist.ProcessGroup | None, reduce_amax: bool) -> None:
    """An outermost autocast begins: amaxes of the last backward take effect."""
    flush()
    _state.group, _state.reduce_amax = group, reduce_amax


def end_forward() -> None:
    """An outermost autocast ends, with gradients on."""
    for buffer in _state.forward.values():
        buffer.update()
    _state.pending = True


def joins_forward(group: dist.ProcessGroup) -> bool:
    """True if the amaxes of this forward will be joined over all ranks of `group`."""
    if not _state.reduce_amax or _state.group is None:
        return _state.reduce_amax
    return set(dist.get_process_group_ranks(_state.group)).issuperset(dist.get_process_group_ranks(group))


def flush() -> None:
    """Update the backward scales if a backward may have recorded amaxes since the last update."""
    if _state.pending:
        for buffer in _state.backward.values():
            buffer.update()
        _state.pending = False


def backward_begins_in(task: int) -> None:
    """A gradient is about to be recorded in autograd's graph task `task`; an earlier backward takes effect first."""
    if task != _state.task:
        flush()
        _state.task = task
    _state.pending = True


def graph_task() -> int:
    """The number of the autograd backward running on this thread; -1 outside of a backward."""
    return torch._C._current_graph_task_id()


def snapshot() -> list[tuple[ScaleBuffer, Tensor]]:
    """The forward scales as they are, for a recomputation to use."""
    return [(buffer, buffer.scale.clone()) for buffer in _state.forward.values()]


@contextlib.contextmanager
def replay(scales: list[tuple[ScaleBuffer, Tensor]]) -> Iterator[None]:
    """Around the recomputation of a forward: use its scales, and restore the amaxes recorded before."""
    before = [(buffer, buffer.scale.clone(), buffer.history[0].clone()) for buffer in _state.forward.values()]
    for buffer, scale in scales:
        buffer.scale[: len(scale)].copy_(scale)
    try:
        yield
    finally:
        for buffer, scale, amaxes in before:
            buffer.scale[: len(scale)].copy_(scale)
            buffer.history[0, : len(amaxes)].copy_(amaxes)


def states_of(model: nn.Module) -> Iterator[tuple[str, ModuleState]]:
    """Every FP8 linear of a model by name; a module with several matrices names each, as in `layernorm_mlp.fc1`."""
    for name, module in model.named_modules():
        for key, state in vars(module).items():
            if isinstance(state, ModuleState):
                suffix = key.removesuffix("fp8_state").rstrip("_")
                yield ".".join(part for part in (name, suffix) if part), state


def inspect(module: nn.Module) -> dict[str, Any]:
    """The state of each FP8 tensor of a module: `"input" | "weight" | "grad_output"` → format, scale, history, saturation.

    Each entry has `format` ("E4M3" | "E5M2"), `scale` (float32; under delayed scaling of the next cast, else of the last one: a
    tensor's, rows' or blocks', and None before a cast or in compiled code), `amax_history` (float32 [L], or None without one)
    and `saturated` (True if the last recorded amax at its scale exceeded the format's range). A module with several matrices
    gives such a dict for each by name; one that was never called gives an empty one.

    Raises:
        InputError: nothing in the module runs in FP8.
    """
    flush()
    found = {name: _entries(state) for name, state in states_of(module)}
    if not found:
        raise InputError(f"{type(module).__name__} has no FP8 layer: octavo.describe(model) names those that have.")
    return found[""] if set(found) == {""} else found


def _entries(state: ModuleState) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    if state.recipe is None:
        return entries
    for operand, how in state.recipe.casts.items():
        entry: dict[str, Any] = {
            "format": how.format.name,
            "scale": state.observed.get(operand),
            "amax_history": None,
            "saturated": False,
        }
        if how.delayed:
            slot = state.slots.get(operand)
            if slot is None:  # the first forward failed, or needed no cast
                continue
            entry["scale"] = slot.scale.clone()
            entry["amax_history"] = slot.history.clone()
            entry["saturated"] = bool(slot.buffer.saturated[slot.index])
        entries[operand.value] = entry
    return entries


def state_records(model: nn.Module) -> dict[str, Tensor]:
    """FP8 state for a checkpoint: `<module>.<operand>.scale` [] and `.amax_history` [L], float32, copied."""
    flush()
    records: dict[str, Tensor] = {}
    for name, state in states_of(model):
        for operand, slot in state.slots.items():
            records[f"{name}.{operand.value}.scale"] = slot.scale.clone()
            records[f"{name}.{operand.value}.amax_history"] = slot.history.clone()
    return records


def check_state_records(model: nn.Module, names: Iterable[str]) -> None:
    """Raise an InputError if a record is of a module that this model does not run in FP8, or a module has no weights yet."""
    states = {name: state for name, state in states_of(model) if not state.skipped}
    strangers = sorted({name.rsplit(".", 2)[0] for name in names} - states.keys())
    if strangers:
        named = ", ".join(strangers[:3]) + (" …" if len(strangers) > 3 else "")
        raise InputError(
            f"the checkpoint has FP8 state for {named}, which this model does not run in FP8."
            " Use the fp8 settings of the run that saved it (fp8.skip, fp8.enabled)."
        )
    for name, state in states.items():
        if state.device is None:
            raise InputError(f"{name} has no weights yet: materialise the model before its FP8 state is loaded.")


def reset_states(model: nn.Module) -> None:
    """Give every slot of a model its first scale and an empty history, and forget the FP8 weights of an earlier micro-batch."""
    flush()
    for _, state in states_of(model):
        state.weight_cache = None
        for slot in state.slots.values():
            fill(slot, torch.ones(()), torch.zeros(1))


def load_state_records(model: nn.Module, records: Mapping[str, Tensor], recipe: Recipe) -> None:
    """Put records from `state_records` back, for the modules that run in FP8 under an autocast of `recipe`.

    Raises:
        InputError: as `check_state_records`, before anything is changed.
    """
    check_state_records(model, records)
    flush()
    for name, state in states_of(model):
        device = state.device
        own = state.under(recipe)
        if own is None or device is None:
            continue
        state.prepare(own, device)
        for operand, slot in state.slots.items():
            key = f"{name}.{operand.value}"
            if f"{key}.scale" in records:
                fill(slot, records[f"{key}.scale"], records[f"{key}.amax_history"])
