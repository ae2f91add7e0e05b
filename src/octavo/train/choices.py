"""`fp8.enabled = "auto"`: which layers of a run compute in FP8, decided when it begins and kept with it.

Where FP8 would be emulated it never pays, so nothing runs in it. Elsewhere each distinct shape of the model's FP8 layers is
timed (`octavo.fp8.payoff`), by the first rank for all, and layers that are no faster in FP8 stay out of it. A run that
continues takes the choice from its folder: with other layers in FP8 its curve would be made of two.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import InputError
from octavo.fp8 import payoff
from octavo.fp8.payoff import Setting, Shape, Timer
from octavo.hardware import supports_fp8
from octavo.parallel.agreement import all_ranks
from octavo.storage import write_atomic
from octavo.train.folder import RunFolder
from octavo.train.setup import RunPlan, recipe_of


def settled(plan: RunPlan, folder: RunFolder, *, resumed: bool) -> RunPlan:
    """The plan with the layers that `fp8.enabled = "auto"` keeps out of FP8; all ranks call it.

    resumed: the run has checkpoints, so that its own choice holds.

    Raises:
        InputError: the choice of a run that continues is missing or not readable.
    """
    if plan.config.fp8.enabled != "auto":
        return plan
    if resumed:
        return _as_begun(plan, all_ranks().on_first(lambda: _read(folder.choices)))
    if plan.recipe is None:
        names = [*plan.layers, "head"] if plan.config.fp8.head else plan.layers
        return dataclasses.replace(plan, kept_out=dict.fromkeys(names, plan.fp8_note))
    timer = timer_on(plan)
    if timer is None:  # emulated because fp8.emulate asks for it
        return plan
    kept_out = all_ranks().on_first(lambda: slower_in_fp8(plan, timer))
    taken = sum(layer.recipe is not None for layer in plan.layers.values())
    note = f"{plan.fp8_note}, where it is faster: in {taken - len(kept_out)} of {taken} layers"
    return dataclasses.replace(plan, kept_out=kept_out, fp8_note=note)


def record(plan: RunPlan, folder: RunFolder) -> None:
    """Write the choice down, for when the run continues."""
    if plan.config.fp8.enabled == "auto":
        choice = {"fp8": plan.recipe is not None, "device": plan.hardware.name, "kept_out": dict(plan.kept_out)}
        write_atomic(folder.choices, json.dumps(choice, indent=1, ensure_ascii=False) + "\n")


def timer_on(plan: RunPlan) -> Timer | None:
    """What times products on the device of a run; None where that has no FP8 units."""
    if not supports_fp8(plan.device):
        return None
    return lambda shape, recipe: payoff.measure(shape, recipe, plan.device, _setting(plan))


def slower_in_fp8(plan: RunPlan, timer: Timer) -> dict[str, str]:
    """The layers for which FP8 does not pay, each with both timings."""
    tokens = plan.micro_batch * plan.config.data.sequence_length
    wanted = {
        name: (Shape(tokens, *layer.shape), layer.recipe) for name, layer in plan.layers.items() if layer.recipe is not None
    }
    timings = payoff.table(wanted.values(), _setting(plan), timer)
    reasons = {name: payoff.against(pair[0], timings[pair], plan.dtype) for name, pair in wanted.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _setting(plan: RunPlan) -> Setting:
    return Setting(plan.hardware.name, plan.dtype, plan.params_dtype)


def _as_begun(plan: RunPlan, choice: Mapping[str, Any]) -> RunPlan:
    note = f"FP8 as it was chosen when the run began, on {choice['device']}"
    recipe = recipe_of(plan.config.fp8) if choice["fp8"] else None
    how = ": none" if recipe is None else "" if supports_fp8(plan.device) else ", emulated here"
    return dataclasses.replace(plan, recipe=recipe, kept_out=choice["kept_out"], fp8_note=note + how)


def _read(path: Path) -> dict[str, Any]:
    try:
        choice = json.loads(path.read_bytes())
        return {"fp8": bool(choice["fp8"]), "device": str(choice["device"]), "kept_out": dict(choice["kept_out"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f'{path} says which layers of this run compute in FP8 (fp8.enabled = "auto") and cannot be read '
            f"({type(error).__name__}): put it back, or set another train.output."
        ) from None
