"""The buffers of delayed scaling: scales and amax histories of all tensors of a model, updated and reduced over ranks together.

A kernel takes one element of a buffer (a `Slot`). One kernel updates the state of a whole model, one all-reduce for each
direction joins it over ranks, and sharding, `state_dict` and `.to()` never see it. Scales of forward are updated at the end of
the outermost `fp8_autocast`, scales of backward at the end of the backward. Only a training step updates, so that a single rank
may evaluate, inspect or copy a model.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.collectives.amaxes import Joins
from octavo.errors import InputError, some, warn
from octavo.fp8 import checkpoints
from octavo.fp8.recipe import History, Operand, Recipe
from octavo.fp8.threads import OfThread
from octavo.kernels.autograd import refuse_transforms
from octavo.kernels.scales import update_scales_
from octavo.process import process

_FIRST_CAPACITY = 64
_ROUNDING = 1 + 2.0**-20
"""An amax times the scale computed from it may round to just above the maximum: that loses nothing."""
_NEVER = sys.maxsize
_UPDATES = 10
"""Updates after which a warning names the operands that still have no scale."""
_LONG = 100
"""Backward passes inside one outermost autocast; more than a step's micro-batches means that training runs inside it."""
_TWO_THREADS = (
    "two threads train layers at once whose scales are in one buffer, and their amaxes would mix: layers outside"
    " octavo.transform share a buffer. Pass each model to octavo.transform, or train one after the other."
)

Scales: TypeAlias = "list[tuple[ScaleBuffer, Tensor]]"
"""Copies of the scales of some buffers."""


@dataclass
class Waiting:
    """Entries of a slot that a training step cast before they had a scale.

    Attributes:
        native: the cast used Octavo's first scale, from the operand's amax.
        state: returns the `ModuleState` of the slot; None if that was deleted.
        updates: number of updates of the buffer since that cast.
    """

    entries: int | slice
    native: bool
    state: weakref.ref[Any]
    operand: Operand
    updates: int = 0

    @property
    def name(self) -> str:
        """The operand, by class and shape of its layer."""
        state = self.state()
        weight = None if state is None else state.weight
        shape = "" if weight is None else f" (weight {list(weight.shape)})"
        return f"{self.operand.value} of {type(None if state is None else state.module).__name__}{shape}"


class Slot:
    """Scale and history of one tensor in a buffer, or of `count` experts.

    A slot has begun once a finite amax above 0 has given it a scale; until then its scale in the buffer is NaN.
    """

    def __init__(self, buffer: ScaleBuffer, index: int, fp8_max: float, count: int | None = None) -> None:
        self.buffer = buffer
        self.index = index
        self.entries = index if count is None else slice(index, index + count)
        self.fp8_max = fp8_max
        self.offered = False
        """Allocated by an autocast, which does not know its layers yet; not recorded until a layer of its model has run."""
        self.position = torch.tensor([buffer.number, index], device="cpu")
        """Number of the buffer and index in it, for `cast_delayed`: int64 [2] on the CPU."""
        self._of: Tensor | None = None  # the history that these are views of
        self._views: tuple[Tensor, Tensor]

    @property
    def scale(self) -> Tensor:
        """The scale of the next cast, 1 for entries without an amax so far: a copy, float32 [] or [count]."""
        scale = self.present()[0]
        return torch.where(scale.isnan(), 1.0, scale)

    @property
    def begun(self) -> Tensor:
        """True where the tensor has begun: bool [] or [count]."""
        return ~self.present()[0].isnan()

    @property
    def saved_scale(self) -> Tensor:
        """The stored scale, NaN for entries without an amax so far, in memory that no update writes: float32 [] or [count]."""
        return self.buffer.copied_scale()[self.entries]

    @property
    def amax(self) -> Tensor:
        """Entry 0 of the history, in which casts record: a view, float32 [] or [count]."""
        return self.present()[1]

    @property
    def history(self) -> Tensor:
        """The history, oldest after entry 0: a view, float32 [L] or [L, count]."""
        return self.buffer.history[:, self.entries]

    def present(self) -> tuple[Tensor, Tensor]:
        """Views of the scale (NaN for entries without an amax) and `amax`, [] or [count]; cached: a view costs the host
        microseconds per cast.
        """
        history = self.buffer.history
        if self._of is not history:  # the buffer has grown
            self._of, self._views = history, (self.buffer.scale[self.entries], history[0, self.entries])
        return self._views

    @property
    def saturated(self) -> bool:
        """True if the last recorded amax, of any expert, exceeded the format's range."""
        return bool(self.buffer.saturated[self.entries].any())


