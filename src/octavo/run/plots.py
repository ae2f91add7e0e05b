"""Plots of losses: of one run in its folder, and of several for `octavo compare --plot`.

Each curve is drawn twice, pale with every step and strong as a running mean: single steps scatter more than recipes differ.
Figures are created without pyplot, so that the caller's backend and figures are not affected.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config.run import RunConfig
from octavo.dtypes import short_name
from octavo.errors import InputError, first_line, warn
from octavo.run.metrics import read_metrics
from octavo.run.records import label_of
from octavo.run.summary import losses_of_sets, percent_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT = "losses.png"
"""The plot in the folder of a run."""
_PICTURES = (".png", ".pdf", ".svg")
_LEGEND_INSIDE = 8
"""Most names in a legend above the curves; a longer legend goes below them."""
_LOSS = "loss (nats per token)"
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
_STYLES = ("-", "--", ":")
_SETS = ("s", "^", "v", "P", "X")
"""Markers of the validation sets."""
_MARKERS = (("o", 8), ("D", 4))  # with sizes that leave both of two nearly equal losses visible


def check_picture(path: Path) -> None:
    """Check the path of a picture before any work.

    Raises:
        InputError: the kind of file is not supported, or the folder does not exist.
    """
    if path.suffix.lower() not in _PICTURES:
        raise InputError(
            f"--plot {path}: {path.suffix or 'no suffix'} is not a known kind of picture. Use {', '.join(_PICTURES)}."
        )
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {str(path.parent)!r}. Create it first, or give another path.")


def plot_run(folder: Path) -> Path | None:
    """Draw the losses of a run, and of the run without FP8 inside it, to `losses.png` in its folder; returns the file.

    A failure is only a warning, and returns None. Nothing is drawn without steps.
    """
    path, temporary = folder / PLOT, folder / f".{PLOT}.tmp"
    try:
        figure = run_figure(folder)
        if figure is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about fonts without a character of the title
            figure.savefig(temporary, dpi=120, format="png")
        temporary.replace(path)
    except Exception as error:  # matplotlib's fonts and caches, the disk, damaged metrics
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        warn(f"{path} was not drawn: {first_line(error)}.")
        return None
    return path


def run_figure(folder: Path) -> Figure | None:
    """The losses of a run and of its run without FP8: every training step, the running mean, and validations.

    None without steps.
    """
    from matplotlib.figure import Figure

    config = RunConfig.from_file(folder / "run.toml", recorded=True)
    label, dtype = label_of(folder, config), short_name(config.model.dtype)
    runs = {label: read_metrics(folder / "metrics.jsonl")}
    if not runs[label]:
        return None
    if label == "fp8" and (twin := read_metrics(folder / "bf16" / "metrics.jsonl")):
        runs[dtype] = twin
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (name, records), colour, (marker, size) in zip(runs.items(), _COLOURS, _MARKERS, strict=False):
        _curve(axes, [r["step"] for r in records], [r["loss"] for r in records], f"{name}: training", color=colour)
        checked = [(r["step"], r["validation_loss"]) for r in records if r.get("validation_loss") is not None]
        if checked:
            text = f"{name}: validation, {checked[-1][1]:.4f} at step {checked[-1][0]}"
            axes.plot(*zip(*checked, strict=True), marker, color=colour, markeredgecolor="black", markersize=size, label=text)
        for number, each in enumerate(dict.fromkeys(key for r in records for key in losses_of_sets(r))):
            losses = [(r["step"], losses_of_sets(r)[each]) for r in records if each in losses_of_sets(r)]
            text = f"{name}: {each}, {losses[-1][1]:.4f} at step {losses[-1][0]}"
            shape = _SETS[number % len(_SETS)]
            axes.plot(*zip(*losses, strict=True), shape, color=colour, markersize=size, fillstyle="none", label=_plain(text))
    precision = f"FP8, {config.fp8.recipe} scaling" if label == "fp8" else f"{label}, no FP8"
    axes.set_title(_plain(f"{folder.absolute().name}: {config.model.source}, {precision}"), fontsize="medium", wrap=True)
    axes.set_xlabel(f"step{_means(_window(max(map(len, runs.values()))))}")
    axes.set_ylabel(_LOSS)
    _finish(axes)
    axes.legend()
    return figure


def draw_comparison(comparison: Mapping[str, Any], path: Path) -> None:
    """Draw the figure of a comparison to a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about fonts without a character of a name
        comparison_figure(comparison).savefig(path, dpi=120)


def comparison_figure(comparison: Mapping[str, Any]) -> Figure:
    """The loss curves of `compare`, and below them each run's gap, as running means over 1/20 of the steps."""
    from matplotlib.figure import Figure

    rows, steps = comparison["rows"], comparison["numbers"]
    beneath = -(-len(rows) // 2) if len(rows) > _LEGEND_INSIDE else 0
    figure = Figure(figsize=(8, 6 + 0.2 * beneath), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    window, reference = _window(len(steps)), rows[0]
    for number, row in enumerate(rows):  # all colours in one line style, then in the next
        style = {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _STYLES[number // len(_COLOURS) % len(_STYLES)]}
        _curve(above, steps, row["losses"], f"{row['run']} ({row['gap_percent']:+.2f}%)", **style)
        gaps = [percent_above(loss, other) for loss, other in zip(row["losses"], reference["losses"], strict=True)]
        below.plot(*_running_mean(steps, gaps, window), linewidth=1.4, **style)
    title = f"Loss of {reference['run']}" + (f" and {len(rows) - 1} more, with the gap to it" if len(rows) > 1 else "")
    above.set_title(_plain(title), fontsize="medium", wrap=True)
    above.set_ylabel(_LOSS)
    if beneath:
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    else:
        above.legend()
    below.set_ylabel("gap (%)")
    below.set_xlabel(f"step{_means(window)}")
    for axes in (above, below):
        _finish(axes)
    return figure


def _curve(axes: Axes, steps: Sequence[int], losses: Sequence[float], label: str, **style: Any) -> None:
    """Draw every step pale, and the running mean strong."""
    window = _window(len(steps))
    if window > 1:
        axes.plot(steps, losses, linewidth=0.7, alpha=0.3, **style)
    marker = "." if len(steps) == 1 else None  # a line with one point is invisible
    axes.plot(*_running_mean(steps, losses, window), linewidth=1.4, marker=marker, label=_plain(label), **style)


def _finish(axes: Axes) -> None:
    """Add a grid, and integer ticks for steps."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _plain(text: str) -> str:
    """Text escaped for matplotlib, which would read formulas in it."""
    return text.replace("$", r"\$")


def _window(steps: int) -> int:
    """Number of steps of a running mean."""
    return max(1, steps // 20)


def _means(window: int) -> str:
    return f" (strong lines: means of {window} steps)" if window > 1 else ""


def _running_mean(steps: Sequence[int], values: Sequence[float], window: int) -> tuple[list[int], list[float]]:
    """Means of `window` consecutive values, placed at the middle step: at the last step a falling curve would look too high."""
    means = [math.fsum(values[i : i + window]) / window for i in range(len(values) - window + 1)]
    return list(steps[window // 2 :][: len(means)]), means
