"""Transformer Engine's contexts (`fp8_autocast`, `fp8_model_init`, …) and checks of FP8 support, on `octavo.fp8_autocast`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from octavo.compat.notices import say_once
from octavo.compat.te.limits import NO_MXFP8, check_recipe
from octavo.compat.te.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from octavo.errors import InputError, check_flags
from octavo.fp8 import autocast as fp8
from octavo.fp8 import calibration
from octavo.fp8.recipe import coerce
from octavo.fp8.threads import OfThread
from octavo.kernels import gemm


class Entered(NamedTuple):
    """The arguments of an autocast; recipe: None where none was given."""

    enabled: bool
    calibrating: bool
    recipe: Recipe | None
    group: dist.ProcessGroup | None


@contextlib.contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """No effect: Transformer Engine saves FP8 state as tensors inside, and Octavo always does. Composer trains in this context.

    Raises:
        InputError: within an export by `torch.onnx`, or `enabled` is not a bool.
    """
    check_flags("onnx_export", enabled=enabled)
    if torch.onnx.is_in_onnx_export():
        raise InputError("Octavo's layers are not exported to ONNX: octavo.export(model, folder) writes Hugging Face's files.")
    yield


_entered: OfThread[list[Entered]] = OfThread("te", list)
"""The autocasts that this thread has entered, innermost last. (Transformer Engine has one list for all threads.)"""


def innermost() -> Entered | None:
    """The innermost autocast of this module; None outside."""
    entered = _entered.here()
    return entered[-1] if entered else None


@contextlib.contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Run matrix products of layers in FP8 by `recipe`; None: delayed scaling.

    amax_reduction_group: ranks over which amaxes are reduced; None: all. calibrating: run without FP8, and record the amaxes of
    inputs and weights (`octavo.fp8.calibration`).

    Raises:
        InputError: an unsupported recipe.
    """
    if (enabled or calibrating) and isinstance(recipe, Recipe):
        check_recipe(recipe, getattr(recipe, "written_in", type(recipe).__name__))
    chosen = coerce(DelayedScaling() if recipe is None else recipe) if enabled or calibrating else None
    measured = chosen if calibrating and not enabled else None
    with calibration.calibrating(measured), fp8.fp8_autocast(bool(enabled), chosen if enabled else None, amax_reduction_group):
        entered = _entered.here()
        entered.append(Entered(bool(enabled), bool(calibrating), recipe, amax_reduction_group))
        try:
            yield
        finally:
            entered.pop()


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
    _graph: bool = False,
) -> Iterator[None]:
    """`autocast` under its earlier names."""
    with autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph):
        yield


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """No effect, logged once: parameters stay in `params_dtype`, which is more exact than FP8 alone.

    Raises:
        InputError: `preserve_high_precision_init_val`: the parameters themselves are in high precision.
    """
    if enabled and preserve_high_precision_init_val:
        raise InputError(
            "fp8_model_init(preserve_high_precision_init_val=True): parameters are in high precision here and have no "
            "get_high_precision_init_val(). Leave it out, and read the parameter itself."
        )
    if enabled:
        message = "fp8_model_init: parameters stay in params_dtype; products run in FP8 under fp8_autocast."
        say_once("quantized_model_init", message)
    yield


fp8_model_init = quantized_model_init


def get_default_recipe() -> Recipe:
    """Delayed scaling, as on Hopper."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe


def check_fp8_support() -> tuple[bool, str]:
    """(True if this machine supports FP8, the reason if not). A CPU computes the same numbers slowly."""
    if not torch.cuda.is_available() or gemm.is_native(torch.device("cuda", torch.cuda.current_device())):
        return True, ""
    return False, "FP8 needs a GPU of compute capability 8.9 or more."


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """`check_fp8_support`: Octavo's block scaling runs wherever FP8 does."""
    return check_fp8_support()


def check_mxfp8_support() -> tuple[bool, str]:
    """(False, the reason)."""
    return False, NO_MXFP8


def check_nvfp4_support() -> tuple[bool, str]:
    """(False, the reason)."""
    return False, "Octavo has no NVFP4: use Float8BlockScaling."


def check_recipe_support(recipe: Recipe) -> None:
    """Raise a RuntimeError with the reason if this machine does not support the recipe."""
    checks: tuple[tuple[Any, Any], ...] = (
        ((DelayedScaling, Float8CurrentScaling), check_fp8_support),
        (Float8BlockScaling, check_fp8_block_scaling_support),
        (MXFP8BlockScaling, check_mxfp8_support),
        (NVFP4BlockScaling, check_nvfp4_support),
    )
    for kinds, check in checks:
        if isinstance(recipe, kinds):
            there, reason = check()
            if not there:
                raise RuntimeError(reason)


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True if this machine supports FP8; with `return_reason` as `check_fp8_support`."""
    return check_fp8_support() if return_reason else check_fp8_support()[0]


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """`is_fp8_available`: Octavo's block scaling runs wherever FP8 does."""
    return check_fp8_block_scaling_support() if return_reason else check_fp8_block_scaling_support()[0]


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """False; with `return_reason` as `check_mxfp8_support`."""
    return check_mxfp8_support() if return_reason else False


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """False; with `return_reason` as `check_nvfp4_support`."""
    return check_nvfp4_support() if return_reason else False


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True if this machine supports bfloat16."""
    there = not torch.cuda.is_available() or torch.cuda.is_bf16_supported()
    return (there, "" if there else "this GPU has no bfloat16.") if return_reason else there