def several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    """True if this group has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _join(amaxes: Tensor, group: dist.ProcessGroup | None) -> None:
    """Take the maximum over the ranks of a group, in place."""
    work = dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group, async_op=amaxes.device.type == "cpu")
    if work is not None:
        work.wait()
        # Held longer than a `Pending` holds it: in a backward it refers to a Python object. If gloo's thread released it last,
        # that thread would need the GIL, and a process that ends after a backward would hang: DistributedDataParallel joins the
        # thread while it holds the GIL.
        _threads.here().joined = work


class ScaleBuffer:
    """Scales [n] and histories [L, n] of all tensors of a model, a direction, a `History` policy and a device."""

    @torch.inference_mode(False)  # here and in `allocate`: training continues with buffers that an evaluation allocated
    def __init__(self, owner: BufferSet, device: torch.device, policy: History) -> None:
        refuse_transforms("FP8 layers")  # tensors created in a transform of torch.func end with it
        self.owner = owner
        self.policy = policy
        self.device = device
        self.number = next(process.numbers)
        process.scale_buffers[self.number] = self
        make: dict[str, Any] = {"dtype": torch.float32, "device": device}  # whatever torch.set_default_dtype says
        self.scale = torch.full((_FIRST_CAPACITY,), math.nan, **make)
        self.begun_from = [_NEVER] * _FIRST_CAPACITY
        """By index of a slot: number of the first session in which all its entries have begun, so that it reads no flag."""
        self.partly_from = [_NEVER] * _FIRST_CAPACITY
        """By index of a slot: number of the first session in which any of its entries has begun."""
        self.waiting: dict[int, Waiting] = {}
        """By index of a slot: entries that may get their first scale in the next update."""
        self._pending: tuple[Tensor, torch.cuda.Event, dict[int, Waiting]] | None = None  # flags being copied to the host
        self.history = torch.zeros(policy.length, _FIRST_CAPACITY, **make)
        self.fp8_max = torch.ones(_FIRST_CAPACITY, **make)
        self.saturated = torch.zeros(_FIRST_CAPACITY, dtype=torch.bool, device=device)
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._copied_scale: tuple[object, Tensor] | None = None

    @torch.inference_mode(False)
    def allocate(self, fp8_max: float, index: int, count: int | None = None) -> Slot:
        """A fresh slot at a free index, with `count` entries that have not begun, and a history of zeros.

        Raises:
            InputError: inside a transform of `torch.func`.
        """
        refuse_transforms("FP8 layers")
        slot = Slot(self, index, fp8_max, count)
        while index + (count or 1) > len(self.scale):
            self._grow()
        with torch.no_grad():
            self.scale[slot.entries] = math.nan
            self.history[:, slot.entries] = 0
            self.saturated[slot.entries] = False
            self.fp8_max[slot.entries] = fp8_max
        self.waiting.pop(index, None)
        self.begun_from[index] = self.partly_from[index] = _NEVER
        self.slots.add(slot)
        return slot

    def know(self, index: int, begun: Tensor) -> None:
        """Note which entries of the slot at `index` have begun after a write from outside: bool [] or [count]."""
        self.waiting.pop(index, None)
        flags = begun.flatten().tolist()
        now = next(process.numbers)
        self.begun_from[index] = now if all(flags) else _NEVER
        self.partly_from[index] = now if any(flags) else _NEVER

    @torch.inference_mode(False)
    def copied_scale(self) -> Tensor:
        """A copy of all current scales, shared until they change: layers save their part for backward."""
        # Writes by PyTorch count versions. A CUDA graph, whose replays write without that, has separate copies.
        recording = self.scale.is_cuda and torch.cuda.is_current_stream_capturing()
        thread = of_thread.state if checkpoints.graph_task() == -1 else _threads.here()
        now = thread.session, recording, self.scale._version, self.scale.data_ptr()
        if self._copied_scale is None or self._copied_scale[0] != now:
            self._copied_scale = now, self.scale.detach().clone()
        return self._copied_scale[1]

    def forget_copies(self) -> None:
        """Drop the copy of the scales, which were written."""
        self._copied_scale = None

    def _grow(self) -> None:
        self.forget_copies()
        self.scale = torch.cat([self.scale, torch.full_like(self.scale, math.nan)])
        self.begun_from += [_NEVER] * len(self.begun_from)
        self.partly_from += [_NEVER] * len(self.partly_from)
        self.history = torch.cat([self.history, torch.zeros_like(self.history)], 1)
        self.fp8_max = torch.cat([self.fp8_max, torch.ones_like(self.fp8_max)])
        self.saturated = torch.cat([self.saturated, torch.zeros_like(self.saturated)])

    @staticmethod
    def bytes_of(slots: int, length: int) -> int:
        """Bytes of the tensors of a buffer with room for so many slots, whose histories have `length` steps."""
        capacity = max(_FIRST_CAPACITY, 1 << (slots - 1).bit_length())  # doubled by `_grow`
        scale = fp8_max = amax = torch.float32.itemsize
        return capacity * (scale + length * amax + fp8_max + torch.bool.itemsize)

    @torch.no_grad()
    def update(self, joint: Joint) -> None:
        """Roll each history with a new amax and compute its scale; see `reference.update_scales`.

        joint: the ranks over which the amaxes were reduced.
        """
        self._share_experts(joint)
        if self.owner.tensor_group is not None and not joint.covers(self.owner.tensor_group):
            _join(self.history[0], self.owner.tensor_group)
        self._copied_scale = None  # the kernel's writes count no version
        by_one = [waiting.entries for waiting in self.waiting.values() if not waiting.native]
        over = [self.scale[entries].isnan() & (self.history[0, entries] > self.fp8_max[entries]) for entries in by_one]
        update_scales_(
            self.history, self.scale, self.fp8_max, self.saturated,
            algo=self.policy.algo, margin=self.policy.margin, rounding=_ROUNDING,
        )  # fmt: skip
        for entries, saturated in zip(by_one, over, strict=True):
            self.saturated[entries] |= saturated
        if self.waiting and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._look()

    def _look(self) -> None:
        """Find the slots that have begun: on a CPU after this update, on a GPU after the previous one, so that nothing waits.

        Ranks that reduce amaxes together get the same result at the same update.
        """
        if self.device.type != "cuda":
            self._learn(self.scale.isnan(), self.waiting)
            return
        if self._pending is not None:
            flags, event, asked = self._pending
            event.synchronize()
            self._learn(flags, asked)
        self._pending = None
        if self.waiting:
            event = torch.cuda.Event()
            self._pending = self.scale.isnan().to("cpu", non_blocking=True), event, dict(self.waiting)
            event.record(torch.cuda.current_stream(self.scale.device))

    def _learn(self, flags: Tensor, asked: Mapping[int, Waiting]) -> None:
        number = next(process.numbers)  # above those of all earlier sessions, whose recomputations repeat their choice
        named = []
        missing = flags.tolist()
        for index, waiting in list(asked.items()):
            if self.waiting.get(index) is not waiting:  # written from outside since
                continue
            if waiting.state() is None:
                del self.waiting[index]
                continue
            entries = waiting.entries
            left = [missing[entries]] if isinstance(entries, int) else missing[entries]
            waiting.updates += 1
            if not all(left):
                self.partly_from[index] = min(self.partly_from[index], number)
            if not any(left):
                self.begun_from[index] = number
                del self.waiting[index]
            elif all(left) and waiting.native and waiting.updates == _UPDATES:
                named.append(waiting.name)
        if named:
            warn(
                f"FP8: {some(named)} {'has' if len(named) == 1 else 'have'} no scale after {_UPDATES} updates: the amaxes are "
                "0, or one in the history is not finite. Until a scale exists, each cast first measures its tensor, and "
                "octavo.graphed records no graph."
            )

    @property
    def holds_graphs(self) -> bool:
        """True if an operand has no scale yet, so that its cast measures the amax: a CUDA graph would repeat that forever."""
        return any(
            waiting.native and self.partly_from[index] == _NEVER and waiting.state() is not None
            for index, waiting in self.waiting.items()
        )

    def _share_experts(self, joint: Joint) -> None:
        """Fetch the entries of other ranks' experts, unless `joint` did: every rank can then save all scales."""
        group = self.owner.expert_group
        if group is None or joint.covers(group):
            return
        seen = torch.zeros_like(self.history[0])
        for slot in self.slots:
            if isinstance(slot.entries, slice):
                seen[slot.entries] = slot.amax
        _join(seen, group)
        self.history[0].copy_(torch.maximum(self.history[0], seen))


