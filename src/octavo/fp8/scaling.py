"""The FP8 state of each layer: its slots in the buffers of delayed scaling, its recipe, and the FP8 weight of micro-batches.

Only training changes it: an evaluation, under any recipe, reads the scales of training.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8 import buffers
from octavo.fp8.buffers import BufferSet, ScaleBuffer, Slot, Waiting
from octavo.fp8.recipe import Operand, Recipe
from octavo.fp8.stored import Stored
from octavo.kernels.quantize.quantized import QuantizedTensor
from octavo.process import process


class ModuleState:
    """FP8 state of one weight of a module: slots, the cached FP8 weight of micro-batches, and the layer's recipe, if any.

    It is a plain attribute of the module. A deep copy gets separate slots with the same values.
    """

    def __init__(
        self,
        module: nn.Module,
        weight_name: str = "weight",
        operands: Sequence[Operand] = tuple(Operand),
        experts: int | None = None,
    ) -> None:
        self.experts = experts  # of a stacked weight, each with separate scales
        self.local_experts: slice | None = None  # experts whose matrices this rank holds, if it does not hold all
        self.caches_columnwise = False  # caches a 16-bit weight's columnwise copy until backward: `octavo.fp8.columnwise`
        self.slots: dict[Operand, Slot] = {}
        self.operands = operands  # with a scale of the recipe
        self.indices: dict[Operand, int] = {}  # of the slots in any buffer
        self.weight_cache: QuantizedTensor | None = None
        self.gathered: QuantizedTensor | None = None  # the weight of a sharded parameter, gathered in FP8
        self.stored: Stored | None = None  # how the weight is stored, if only in FP8
        self.context_group: dist.ProcessGroup | None = None  # shares each sequence, whose tokens have one current scale
        self.tensor_group: dist.ProcessGroup | None = None  # holds parts of operands, which have one scale
        self.joined_amax: Tensor | None = None  # of the weight over the tensor group, within a forward of the model
        self.observed: dict[Operand, Tensor] = {}
        self.buffers = buffers.default
        self.recipe: Recipe | None = None  # of the last use in training; before the first, of the last evaluation
        self.history_recipe: Recipe | None = None  # of the slots
        self.trained = False
        self.skipped = ""  # why this layer stays out of FP8, if it does
        self.paused = False  # temporarily out of FP8
        self.override: Recipe | None = None  # replaces an autocast's recipe
        self.override_by = ""  # why
        self._module = weakref.ref(module)
        module.register_load_state_dict_pre_hook(_weights_change)
        self.weight_name = weight_name
        self.pickled: dict[Operand, Any] = {}  # a reference: a started process reads the memory of the last pickle's tensors
        self._register()

    def _register(self) -> None:
        process.fp8_modules[next(process.numbers)] = self
        self.buffers.claimed = None
        process.offered.clear()

    def tensor_group_of(self, operand: Operand) -> dist.ProcessGroup | None:
        """The ranks that join the amaxes of an operand over the tensor group; None for none.

        If experts are distributed over ranks, other ranks hold other tokens and no parts of these weights.
        """
        return None if operand is Operand.WEIGHT and self.local_experts is not None else self.tensor_group

    @property
    def records(self) -> dict[Operand, Slot]:
        """The slots that this model's autocasts have used, by operand."""
        return {operand: slot for operand, slot in self.slots.items() if not slot.offered}

    @property
    def module(self) -> nn.Module | None:
        """The module with this state; None when it is gone."""
        return self._module()

    @property
    def weight(self) -> Tensor | None:
        """The module's weight [N, K]; None when the module is gone."""
        module = self._module()
        return getattr(module, self.weight_name, None) if module is not None else None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parameters whose rows form the weight."""
        return (self.weight_name,)

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        module = self._module()
        return module is None or module.training

    @property
    def device(self) -> torch.device | None:
        """The device of the module's weight; None when the module is gone or on the meta device."""
        weight = self.weight
        return None if weight is None or weight.is_meta else weight.device

    def under(self, recipe: Recipe | None) -> Recipe | None:
        """The recipe of this layer inside an autocast of `recipe`: its override, if any; None for high precision."""
        if recipe is None or self.skipped or self.paused:
            return None
        return recipe if self.override is None else self.override

    def pause(self, paused: bool) -> None:
        """Exclude the layer from FP8, or include it, in the next forwards."""
        if paused != self.paused:
            self.paused = paused
            self.buffers.claimed = None  # slots for all layers were allocated without this one
            process.offered.clear()

    def prepare(self, recipe: Recipe, device: torch.device, *, offered: bool = False) -> None:
        """Allocate a slot for each operand with a delayed scale in `recipe`; an earlier history is copied."""
        with process.slots:
            self._prepare(recipe, device, offered)

    def _prepare(self, recipe: Recipe, device: torch.device, offered: bool) -> None:
        policy = recipe.history
        if policy is None:
            return
        for operand in self.operands:
            how = recipe.casts[operand]
            old = self.slots.get(operand)
            buffer = self.buffers.buffer(operand, device, policy)
            if old is None or old.buffer is not buffer or old.fp8_max != how.format.max:
                if operand not in self.indices:
                    self.indices[operand] = self.buffers.new_index(self, operand, self.experts or 1)
                before = None if old is None else (old.present()[0].clone(), old.history.clone())
                new = buffer.allocate(how.format.max, self.indices[operand], self.experts)
                new.offered = offered
                if old is not None and before is not None:
                    # The same amaxes in another format: its scale differs by a power of two.
                    scale, history = before
                    fill(new, scale * (how.format.max / old.fp8_max), history)
                self.slots[operand] = new
        self.history_recipe = recipe

    def slot(self, operand: Operand, recipe: Recipe, device: torch.device, *, trains: bool = True) -> Slot:
        """The slot of an operand, allocated on first use; an evaluation reads training's, whatever the policy of its
        history."""
        slot = self.slots.get(operand)
        fits = slot is not None and slot.fp8_max == recipe.casts[operand].format.max and slot.buffer.device == device
        if slot is None or not fits or (trains and slot.buffer.policy != recipe.history and self.training):
            torch.compiler.disable(self.prepare)(recipe, device)
            slot = self.slots[operand]
        return slot

    def slot_of_forward(self, operand: Operand, recipe: Recipe, device: torch.device) -> Slot:
        """The slot that the forward of this recomputation used; since then the layer may have moved to another recipe's."""
        slot = self.slots.get(operand)
        if slot is None or recipe.history is None or slot.buffer.policy == recipe.history or not self.training:
            return self.slot(operand, recipe, device, trains=False)
        buffer = self.buffers.buffer(operand, device, recipe.history)
        return Slot(buffer, self.indices[operand], recipe.casts[operand].format.max, self.experts)

    def __getstate__(self) -> dict[str, Any]:
        transient = (
            "_module",
            "slots",
            "indices",
            "observed",
            "weight_cache",
            "gathered",
            "context_group",
            "tensor_group",
            "joined_amax",
            "pickled",
        )
        state = {name: value for name, value in vars(self).items() if name not in transient}
        self.pickled = {
            operand: (slot.buffer.policy, slot.fp8_max, torch.cat((slot.present()[0][None], slot.history)))
            for operand, slot in self.records.items()
        }
        return state | {"module": self._module(), "values": self.pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values, module = state.pop("values"), state.pop("module")
        vars(self).update(
            state, slots={}, indices={}, observed={}, weight_cache=None, gathered=None, context_group=None, tensor_group=None,
            joined_amax=None,
        )  # fmt: skip
        self.pickled = {}
        self._module = weakref.ref(module)
        for operand, (policy, fp8_max, numbers) in values.items():
            self.indices[operand] = self.buffers.new_index(self, operand, self.experts or 1)
            buffer = self.buffers.buffer(operand, numbers.device, policy)
            self.slots[operand] = buffer.allocate(fp8_max, self.indices[operand], self.experts)
            fill(self.slots[operand], numbers[0], numbers[1:])
        self._register()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin.slots, twin.indices, twin.observed, twin.pickled = {}, {}, {}, {}
        twin.weight_cache = twin.gathered = twin.joined_amax = None
        module = self._module()
        if module is not None:
            twin._module = weakref.ref(memo.get(id(module), module))
        key = id(BufferSet)  # one copied set for everything that is copied together
        twin.buffers = memo[key] = memo.get(key) or BufferSet()
        twin.buffers.trained = twin.buffers.trained or self.trained
        twin.buffers.tensor_group = self.buffers.tensor_group
        for operand, slot in self.records.items():
            twin.indices[operand] = twin.buffers.new_index(twin, operand, self.experts or 1)
            buffer = twin.buffers.buffer(operand, slot.buffer.device, slot.buffer.policy)
            twin.slots[operand] = buffer.allocate(slot.fp8_max, twin.indices[operand], self.experts)
            fill(twin.slots[operand], slot.present()[0], slot.history)
        twin._register()
        return twin


def _weights_change(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: weights that it will write lose their scales."""
    for state in vars(module).values():
        if isinstance(state, ModuleState):
            pairs = ((getattr(module, part, None), state_dict.get(prefix + part)) for part in state.parts)
            if state.stored is not None and (new := state_dict.get(prefix + state.weight_name)) is not None:
                # A copy into bytes would round each value to a whole number.
                raise InputError(
                    f"load_state_dict: {prefix}{state.weight_name} is stored in FP8 (lora.base), and cannot take a tensor of "
                    f"{new.dtype}. Give the weights to octavo.transform, or load only the trained parameters."
                )
            # PyTorch reports a tensor of another shape, and leaves the weight unchanged.
            if any(a is not None and b is not None and a.shape == getattr(b, "shape", None) for a, b in pairs):
                weight_is_new(state)


def weight_is_new(state: ModuleState) -> None:
    """A load writes a weight without its scale, which is reset. By Transformer Engine's rule the scale stays."""
    state.weight_cache = None
    # An autocast may have allocated the slots under a different rule since the last use.
    used = state.recipe if state.recipe is not None and state.recipe.history is not None else state.history_recipe
    if used is not None and used.native and (slot := state.slots.get(Operand.WEIGHT)) is not None:
        reset(slot)
        wait_to_begin(state, Operand.WEIGHT, slot.buffer, slot.index, slot.entries, native=True)  # graphs too


@torch.no_grad()
def fill(slot: Slot, scale: Tensor, history: Tensor) -> None:
    """Set a slot's scale [] (NaN: not begun) and history [L]: a longer one is cut to its newest entries, a shorter one padded.

    For a slot of experts: scale [count], history [L, count].
    """
    copied = min(len(history), slot.buffer.policy.length) - 1
    slot.present()[0].copy_(scale)
    slot.buffer.know(slot.index, slot.begun)
    slot.history.zero_()
    slot.amax.copy_(history[0])
    if copied > 0:
        slot.history[-copied:] = history[-copied:].to(slot.scale.device)


def reset(slot: Slot) -> None:
    """Reset a slot: no scale, and an empty history."""
    fill(slot, slot.buffer.scale.new_tensor(math.nan), slot.buffer.scale.new_zeros(1))


def wait_to_begin(
    state: ModuleState, operand: Operand, buffer: ScaleBuffer, index: int, entries: int | slice, *, native: bool
) -> None:
    """An operand that has not begun is cast and recorded: the next update of its buffer may begin it."""
    waiting = buffer.waiting.setdefault(index, Waiting(entries, native, weakref.ref(state), operand))
    waiting.native = native


def owner_of_slot(buffer: ScaleBuffer, index: int) -> tuple[ModuleState, Operand]:
    """State and operand of the slot at an index of a buffer. Slow, since it searches all layers: only for first casts."""
    owners = (
        (state, operand)
        for state in list(process.fp8_modules.values())
        for operand, slot in state.slots.items()
        if slot.buffer is buffer and slot.index == index
    )
    return next(owners)


def prepare_all(recipe: Recipe) -> None:
    """Allocate slots of every new FP8 module for an autocast of `recipe`, outside of any tracing or compilation.

    An autocast does not yet know which model runs inside: slots count once a layer of the model runs (`claim`).
    """
    if recipe not in process.offered:
        with process.slots:
            _offer(recipe)


def _offer(recipe: Recipe) -> None:
    if buffers.several_ranks() and next(_without_slots(_new(), recipe), None) is not None:
        gc.collect()  # a model freed on one rank and not yet on another would take slots there
    for state, of_layer, device in _without_slots(_new(), recipe):
        state.prepare(of_layer, device, offered=True)
    if all(state.device is not None for state in list(process.fp8_modules.values())):
        process.offered.clear()
        process.offered.add(recipe)


def _new() -> list[ModuleState]:
    """Modules of models that have not run in FP8 yet, without slots or with provisional ones, in order of creation."""
    return [
        state
        for state in list(process.fp8_modules.values())
        if state.buffers.claimed is None and all(slot.offered for slot in state.slots.values())
    ]


def claim(model: BufferSet, recipe: Recipe) -> None:
    """Allocate the slots of all modules of a model, before its first layer runs in an autocast of `recipe`.

    A trained module retains its slots: it changes to another recipe only in a training forward with that recipe.
    """
    with process.slots:
        _claim(model, recipe)


def _claim(model: BufferSet, recipe: Recipe) -> None:
    if model.claimed != recipe:
        states = [state for state in list(process.fp8_modules.values()) if state.buffers is model]
        for state, of_layer, device in _without_slots(states, recipe):
            state.prepare(of_layer, device)
        for state in states:
            under = state.under(recipe)
            for slot in state.slots.values() if under is not None and under.history is not None else ():
                slot.offered = False
        if any(state.device is None for state in states):
            return
    model.claimed = recipe


def _without_slots(states: Iterable[ModuleState], recipe: Recipe) -> Iterator[tuple[ModuleState, Recipe, torch.device]]:
    """The modules without slots of training."""
    # A slot needs the same number on every rank, or an all-reduce would join different tensors. Slots of an evaluation before
    # training do not count: a single rank may have evaluated, or used another recipe.
    for state in states:
        of_layer, device = state.under(recipe), state.device
        if of_layer is None or of_layer.history is None or device is None:
            continue
        others = any(slot.buffer.policy != of_layer.history or slot.buffer.device != device for slot in state.slots.values())
        if not state.slots or (others and not state.trained):
            yield state, of_layer, device


def states_of(model: nn.Module) -> Iterator[tuple[str, ModuleState]]:
    """Every FP8 linear of a model by name; a module with several matrices names each, as in `layernorm_mlp.fc1`."""
    for name, module in model.named_modules():
        for key, state in vars(module).items():
            if isinstance(state, ModuleState):
                suffix = key.removesuffix("fp8_state").rstrip("_")
                yield ".".join(part for part in (name, suffix) if part), state


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore scales, histories and recipes of a model's layers at the end, whatever runs in between."""
    states = [state for _, state in states_of(model)]
    names = ("recipe", "history_recipe", "trained")
    before = [(dict(state.slots), dict(state.observed), [getattr(state, name) for name in names]) for state in states]
    sets = list({id(state.buffers): state.buffers for state in states}.values())
    joints = [each.joint for each in sets]
    try:
        with buffers.restored(sets):
            yield
    finally:
        for state, (slots, observed, values) in zip(states, before, strict=True):
            state.slots, state.observed, state.weight_cache = slots, observed, None
            for name, value in zip(names, values, strict=True):
                setattr(state, name, value)
        for each, joint in zip(sets, joints, strict=True):
            each.joint, each.claimed = joint, None
        process.offered.clear()


def inspect(module: nn.Module) -> dict[str, Any]:
    """The state of each FP8 tensor of a module: `"input" | "weight" | "grad_output"` → format, scale, history, saturation.

    Each entry has `format` ("E4M3" | "E5M2"), `scale` (float32; under delayed scaling of the next cast, else of the last one: a
    tensor's, rows' or blocks', and None before a cast or in compiled code), `amax_history` (float32 [L], or None without one;
    experts have scales [E] and a history [L, E]), `saturated` (True if the last recorded amax at its scale exceeded the
    format's range) and `begun` (False until delayed scaling has a finite amax above 0 for every scale: the scale reads 1 then,
    and the next cast uses that of its tensor's amax). A module with several matrices gives such a dict for each by name; a
    module that was never called gives an empty one.

    Raises:
        InputError: the module has no FP8 layer.
    """
    entries = {name: _entries(state) for name, state in states_of(module)}
    if not entries:
        raise InputError(f"{type(module).__name__} has no FP8 layer: octavo.describe(model) lists modules that have one.")
    return entries[""] if set(entries) == {""} else entries


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
            "begun": True,
        }
        if how.delayed:
            slot = state.slots.get(operand)
            if slot is None:  # the first forward failed, or needed no cast
                continue
            entry["scale"] = slot.scale
            entry["begun"] = bool(slot.begun.all())
            entry["amax_history"] = slot.history.clone()
            entry["saturated"] = slot.saturated
        entries[operand.value] = entry
    return entries


def use_separate_buffers(model: nn.Module) -> None:
    """Store the state of a model's layers in separate buffers: see `BufferSet`."""
    separate = BufferSet()
    for _, state in states_of(model):
        if not state.records:
            state.slots, state.indices, state.buffers = {}, {}, separate


def state_records(model: nn.Module) -> dict[str, Tensor]:
    """FP8 state for a checkpoint: `<module>.<operand>.scale` [] and `.amax_history` [L], float32, `.begun` [], bool; copied.

    Those of experts are [E], [L, E] and [E]. A scale that has not begun is 1.

    Raises:
        InputError: an autocast with a forward of training has not ended.
    """
    owners = {slot.buffer.owner for _, state in states_of(model) for slot in state.slots.values()}
    if any(owner.session is not None and owner.session.is_open for owner in owners):
        raise InputError(
            "a checkpoint inside fp8_autocast, after a forward with gradients: the amaxes of this forward are in no history"
            " yet, and would be lost on resume. Save after the end of the outermost fp8_autocast, one for each forward."
        )
    records: dict[str, Tensor] = {}
    for name, state in states_of(model):
        for operand, slot in state.records.items():
            records[f"{name}.{operand.value}.scale"] = slot.scale
            records[f"{name}.{operand.value}.amax_history"] = slot.history.clone()
            records[f"{name}.{operand.value}.begun"] = slot.begun
    return records


def check_state_records(model: nn.Module, names: Iterable[str]) -> None:
    """Raise an InputError for a record of a module without FP8 in this model, or a module without weights yet."""
    states = {name: state for name, state in states_of(model) if not state.skipped}
    strangers = sorted({name.rsplit(".", 2)[0] for name in names} - states.keys())
    if strangers:
        named = ", ".join(strangers[:3]) + (" …" if len(strangers) > 3 else "")
        raise InputError(
            f"the checkpoint has FP8 state for {named}, which this model does not run in FP8."
            " Use the fp8 settings of the run that saved it (fp8.skip, fp8.enabled, fp8.head)."
        )
    for name, state in states.items():
        if state.device is None:
            raise InputError(f"{name} has no weights yet: materialise the model before its FP8 state is loaded.")


def load_state_records(model: nn.Module, records: Mapping[str, Tensor], recipe: Recipe, *, fresh: Collection[str] = ()) -> None:
    """Restore records of `state_records` in the FP8 modules under an autocast of `recipe`, except those in `fresh`.

    Raises:
        InputError: as `check_state_records`, before anything is changed.
    """
    check_state_records(model, records)
    for name, state in states_of(model):
        device = state.device
        of_layer = state.under(recipe)
        if of_layer is None or device is None or name in fresh:
            continue
        state.prepare(of_layer, device)
        for operand, slot in state.slots.items():
            key = f"{name}.{operand.value}"
            slot.offered = False
            if f"{key}.scale" in records:
                scale, history = records[f"{key}.scale"], records[f"{key}.amax_history"]
                begun = records.get(f"{key}.begun")
                if begun is None:  # of an older version
                    begun = (scale != 1) | (history != 0).any(0)
                fill(slot, torch.where(begun.to(scale.device), scale, math.nan), history)


def reset_states(model: nn.Module) -> None:
    """Reset every slot of a model to no scale and an empty history, and drop cached FP8 weights."""
    for _, state in states_of(model):
        state.weight_cache = None
        for slot in state.slots.values():
            reset(slot)
            slot.buffer.saturated[slot.entries] = False
