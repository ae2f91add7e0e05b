"""`fp8_autocast`: the context that turns FP8 on, chooses the recipe, and updates the scales of delayed scaling at its edges.

Scales change only at the edges of the outermost context, so that all uses inside one step see the same ones. Backward may run
inside the context or after it. A forward that runs inside a backward is a recomputation: it records no amax and repeats the
casts of its forward by the same scales, found by `octavo.fp8.checkpoints` or, cheaper, kept by `recomputing`. The outermost
contexts that it enters itself are those of its forward in the same order, each with its scales.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from octavo.errors import InputError, check_flags
from octavo.fp8 import buffers, checkpoints, scaling
from octavo.fp8.recipe import DelayedScaling, Recipe, coerce
from octavo.kernels import gemm
from octavo.kernels.autograd import refuse_transforms


@dataclass
class _Active:
    """One level of autocast; `recipe` is None where FP8 is off."""

    recipe: Recipe | None
    emulate: bool
    outer: _Active | None
    task: int  # the backward in whose recomputation it was entered; -1 outside of one
    inside: frozenset[int]  # ids of the checkpoints around it
    session: buffers.Session  # of its forward, if this is a recomputation


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


@dataclass
class _State:
    """The current contexts of the process: global, since backward runs on threads of its own."""

    active: _Active | None = None
    last: _Forward = field(default_factory=lambda: _Forward(None))
    checkpoints: weakref.WeakKeyDictionary[Any, _Forward] = field(default_factory=weakref.WeakKeyDictionary)
    entered: weakref.WeakKeyDictionary[Any, _Entered] = field(default_factory=weakref.WeakKeyDictionary)
    told: tuple[_Recomputing, ...] = ()  # whose forwards are running
    first_microbatch: bool | None = None
    warned: set[torch.device] = field(default_factory=set)
    recomputed: _Recomputing | None = None  # inside `recomputing`
    dropping: bool = False  # inside `dropping`


_state = _State()


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, fp8_recipe: Any = None, fp8_group: dist.ProcessGroup | None = None, *, emulate: bool = False
) -> Iterator[None]:
    """Run the products of FP8 layers inside in FP8 (or, with `enabled=False`, in the dtype of their inputs).

    On a GPU without FP8 units the layers run in the dtype of their inputs and a warning says so once; a CPU emulates FP8.
    Ranks join their amaxes at the end of a forward of training and of its backward. An evaluation, without gradients or of
    modules in evaluation mode, is no collective and changes no state: one rank may run it alone.

    Args:
        enabled: False takes the layers inside out of FP8, also within another autocast.
        fp8_recipe: one of `octavo.recipe`, or a Transformer Engine recipe; None is `DelayedScaling()`.
        fp8_group: ranks whose amaxes are joined; None is the default group.
        emulate: on a GPU without FP8 units, compute FP8's numbers slowly instead.

    Raises:
        InputError: `fp8_recipe` is not a recipe, or another argument of the wrong kind.
    """
    check_flags("fp8_autocast", enabled=enabled, emulate=emulate)
    if fp8_group is not None and not isinstance(fp8_group, dist.ProcessGroup):
        raise InputError(f"fp8_autocast: fp8_group = {fp8_group!r} is not a process group of torch.distributed.")
    recipe = (DelayedScaling() if fp8_recipe is None else coerce(fp8_recipe)) if enabled else None
    before, task, outer, around = _state.active, checkpoints.graph_task(), _in_force(), checkpoints.enclosing()
    outermost = before is None and task == -1  # in a backward it is part of a recomputation
    if outermost:
        buffers.begin(fp8_group, getattr(recipe, "reduce_amax", True))
    session = _enter(around) if outer is None else outer.session
    active = _Active(recipe, emulate, outer, task, frozenset(map(id, around)), session)
    try:
        if recipe is not None:
            scaling.prepare_all(recipe)
        _state.active = active
        # `recomputing` has the scales in place all the while; elsewhere `scales_of_forward` puts them there for each layer.
        with buffers.replay(session.scales()) if outer is None and _state.recomputed is not None else contextlib.nullcontext():
            yield
        if outermost and (torch.is_grad_enabled() or buffers.has_recorded()):
            buffers.keep_scales()
            _state.last = _Forward(active, _state.first_microbatch)
            buffers.end_forward(unseen=recipe is not None)
    finally:
        _state.active = before
        if outermost:
            buffers.leave()


def _enter(around: list[Any]) -> buffers.Session:
    """The session of an outermost autocast that is about to begin: in a recomputation that of its forward."""
    task, recomputed = checkpoints.graph_task(), checkpoints.recomputed()
    session = None
    if _state.recomputed is not None:
        session = _state.recomputed.entered.next(task)
    elif task != -1:
        found = next((one for one in around if one in recomputed), None)
        session = _state.entered[found].next(task) if found in _state.entered else None
    if session is None:
        session = buffers.session() if task == -1 else _repeated().session
    for one in around:
        if one not in recomputed:
            _state.entered.setdefault(one, _Entered()).sessions.append(session)
    for told in _state.told:
        told.entered.sessions.append(session)
    return session


def current_recipe(device: torch.device) -> Recipe | None:
    """The recipe that applies here on this device, or None where products stay in high precision."""
    active = _state.active
    if not torch.compiler.is_compiling():
        backward = checkpoints.graph_task() != -1
        if backward:
            active = _in_force()
        if _state.recomputed is None and (checkpoints.has_hooks() or not torch.is_grad_enabled()):
            _remember(active)
        if backward:
            buffers.update_after_backward()
    if active is None or active.recipe is None:
        return None
    refuse_transforms("FP8 layers")  # before the layer touches its scales
    native = device.type == "cpu" or active.emulate or gemm.is_native(device)
    return active.recipe if native else _warn_without_fp8(device)


def gathering_recipe(device: torch.device) -> Recipe | None:
    """`current_recipe` for a weight that is gathered: what a checkpoint will repeat is noted by the layers that read it."""
    active = _state.active if checkpoints.graph_task() == -1 else _in_force()
    if active is None or active.recipe is None:
        return None
    native = device.type == "cpu" or active.emulate or gemm.is_native(device)
    return active.recipe if native else _warn_without_fp8(device)


def _is_in_checkpoint() -> bool:
    """True in the recomputation of a checkpoint without `recomputing`."""
    return _state.recomputed is None and checkpoints.graph_task() != -1


def _in_force() -> _Active | None:
    """The context of this forward; in a recomputation that of its forward, unless it enters one again itself."""
    active = _state.active
    if not _is_in_checkpoint() or (active is not None and active.task == checkpoints.graph_task()):
        return active
    return _repeated().active


def _remember(active: _Active | None) -> None:
    """Keep context and scales of this forward, without gradients or under hooks, for each checkpoint around it to repeat."""
    if torch.is_grad_enabled():
        if checkpoints.innermost() in _state.checkpoints:
            return
    elif not checkpoints.trains():
        return
    new = [found for found in checkpoints.enclosing() if found not in _state.checkpoints]
    if not new:
        return
    forward = _repeated() if _is_in_checkpoint() else _Forward(None, _state.first_microbatch)
    for found in new:
        around = active
        while around is not None and id(found) in around.inside:
            around = around.outer
        session = forward.session if around is None else around.session
        _state.checkpoints[found] = _Forward(around, forward.first, session, forward.captured)


@torch.compiler.disable
def _warn_without_fp8(device: torch.device) -> None:
    """Say once that layers on this device stay in high precision."""
    if device not in _state.warned:
        _state.warned.add(device)
        warnings.warn(
            f"{device} has no FP8 units (compute capability 8.9 or more): FP8 layers run in the dtype of their inputs."
            " fp8_autocast(emulate=True) computes FP8's numbers slowly.",
            stacklevel=3,
        )


@contextlib.contextmanager
def microbatch(first: bool) -> Iterator[None]:
    """Around a forward of an accumulated step: all but the first reuse its FP8 weights and record no amax of them."""
    before, _state.first_microbatch = _state.first_microbatch, first
    try:
        yield
    finally:
        _state.first_microbatch = before


def first_microbatch() -> bool | None:
    """True in the first forward of an accumulated step, False in later ones, None outside of `microbatch`."""
    if torch.compiler.is_compiling() or not _is_in_checkpoint():
        return _state.first_microbatch
    return _repeated().first


def session() -> buffers.Session:
    """The outermost autocast of this forward; in a recomputation that of its forward."""
    active = _in_force()
    if active is not None:
        return active.session
    if _state.recomputed is not None:
        return _state.recomputed.forward.session
    return _repeated().session if _is_in_checkpoint() else buffers.session()


def around_layer() -> tuple[buffers.Session, bool | None, bool]:
    """`session`, `first_microbatch` and `drops` of this forward, in eager code."""
    active = _state.active
    if active is not None and checkpoints.graph_task() == -1:
        return active.session, _state.first_microbatch, _state.dropping
    return session(), first_microbatch(), _state.dropping


class _Told(contextlib.AbstractContextManager[None]):
    """The forward of a checkpoint with `recomputing`: it collects the autocasts that it enters."""

    def __init__(self, again: _Recomputing) -> None:
        self._again = again

    def __enter__(self) -> None:
        self._before = _state.told
        _state.told = (*self._before, self._again)

    def __exit__(self, *exc: object) -> None:
        _state.told = self._before


class _Recomputing(contextlib.AbstractContextManager[None]):
    """The context of a recomputation: recipe and scales of its forward."""

    def __init__(self) -> None:
        captured = _repeated().captured if _is_in_checkpoint() else buffers.captured()
        self.forward = _Forward(_in_force(), first_microbatch(), session(), captured)
        self.entered = _Entered()

    def __enter__(self) -> None:
        self._before = (_state.active, _state.first_microbatch, _state.recomputed, _state.dropping, _state.told)
        self.entered.task = -1
        self._replay = buffers.replay(self.forward.scales)
        self._replay.__enter__()
        _state.active, _state.first_microbatch = self.forward.active, self.forward.first
        _state.recomputed, _state.dropping, _state.told = self, False, ()

    def __exit__(self, *exc: object) -> None:
        self._replay.__exit__(None, None, None)
        _state.active, _state.first_microbatch, _state.recomputed, _state.dropping, _state.told = self._before


def recomputing() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: recompute with the forward's scales."""
    again = _Recomputing()
    return _Told(again), again


@contextlib.contextmanager
def dropping() -> Iterator[None]:
    """Around a forward whose saved tensors are dropped and recomputed: operands of backward alone have no values."""
    before, _state.dropping = _state.dropping, True
    try:
        yield
    finally:
        _state.dropping = before


def drops() -> bool:
    """True inside `dropping`."""
    return _state.dropping


def scales_of_forward() -> contextlib.AbstractContextManager[None]:
    """Around the casts of a forward: the scales of the first forward, if this is a recomputation without `recomputing`."""
    if torch.compiler.is_compiling() or checkpoints.graph_task() == -1 or not _is_in_checkpoint():
        return contextlib.nullcontext()
    active = _in_force()
    mine = active is not None and active.task == checkpoints.graph_task()  # entered by this recomputation
    return buffers.replay(active.session.scales() if active is not None and mine else _repeated().scales)


def _repeated() -> _Forward:
    """The forward of this recomputation; without a checkpoint around, that of the current context or of the last one."""
    for found in checkpoints.enclosing():
        if found in _state.checkpoints:
            return _state.checkpoints[found]
    return _state.last if _state.active is None else _Forward(_state.active, _state.first_microbatch, _state.active.session)