@dataclass(frozen=True)
class Joint:
    """The ranks over which an autocast reduces amaxes."""

    group: dist.ProcessGroup | None = None
    reduce_amax: bool = True

    def covers(self, group: dist.ProcessGroup) -> bool:
        """True if amaxes are reduced over all ranks of `group`."""
        if not self.reduce_amax or self.group is None:
            return self.reduce_amax
        return set(dist.get_process_group_ranks(self.group)).issuperset(dist.get_process_group_ranks(group))


@dataclass(eq=False)
class Session:
    """An outermost autocast; its layers refer to it until their backward.

    Attributes:
        number: higher than that of all earlier sessions.
        used: buffers of the layers that have run in FP8 in it; replays of CUDA graphs are not counted.
        recorded: buffers with amaxes of an unfinished forward → the mode of its modules.
    """

    joint: Joint
    number: int = field(default_factory=lambda: next(process.numbers))
    ended_scales: Scales | None = None  # the forward scales of all casts, once it has ended
    is_open: bool = False
    used: dict[BufferSet, None] = field(default_factory=dict)
    recorded: dict[BufferSet, Literal["evaluation", "training"]] = field(default_factory=dict)
    backwards: int = 0  # that ended while it was open

    def scales(self) -> Scales:
        """The forward scales of all casts of the session; they change only when it ends."""
        return snapshot(self.used) if self.ended_scales is None else self.ended_scales


