"""Summary of a finished run, from metrics.jsonl: a run that was continued, or had already finished, gets the same one."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config.run import RunConfig
from octavo.dtypes import short_name
from octavo.errors import OctavoError
from octavo.run.metrics import read_metrics

LAST_STEPS = 50
"""Steps whose mean loss is reported, at most."""


@dataclass(frozen=True)
class Summary:
    """Figures of one training: losses in nats, `loss` over the last `averaged` steps; the median speed; the sum of seconds."""

    steps: int
    first_loss: float
    loss: float
    averaged: int
    validation_loss: float | None
    tokens_per_second: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """Result of `train`: the run's folder and summary, and the summary of the run without FP8 if there is one."""

    folder: Path
    config: RunConfig
    summary: Summary
    bf16: Summary | None
    ended_early: str = ""
    """The reason for an end before the last step."""

    @property
    def gap_percent(self) -> float | None:
        """Distance of the FP8 loss to the loss without FP8, in % of the latter."""
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
    """Figures of a finished training; its loss is the mean of the last tenth of the steps, at most 50."""
    records = read_metrics(metrics)
    if not records or records[-1]["step"] != steps:
        raise OctavoError(f"{metrics} does not reach step {steps}: it was changed after the run ended.")
    averaged = min(LAST_STEPS, max(1, steps // 10), len(records))
    return Summary(
        steps=steps,
        first_loss=records[0]["loss"],
        loss=math.fsum(record["loss"] for record in records[-averaged:]) / averaged,
        averaged=averaged,
        validation_loss=records[-1].get("validation_loss"),
        tokens_per_second=median_speed(records),
        seconds=math.fsum(record["step_seconds"] for record in records),
    )


def median_speed(records: Iterable[Mapping[str, Any]]) -> float:
    """Median of tokens_per_second."""
    return float(statistics.median_high(record["tokens_per_second"] for record in records))


def summary_lines(result: Result) -> list[str]:
    """The summary as text: folder, loss, cost of FP8, next commands."""
    own, other = result.summary, result.bf16
    lines = ["", f"The run is in {result.folder}: run.toml, metrics.jsonl, checkpoints/, model/config.json, tokenizer/."]
    mean = f"mean of the last {own.averaged} steps" if own.averaged > 1 else "of the last step"
    validation = f"; validation {own.validation_loss:.4f}" if own.validation_loss is not None else ""
    lines.append(f"Loss {own.first_loss:.4f} → {own.loss:.4f} ({mean}){validation}; {own.tokens_per_second:,.0f} tokens/s.")
    if other is not None and result.gap_percent is not None:
        held_out = ""
        if own.validation_loss is not None and other.validation_loss is not None:
            held_out = f"; validation {own.validation_loss:.4f} and {other.validation_loss:.4f}"
        dtype = short_name(result.config.model.dtype)
        lines.append(
            f"Cost of FP8: loss {own.loss:.4f} in FP8 and {other.loss:.4f} in {dtype}, "
            f"a gap of {result.gap_percent:+.2f}%{held_out}."
        )
    fp8 = result.config.fp8
    recipe = "current" if fp8.recipe != "current" else "delayed"
    other_run = ("fp8.enabled=true", "fp8") if fp8.enabled is False else (f"fp8.recipe={recipe}", recipe)
    folder = str(result.folder)
    commands = (
        ["export", folder, "--to", f"{folder}/export"],
        ["train", f"{folder}/run.toml", other_run[0], f"train.output={folder}-{other_run[1]}"],
        ["doctor"],
    )
    return [*lines, "", "Next:", *(f"  {shlex.join(['octavo', *command])}" for command in commands)]
