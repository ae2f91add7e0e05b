"""[train]: steps, batches, and memory against time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from octavo.config.section import Section


class TrainConfig(Section):
    """How long, how wide, and what is given up for memory or speed."""

    output: str | None = Field(None, description="The run's folder; by default runs/<name of the run file>.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    global_batch: int = Field(ge=1, description="Sequences in an optimizer step, over all ranks.")
    micro_batch: int | None = Field(None, ge=1, description="Sequences in a forward of one rank; all of its share when absent.")
    recompute: bool | Literal["mlp"] = Field(
        False,
        description='true: keep only each block\'s input and compute the rest again in backward. "mlp": keep all but the '
        "largest, the first product of each MLP (Octavo's decoder only; not with compile).",
    )
    offload: bool = Field(False, description="Keep what blocks save for backward in host memory (Octavo's decoder only).")
    compile: bool | Literal["auto"] = Field(
        "auto", description='torch.compile each block, in place of its fused kernels; "auto": no, since those are faster.'
    )
    seed: int = Field(0, ge=0, description="Of the initial weights and of dropout.")
    deterministic: bool = Field(False, description="Only deterministic kernels on GPUs (a CPU always is).")
    loss_scale: Literal["dynamic"] | float = Field(
        "dynamic",
        description='With model.dtype = "float16" the loss is multiplied by this before backward. "dynamic": halved when a '
        "gradient overflows, doubled after 2,000 steps without; a number stays as it is.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Share of each target that is spread evenly over all words (Octavo's decoder only; not in validation).",
    )
    z_loss: float = Field(
        0.0,
        ge=0.0,
        description="Weight of the square of the logits' log-sum-exp in the loss, which keeps logits near 0 (Octavo's decoder "
        "only; not in validation).",
    )
    compare_bf16: bool = Field(False, description="Train the same steps without FP8 afterwards, and report the gap in loss.")
    validate_every: int = Field(0, ge=0, description="Steps between validations; 0: only at the end.")
    validate_batches: int = Field(
        16, ge=1, description="Micro-batches in a validation, over all ranks; fewer where the split is smaller."
    )

    @model_validator(mode="after")
    def _a_compiler_keeps_what_it_likes(self) -> TrainConfig:
        if self.recompute == "mlp" and self.compile is True:
            raise ValueError(
                'train.recompute = "mlp" with train.compile = true: a compiler decides what is kept. '
                "Set train.compile = false, or train.recompute = true"
            )
        return self