@contextlib.contextmanager
def restored(sets: Iterable[BufferSet]) -> Iterator[None]:
    """Restore scales and histories of these sets at the end, whatever forwards and backwards record in between."""

    saved = [_Saved(buffer) for each in sets for buffer in (*each.forward.values(), *each.backward.values())]
    try:
        yield
    finally:
        for each in saved:
            each.restore()


class _Saved:
    """A copy of a buffer's contents."""

    def __init__(self, buffer: ScaleBuffer) -> None:
        self._buffer = buffer
        self._tensors = [x.detach().clone() for x in (buffer.scale, buffer.history, buffer.saturated)]
        self._begun, self._partly, self._waiting = [*buffer.begun_from], [*buffer.partly_from], dict(buffer.waiting)

    @torch.no_grad()
    def restore(self) -> None:
        buffer, size = self._buffer, len(self._begun)
        for tensor, saved in zip((buffer.scale, buffer.history, buffer.saturated), self._tensors, strict=True):
            tensor[..., :size].copy_(saved)
        buffer.begun_from[:size], buffer.partly_from[:size] = self._begun, self._partly
        buffer.waiting = self._waiting
        buffer.forget_copies()


class BufferSet:
    """The buffers of one model. Models are updated separately: a copy on a single rank changes no scales of other ranks."""

    def __init__(self) -> None:
        self.forward: dict[tuple[torch.device, History], ScaleBuffer] = {}
        self.backward: dict[tuple[torch.device, History], ScaleBuffer] = {}
        self.joint = Joint()  # of the last forward of training
        self.trained = False
        self.claimed: Recipe | None = None  # of the last autocast in which a layer has run; all layers have slots for it
        self.session: Session | None = None  # open, with amaxes recorded here
        self.backward_of: _Thread | None = None  # not ended, with amaxes recorded here
        self.expert_group: dist.ProcessGroup | None = None
        """Ranks with different experts of the model's MoE layers, whose slots have entries for all experts."""
        self.tensor_group: dist.ProcessGroup | None = None
        """Ranks that hold parts of each operand, and share its scale."""
        self.joins = Joins()
        """Joins of amaxes before a cast."""
        self._free: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)  # by direction and length
        self._used = {False: 0, True: 0}
        self.deferred: weakref.WeakKeyDictionary[Session, list[tuple[ScaleBuffer, Tensor]]] = weakref.WeakKeyDictionary()
        """Amaxes of forwards in evaluation mode, which count if a backward follows."""
        self.number = next(process.numbers)
        process.buffer_sets[self.number] = self

    def __reduce__(self) -> Any:
        """Pickle without slots: each `ModuleState` allocates them. `default` becomes that of the unpickling process."""
        return (_default, ()) if self is default else (BufferSet, ())

    def buffer(self, operand: Operand, device: torch.device, policy: History) -> ScaleBuffer:
        """The buffer of an operand's slots, allocated on first use."""
        buffers = self.backward if operand is Operand.GRAD_OUTPUT else self.forward
        return buffers.get((device, policy)) or buffers.setdefault((device, policy), ScaleBuffer(self, device, policy))

    def new_index(self, owner: object, operand: Operand, count: int = 1) -> int:
        """Reserve `count` indices in all buffers for an operand while `owner` lives: ranks reduce slots by index."""
        backward = operand is Operand.GRAD_OUTPUT
        free = self._free[backward, count]
        if free and not several_ranks():  # several ranks collect garbage at different times
            index = free.pop()
        else:
            index = self._used[backward]
            self._used[backward] += count
        weakref.finalize(owner, free.append, index)
        return index

    def record_forward(self, session: Session | None = None, *, training: bool) -> None:
        """Note that an amax of a forward with gradients is about to be recorded, in `session` or else the current one.

        Raises:
            InputError: a forward on another thread is recording too.
        """
        if session is None:
            session = of_thread.state.session
            session.used[self] = None
        mode = session.recorded.get(self)
        if mode is None:
            if self.session is not None and self.session.is_open and self.session is not session:
                raise InputError(_TWO_THREADS)
            self.joint, self.trained, self.session = session.joint, True, session
        if mode != "training":
            session.recorded[self] = "training" if training else "evaluation"

    def record_gradient(self, session: Session | None = None) -> None:
        """Note that a gradient's amax is about to be recorded: its forward, in `session`, counts; backward's end updates.

        Raises:
            InputError: a backward on another thread is recording too.
        """
        thread = _threads.here()
        if session is not None and session.is_open and session.recorded.get(self) == "evaluation":
            session.recorded[self] = "training"
        elif session is not None and session in self.deferred:
            _update_postponed(thread)  # those of another forward
            for buffer, amaxes in self.deferred.pop(session):
                newest = buffer.history[0, : len(amaxes)]
                newest.copy_(torch.maximum(newest, amaxes))
            if self.session is None:
                _update(self.forward, session.joint, thread)
        if checkpoints.graph_task() != thread.task:
            update_after_backward(thread)
        if self.backward_of is not thread:
            if self.backward_of is not None and self in self.backward_of.gradients:
                raise InputError(_TWO_THREADS)
            self.backward_of = thread
        thread.gradients[self] = self.joint if session is None else session.joint

    def defer_forward(self, session: Session) -> None:
        """Hold the amaxes of a forward in evaluation mode until its backward."""
        buffers = list(self.forward.values())
        self.deferred[session] = [(buffer, buffer.history[0].clone()) for buffer in buffers]
        for buffer in buffers:
            buffer.history[0].zero_()


