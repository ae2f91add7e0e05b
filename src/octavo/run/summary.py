"""What a run says when it ends, and before it begins (`--dry-run`).

Figures come from metrics.jsonl, so a run that was continued many times, or was finished before, closes with the same words.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config.run import RunConfig
from octavo.errors import OctavoError
from octavo.run.metrics import read_metrics

LAST_STEPS = 50


@dataclass(frozen=True)
class Summary:
    """One training in figures: losses in nats; `loss` is the mean of the last `averaged` steps."""

    steps: int
    first_loss: float
    loss: float
    averaged: int
    validation_loss: float | None
    tokens_per_second: float
    """Median over the steps."""
    seconds: float
    """Of all steps together."""


@dataclass(frozen=True)
class Result:
    """What `train` returns: where the run is, what it reached, and the run without FP8 beside it if there was one."""

    folder: Path
    config: RunConfig
    summary: Summary
    bf16: Summary | None

    @property
    def gap_percent(self) -> float | None:
        """By how much the FP8 loss lies above the one without, in % of the latter."""
        return None if self.bf16 is None else 100 * (self.summary.loss / self.bf16.loss - 1)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "folder": str(self.folder),
            "run": vars(self.summary),
            "bf16": vars(self.bf16) if self.bf16 else None,
            "gap_percent": self.gap_percent,
        }


def summarise(metrics: Path, steps: int) -> Summary:
    """The figures of a finished training: its loss is the mean of the last tenth of the steps, at most 50."""
    records = read_metrics(metrics)
    if not records or records[-1]["step"] != steps:
        raise OctavoError(f"{metrics} does not reach step {steps}: it was changed after the run ended.")
    averaged = min(LAST_STEPS, max(1, steps // 10), len(records))
    speeds = sorted(record["tokens_per_second"] for record in records)
    return Summary(
        steps=steps,
        first_loss=records[0]["loss"],
        loss=math.fsum(record["loss"] for record in records[-averaged:]) / averaged,
        averaged=averaged,
        validation_loss=records[-1].get("validation_loss"),
        tokens_per_second=speeds[len(speeds) // 2],
        seconds=math.fsum(record["step_seconds"] for record in records),
    )


def summary_lines(result: Result) -> list[str]:
    """The last words of a run: where it is, what it reached, what FP8 cost, and what to try next."""
    own, other = result.summary, result.bf16
    lines = ["", f"The run is in {result.folder}: run.toml, metrics.jsonl, checkpoints/, model/config.json, tokenizer/."]
    mean = f"mean of the last {own.averaged} steps" if own.averaged > 1 else "of the last step"
    validation = f"; validation {own.validation_loss:.4f}" if own.validation_loss is not None else ""
    lines.append(f"Loss {own.first_loss:.4f} → {own.loss:.4f} ({mean}){validation}; {own.tokens_per_second:,.0f} tokens/s.")
    if other is not None and result.gap_percent is not None:
        held_out = ""
        if own.validation_loss is not None and other.validation_loss is not None:
            held_out = f"; validation {own.validation_loss:.4f} and {other.validation_loss:.4f}"
        dtype = dtype_name(result.config)
        lines.append(
            f"What FP8 cost: loss {own.loss:.4f} in FP8 and {other.loss:.4f} in {dtype}, "
            f"a gap of {result.gap_percent:+.2f}%{held_out}."
        )
    lines += ["", "Next:"]
    lines += [f"  {command}" for command in next_commands(result)]
    return lines


def dtype_name(config: RunConfig) -> str:
    """What the field calls the dtype of a run without FP8."""
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[config.model.dtype]


def next_commands(result: Result) -> list[str]:
    """Three commands that work as they stand."""
    recipe = "current" if result.config.fp8.recipe != "current" else "delayed"
    folder = str(result.folder)
    return [
        shlex.join(["octavo", "export", folder, "--to", f"{folder}/export"]),
        shlex.join(["octavo", "train", f"{folder}/run.toml", f"fp8.recipe={recipe}", f"train.output={folder}-{recipe}"]),
        "octavo doctor",
    ]
