"""Table and plot of the context suite: tokens a second of a GPU by the length of a sequence and the GPUs that share it.

    python -m benchmarks.lengths benchmarks/results/context-*.json --plot benchmarks/results/context-lengths.png

prints the table of one entry. A dash: no such row. Where files have several rows of a cell, that of the file given last counts;
a line below the table names the files, with the figures that are left out. Reasons of failed rows stand there too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.cases import CONTEXT_CASES
from benchmarks.files import does_not_fit, read_results
from octavo.errors import OctavoError, unknown, warn
from octavo.storage import check_file, describe_fault, local_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Found(NamedTuple):
    """A row and the file that has it."""

    file: str
    row: Mapping[str, Any]


Cells = Mapping[tuple[int, int], Sequence[Found]]
"""(tokens of a sequence, GPUs that share it) → its rows in the order of the files; the last counts."""


def cells_of(documents: Sequence[tuple[str, Mapping[str, Any]]], entry: str) -> dict[tuple[int, int], list[Found]]:
    """The rows of an entry in results of the context suite, each document with the name of its file.

    Raises:
        InputError: no row is of this entry, or a workload is unknown.
    """
    found = [Found(file, row) for file, document in documents for row in document["rows"]]
    of_entry = [one for one in found if one.row["entry"] == entry]
    if not of_entry:
        raise unknown("entry", entry, {one.row["entry"] for one in found}, key="--entry")
    cells: dict[tuple[int, int], list[Found]] = {}
    for one in of_entry:
        if (name := one.row["workload"]) not in CONTEXT_CASES:
            raise unknown(f"workload in {one.file}", name, CONTEXT_CASES)
        case = CONTEXT_CASES[name]
        cells.setdefault((case.sequence_length, case.context), []).append(one)
    return cells


def table(cells: Cells) -> str:
    """Lengths down; for each degree tokens/s of a GPU, peak GiB and settings; sources of doubled cells below."""
    degrees = sorted({degree for _, degree in cells})
    titles = [f"{'one GPU' if n == 1 else f'{n} GPUs'} a sequence: tokens/s a GPU | GiB | settings" for n in degrees]
    lines = [f"| tokens | {' | '.join(titles)} |", "|---" * (1 + 3 * len(degrees)) + "|"]
    for length in sorted({length for length, _ in cells}):
        parts = [part for degree in degrees for part in _cell(cells.get((length, degree)))]
        lines.append(f"| {length:,} | {' | '.join(parts)} |")
    ordered = [cells[place] for place in sorted(cells)]
    sources = [_source(found) for found in ordered if len(found) > 1]
    rows = [found[-1].row for found in ordered]
    errors = [f"{row['workload']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*lines, *([""] if sources else []), *sources, *([""] if errors else []), *errors])


def _cell(found: Sequence[Found] | None) -> tuple[str, str, str]:
    if found is None:
        return "-", "-", "-"
    row = found[-1].row
    case = CONTEXT_CASES[row["workload"]]
    settings = [f"recompute={str(case.recompute).lower()}"] * bool(case.recompute) + ["offload"] * case.offload
    peak = "-" if "error" in row or not row.get("peak_gib") else f"{row['peak_gib']:.1f}"
    return _speed(row), peak, " ".join(settings)


def _speed(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return "does not fit" if does_not_fit(row) else "failed"
    return f"{row['tokens_per_second']:,.0f}"


def _source(found: Sequence[Found]) -> str:
    """The files of a cell that has several rows."""
    *others, last = (f"{_speed(row)} of {file}" for file, row in found)
    return f"{found[-1].row['workload']}: {last}, given last; left out: {', '.join(others)}"


def figure(cells: Cells, entry: str) -> Figure:
    """A line for each degree over the lengths, with a gap where one does not train."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawn.subplots()
    rows = {place: found[-1].row for place, found in cells.items()}
    for degree in sorted({degree for _, degree in rows}):
        of_degree = sorted((length, row) for (length, found), row in rows.items() if found == degree)
        points = [(length, math.nan if "error" in row else row["tokens_per_second"]) for length, row in of_degree]
        label = "a sequence on one GPU" if degree == 1 else f"a sequence on {degree} GPUs"
        axes.plot([n for n, _ in points], [speed for _, speed in points], marker="o", label=label)
    lengths = sorted({length for length, _ in rows})
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lengths",
        description="Table and plot of the context suite. Where files have several rows of a cell, that of the file given last "
        "counts; a line below the table names the files, with the figures that are left out.",
    )
    parser.add_argument("results", nargs="+", help="JSON files of python -m benchmarks context")
    parser.add_argument("--entry", default="octavo-delayed", help="octavo-delayed if absent")
    parser.add_argument("--plot", metavar="FILE.png")
    given = parser.parse_args(arguments)
    try:
        given.results = [local_path(path, "results") for path in given.results]
        given.plot = None if given.plot is None else local_path(given.plot, "--plot")
        if given.plot is not None:
            check_file(given.plot, "--plot", ".png")
        documents = [(str(path), read_results(path, "context", "tokens_per_second")) for path in given.results]
        cells = cells_of(documents, given.entry)
        if given.plot is not None:
            figure(cells, given.entry).savefig(given.plot, dpi=120, format="png")
    except OctavoError as error:
        warn(str(error))
        return error.exit_code
    except OSError as error:  # of the plot, such as a full disk
        message, code = describe_fault(error)
        warn(message)
        return code
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
