"""`octavo compare`: losses of runs of the same steps, as a table, as curves and as JSON with the runs' environments.

A gap means something only beside the noise of training: a second run of the reference, with another order of sums, shows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.errors import InputError
from octavo.run.metrics import read_metrics
from octavo.run.summary import LAST_STEPS, median_speed

_PICTURES = (".png", ".pdf", ".svg")
_LEGEND_INSIDE = 8
"""Largest number of names in a legend above the curves; a longer legend goes beneath them."""


def compare(runs: Sequence[Path], *, last: int = LAST_STEPS) -> dict[str, Any]:
    """Losses and speeds of runs against the first of them.

    Args:
        runs: run folders; the first is the reference.
        last: steps at the end whose mean loss is compared.

    Returns:
        `{"last", "steps", "numbers", "rows": [{"run", "loss", "gap_percent", "tokens_per_second", "losses", "environment"}]}`:
        `numbers` are the steps that all runs have, `steps` their count and `losses` the losses there; `loss` is the mean of the
        last `last`, `gap_percent` its distance to the reference's, `tokens_per_second` a median.

    Raises:
        InputError: a folder is no run, or the runs have fewer than `last` steps in common.
    """
    curves = [(run, {record["step"]: record for record in _records(run)}) for run in runs]
    numbers = sorted(set.intersection(*(set(curve) for _, curve in curves)))
    steps = len(numbers)
    if not steps:
        ranges = ", ".join(f"{run} has steps {min(curve)} to {max(curve)}" for run, curve in curves)
        raise InputError(f"the runs have no step in common: {ranges}.")
    if not 1 <= last <= steps:
        shortest, curve = min(curves, key=lambda pair: len(pair[1]))
        has = f"{shortest} has {steps} steps" if len(curve) == steps else f"the runs have {steps} steps in common"
        raise InputError(f"--last {last}: {has}; use 1 to {steps}.")
    rows: list[dict[str, Any]] = []
    for run, curve in curves:
        losses = [curve[number]["loss"] for number in numbers]
        loss = math.fsum(losses[-last:]) / last
        reference = rows[0]["loss"] if rows else loss
        rows.append(
            {
                "run": run.name,
                "loss": loss,
                "gap_percent": 100 * (loss / reference - 1),
                "tokens_per_second": median_speed(curve.values()),
                "losses": losses,
                "environment": _environment(run),
            }
        )
    return {"last": last, "steps": steps, "numbers": numbers, "rows": rows}


def lines(found: dict[str, Any]) -> list[str]:
    """The comparison as a table."""
    width = max(len(row["run"]) for row in found["rows"])
    first, last = found["numbers"][-found["last"]], found["numbers"][-1]
    return [
        f"{'run':<{width}}  {'loss':>9}  {'gap':>8}  {'tokens/s':>10}   (mean of steps {first} to {last})",
        *(
            f"{row['run']:<{width}}  {row['loss']:9.5f}  {row['gap_percent']:+7.3f}%  {row['tokens_per_second']:10,.0f}"
            for row in found["rows"]
        ),
    ]


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
        raise InputError(f"--plot {path}: there is no folder {str(path.parent)!r}. Make it first, or give another path.")


def draw(found: dict[str, Any], path: Path) -> None:
    """Plot the loss curves, and below them each run's gap, smoothed over a twentieth of the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    beneath = -(-len(found["rows"]) // 2) if len(found["rows"]) > _LEGEND_INSIDE else 0
    size = (8, 6 + 0.2 * beneath)
    figure, (above, below) = plt.subplots(2, 1, figsize=size, sharex=True, height_ratios=(2, 1), layout="constrained")
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for axes in (above, below):  # all colours in one line style, then in the next
        axes.set_prop_cycle(plt.cycler(linestyle=("-", "--", ":")) * plt.cycler(color=colours))
    steps = found["numbers"]
    window = max(1, found["steps"] // 20)
    reference = found["rows"][0]["losses"]
    for row in found["rows"]:
        above.plot(steps, row["losses"], linewidth=0.9, label=f"{row['run']} ({row['gap_percent']:+.3f}%)")
        gaps = [100 * (loss / other - 1) for loss, other in zip(row["losses"], reference, strict=True)]
        smooth = [math.fsum(gaps[i + 1 - window : i + 1]) / window for i in range(window - 1, len(gaps))]
        below.plot(steps[window - 1 :], smooth, linewidth=0.9)
    above.set_ylabel("loss (nats per token)")
    if beneath:
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    else:
        above.legend()
    below.set_ylabel(f"% above {found['rows'][0]['run']}")
    below.set_xlabel(f"step (below: means of {window})")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _records(run: Path) -> list[dict[str, Any]]:
    records = read_metrics(run / "metrics.jsonl")
    if not records:
        raise InputError(f"{str(run)!r} has no metrics.jsonl with whole lines. Give the folder of a run, such as runs/demo.")
    return records


def _environment(run: Path) -> Any:
    path = run / "environment.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
