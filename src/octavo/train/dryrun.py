"""`octavo train --dry-run`: what would run, without running or writing any of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from octavo.data.prepared import prepared_or_none
from octavo.train.setup import RunPlan


@dataclass(frozen=True)
class DryRun:
    """A run in numbers, before it exists."""

    plan: RunPlan
    parameters: int
    sequences: int | None
    """In the training split; None while the data is not prepared."""

    @property
    def epochs(self) -> float | None:
        """How often each sequence is seen."""
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
                "tokens": plan.tokens_per_step * train.steps,
                "epochs": self.epochs,
            },
        }

    def lines(self) -> list[str]:
        """The resolved run file and the arithmetic."""
        plan, train = self.plan, self.plan.config.train
        return [
            plan.config.to_toml(),
            f"device      {plan.hardware.name}",
            f"precision   {plan.fp8_note}",
            f"parameters  {self.parameters:,}",
            f"batch       {train.global_batch} sequences = {plan.degrees.data} data-parallel x {plan.micro_batch} micro-batch "
            f"x {plan.accumulation} accumulation",
            f"tokens      {plan.tokens_per_step:,} a step ({train.global_batch} x {plan.config.data.sequence_length}) "
            f"x {train.steps:,} steps = {plan.tokens_per_step * train.steps:,}",
            f"epochs      {self.epochs:.2f} of {self.sequences:,} sequences"
            if self.epochs is not None
            else "epochs      unknown until the data is prepared (octavo prepare)",
            f"output      {plan.config.output}",
        ]


def dry_run(plan: RunPlan) -> DryRun:
    """Count what a checked run would train, without building or writing any of it."""
    data = prepared_or_none(plan.config.data)
    sequences = len(data.sequences("train")) if data is not None else None
    return DryRun(plan, sum(math.prod(shape) for shape, _ in plan.weights.values()), sequences)
