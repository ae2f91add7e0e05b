"""`fp8_autocast`: the context that turns FP8 on, chooses the recipe, and updates the scales of delayed scaling at its edges.

Scales change only at the edges of the outermost context, so that all uses inside one step see the same ones. Backward may run
inside the context or after it. A forward that runs inside a backward is a recomputation: it records no amax and repeats the
casts of its forward by the same scales; `recomputing` arranges this for `torch.utils.checkpoint`.
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

from octavo.errors import InputError
from octavo.fp8 import scaling
from octavo.fp8.recipe import DelayedScaling, Recipe, coerce
from octavo.kernels import gemm


@dataclass
class _Active:
    """One level of autocast; `recipe` is None where FP8 is off."""

    recipe: Recipe | None
    emulate: bool


@dataclass
class _Forward:
    """The context and the scales of a forward, for its recomputation."""

    active: _Active | None
    scales: list[tuple[scaling.ScaleBuffer, torch.Tensor]]


@dataclass
class _State:
    """The current contexts of the process: global, since backward runs on threads of its own."""

    active: _Active | None = None
    last: _Forward = field(default_factory=lambda: _Forward(None, []))
    checkpoints: weakref.WeakKeyDictionary[Any, _Forward] = field(default_factory=weakref.WeakKeyDictionary)
    first_microbatch: bool | None = None
    warned: set[torch.device] = field(default_factory=set)
    recomputing: bool = False


_state = _State()


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, fp8_recipe: Any = None, fp8_group: dist.ProcessGroup | None = None, *, emulate: bool = False
) -> Iterator[None]:
    """Run the products of FP8 layers inside in FP8 (or, with `enabled=False`, in the dtype of their inputs).

    On a GPU without FP8 units the layers run in the dtype of their inputs and a warning says so once; a CPU emulates FP8.

    Args:
        enabled: False takes the layers inside out of FP8, also within another autocast.
        fp8_recipe: one of `octavo.recipe`, or a Transformer Engine recipe; None is `DelayedScaling()`.
        fp8_group: ranks whose amaxes are joined; None is the default group.
        emulate: on a GPU without FP8 units, compute FP8's numbers slowly instead.

    Raises:
        InputError: `fp8_recipe` is not a recipe, or another argument of the wrong kind.
    """
    for name, flag in (("enabled", enabled), ("emulate", emulate)):
        if not isinstance(flag, bool):
            raise InputError(f"fp8_autocast: {name} = {flag!r} is neither True nor False.")
    if fp8_group is not None and not isinstance(fp8_group, dist.ProcessGroup):
        raise InputError(f"fp8_autocast: fp8_group = {fp8_group!r} is not a process group of torch.distributed.")
    recipe = (DelayedScaling() if fp8_recipe is None else coerce(fp8_recipe)) if enabled else None
    outer, active = _state.active, _Active(recipe, emulate)
    if outer is None:
        scaling.begin(fp8_group, getattr(recipe, "reduce_amax", True))
    if recipe is not None:
        scaling.prepare_all(recipe)
    _state.active = active
    try:
        yield
        if outer is None and torch.is_grad_enabled():
            _state.last = _Forward(active, scaling.snapshot())
            scaling.end_forward()
    finally:
        _state.active = outer


def current_recipe(device: torch.device) -> Recipe | None:
    """The recipe that applies here on this device, or None where products stay in high precision."""
    active = _state.active
    if not torch.compiler.is_compiling() and not _state.recomputing:
        if scaling.graph_task() != -1:
            active = _repeated().active
        elif (frame := _checkpoint_frame()) is not None and frame not in _state.checkpoints:
            _state.checkpoints[frame] = _Forward(active, scaling.snapshot())
    if active is None or active.recipe is None:
        return None
    if device.type == "cpu" or active.emulate or gemm.is_native(device):
        return active.recipe
    _warn_without_fp8(device)
    return None


@torch.compiler.disable
def _warn_without_fp8(device: torch.device) -> None:
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
    return _state.first_microbatch


class _Recomputing:
    """The context of a recomputation: recipe and scales of its forward."""

    def __init__(self) -> None:
        self._forward = _Forward(_state.active, scaling.snapshot())
        self._first = _state.first_microbatch

    def __enter__(self) -> None:
        self._before = (_state.active, _state.first_microbatch, _state.recomputing)
        self._replay = scaling.replay(self._forward.scales)
        self._replay.__enter__()
        _state.active, _state.first_microbatch, _state.recomputing = self._forward.active, self._first, True

    def __exit__(self, *exc: object) -> None:
        self._replay.__exit__(None, None, None)
        _state.active, _state.first_microbatch, _state.recomputing = self._before


def recomputing() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: recompute with the forward's scales."""
    return contextlib.nullcontext(), _Recomputing()


def scales_of_forward() -> contextlib.AbstractContextManager[None]:
    """Around the casts of a forward: the scales of the first forward, if this is a recomputation without `recomputing`."""
    if torch.compiler.is_compiling() or _state.recomputing or scaling.graph_task() == -1:
        return contextlib.nullcontext()
    return scaling.replay(_repeated().scales)


def _checkpoint_frame() -> Any:
    """The object of `torch.utils.checkpoint` that a forward and its recomputation share; None outside of a checkpoint.

    It is in the closure of the saved-tensor hook that checkpoint sets around both: there is no public access.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0]) if hooks else None
    names = pack.__code__.co_freevars if hasattr(pack, "__code__") else ()
    cells = dict(zip(names, getattr(pack, "__closure__", None) or (), strict=False))
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents()
    return cells["frame"].cell_contents if "frame" in cells else None


def _repeated() -> _Forward:
    """The forward of this recomputation; without a checkpoint frame, that of the current context or of the last one."""
    frame = _checkpoint_frame()
    remembered = _state.checkpoints.get(frame) if frame is not None else None
    return remembered or (_state.last if _state.active is None else _Forward(_state.active, []))
