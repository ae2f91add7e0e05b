"""`[fp8]` keys that change when a run continues: which layers get new scales, and what is refused.

FP8 state is scales and amax histories, which follow from the tensors: weights, optimizer states and data continue exactly under
other keys. A layer with an unchanged recipe continues with its state to the bit. A layer with another recipe drops its state,
and its first scale is measured, as at the start of a run. The section is compared with the checkpoint's, so a start that ended
before its first save changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import nn

from octavo.build import build_model
from octavo.config.fp8 import Fp8Config
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.fp8.recipe import Recipe
from octavo.fp8.scaling import states_of
from octavo.models.decoder import Decoder
from octavo.plan.precision import PrecisionSchedule
from octavo.plan.run import RunPlan, build_options, recipe_from_config
from octavo.run.resume import changed_fp8

_OTHER_RUN = "set another train.output"


@dataclass(frozen=True)
class Fp8Changes:
    """The changes that another `[fp8]` section makes in a continued run.

    Attributes:
        keys: each changed key with its old and new value.
        fresh: layers whose state in the checkpoint is dropped.
        begin: number of these layers that are in FP8 from now on; unchanged: number of layers with unchanged FP8 state.
    """

    keys: Mapping[str, tuple[Any, Any]]
    fresh: frozenset[str]
    begin: int
    unchanged: int

    def __str__(self) -> str:
        keys = "; ".join(f"{key} was {old!r} and is now {new!r}" for key, (old, new) in self.keys.items())
        if self.begin:
            state = f"{self.begin} matrices drop their scales and amax histories, and their first scale is measured"
        elif self.fresh:
            state = "matrices that leave FP8 drop their scales and amax histories"
        else:
            state = "no scale is dropped"
        unchanged = f"; {self.unchanged} do not change" if self.unchanged and self.fresh else ""
        return (
            f"{keys}. Weights, optimizer states and data continue exactly; {state}{unchanged}. Losses from here on differ from "
            "those of an uninterrupted run by the rounding of FP8"
        )


def section_of(saved: Mapping[str, Any], before: RunConfig) -> Fp8Config:
    """The `[fp8]` section with which a checkpoint was trained; for older versions the run file's."""
    section = saved.get("fp8")
    try:
        return Fp8Config.model_validate(section) if isinstance(section, dict) else before.fp8
    except ValidationError:  # from a version with other keys
        return before.fp8


def find(plan: RunPlan, before: RunConfig, saved: Mapping[str, Any]) -> Fp8Changes | None:
    """The changes of a run that continues from a checkpoint; None for none.

    Args:
        plan: the continued run's plan.
        before: the run file of the last start.
        saved: the checkpoint's state.

    Raises:
        InputError: the change would be silently wrong; see `docs/run-files.md`.
    """
    before = before.model_copy(update={"fp8": section_of(saved, before)})
    keys = changed_fp8(before, plan.config)
    if not keys:
        return None
    _refuse(plan, before, keys, int(saved["step"]))
    recorded = recipe_from_config(before.fp8) if before.fp8.enabled is not False and saved.get("recipe", True) else None
    old = _recipes(_model_of(plan, before), recorded)
    new = _recipes(plan.model_on_meta, plan.recipe)
    fresh = frozenset(name for name in {*old, *new} if old.get(name) != new.get(name))
    running = {name for name, recipe in new.items() if recipe is not None}
    return Fp8Changes(keys, fresh, len(fresh & running), len(running - fresh))


def _model_of(plan: RunPlan, config: RunConfig) -> nn.Module:
    """The model under another `[fp8]` section, on the meta device: the plan's unless other layers run in FP8."""
    now, options = plan.build_options, build_options(config, blocks=plan.blocks)
    chosen = [(each.layers, each.skip, each.fp8_head, each.excluded) for each in (now, options)]
    return plan.model_on_meta if chosen[0] == chosen[1] else build_model(plan.hf_config, options, device="meta")


def _recipes(model: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
    """Each layer's recipe, without settings that do not affect its scales, and the head's FP8 products."""
    recipes: dict[str, Any] = {}
    for name, state in states_of(model):
        of_layer: Any = state.under(recipe)
        if of_layer is not None and hasattr(of_layer, "fast_accumulation"):
            of_layer = dataclasses.replace(of_layer, fast_accumulation=False)
        is_head = isinstance(model, Decoder) and name == "head"
        recipes[name] = (of_layer, model.fp8_head) if is_head and of_layer is not None else of_layer
    return recipes


def _refuse(plan: RunPlan, before: RunConfig, keys: Mapping[str, tuple[Any, Any]], done: int) -> None:
    config = plan.config
    if "fp8.enabled" in keys and "auto" in keys["fp8.enabled"]:
        old, new = keys["fp8.enabled"]
        raise InputError(
            f'fp8.enabled was {old!r} and is now {new!r}: "auto" measures its choice of layers before '
            f"the first step. Restore it, or {_OTHER_RUN}."
        )
    if config.lora.rank is not None and config.lora.base == "fp8" and keys.keys() - {"fp8.fast_accumulation", "fp8.schedule"}:
        raise InputError(
            f'lora.base = "fp8" stores the frozen weights by the recipe, but {", ".join(keys)} changed: the weights would be '
            f"rounded differently than in the adapters' training. Restore it, or {_OTHER_RUN}."
        )
    if config.train.compare_bf16:
        raise InputError(
            f"train.compare_bf16 = true compares one setting of FP8 with bf16, but {', '.join(keys)} changed after step "
            f"{done}. Set train.compare_bf16 = false, or restore it."
        )
    if "fp8.schedule" in keys:
        model = plan.model_on_meta
        past = []
        for section, steps in ((before, before.steps), (config, plan.steps)):
            past.append(PrecisionSchedule(model, section.fp8.schedule, steps or plan.steps).until(done))
        if past[0] != past[1]:
            raise InputError(
                f"fp8.schedule was {before.fp8.schedule!r} and is now {config.fp8.schedule!r}: some of the {done} finished "
                "steps would have had another precision. Change only later steps, or "
                f"{_OTHER_RUN}."
            )
