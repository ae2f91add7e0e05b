"""Calibration: amaxes of inputs and weights, measured while products run in high precision.

As in Transformer Engine, the amax of each operand replaces the newest entry of its history, and no scale changes. The next
training forward in FP8 updates the scales from it as if a cast had measured it; an FP8 evaluation before that uses the current
scales. (In Transformer Engine that forward has to run the same layer; here any layer of the model will do.) Recipes without a
history have nothing to calibrate. In compiled code each record is a graph break.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.errors import InputError
from octavo.fp8 import autocast
from octavo.fp8.recipe import Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels.quantize.cast_scaled import amax


@contextlib.contextmanager
def calibrating(recipe: Recipe | None) -> Iterator[None]:
    """Products in high precision inside record amaxes in the histories of `recipe`; None: they do not."""
    with autocast.measuring(None if recipe is None or recipe.history is None else recipe):
        yield


def observe(state: ModuleState, operand: Operand, matrix: Tensor) -> None:
    """Record the amax of an operand [..., K] of a product in high precision, inside of `calibrating`.

    Raises:
        InputError: a stack of experts.
    """
    recipe = autocast.measured()
    if recipe is not None:
        _record(state, operand, matrix.detach(), recipe)


@torch.compiler.disable
def _record(state: ModuleState, operand: Operand, matrix: Tensor, around: Recipe) -> None:
    if state.experts:
        raise InputError(
            "calibrating: experts of LayerNormMoE cannot be calibrated. Leave calibrating out, and train in FP8 for a step."
        )
    recipe = state.under(around)
    if recipe is not None and recipe.history is not None and recipe.casts[operand].delayed:
        if not state.trained:
            state.recipe = recipe  # for `inspect`
        slot = state.slot(operand, recipe, matrix.device)
        slot.offered = False
        slot.amax.copy_(amax(matrix.reshape(-1, matrix.shape[-1])))
