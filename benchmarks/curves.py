"""The picture of the README: losses of a pair of runs, in FP8 and in bf16, as SVG.

`python -m benchmarks.pages` writes it. An SVG of text is read on any page, light or dark, and its changes are read in a diff.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.readme import TITLES

WINDOW, EVERY = 25, 8
"""Steps of a mean, and from one mean to the next."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 860, 40, 260
_COLOURS = {"bf16": "#c67a22", "FP8": "#3b78c4"}
_STYLE = ".g{stroke:#d7dde3} .t{fill:#1c2733} .s{fill:#52606d} .p{fill:none;stroke-width:1.6}"


def picture(document: Mapping[str, Any], pair: tuple[str, str]) -> str:
    """The curves of two runs of a file of loss pairs: `pair` has the names of that in bf16 and of that in FP8.

    The vertical axis ends where the first tenth of the steps is over; the curves' beginnings lie above it.
    """
    rows = [next(row for row in document["rows"] if row["run"] == run) for run in pair]
    curves = dict(zip(_COLOURS, (row["losses"] for row in rows), strict=True))
    steps = len(rows[0]["losses"])
    shown = [loss for losses in curves.values() for loss in _means(losses[steps // 20 :])]
    low, high = int(min(shown)), int(max(shown)) + 1

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * step / steps

    def y(loss: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (min(loss, high) - low) / (high - low)

    label = f"Loss of {steps:,} steps in FP8 and in bf16"
    gpu = document["machine"]["gpu"].removeprefix("NVIDIA ")
    title = f"Loss, {TITLES[rows[0]['workload']]} from random weights, {gpu} (means of {WINDOW} steps)"
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 300" font-family="system-ui, sans-serif" font-size="12" '
        f'role="img" aria-label="{label}">',
        f"<style>{_STYLE}</style>",
        '<rect width="880" height="300" rx="8" fill="#fff"/>',
        f'<text class="t" x="{_LEFT}" y="24" font-weight="600">{escape(title)}</text>',
    ]
    for loss in range(low, high + 1):
        lines.append(f'<path class="g" d="M{_LEFT} {y(loss):.1f}H{_RIGHT}"/>')
        lines.append(f'<text class="s" x="{_LEFT - 10}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, steps + 1, steps // 5):
        lines.append(f'<text class="s" x="{x(step):.1f}" y="280" text-anchor="middle">{step:,}</text>')
    lines.append(f'<text class="s" x="{_RIGHT}" y="295" text-anchor="end">step</text>')
    for name, losses in curves.items():
        points = (f"{x(EVERY * at + EVERY / 2):.1f} {y(mean):.1f}" for at, mean in enumerate(_means(losses)))
        lines.append(f'<path class="p" stroke="{_COLOURS[name]}" d="M{"L".join(points)}"/>')
    ends = {name: statistics.fmean(losses[-steps // 10 :]) for name, losses in curves.items()}
    for row, (name, end) in enumerate(ends.items()):
        gap = f" ({100 * (end / ends['bf16'] - 1):+.2f}%)" if name != "bf16" else ""
        lines.append(f'<rect x="600" y="{60 + 20 * row}" width="14" height="3" fill="{_COLOURS[name]}"/>')
        lines.append(
            f'<text class="t" x="622" y="{65 + 20 * row}">{name}: {end:.3f} in the last {steps // 10} steps{gap}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _means(losses: Sequence[float]) -> list[float]:
    """Means of `WINDOW` steps around every `EVERY`th, fewer at both ends."""
    half = WINDOW // 2
    return [statistics.fmean(losses[max(0, at - half) : at + half + 1]) for at in range(EVERY // 2, len(losses), EVERY)]
