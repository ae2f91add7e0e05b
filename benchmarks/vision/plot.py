"""The plot of the vision suite: images a second of a GPU and dollars of a million images, a bar for each row.

Drawn without pyplot, as the plots of losses are. A measurement is worth more than its picture: a failure is a warning.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.vision.costs import CostRow, measured, with_published
from octavo.errors import first_line, warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"published": "#7f7f7f", "measured": "#1f77b4"}


def draw_costs(path: Path) -> Path | None:
    """Draw the rows of a results file of the vision suite beside it, as .png; returns the picture.

    None without a finished row, and after a warning if it cannot be drawn.
    """
    picture = path.with_suffix(".png")
    temporary = picture.with_name(f".{picture.name}.tmp")
    try:
        rows = measured(json.loads(path.read_text(encoding="utf-8")))
        if not rows:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fonts without a character of a name
            costs_figure(with_published(rows)).savefig(temporary, dpi=120, format="png")
        temporary.replace(picture)
    except Exception as error:  # of matplotlib's fonts and caches, of the disk
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        warn(f"{picture} was not drawn: {first_line(error)}.")
        return None
    return picture


def costs_figure(rows: Sequence[CostRow]) -> Figure:
    """Rows down in their order; speed on the left, cost on the right, where a row without a price has a "-"."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.4 + 0.42 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    colours = [_COLOURS[row.figures] for row in rows]
    speeds = left.barh(places, [row.images_per_second for row in rows], color=colours)
    left.bar_label(speeds, [f"{row.images_per_second:,.0f}" for row in rows], padding=3, fontsize="small")
    costs = right.barh(places, [row.dollars or 0.0 for row in rows], color=colours)
    labels = ["-" if row.dollars is None else f"{row.dollars:.2f}" for row in rows]
    right.bar_label(costs, labels, padding=3, fontsize="small")
    left.set_yticks(places, [_label(row) for row in rows], fontsize="small")
    left.invert_yaxis()
    left.set_xlabel("images per second and GPU")
    right.set_xlabel("dollars per million images")
    for axes in (left, right):
        axes.margins(x=0.15)
        axes.grid(alpha=0.25, axis="x")
    kinds = list(dict.fromkeys(row.figures for row in rows))
    figure.legend(handles=[Patch(color=_COLOURS[kind], label=kind) for kind in kinds], loc="outside upper right", ncols=2)
    return figure


def _label(row: CostRow) -> str:
    workload = "" if row.figures == "published" else f"{row.workload}, "
    return f"{row.machine}: {workload}{row.entry}, batch {row.batch}".replace("$", r"\$")
