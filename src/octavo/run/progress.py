"""Progress of a run: a permanent line every few steps and for each validation, and on a terminal a live line below.

Lines fit their terminal, and plain output has 110 columns. A narrow line omits the least important fields; results of a
validation continue on a further line instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column

_ETA_STEPS = 20
_BAR_WIDTH = 20
_WIDTH_WITH_BAR = 110  # columns of a terminal
_PLAIN_WIDTH = 110  # columns of a line in a file or a pipe
_SPACE = "  "
_LEFT_OUT = ("tflops", "memory", "mfu", "loss scale", "epoch", "dropped", "entropy", "load", "speed", "lr", "norm", "eta")
"""Fields that a narrow line omits, in this order."""


class StepProgress:
    """Shows the steps of one training; a context manager.

    Args:
        console: output; a terminal gets a live line below the others.
        label: precision of the training, such as "fp8" or "bf16".
        steps: the last step.
        done: steps finished before this start.
        every: steps between permanent lines. The first and the last step of this start have one too.
    """

    def __init__(self, console: Console, *, label: str, steps: int, done: int, every: int) -> None:
        self.console = console
        self.label = label
        self.steps = steps
        self.every = every
        self._first = done + 1
        self._recent: deque[float] = deque(maxlen=_ETA_STEPS)
        self._unshown: Mapping[str, Any] | None = None  # the newest step, until it has a permanent line
        self._live: Progress | None = None
        # Not on a quiet rank: a live line captures stdout and stderr, and would swallow other output.
        if console.is_terminal and not console.quiet:
            columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
            self._beside = cell_len(label) + 1
            if console.width >= _WIDTH_WITH_BAR:
                columns.append(BarColumn(bar_width=_BAR_WIDTH))
                self._beside += _BAR_WIDTH + 1
            columns.append(TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True)))
            # Transient: the last step has a permanent line.
            self._live = Progress(*columns, console=console, transient=True)
            self._task = self._live.add_task(label, total=steps, completed=done, line=f"step {done}/{steps}")

    def __enter__(self) -> StepProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()
        if self._unshown is not None:  # the run ends early
            self._keep(self._unshown)

    def step(self, record: Mapping[str, Any]) -> None:
        """Show one step's metrics."""
        step = int(record["step"])
        self._recent.append(record["step_seconds"])
        if self._live:
            line = step_line(record, self.steps, self._step_seconds, self.console.width - self._beside)
            self._live.update(self._task, completed=step, line=line)
        self._unshown = record
        if step % self.every == 0 or step in (self._first, self.steps):
            self._keep(record)
        for line in validation_lines(record, self.steps, self._width):
            self.say(f"{self.label}  {line}")

    def say(self, message: str) -> None:
        """Print a separate line above the live one."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    @property
    def _step_seconds(self) -> float:
        return sum(self._recent) / len(self._recent)

    @property
    def _width(self) -> int:
        """Columns of a permanent line, without the label."""
        return (self.console.width if self._live else _PLAIN_WIDTH) - cell_len(self.label) - len(_SPACE)

    def _keep(self, record: Mapping[str, Any]) -> None:
        self.say(f"{self.label}  {step_line(record, self.steps, self._step_seconds, self._width)}")
        self._unshown = None


def step_line(record: Mapping[str, Any], steps: int, mean_step_seconds: float, width: int) -> str:
    """The fields of a training step that fit into `width` columns, at least step and loss."""
    step = int(record["step"])
    fields = _fields(record, steps, mean_step_seconds)
    room = width - len(str(steps)) + len(str(step))  # the same fields in all steps of a run
    for name in _LEFT_OUT:
        if cell_len(_SPACE.join(fields.values())) <= room:
            break
        fields.pop(name, None)
    return _SPACE.join(fields.values())


def validation_lines(record: Mapping[str, Any], steps: int, width: int) -> list[str]:
    """The results of a validation, and of a user's evaluations, in lines of at most `width` columns; none without one."""
    step, loss, perplexity = (record.get(key) for key in ("step", "validation_loss", "perplexity"))
    results = [] if loss is None else [f"validation {loss:.4f}"]
    results += [] if perplexity is None else [f"perplexity {perplexity:,.1f}"]
    sets = [key.removeprefix("validation_loss/") for key in record if key.startswith("validation_loss/")]
    results += [f"{name} {record[f'validation_loss/{name}']:.4f}" for name in sets]
    for key, value in record.items():
        if key.startswith("evaluation/") and value is not None:
            results.append(f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}")
    lines = [f"step {step}/{steps}{_SPACE}loss {record['loss']:.4f}"]
    for result in results:
        joined = f"{lines[-1]}{_SPACE}{result}"
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(f"step {step}/{steps}{_SPACE}{result}")
    return lines if results else []


def duration(seconds: float) -> str:
    """Seconds as m:ss, from an hour on as h:mm:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _fields(record: Mapping[str, Any], steps: int, mean_step_seconds: float) -> dict[str, str]:
    """The fields with a value, in the order of the line."""
    step = int(record["step"])
    texts = {
        "skipped": ("skipped", lambda skipped: "skipped" if skipped else ""),
        "epoch": ("epoch", lambda epoch: f"epoch {epoch:.2f}"),
        "lr": ("lr", lambda rate: f"lr {rate:.1e}"),
        "norm": ("grad_norm", lambda norm: f"norm {norm:.2f}" if 0.1 <= norm < 1000 else f"norm {norm:.1e}"),
        "loss scale": ("loss_scale", lambda scale: f"scale {scale:,.0f}" if scale >= 1 else f"scale {scale:.1e}"),
        "speed": ("tokens_per_second", lambda speed: f"{speed:,.0f} tok/s"),
        "tflops": ("tflops", lambda rate: f"{rate:,.0f} TFLOP/s" if rate >= 100 else f"{rate:.3g} TFLOP/s"),
        "mfu": ("mfu", lambda share: f"MFU {100 * share:.1f}%"),
        "load": ("largest_expert_load", lambda load: f"load {load:.2f}"),
        "entropy": ("router_entropy", lambda entropy: f"entropy {entropy:.2f}"),
        "dropped": ("dropped_tokens", lambda tokens: f"dropped {tokens}"),
        "memory": ("memory_gib", lambda size: f"{size:.1f} GiB"),
    }
    known = {name: text(record[key]) for name, (key, text) in texts.items() if record.get(key) is not None}
    fields = {"step": f"step {step}/{steps}", "loss": f"loss {record['loss']:.4f}", **known}
    fields["eta"] = f"ETA {duration((steps - step) * mean_step_seconds)}"
    return {name: text for name, text in fields.items() if text}
