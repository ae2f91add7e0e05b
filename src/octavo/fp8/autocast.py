"""`fp8_autocast`: where FP8 is on, with which recipe, and when the scales of delayed scaling move.

Scales move only at the edges of the outermost context, so that every use inside one step sees the same ones. Backward may run
inside the context or after it. A forward that runs inside a backward is a recomputation: it records nothing and repeats the
casts of its forward, which `recomputing` arranges for `torch.utils.checkpoint`.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from octavo.fp8 import scaling
from octavo.fp8.recipe import DelayedScaling, Recipe, coerce
from octavo.kernels import gemm


@dataclass
class _Active:
    """One level of autocast; `recipe` is None where FP8 is off."""

    recipe: Recipe | None
    group: dist.ProcessGroup | None
    emulate: bool = False


@dataclass
class _Forward:
    """What a recomputation needs of its forward: the context it was in, and the scales that held."""

    active: _Active | None
    scales: list[tuple[scaling.ScaleBuffer, torch.Tensor]]


class _State:
    """What the whole process is inside of. One model trains in a process, and backward threads must see it too."""

    def __init__(self) -> None:
        self.active: _Active | None = None
        self.last = _Forward(None, [])
        self.checkpoints: weakref.WeakKeyDictionary[Any, _Forward] = weakref.WeakKeyDictionary()
        self.first_microbatch: bool | None = None
        self.told: set[torch.device] = set()
        self.recomputing = False


_state = _State()


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    fp8_recipe: Any = None,
    fp8_group: dist.ProcessGroup | None = None,
    *,
    emulate: bool = False,
) -> Iterator[None]:
    """Run the products of FP8 layers inside in FP8 (or, with `enabled=False`, in the dtype of their inputs).

    On a GPU without FP8 units the layers run in the dtype of their inputs and a warning says so once; a CPU emulates FP8.

    Args:
        enabled: False takes the layers inside out of FP8, also within another autocast.
        fp8_recipe: one of `octavo.recipe`, or a Transformer Engine recipe; None is `DelayedScaling()`.
        fp8_group: ranks whose amaxes are joined; None is the default group.
        emulate: on a GPU without FP8 units, compute FP8's numbers slowly instead.

    Raises:
        InputError: `fp8_recipe` is not a recipe.
    """
    recipe = (DelayedScaling() if fp8_recipe is None else coerce(fp8_recipe)) if enabled else None
    outer, active = _state.active, _Active(recipe, fp8_group, emulate)
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
        if scaling.graph_task() == -1:
            _remember_checkpoint()
        else:
            active = _repeated().active
    if active is None or active.recipe is None:
        return None
    if device.type == "cpu" or active.emulate or gemm.is_native(device):
        return active.recipe
    _say_without_fp8(device)
    return None


@torch.compiler.disable
def _say_without_fp8(device: torch.device) -> None:
    if device not in _state.told:
        _state.told.add(device)
        warnings.warn(
            f"{device} has no FP8 units (compute capability 8.9 or more): FP8 layers run in the dtype of their inputs."
            " fp8_autocast(emulate=True) computes FP8's numbers slowly.",
            stacklevel=3,
        )


@contextlib.contextmanager
def microbatch(first: bool) -> Iterator[None]:
    """Say which forward of an accumulated step this is: later ones reuse the FP8 weights of the first and record none."""
    before, _state.first_microbatch = _state.first_microbatch, first
    try:
        yield
    finally:
        _state.first_microbatch = before


def first_microbatch() -> bool | None:
    """Whether this is the first forward of an accumulated step; None where nobody said."""
    return _state.first_microbatch


class _Recomputing:
    """A recomputation's surroundings: the recipe and the scales that its forward had."""

    def __init__(self) -> None:
        self._active = _state.active
        self._first = _state.first_microbatch
        self._scales = scaling.snapshot()

    def __enter__(self) -> None:
        self._before = (_state.active, _state.first_microbatch, _state.recomputing)
        self._replay = scaling.replay(self._scales)
        self._replay.__enter__()
        _state.active, _state.first_microbatch, _state.recomputing = self._active, self._first, True

    def __exit__(self, *exc: object) -> None:
        self._replay.__exit__(None, None, None)
        _state.active, _state.first_microbatch, _state.recomputing = self._before


def recomputing() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: recompute with the forward's scales."""
    return contextlib.nullcontext(), _Recomputing()


def unannounced() -> contextlib.AbstractContextManager[None]:
    """Around a forward: where it turns out to be a recomputation that `recomputing` did not announce, its forward's scales."""
    if torch.compiler.is_compiling() or _state.recomputing or scaling.graph_task() == -1:
        return contextlib.nullcontext()
    return scaling.replay(_repeated().scales)


def _checkpoint_frame() -> Any:
    """What `torch.utils.checkpoint` knows this forward by, in the forward and in its repetition; None outside of one.

    It is found in the closure of the saved-tensor hook that checkpoint sets around both, for want of a public place.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0]) if hooks else None
    names = pack.__code__.co_freevars if hasattr(pack, "__code__") else ()
    cells = dict(zip(names, getattr(pack, "__closure__", None) or (), strict=False))
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents()
    return cells["frame"].cell_contents if "frame" in cells else None


def _remember_checkpoint() -> None:
    frame = _checkpoint_frame()
    if frame is not None and frame not in _state.checkpoints:
        _state.checkpoints[frame] = _Forward(_state.active, scaling.snapshot())


def _repeated() -> _Forward:
    """The forward that a recomputation repeats; if checkpoint does not say which, the one of this context or of the last."""
    frame = _checkpoint_frame()
    remembered = _state.checkpoints.get(frame) if frame is not None else None
    return remembered or (_state.last if _state.active is None else _Forward(_state.active, []))
