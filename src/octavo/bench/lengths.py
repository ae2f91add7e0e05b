"""Table and plot of the context suite: tokens a second of a GPU by the length of a sequence and the GPUs that share it.

    python -m octavo.bench.lengths benchmarks/context-*.json --entry octavo-delayed --plot benchmarks/context-lengths.png

prints the table of one entry. A dash: no such row. Reasons of failed rows stand below the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.cases import CONTEXT_CASES
from octavo.errors import InputError, OctavoError, unknown, warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cells = Mapping[tuple[int, int], Mapping[str, Any]]
"""(tokens of a sequence, GPUs that share it) → the row."""

_FULL = "out of memory"


def cells_of(documents: Sequence[Mapping[str, Any]], entry: str) -> dict[tuple[int, int], Mapping[str, Any]]:
    """The rows of an entry in results of the context suite; of two for one cell the later one.

    Raises:
        InputError: no row is of this entry.
    """
    rows = [row for found in documents for row in found["rows"] if found["suite"] == "context"]
    own = [row for row in rows if row["entry"] == entry and row["workload"] in CONTEXT_CASES]
    if not own:
        raise unknown("entry", entry, sorted({row["entry"] for row in rows}), key="--entry")
    cases = ((CONTEXT_CASES[row["workload"]], row) for row in own)
    return {(case.sequence_length, case.context): row for case, row in cases}


def table(cells: Cells) -> str:
    """Lengths down; for each degree tokens/s of a GPU, peak GiB and the settings of the case."""
    degrees = sorted({degree for _, degree in cells})
    titles = [f"{'one GPU' if n == 1 else f'{n} GPUs'} a sequence: tokens/s a GPU | GiB | settings" for n in degrees]
    lines = [f"| tokens | {' | '.join(titles)} |", "|---" * (1 + 3 * len(degrees)) + "|"]
    for length in sorted({length for length, _ in cells}):
        parts = [part for degree in degrees for part in _cell(cells.get((length, degree)))]
        lines.append(f"| {length:,} | {' | '.join(parts)} |")
    errors = [f"{row['workload']}: {row['error']}" for _, row in sorted(cells.items()) if "error" in row]
    return "\n".join([*lines, *([""] if errors else []), *errors])


def _cell(row: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if row is None:
        return "-", "-", "-"
    case = CONTEXT_CASES[row["workload"]]
    settings = [f"recompute={str(case.recompute).lower()}"] * bool(case.recompute) + ["offload"] * case.offload
    if "error" in row:
        return "does not fit" if _FULL in row["error"].lower() else "failed", "-", " ".join(settings)
    return f"{row['tokens_per_second']:,.0f}", f"{row['peak_gib']:.1f}" if row.get("peak_gib") else "-", " ".join(settings)


def figure(cells: Cells, entry: str) -> Figure:
    """A line for each degree, over the lengths that it has trained."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawn.subplots()
    for degree in sorted({degree for _, degree in cells}):
        trained = [(length, row) for (length, found), row in cells.items() if found == degree and "error" not in row]
        points = sorted((length, row["tokens_per_second"]) for length, row in trained)
        label = "a sequence on one GPU" if degree == 1 else f"a sequence on {degree} GPUs"
        axes.plot([n for n, _ in points], [speed for _, speed in points], marker="o", label=label)
    lengths = sorted({length for length, _ in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel(f"tokens/s of a GPU, {entry}")
    axes.grid(alpha=0.25)
    axes.legend()
    return drawn


def main(arguments: Sequence[str]) -> int:
    """Print the table, draw the plot; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.lengths", description="Table and plot of the context suite.")
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of octavo bench context")
    parser.add_argument("--entry", default="octavo-delayed")
    parser.add_argument("--plot", type=Path, help="a .png file")
    given = parser.parse_args(arguments)
    try:
        cells = cells_of([_read(path) for path in given.results], given.entry)
        if given.plot is not None:
            figure(cells, given.entry).savefig(given.plot, dpi=120, format="png")
    except OctavoError as error:
        warn(str(error))
        return error.exit_code
    print(table(cells))
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["suite"], found["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a file of octavo bench: {error}. Give the JSON files of octavo bench context."
        ) from None
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