def _in_order(sets: Iterable[BufferSet]) -> list[BufferSet]:
    """Buffers in order of creation, the same on every rank: each may wait for the other ranks."""
    return sorted(sets, key=lambda buffers: buffers.number)


def _update(buffers: Mapping[Any, ScaleBuffer], joint: Joint, thread: _Thread) -> None:
    used = {buffer: joint for buffer in buffers.values() if buffer.slots}
    if thread.postponed is None:
        _update_each(used)
    else:
        thread.postponed |= used


@torch.no_grad()
def _update_each(joints: Mapping[ScaleBuffer, Joint]) -> None:
    """Reduce the amaxes of all buffers, by one all-reduce per group of ranks and device, and update the buffers."""
    together: dict[tuple[dist.ProcessGroup | None, torch.device], list[Tensor]] = {}
    for buffer, joint in joints.items():
        if joint.reduce_amax and several_ranks(joint.group):
            together.setdefault((joint.group, buffer.device), []).append(buffer.history[0])
    for (group, _), amaxes in together.items():
        joined = amaxes[0] if len(amaxes) == 1 else torch.cat(amaxes)
        _join(joined, group)
        if len(amaxes) > 1:
            torch._foreach_copy_(amaxes, joined.split([len(each) for each in amaxes]))
    for buffer, joint in joints.items():
        buffer.update(joint)


