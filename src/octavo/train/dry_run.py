"""`octavo train --dry-run`: the resolved run file and the arithmetic of a checked run; nothing is built or written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from octavo.data.loader import sequences_of
from octavo.data.prepared import prepared_or_none
from octavo.train.plan import RunPlan


@dataclass(frozen=True)
class DryRun:
    """Figures of a run before it starts."""

    plan: RunPlan
    parameters: int
    sequences: int | None
    """Sequences of the training split; None before the data is prepared."""

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return self.plan.tokens_per_step * self.plan.config.train.steps

    @property
    def epochs(self) -> float | None:
        """Passes over the training split."""
        train = self.plan.config.train
        return train.steps * train.global_batch / self.sequences if self.sequences else None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        plan, train = self.plan, self.plan.config.train
        return {
            "config": plan.config.model_dump(mode="json"),
            "device": plan.hardware.name,
            "fp8": plan.fp8_note,
            "parameters": self.parameters,
            "batch": {
                "global_batch": train.global_batch,
                "data_parallel": plan.degrees.data,
                "micro_batch": plan.micro_batch,
                "accumulation": plan.accumulation,
                "tokens_per_step": plan.tokens_per_step,
                "steps": train.steps,
                "tokens": self.tokens,
                "epochs": self.epochs,
            },
        }

    def lines(self) -> list[str]:
        """The resolved run file and the arithmetic, as text."""
        plan, config, train = self.plan, self.plan.config, self.plan.config.train
        epochs = "unknown until the data is prepared (octavo prepare)"
        if self.epochs is not None:
            epochs = f"{self.epochs:.2f} of {self.sequences:,} sequences"
        return [
            config.to_toml(),
            f"device      {plan.hardware.name}",
            f"precision   {plan.fp8_note}",
            f"parameters  {self.parameters:,}",
            f"batch       {train.global_batch} sequences = {plan.degrees.data} data-parallel x {plan.micro_batch} micro-batch "
            f"x {plan.accumulation} accumulation",
            f"tokens      {plan.tokens_per_step:,} a step ({train.global_batch} x {config.data.sequence_length}) "
            f"x {train.steps:,} steps = {self.tokens:,}",
            f"epochs      {epochs}",
            f"output      {config.output}",
        ]


def dry_run(plan: RunPlan) -> DryRun:
    """Count parameters, tokens and epochs of a checked run."""
    data, sequences = plan.config.data, None
    if (prepared := prepared_or_none(data)) is not None:
        sequences = len(sequences_of(prepared, "train", sequence_length=data.sequence_length, packing=data.packing))
    return DryRun(plan, sum(math.prod(shape) for shape, _ in plan.weights.values()), sequences)
