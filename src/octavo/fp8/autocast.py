"""`fp8_autocast`: the context that turns FP8 on, chooses the recipe, and updates the scales of delayed scaling at its edges.

Scales change only at the edges of the outermost context, so that all uses within a step see the same scales. Backward may run
inside the context or after it. A forward inside a backward is a recomputation: it records no amax and repeats the casts of its
forward with the same scales, found by `octavo.fp8.checkpoints` or, cheaper, stored by `recomputing`. Outermost contexts inside
a recomputation correspond to those of its forward in order, each with its scales.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from octavo.errors import InputError, check_flags
from octavo.fp8 import buffers, checkpoints, scaling
from octavo.fp8.recipe import DelayedScaling, Recipe, coerce
from octavo.fp8.threads import OfThread
from octavo.kernels import gemm
from octavo.kernels.autograd import refuse_transforms
from octavo.process import process


@dataclass
class _Active:
    """One level of autocast; `recipe` is None if FP8 is off."""

    recipe: Recipe | None
    emulate: bool
    outer: _Active | None
    task: int  # the backward in which a recomputation entered it; -1 outside a backward
    inside: frozenset[int]  # ids of the checkpoints around it
    session: buffers.Session  # the forward's session in a recomputation


@dataclass
class _Forward:
    """The context, the scales and the micro-batch of a forward, for its recomputation."""

    active: _Active | None
    first: bool | None = None
    session: buffers.Session = field(default_factory=buffers.session)
    captured: buffers.Scales | None = field(default_factory=buffers.captured)

    @property
    def scales(self) -> buffers.Scales:
        """The scales of this forward."""
        return self.session.scales() if self.captured is None else self.captured


@dataclass
class _Entered:
    """The outermost autocasts that a checkpoint's function has entered itself, in order."""

    sessions: list[buffers.Session] = field(default_factory=list)
    repeated: int = 0  # by the recomputation within `task`
    task: int = -1

    def next(self, task: int) -> buffers.Session | None:
        """The session of the next one that a recomputation enters; None for more than the forward has entered."""
        if task != self.task:
            self.task, self.repeated = task, 0
        self.repeated += 1
        return self.sessions[self.repeated - 1] if self.repeated <= len(self.sessions) else None


@dataclass(eq=False)
class _Thread:
    """The contexts of a thread, which its backwards have too."""

    active: _Active | None = None
    last: _Forward = field(default_factory=lambda: _Forward(None))
    forwards: tuple[_Recomputing, ...] = ()  # contexts whose forwards are running
    first_microbatch: bool | None = None
    recomputed: _Recomputing | None = None  # inside `recomputing`
    found: tuple[Callable[[], Any], Callable[[], _Forward | None]] | None = None  # see `_found`; two weak references
    discard_copies: bool = False  # inside `discard_copies`
    measured: Recipe | None = None  # inside `measuring`


