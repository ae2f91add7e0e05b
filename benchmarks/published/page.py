"""The table of published figures beside Octavo's, on the page of results, from the files of its rows that are there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.files import read_json
from benchmarks.published.rows import ROWS, SAMPLES, TFLOPS, UNITS, Figure, Row, machine_of, octavo_of
from benchmarks.readme import WIDTH
from octavo.errors import InputError

COMMAND = "python -m benchmarks.published --gpus 8 --output benchmarks/results"
_BLOCK = re.compile(r"(<!-- Published figures -->\n).*?(<!-- End of published figures -->)", re.S)
_DASH = "\N{EN DASH}"
_AT_LEAST = "\N{GREATER-THAN OR EQUAL TO}"
_TITLES = ("row", "workload", "unit", "published", "aim", "Octavo", "ratio", "measured")

Documents = Mapping[str, dict[str, Any]]


def rewrite(text: str, results: Path, folder: Path) -> str:
    """The text of a page with its block regenerated. folder: that of the page, for links.

    Raises:
        InputError: a row's file is not complete.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}{block(results, folder)}\n{found[2]}", text)


def block(results: Path, folder: Path) -> str:
    """The table, a line for each figure of a measured row, and the rows that are not measured, with the command for them.

    Raises:
        InputError: a row's file is not complete.
    """
    documents = {row.name: _read(row, path) for row in ROWS.values() if (path := row.file_in(results)).is_file()}
    lines = [f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|", *_lines(documents, results, folder), ""]
    missing = [name for name in ROWS if name not in documents]
    if not missing:
        return "\n".join(lines[:-1])
    said = f"Rows, not yet measured: {', '.join(missing)}" if not documents else f"Not measured: {', '.join(missing)}"
    said += ". In a clone of Octavo, on one host with 8 GPUs (fewer: with `--cases`), a command that leaves out measured rows:"
    return "\n".join([*(lines if documents else []), fill(said, WIDTH, break_on_hyphens=False), "", "```", COMMAND, "```"])


def _lines(documents: Documents, results: Path, folder: Path) -> Iterator[str]:
    """The lines of the measured rows."""
    for row in (ROWS[name] for name in documents):
        for figure in row.figures:
            of_octavo = _cells(row, figure, documents)
            where = _measured(row, documents[row.name], results, folder)
            aim = f"{_AT_LEAST} {figure.aim}" if figure.aim else _DASH
            cells = [row.name, row.workload, f"{figure.unit}, {figure.layers}", figure.source or _DASH, aim, *of_octavo, where]
            yield f"| {' | '.join(cells)} |"


def _read(row: Row, path: Path) -> dict[str, Any]:
    document: dict[str, Any] = read_json(path, "a file of python -m benchmarks.published", "that of a complete row")
    if not row.is_complete(document):
        raise InputError(
            f"{path} is not complete: it lacks an entry of row {row.name}, or a figure of Octavo's. Repeat {COMMAND}."
        )
    return document


def _value(row: Row, figure: Figure, documents: Documents) -> tuple[float, dict[str, Any]] | None:
    """A figure of Octavo's with its row of results: that of the fastest entry in the figure's precision."""
    found = octavo_of(documents[row.name]["rows"], figure.layers) if row.name in documents else []
    return (UNITS[figure.unit](found[0]), found[0]) if found else None


def _cells(row: Row, figure: Figure, documents: Documents) -> list[str]:
    """Octavo's figure, and its ratio to the published one or to that of another row on the same kind of GPU."""
    found = _value(row, figure, documents)
    if found is None:
        return [_DASH, _DASH]
    value, result = found
    shown = f"{value:.2f}" if figure.unit == SAMPLES else f"{value:,.0f}"
    rate = "" if figure.unit == TFLOPS else f", {result['tflops']:,.0f} TFLOP/s"
    other = figure.published
    if figure.beside is not None:
        beside = _value(ROWS[figure.beside], figure, documents)
        alike = beside is not None and machine_of(documents[figure.beside]) == machine_of(documents[row.name])
        other = beside[0] if beside is not None and alike else None
    return [f"{shown}{rate}", _DASH if other is None else f"{value / other:.3f}"]


def _measured(row: Row, document: Mapping[str, Any], results: Path, folder: Path) -> str:
    """GPUs and date, with the file."""
    gpu = machine_of(document).removeprefix("NVIDIA ").split(" ")[0]
    link = Path(os.path.relpath(row.file_in(results), folder)).as_posix()
    return f"{row.gpus} {gpu}{'s' * (row.gpus > 1)}, [{document['date'][:10]}]({link})"
