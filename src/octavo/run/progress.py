"""Progress of a run: one live line on a terminal, plain lines with the same fields anywhere else.

A narrow terminal has no bar, and the live line wraps rather than lose fields.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column

_ETA_STEPS = 20
_BAR_WIDTH = 20
_WIDTH_WITH_BAR = 110  # columns; the fields of a step without validation take about 85


class StepProgress:
    """Shows the steps of one training; a context manager.

    Args:
        console: output; a terminal gets a live line.
        label: precision of the training, such as "fp8" or "bf16".
        steps: the last step.
        done: steps before this start.
        every: steps between plain lines (the first and the last step are always shown).
    """

    def __init__(self, console: Console, *, label: str, steps: int, done: int, every: int) -> None:
        self.console = console
        self.label = label
        self.steps = steps
        self.every = every
        self._recent: deque[float] = deque(maxlen=_ETA_STEPS)
        self._live: Progress | None = None
        # Not on a quiet rank: a live line captures stdout and stderr, and would swallow other output.
        if console.is_terminal and not console.quiet:
            columns: list[ProgressColumn] = [TextColumn("{task.description}")]
            if console.width >= _WIDTH_WITH_BAR:
                columns.append(BarColumn(bar_width=_BAR_WIDTH))
            columns.append(TextColumn("{task.fields[line]}", table_column=Column(no_wrap=False)))
            self._live = Progress(*columns, console=console, transient=False)
            self._task = self._live.add_task(label, total=steps, completed=done, line=f"step {done}/{steps}")

    def __enter__(self) -> StepProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show one step's metrics."""
        step = int(record["step"])
        self._recent.append(record["step_seconds"])
        line = format_step(record, self.steps, sum(self._recent) / len(self._recent))
        if self._live:
            self._live.update(self._task, completed=step, line=line)
        elif step % self.every == 0 or step in (1, self.steps):
            self.say(f"{self.label}  {line}")

    def say(self, message: str) -> None:
        """A separate line, above the live one."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)


def format_step(record: Mapping[str, Any], steps: int, mean_step_seconds: float) -> str:
    """The known fields of one step in one line."""
    step = int(record["step"])
    parts = [f"step {step}/{steps}", f"loss {record['loss']:.4f}"]
    if record.get("validation_loss") is not None:
        parts.append(f"validation {record['validation_loss']:.4f} (perplexity {record['perplexity']:,.1f})")
    parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    if record.get("tflops") is not None:
        tflops = record["tflops"]
        parts.append(f"{tflops:,.0f} TFLOP/s" if tflops >= 100 else f"{tflops:.3g} TFLOP/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f}%")
    parts.append(f"{record['memory_gib']:.1f} GiB")
    parts.append(f"ETA {duration((steps - step) * mean_step_seconds)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as m:ss, from an hour on as h:mm:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