_threads: OfThread[_Thread] = OfThread("contexts", _Thread)
_local = _threads.local


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, fp8_recipe: Any = None, fp8_group: dist.ProcessGroup | None = None, *, emulate: bool = False
) -> Iterator[None]:
    """Run the products of FP8 layers inside in FP8 (or, with `enabled=False`, in the dtype of their inputs).

    On a GPU without FP8 units the layers run in the dtype of their inputs, with one warning; a CPU emulates FP8.
    Amaxes are reduced over ranks at the end of a training forward and of its backward. An evaluation, without gradients or in
    evaluation mode, calls no collective and changes no state: a single rank may run it.

    A context belongs to its thread, as `torch.autocast` does, and to the backwards that the thread calls: two threads may each
    train a model of `octavo.transform`. Compiled code follows the thread that last entered a context.

    Args:
        enabled: False takes the layers inside out of FP8, also within another autocast.
        fp8_recipe: one of `octavo.recipe`, or a Transformer Engine recipe; None is `DelayedScaling()`.
        fp8_group: ranks over which amaxes are reduced; None is the default group.
        emulate: on a GPU without FP8 units, compute FP8's numbers slowly instead.

    Raises:
        InputError: `fp8_recipe` is not a recipe, or another argument has the wrong type.
    """
    check_flags("fp8_autocast", enabled=enabled, emulate=emulate)
    if fp8_group is not None and not isinstance(fp8_group, dist.ProcessGroup):
        raise InputError(f"fp8_autocast: fp8_group = {fp8_group!r} is not a process group of torch.distributed.")
    recipe = (DelayedScaling() if fp8_recipe is None else coerce(fp8_recipe)) if enabled else None
    thread = process.traced = _threads.here()
    before, task, outer, around = thread.active, checkpoints.graph_task(), _in_force(thread), checkpoints.enclosing()
    outermost = before is None and task == -1  # in a backward it is part of a recomputation
    if outermost:
        buffers.begin(fp8_group, getattr(recipe, "reduce_amax", True))
    session = _enter(thread, around) if outer is None else outer.session
    active = _Active(recipe, emulate, outer, task, frozenset(map(id, around)), session)
    counts = outermost and recipe is not None
    process.open_autocasts += counts
    try:
        if recipe is not None:
            scaling.prepare_all(recipe)
        thread.active = active
        # `recomputing` sets the scales for the whole recomputation; otherwise `scales_of_forward` sets them for each layer.
        with buffers.replay(session.scales()) if outer is None and thread.recomputed is not None else contextlib.nullcontext():
            yield
        if outermost and (torch.is_grad_enabled() or buffers.has_recorded()):
            buffers.save_scales()
            thread.last = _Forward(active, thread.first_microbatch)
            buffers.end_forward(unseen=recipe is not None)
    finally:
        process.open_autocasts -= counts
        thread.active = before
        if outermost:
            buffers.leave()


def _traced(name: str) -> Any:
    """A thread's attribute that compiled code follows: PyTorch's compiler guards no attributes of threads."""
    return None if process.traced is None else getattr(process.traced, name)


def _enter(thread: _Thread, around: list[Any]) -> buffers.Session:
    """The session of an outermost autocast that is about to begin: in a recomputation that of its forward."""
    task, recomputed = checkpoints.graph_task(), checkpoints.recomputed()
    session = None
    if thread.recomputed is not None:
        session = thread.recomputed.entered.next(task)
    elif task != -1:
        checkpoint = next((one for one in around if one in recomputed), None)
        session = process.checkpoint_autocasts[checkpoint].next(task) if checkpoint in process.checkpoint_autocasts else None
    if session is None:
        session = buffers.session() if task == -1 else _repeated(thread).session
    for one in around:
        if one not in recomputed:
            process.checkpoint_autocasts.setdefault(one, _Entered()).sessions.append(session)
    for forward in thread.forwards:
        forward.entered.sessions.append(session)
    return session


def current_recipe(device: torch.device) -> Recipe | None:
    """The recipe that applies here on this device, or None where products stay in high precision."""
    if torch.compiler.is_compiling():
        active = _traced("active")
    elif checkpoints.graph_task() == -1:
        thread = _local.state
        active = thread.active
        if thread.recomputed is None and (checkpoints.has_hooks() or not torch.is_grad_enabled()):
            _remember(thread, active)
    else:
        thread = _threads.here()
        active = _in_force(thread)
        if thread.recomputed is None and (checkpoints.has_hooks() or not torch.is_grad_enabled()):
            _remember(thread, active)
        buffers.update_after_backward()
    if active is None or active.recipe is None:
        if active is None and not torch.compiler.is_compiling() and process.open_autocasts:
            _warn_of_other_thread()
        return None
    refuse_transforms("FP8 layers")  # before the layer touches its scales
    native = device.type == "cpu" or active.emulate or gemm.is_native(device)
    return active.recipe if native else _warn_without_fp8(device)


def claim_buffers(model: buffers.BufferSet) -> None:
    """Call `scaling.claim` before a layer of this model runs in compiled code."""
    active = _local.state.active
    if active is not None and active.recipe is not None and active.recipe is not model.claimed:
        scaling.claim(model, active.recipe)


