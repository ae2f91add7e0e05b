"""[optimizer]: AdamW, its schedule and clipping."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from octavo.config.section import Section


class OptimizerConfig(Section):
    """AdamW, its schedule and clipping."""

    lr: float = Field(3e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay of matrices; none for norms, biases and other vectors."
    )
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="Decay rates of the two moments.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator of the update.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear rise of the rate from zero.")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description='Learning rate after the warm-up; "wsd": constant, then a linear decay in the last `decay_steps`.',
    )
    decay_steps: int | None = Field(None, ge=1, description="Steps of the decay of wsd; a tenth of the steps when absent.")
    min_lr_fraction: float = Field(
        0.1, ge=0, le=1, description="Final rate of every schedule but constant, as a fraction of lr."
    )
    clip: float = Field(1.0, ge=0, description="Largest global norm of the gradient; 0: no clipping.")

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both betas must lie in [0, 1): the usual pair is [0.9, 0.95]")
        return value

    def decay_start(self, steps: int) -> int:
        """The last step of wsd before its decay, in a run of `steps`."""
        return max(0, steps - (self.decay_steps or max(1, steps // 10)))