def _update_postponed(thread: _Thread) -> None:
    if thread.postponed:
        postponed, thread.postponed = thread.postponed, {}
        _update_each(postponed)


class Together:
    """Postponed updates of `buffers`, which a call runs together."""

    def __init__(self, thread: _Thread) -> None:
        self._thread = thread
        self.buffers: set[ScaleBuffer] = set()

    def __call__(self) -> None:
        """Run the postponed updates."""
        self.buffers |= (self._thread.postponed or {}).keys()
        _update_postponed(self._thread)


@contextlib.contextmanager
def updates_together() -> Iterator[Together]:
    """Around a forward and its backward: both update scales when the yielded function is called, after the backward.

    Ranks then wait for each other once. Results are the same: an outermost autocast inside runs outstanding updates first.
    After an exception, recorded amaxes count in the next forward.
    """
    thread = _threads.here()
    thread.postponed = {}
    update = Together(thread)
    try:
        yield update
        update()
    finally:
        thread.postponed = None


@dataclass(eq=False)
class _Thread:
    """The outermost autocast of a thread, open or the last one, and its last backward."""

    session: Session = field(default_factory=lambda: Session(Joint()))
    task: int = -1  # autograd's number of the last backward that recorded
    gradients: dict[BufferSet, Joint] = field(default_factory=dict)  # sets with amaxes of that backward
    joined: dist.Work | None = None  # the last collective on a CPU
    postponed: dict[ScaleBuffer, Joint] | None = None  # pending updates inside `updates_together`


_threads: OfThread[_Thread] = OfThread("scales", _Thread)
of_thread = _threads.local
"""`.state.session`: the current outermost autocast of this thread, or the last one, of a forward."""
default = BufferSet()
"""Buffers of layers outside of `transform`."""


def _default() -> BufferSet:
    """The default set of the process that unpickles."""
    return default


def begin(group: dist.ProcessGroup | None, reduce_amax: bool) -> None:
    """An outermost autocast begins."""
    thread = _threads.here()
    _update_postponed(thread)
    thread.session = Session(Joint(group, reduce_amax), is_open=True)