def gathering_recipe(device: torch.device) -> Recipe | None:
    """`current_recipe` for a weight that is gathered; its layers, not the gather, record forwards for checkpoints."""
    active = _local.state.active if checkpoints.graph_task() == -1 else _in_force(_threads.here())
    if active is None or active.recipe is None:
        return None
    native = device.type == "cpu" or active.emulate or gemm.is_native(device)
    return active.recipe if native else _warn_without_fp8(device)


def _is_in_checkpoint(thread: _Thread) -> bool:
    """True in the recomputation of a checkpoint without `recomputing`."""
    return thread.recomputed is None and checkpoints.graph_task() != -1


def _in_force(thread: _Thread) -> _Active | None:
    """The context of this forward; in a recomputation the forward's context, unless it enters one itself."""
    active = thread.active
    if not _is_in_checkpoint(thread) or (active is not None and active.task == checkpoints.graph_task()):
        return active
    return _repeated(thread).active


def _remember(thread: _Thread, active: _Active | None) -> None:
    """Store context and scales of this forward for each checkpoint around it, which may recompute it."""
    if torch.is_grad_enabled():
        if _found(thread) is not None:
            return
    elif not checkpoints.trains():
        return
    new = [checkpoint for checkpoint in checkpoints.enclosing() if checkpoint not in process.checkpoint_forwards]
    if not new:
        return
    forward = _repeated(thread) if _is_in_checkpoint(thread) else _Forward(None, thread.first_microbatch)
    for checkpoint in new:
        around = active
        while around is not None and id(checkpoint) in around.inside:
            around = around.outer
        session = forward.session if around is None else around.session
        process.checkpoint_forwards[checkpoint] = _Forward(around, forward.first, session, forward.captured)


def _warn_of_other_thread() -> None:
    """Warn once that a layer runs on a thread outside fp8_autocast while another thread is inside one."""
    if "autocast of another thread" not in process.said:
        process.said.add("autocast of another thread")
        warnings.warn(
            "a layer that can run in FP8 runs in high precision, on a thread without fp8_autocast while another thread is "
            "inside one. A context belongs to its thread, as torch.autocast does: enter fp8_autocast on this thread, or "
            "fp8_autocast(enabled=False) to confirm high precision.",
            stacklevel=4,
        )


@torch.compiler.disable
def _warn_without_fp8(device: torch.device) -> None:
    """Warn once that layers on this device stay in high precision."""
    if device not in process.said:
        process.said.add(device)
        warnings.warn(
            f"{device} has no FP8 units (compute capability 8.9 or more): FP8 layers run in the dtype of their inputs."
            " fp8_autocast(emulate=True) computes FP8's numbers slowly.",
            stacklevel=3,
        )


@contextlib.contextmanager
def _within(name: str, value: Any) -> Iterator[None]:
    """A context of this thread: one attribute of `_Thread` has another value inside."""
    thread = process.traced = _threads.here()
    before = getattr(thread, name)
    setattr(thread, name, value)
    try:
        yield
    finally:
        setattr(thread, name, before)


def microbatch(first: bool) -> contextlib.AbstractContextManager[None]:
    """Around a forward of an accumulated step: all but the first reuse its FP8 weights and record no amax of them."""
    return _within("first_microbatch", first)


def first_microbatch() -> bool | None:
    """True in the first forward of an accumulated step, False in later ones, None outside of `microbatch`."""
    if torch.compiler.is_compiling():
        return cast("bool | None", _traced("first_microbatch"))
    thread = _threads.here()
    return _repeated(thread).first if _is_in_checkpoint(thread) else thread.first_microbatch


def session() -> buffers.Session:
    """The outermost autocast of this forward; in a recomputation, of the recomputed forward."""
    thread = _threads.here()
    active = _in_force(thread)
    if active is not None:
        return active.session
    if thread.recomputed is not None:
        return thread.recomputed.forward.session
    return _repeated(thread).session if _is_in_checkpoint(thread) else buffers.session()


def around_layer() -> tuple[buffers.Session, bool | None, bool]:
    """`session`, `first_microbatch` and `discards_copies` of this forward, in eager code."""
    if checkpoints.graph_task() == -1:
        thread = _local.state
        if thread.active is not None:
            return thread.active.session, thread.first_microbatch, thread.discard_copies
    return session(), first_microbatch(), discards_copies()


