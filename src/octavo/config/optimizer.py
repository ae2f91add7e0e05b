"""[optimizer]: AdamW or Muon, the schedule and clipping."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from octavo.config.section import Section


class OptimizerConfig(Section):
    """AdamW or Muon, the schedule and clipping."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description='"muon": Muon for the matrices of blocks; AdamW for embedding, head, norms, biases and routers.',
    )
    lr: float = Field(3e-4, gt=0, description="Peak learning rate.")
    adamw_lr: float | None = Field(
        None,
        gt=0,
        description="Peak rate of AdamW's parameters in a run with Muon; by default lr, which only muon_scale = "
        '"match_rms_adamw" allows.',
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Decay rate of Muon's momentum.")
    muon_nesterov: bool = Field(True, description="Nesterov momentum in Muon.")
    muon_scale: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Factor of Muon's rate for a matrix [A, B]: 0.2 sqrt(max(A, B)), for rates and weight decay like "
        'AdamW\'s, or "original": sqrt(max(1, A / B)).',
    )
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay of matrices; none for norms, biases and other vectors."
    )
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="Decay rates of the two moments.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator of the update.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from zero.")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description='Learning rate after the warm-up; "wsd": constant, then a linear decay in the last `decay_steps`.',
    )
    decay_steps: int | None = Field(None, ge=1, description="Steps of wsd's decay, by default a tenth of all steps.")
    min_lr_fraction: float = Field(
        0.1, ge=0, le=1, description="Final rate of every schedule except constant, as a fraction of lr."
    )
    rates: dict[str, float] = Field(
        default_factory=dict,
        description="Factors of the learning rate by pattern (`fnmatch`) for names of parameters or of their modules; "
        "later patterns win.",
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Factor d of the rate by depth: d for the last of L blocks, d^L for the first, d^(L + 1) for embeddings, "
        "1 for parameters after the blocks.",
    )
    clip: float = Field(1.0, ge=0, description="Maximum global gradient norm; 0: no clipping.")

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both betas must lie in [0, 1): the usual pair is [0.9, 0.95]")
        return value

    @model_validator(mode="after")
    def _check_rates(self) -> OptimizerConfig:
        if self.name == "muon" and self.muon_scale == "original" and self.adamw_lr is None:
            raise ValueError(
                'optimizer.muon_scale = "original" needs larger rates (about 0.02) than AdamW, which trains the '
                "embedding, head, norms, biases and routers: set optimizer.adamw_lr too, such as 3e-4"
            )
        return self

    @field_validator("rates")
    @classmethod
    def _check_factors(cls, value: dict[str, float]) -> dict[str, float]:
        for pattern, factor in value.items():
            if not 0 < factor <= 1000:
                frozen = " (to freeze parameters, use train.freeze)" if factor == 0 else ""
                raise ValueError(f"{pattern!r} = {factor:g}: a factor is above 0, at most 1000, such as 0.1{frozen}")
        return value

    def decay_start(self, steps: int) -> int:
        """The last step of wsd before its decay, in a run of `steps`."""
        return max(0, steps - (self.decay_steps or max(1, steps // 10)))