def leave() -> None:
    """The outermost autocast ends, also by an exception: recorded amaxes wait for the next forward."""
    session = _threads.here().session
    if session.recorded and session.ended_scales is None:
        save_scales()
    session.is_open = False
    for buffers, mode in session.recorded.items():
        if mode == "evaluation":
            buffers.defer_forward(session)
        buffers.session = None
    session.recorded.clear()


def session() -> Session:
    """The current outermost autocast, or the last one."""
    return _threads.here().session


def by_number(number: int) -> ScaleBuffer:
    """The buffer with this number, from a slot's `position`."""
    return cast(ScaleBuffer, process.scale_buffers[number])


def save_scales() -> None:
    """The outermost autocast is about to end: recomputations of its forwards need the scales as they are."""
    session = _threads.here().session
    session.ended_scales = snapshot(session.used)


def has_recorded() -> bool:
    """True if a forward of training has recorded amaxes since the outermost autocast began."""
    return bool(_threads.here().session.recorded)


def end_forward(*, unseen: bool) -> None:
    """An outermost autocast ends: amaxes of training take effect.

    Amaxes of modules in evaluation mode wait for their backward: without one they are dropped and not reduced over ranks.
    unseen: update also if no layer has run from Python, since a CUDA graph may have been replayed.
    """
    thread = _threads.here()
    session = thread.session
    trained = [buffers for buffers, mode in session.recorded.items() if mode == "training"]
    if unseen and not session.used:
        trained = [buffers for buffers in list(process.buffer_sets.values()) if buffers.trained and buffers.session is None]
    for buffers in _in_order(trained):
        _update(buffers.forward, session.joint, thread)


def joins_forward(group: dist.ProcessGroup) -> bool:
    """True if the amaxes of this forward will be reduced over all ranks of `group`."""
    thread = of_thread.state if checkpoints.graph_task() == -1 else _threads.here()
    return thread.session.joint.covers(group)


def update_after_backward(thread: _Thread | None = None) -> None:
    """Queue the update of the gradients' scales at the end of the outermost running backward."""
    thread = thread or _threads.here()
    task = checkpoints.graph_task()
    if task in (-1, thread.task) or checkpoints.is_nested_backward():
        return
    thread.task = task
    thread.gradients.clear()  # of a backward that an exception has left
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_end_backward, thread))


def _end_backward(thread: _Thread) -> None:
    session = thread.session
    session.backwards += session.is_open
    if session.is_open and session.backwards == _LONG:
        warnings.warn(
            f"fp8_autocast has been open for {_LONG} backward passes: delayed scaling changes the scales of inputs and weights"
            " where the outermost context ends. Enter it around each forward, not around the training loop.",
            stacklevel=2,
        )
    joints, thread.gradients = thread.gradients, {}
    for buffers in _in_order(joints):
        _update(buffers.backward, joints[buffers], thread)


def snapshot(sets: Iterable[BufferSet]) -> Scales:
    """The present forward scales of models, for a recomputation."""
    return [(buffer, buffer.copied_scale()) for buffers in list(sets) for buffer in list(buffers.forward.values())]


def captured() -> Scales | None:
    """During the capture of a CUDA graph a captured snapshot, since replays belong to later sessions; else None."""
    return (
        snapshot(process.buffer_sets.values())
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        else None
    )


@contextlib.contextmanager
def replay(scales: Scales) -> Iterator[None]:
    """Around the recomputation of a forward: use its scales; restore scales and recorded amaxes at the end."""
    before = [(buffer, buffer.copied_scale(), buffer.history[0].clone()) for buffer, _ in scales]
    for buffer, scale in scales:
        buffer.scale[: len(scale)].copy_(scale)
    try:
        yield
    finally:
        for buffer, scale, amaxes in before:
            buffer.scale[: len(scale)].copy_(scale)
            buffer.history[0, : len(amaxes)].copy_(amaxes)


def is_open() -> bool:
    """True inside an autocast."""
    return _threads.here().session.is_open
