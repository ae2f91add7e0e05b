"""[fp8]: the products in 8-bit floating point, and their scales."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from octavo.config.section import Section, several

KEYS_OF_RECIPES: dict[str, tuple[str, ...]] = {
    "delayed": ("format", "amax_history_len", "amax_compute_algo", "margin", "fast_accumulation"),
    "current": ("format", "fast_accumulation", "use_power_2_scales"),
    "rowwise": (),
    "block": (),
}
"""The settings of each recipe: the fields of its class in `octavo.fp8.recipe`, which would import torch."""


_WHEN = re.compile(r"(?P<end>first|last) (?P<number>\d+(?P<part>\.\d+)?)(?P<share>%)?(?(share)|(?(part)(?!)))")
"""Pattern of a key of `fp8.schedule`; only a percentage may have decimals."""


def steps_without_fp8(when: str, steps: int) -> range:
    """The steps of a key of `fp8.schedule` in a run of `steps` steps; the first is 1."""
    match = _WHEN.fullmatch(when)
    assert match is not None  # checked when the key was read
    number = float(match["number"])
    count = min(steps, round(steps * number / 100) if match["share"] else int(number))
    return range(1, count + 1) if match["end"] == "first" else range(steps - count + 1, steps + 1)


class Fp8Config(Section):
    """Products in 8-bit floating point, and their scales."""

    enabled: bool | Literal["auto"] = Field(
        True,
        description="true: FP8 on GPUs with FP8 products and, emulated exactly, on CPUs; other GPUs train without FP8 "
        'unless `emulate`. "auto": FP8 in layers that are faster in FP8, measured at the start; none where FP8 '
        "would be emulated, unless `emulate`. false: no FP8.",
    )
    recipe: Literal["delayed", "current", "rowwise", "block"] = Field("delayed", description="How scales are computed.")
    format: Literal["HYBRID", "E4M3"] = Field(
        "HYBRID", description="HYBRID: E4M3 forward, E5M2 for gradients (delayed and current scaling only)."
    )
    amax_history_len: int = Field(
        1024, ge=1, le=2**20, description="Steps in the amax history of a scale (delayed scaling only)."
    )
    amax_compute_algo: Literal["max", "most_recent"] = Field(
        "max", description="Which amax of the history sets the scale (delayed scaling only)."
    )
    margin: int = Field(0, ge=-64, le=64, description="Scales are divided by 2^margin (delayed scaling only).")
    fast_accumulation: bool | Literal["input_gradient"] | None = Field(
        None,
        description="Hopper's fast accumulation in backward (forward always uses it). true: in both gradients, at about "
        '0.15% of loss after 1,000 steps. "input_gradient": only in input gradients, without a measured cost '
        'in loss. false: in neither. Only delayed and current scaling have it, by default "input_gradient". '
        "Heads are always precise.",
    )
    use_power_2_scales: bool = Field(
        False, description="Round scales down to powers of two (current scaling only; block scaling always does)."
    )
    skip: list[str] = several("Patterns (`fnmatch`) for names of modules without FP8.")
    layers: dict[str, Literal["bf16", "delayed", "current", "rowwise", "block"]] = Field(
        default_factory=dict,
        description='Patterns for module names → their recipe instead of `recipe`, or "bf16" for no FP8. Later patterns '
        "win; `skip` overrides all.",
    )
    schedule: dict[str, list[str]] = Field(
        default_factory=dict,
        description='Steps → patterns for names of modules outside FP8 in these steps: "first 100", "last 50", or a share '
        'of the run\'s steps, "last 10%". `{ "first 100" = "*" }` starts without FP8.',
    )
    head: bool | Literal["backward"] | None = Field(
        None,
        description='FP8 in the output head. true: all three products. "backward": only its two gradient products; logits '
        'and loss are those of a bf16 head. false: none. Default: "backward" for Octavo\'s decoder, the only '
        "model that supports it, otherwise false.",
    )
    emulate: bool = Field(
        False, description='Emulate FP8 (the same numbers, slowly) on GPUs without FP8 and, with `enabled` = "auto", on CPUs.'
    )

    @field_validator("schedule", mode="before")
    @classmethod
    def _patterns(cls, schedule: Any) -> Any:
        if not isinstance(schedule, dict):
            return schedule
        for when in schedule:
            if (match := _WHEN.fullmatch(str(when))) is None or not 0 < float(match["number"]) <= (
                100 if match["share"] else 2**31
            ):
                raise ValueError(f'{when!r} is not a range of steps: write "first 100", "last 50" or "last 10%"')
        return {when: [patterns] if isinstance(patterns, str) else patterns for when, patterns in schedule.items()}

    def uses(self, setting: str) -> bool:
        """True if the recipe, or one of a layer, has this setting."""
        names = {self.recipe, *self.layers.values()}
        return any(name in names for name, settings in KEYS_OF_RECIPES.items() if setting in settings)