class _CheckpointedForward(contextlib.AbstractContextManager[None]):
    """Context of the forward of a checkpoint with `recomputing`: collects the autocasts that the forward enters."""

    def __init__(self, recomputing: _Recomputing) -> None:
        self._recomputing = recomputing

    def __enter__(self) -> None:
        self._thread = _threads.here()
        self._before = self._thread.forwards
        self._thread.forwards = (*self._before, self._recomputing)

    def __exit__(self, *exc: object) -> None:
        self._thread.forwards = self._before


class _Recomputing(contextlib.AbstractContextManager[None]):
    """The context of a recomputation: recipe and scales of its forward."""

    def __init__(self) -> None:
        thread = _threads.here()
        captured = _repeated(thread).captured if _is_in_checkpoint(thread) else buffers.captured()
        self.forward = _Forward(_in_force(thread), first_microbatch(), session(), captured)
        self.entered = _Entered()

    def __enter__(self) -> None:
        thread = self._thread = process.traced = _threads.here()
        self._before = (thread.active, thread.first_microbatch, thread.recomputed, thread.discard_copies, thread.forwards)
        self.entered.task = -1
        self._replay = buffers.replay(self.forward.scales)
        self._replay.__enter__()
        thread.active, thread.first_microbatch = self.forward.active, self.forward.first
        thread.recomputed, thread.discard_copies, thread.forwards = self, False, ()

    def __exit__(self, *exc: object) -> None:
        thread = self._thread
        self._replay.__exit__(None, None, None)
        thread.active, thread.first_microbatch, thread.recomputed, thread.discard_copies, thread.forwards = self._before


def recomputing() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: recompute with the forward's scales."""
    recomputation = _Recomputing()
    return _CheckpointedForward(recomputation), recomputation


def discard_copies() -> contextlib.AbstractContextManager[None]:
    """Around a forward whose saved tensors are discarded and recomputed: operands that only backward needs get no values."""
    return _within("discard_copies", True)


def measuring(recipe: Recipe | None) -> contextlib.AbstractContextManager[None]:
    """Around a calibration by this recipe: see `octavo.fp8.calibration`."""
    return _within("measured", recipe)


def measured() -> Recipe | None:
    """The recipe of the innermost `measuring`; None outside of one."""
    return cast("Recipe | None", _traced("measured")) if torch.compiler.is_compiling() else _threads.here().measured


def discards_copies() -> bool:
    """True inside `discard_copies`."""
    return _threads.here().discard_copies


def scales_of_forward() -> contextlib.AbstractContextManager[None]:
    """Around the casts of a forward: the scales of the first forward, if this is a recomputation without `recomputing`."""
    if torch.compiler.is_compiling() or checkpoints.graph_task() == -1:
        return contextlib.nullcontext()
    thread = _threads.here()
    if not _is_in_checkpoint(thread):
        return contextlib.nullcontext()
    active = _in_force(thread)
    entered_here = active is not None and active.task == checkpoints.graph_task()  # entered by this recomputation
    return buffers.replay(active.session.scales() if active is not None and entered_here else _repeated(thread).scales)


def _repeated(thread: _Thread) -> _Forward:
    """The forward of this recomputation; without a checkpoint around it, the one of the current, else of the last context."""
    if (known := _found(thread)) is not None:
        return known
    for one in checkpoints.nearest_first():
        if one in process.checkpoint_forwards:
            return process.checkpoint_forwards[one]
    if thread.active is None:
        return thread.last
    return _Forward(thread.active, thread.first_microbatch, thread.active.session)


def _found(thread: _Thread) -> _Forward | None:
    """The forward of the innermost checkpoint with `use_reentrant=False`, searched once per forward and recomputation."""
    hook = checkpoints.pack_hook()
    if hook is None:
        return None
    if thread.found is not None and thread.found[0]() is hook:
        return thread.found[1]()
    one = checkpoints.innermost()
    forward = None if one is None else process.checkpoint_forwards.get(one)
    if forward is not None:
        thread.found = weakref.ref(hook), weakref.ref(forward)
    return forward
