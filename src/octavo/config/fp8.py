"""[fp8]: the products in 8-bit floating point, and their scales."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octavo.config.section import Section


class Fp8Config(Section):
    """Which products run in 8-bit floating point, and with which scales."""

    enabled: bool | Literal["auto"] = Field(
        True,
        description="true: FP8 where the device multiplies it (a CPU emulates it, exactly), and none on a GPU that does not, "
        'unless `emulate`. "auto": in the layers that a measurement at the start finds faster in FP8, and none where FP8 would '
        "be emulated, unless `emulate`. false: none.",
    )
    recipe: Literal["delayed", "current", "rowwise", "block"] = Field("delayed", description="How scales are chosen.")
    format: Literal["HYBRID", "E4M3"] = Field(
        "HYBRID", description="HYBRID: E4M3 forward, E5M2 for gradients (delayed and current scaling only)."
    )
    amax_history_len: int = Field(1024, ge=1, description="Steps that a scale looks back on (delayed scaling only).")
    amax_compute_algo: Literal["max", "most_recent"] = Field(
        "max", description="What a scale takes from its history (delayed scaling only)."
    )
    margin: int = Field(
        0, ge=-64, le=64, description="Powers of two that a scale stays below the format's maximum (delayed scaling only)."
    )
    fast_accumulation: bool | Literal["input_gradient"] = Field(
        False,
        description="true: faster, by Hopper's fast accumulation in backward too, not in forward alone, for about 0.15% of "
        'loss after 1,000 steps. "input_gradient": there in input gradients alone, for no more loss than without (delayed and '
        "current scaling only; heads and experts stay precise).",
    )
    use_power_2_scales: bool = Field(
        False, description="Scales are rounded down to powers of two (current scaling only; those of blocks always are)."
    )
    skip: list[str] = Field(default_factory=list, description="Patterns of module names that stay out of FP8 (`fnmatch`).")
    layers: dict[str, Literal["bf16", "delayed", "current", "rowwise", "block"]] = Field(
        default_factory=dict,
        description='Patterns of module names → the recipe of these layers, or "bf16" for none in place of `recipe`; the last '
        "pattern that names a layer holds, and `skip` above all.",
    )
    head: bool | Literal["backward"] = Field(
        False,
        description='true: the output head\'s products are FP8 too. "backward": those of its gradients, which leaves the loss '
        "as it is (Octavo's decoder only).",
    )
    emulate: bool = Field(
        False,
        description='Compute FP8\'s numbers slowly, on a GPU without FP8 products and, with `enabled` = "auto", on a CPU.',
    )
