"""Summary of a finished run from metrics.jsonl: the same for an uninterrupted and a continued run."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config.run import RunConfig
from octavo.dtypes import short_name
from octavo.errors import OctavoError
from octavo.run.metrics import lacking, read_metrics

LAST_STEPS = 50
"""Most steps whose mean loss is reported."""
_WIDTH = 80  # columns of the text
_SAMPLE_LINES = 6
_FILES = ("run.toml", "metrics.jsonl", "losses.png", "checkpoints/", "model/config.json", "tokenizer/")
_PROMPT = "The first"


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
    validation_losses: Mapping[str, float] = field(default_factory=dict)
    """Name of a set in `data.validation` → its loss."""


@dataclass(frozen=True)
class Result:
    """Result of `train`: the run's folder and summary; if present, the summary of the run without FP8, and a sample."""

    folder: Path
    config: RunConfig
    summary: Summary
    bf16: Summary | None
    ended_early: str = ""
    """The reason for an early end; else empty."""
    sample: str | None = None
    best: tuple[int, str] | None = None
    """Step of the best checkpoint and its figure in words, if it is not the last one."""

    def __repr__(self) -> str:
        summary = self.summary
        validation = "" if summary.validation_loss is None else f", validation_loss={summary.validation_loss:.4f}"
        return f"Result(steps={summary.steps}, loss={summary.loss:.4f}{validation}, folder={str(self.folder)!r})"

    @property
    def gap_percent(self) -> float | None:
        """Relative difference of the FP8 loss to the loss without FP8, in %."""
        return None if self.bf16 is None else percent_above(self.summary.loss, self.bf16.loss)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "folder": str(self.folder),
            "run": vars(self.summary),
            "bf16": vars(self.bf16) if self.bf16 else None,
            "gap_percent": self.gap_percent,
            "sample": self.sample,
            "ended_early": self.ended_early,
            "best_step": None if self.best is None else self.best[0],
        }


def summarise(metrics: Path, steps: int) -> Summary:
    """Figures of a finished training; its loss is the mean of the last `averaged_steps`."""
    records = read_metrics(metrics)
    if not records or records[-1]["step"] != steps:
        raise OctavoError(f"the run is done, but {lacking(metrics, steps)}")
    averaged = min(averaged_steps(steps), len(records))
    return Summary(
        steps=steps,
        first_loss=records[0]["loss"],
        loss=math.fsum(record["loss"] for record in records[-averaged:]) / averaged,
        averaged=averaged,
        validation_loss=records[-1].get("validation_loss"),
        tokens_per_second=median_speed(records),
        seconds=math.fsum(record["step_seconds"] for record in records),
        validation_losses=losses_of_sets(records[-1]),
    )


def losses_of_sets(record: Mapping[str, Any]) -> dict[str, float]:
    """The validation losses of named sets in a line of metrics.jsonl."""
    prefix = "validation_loss/"
    return {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}


def averaged_steps(steps: int) -> int:
    """Number of last steps whose mean is a run's loss: a tenth of all, at most 50."""
    return min(LAST_STEPS, max(1, steps // 10))


def percent_above(loss: float, reference: float) -> float:
    """Relative difference of a loss to a reference in %; NaN for a reference of 0."""
    return 100 * (loss / reference - 1) if reference else math.nan


def median_speed(records: Iterable[Mapping[str, Any]]) -> float:
    """Median of tokens_per_second."""
    return float(statistics.median_high(record["tokens_per_second"] for record in records))


def summary_lines(result: Result) -> list[str]:
    """The summary as text of 80 columns: folder, loss, cost of FP8, sample, next commands (never wrapped)."""
    summary, other = result.summary, result.bf16
    files = ", ".join(name for name in _FILES if (result.folder / name).exists())
    mean = f"mean of {summary.averaged} steps" if summary.averaged > 1 else "of the last step"
    validation = f"; validation {summary.validation_loss:.4f}" if summary.validation_loss is not None else ""
    facts = [
        f"The run is in {result.folder}: {files}.",
        f"Loss {summary.first_loss:.4f} → {summary.loss:.4f} ({mean}){validation}; {summary.tokens_per_second:,.0f} tok/s.",
    ]
    if summary.validation_losses:
        facts.append(f"Validation: {', '.join(f'{name} {loss:.4f}' for name, loss in summary.validation_losses.items())}.")
    if result.ended_early:
        facts.insert(1, f"It ended at step {summary.steps} of {result.config.train.steps}: {result.ended_early}.")
    if result.best is not None:
        step, said = result.best
        facts.append(
            f"At step {step} {said}: octavo export and octavo sample take --checkpoint step-{step}, else the last step."
        )
    if other is not None and result.gap_percent is not None:
        dtype = short_name(result.config.model.dtype)
        cost = f"loss {summary.loss:.4f} in FP8 and {other.loss:.4f} in {dtype}, a gap of {result.gap_percent:+.2f}%"
        facts.append(f"Cost of FP8: {cost}.")
        if summary.validation_loss is not None and other.validation_loss is not None:
            gap = percent_above(summary.validation_loss, other.validation_loss)
            facts.append(f"In validation {summary.validation_loss:.4f} and {other.validation_loss:.4f}, a gap of {gap:+.2f}%.")
    lines = ["", *itertools.chain.from_iterable(map(_wrapped, facts))]
    if result.sample is not None:
        lines += ["", "Sample:", *_sample_lines(result.sample)]
    return [*lines, "", "Next:", *(f"  {shlex.join(command)}" for command in _next_commands(result))]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _sample_lines(sample: str) -> list[str]:
    """The first lines of a text, wrapped, without control characters, which a terminal would execute."""
    plain = ("".join(c if c.isprintable() else " " for c in line) for line in sample.expandtabs(4).splitlines())
    lines = list(itertools.chain.from_iterable(textwrap.wrap(line, _WIDTH - 2) or [""] for line in plain))
    cut = [*lines[:_SAMPLE_LINES], "…"] if len(lines) > _SAMPLE_LINES else lines
    return [f"  {line}".rstrip() for line in cut]


def _next_commands(result: Result) -> Iterator[list[str]]:
    """Commands that work as printed in the current folder."""
    folder = str(result.folder)
    folder = f"./{folder}" if folder.startswith("-") else folder  # not to be parsed as an option
    if (result.folder / "tokenizer").is_dir():
        yield ["octavo", "sample", folder, "--prompt", _PROMPT]
    names = itertools.chain(["export"], (f"export-{number}" for number in itertools.count(2)))
    yield [
        "octavo",
        "export",
        folder,
        "--to",
        f"{folder}/{next(name for name in names if not (result.folder / name).exists())}",
    ]
    if result.bf16 is not None:
        yield ["octavo", "compare", f"{folder}/bf16", folder]
    fp8 = result.config.fp8
    recipe = "current" if fp8.recipe != "current" else "delayed"
    key, name = ("fp8.enabled=true", "fp8") if fp8.enabled is False else (f"fp8.recipe={recipe}", recipe)
    world = os.environ.get("WORLD_SIZE", "1")
    if world in ("1", os.environ.get("LOCAL_WORLD_SIZE")):  # not on several hosts
        ranks = [] if world == "1" else ["--ranks", world]
        yield ["octavo", "train", f"{folder}/run.toml", key, f"train.output={folder}-{name}", *ranks]
