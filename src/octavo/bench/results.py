"""Results with their provenance, as JSON on disk and as tables on the screen, for `benchmarks/` of a clone too.

Each file holds the command, the commit, the date and the machine. Ratios follow from the rows of a run and are not stored.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from octavo.errors import InputError, OctavoError, some
from octavo.hardware import Device, driver_version
from octavo.kernels.attention import flash
from octavo.run import provenance
from octavo.run.provenance import version
from octavo.storage import check_writable, write_atomic

LOG_WIDTH = 160
"""Maximum width outside a terminal, where rich assumes 80 columns and would cut figures off."""

Columns = tuple[tuple[str, str, str, float], ...]
"""(title, key in the row, format, factor) of each figure."""

KERNEL: Columns = (
    ("us", "us", "{:,.1f}", 1),
    ("MB", "bytes", "{:,.0f}", 1e-6),
    ("GB/s", "gb_per_s", "{:,.0f}", 1),
    ("of copy", "share_of_copy", "{:.1%}", 1),
)


def document(
    suite: str,
    command: str,
    device: Device,
    rows: list[dict[str, Any]],
    *,
    ranks: int = 1,
    peers: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """A whole run, as a file of results.

    Args:
        ranks: number of processes, one per GPU.
        peers: packages whose versions are recorded.
        **more: further entries of the document before its rows.
    """
    on_gpu = device.kind == "cuda"
    return {
        "suite": suite,
        "command": command,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "gpu": device.name if on_gpu else None,
            "cpu": None if on_gpu else device.name,
            "count": ranks if on_gpu else 0,
            "driver": driver_version() if on_gpu else None,
            "torch": version("torch"),
            "triton": version("triton"),
            "flash-attn-4": version("flash-attn-4") if flash.enabled() else None,
            "peers": {package: version(package) for package in peers},
        },
        **more,
        "rows": rows,
    }


def commit() -> str | None:
    """The commit of this code: from OCTAVO_COMMIT (for a copy without .git), else from git, else None."""
    return os.environ.get("OCTAVO_COMMIT") or provenance.commit()


def check_output(files: Sequence[Path], output: Path, say: Callable[[str], None]) -> None:
    """Refuse, before a run, an `output` that cannot be written, or a folder with earlier results.

    Args:
        files: the files of the run, if `output` is a folder.
        say: called with a message about a file that will be replaced.

    Raises:
        InputError: names the file or folder in the way.
    """
    as_file = output.suffix == ".json"
    if output.exists() and output.is_dir() == as_file:
        what = "a folder, and a name in .json is a file" if as_file else "a file, and its name does not end in .json"
        raise InputError(f"--output {output} is {what}: give another name.")
    files = [output] if as_file else list(files)
    if there := [str(path) for path in files if path.exists() and not as_file]:
        raise InputError(
            f"{', '.join(there)}: results are there already and are not replaced. Give a new folder, or a file by name, "
            f"such as --output {there[0]}."
        )
    if as_file and output.exists():
        say(f"replaces {output}")
    for path in files:
        check_writable(path, "--output")


def write(files: Mapping[Path, dict[str, Any]]) -> None:
    """Write documents, each whole or not at all."""
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def check_figures(figures: Mapping[str, bool]) -> None:
    """Check that each workload has a figure.

    Raises:
        OctavoError: names the workloads whose entries all failed.
    """
    if without := [name for name, has in figures.items() if not has]:
        raise OctavoError(f"no entry gave a figure of {some(without)}. The results are written, with the reason in each row.")


def titled(what: str, results: dict[str, Any]) -> str:
    """The title of a table, with the machine."""
    machine = results["machine"]
    name = f"{machine['count']} x {machine['gpu']}" if machine["count"] > 1 else machine["gpu"] or machine["cpu"]
    return f"{what} · {name} · torch {machine['torch']}"


def print_table(title: str, names: Sequence[str], figures: Sequence[str], lines: list[list[str]], console: Console) -> None:
    """Print a table: columns of names, columns of figures; outside a terminal in its full width."""
    table = Table(title=title, box=SIMPLE, pad_edge=False, title_justify="left")
    for name in names:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    if not console.is_terminal:
        wide = Console(width=LOG_WIDTH)
        table.width = Measurement.get(wide, wide.options, table).maximum
    console.print(table, crop=console.is_terminal)


def figure(row: dict[str, Any], column: tuple[str, str, str, float]) -> str:
    """A figure of a row as text, "-" for none."""
    _, key, text, factor = column
    return "-" if row.get(key) is None else text.format(row[key] * factor)


def print_rows(
    title: str,
    names: Sequence[str],
    columns: Columns,
    rows: list[dict[str, Any]],
    console: Console,
    *,
    names_of: Callable[[dict[str, Any]], tuple[str, str]],
    ratio: Callable[[dict[str, Any]], str] | None = None,
) -> None:
    """A line for each row: two names, the figures, and its ratio to the best peer if there is one; then the errors."""
    titles = [name for name, *_ in columns] + (["vs peer"] if ratio else [])
    lines = []
    for row in rows:
        if "error" in row:
            figures = ["failed", *["-"] * (len(titles) - 1)]
        else:
            figures = [figure(row, column) for column in columns] + ([ratio(row)] if ratio else [])
        lines.append([*names_of(row), *figures])
    print_table(title, names, titles, lines, console)
    for row in rows:
        if "error" in row:
            console.print(f"{names_of(row)[0]}: {row['error']}", markup=False, highlight=False, soft_wrap=True)


def print_kernels(results: dict[str, Any], console: Console) -> None:
    """A line for each shape of each kernel."""

    def names_of(row: dict[str, Any]) -> tuple[str, str]:
        return row["workload"], " x ".join(f"{size:,}" for size in row["shape"])

    print_rows(titled("kernels", results), ("kernel", "shape"), KERNEL, results["rows"], console, names_of=names_of)


def print_errors(results: dict[str, Any], console: Console) -> None:
    """A table for each layer, tensors down; for each recipe the error, and if measured Transformer Engine's and the ratio."""
    rows = results["rows"]
    beside = any(row["te_error"] is not None or "te_failed" in row for row in rows)
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    for layer in dict.fromkeys(row["layer"] for row in rows):
        of_layer = [row for row in rows if row["layer"] == layer]
        lines: dict[str, list[str]] = {}
        for row in of_layer:  # of each recipe in turn
            lines.setdefault(row["tensor"], [row["tensor"]]).extend(_errors(row, beside))
        figures = [title for recipe in recipes for title in ((recipe, "te", "ratio") if beside else (recipe,))]
        title = titled(f"layers · {layer} · relative error", results)
        print_table(title, ["tensor"], figures, list(lines.values()), console)
        failures = {f"{row['recipe']}: {row[key]}" for row in of_layer for key in row if key.endswith("_failed")}
        for text in sorted(failures):
            console.print(text, markup=False, highlight=False)
    worst = max(rows, key=lambda row: _ratio(row) or 0.0)
    if ratio := _ratio(worst):
        where = ", ".join(worst[key] for key in ("layer", "recipe", "tensor"))
        console.print(f"largest ratio to Transformer Engine's error: {ratio:.3f} ({where})", highlight=False)


def print_times(results: dict[str, Any], console: Console) -> None:
    """A line for each layer: microseconds of forward and backward by each recipe, and speed relative to the first."""
    timed = {(row["layer"], row["recipe"]): row["octavo_us"] for row in results["rows"] if "octavo_us" in row}
    layers, recipes = (list(dict.fromkeys(key[part] for key in timed)) for part in (0, 1))
    if not layers:
        return
    plain, *others = recipes
    lines = []
    for layer in layers:
        figures = [(timed[layer, recipe], timed[layer, plain] / timed[layer, recipe]) for recipe in others]
        cells = [text for us, faster in figures for text in (f"{us:,.0f}", f"{faster:.2f}")]
        lines.append([layer, f"{timed[layer, plain]:,.0f}", *cells])
    titles = [f"{plain} us", *(title for recipe in others for title in (f"{recipe} us", "x"))]
    batch, tokens, hidden = next(row["timed"] for row in results["rows"] if "octavo_us" in row)
    what = f"layers · forward and backward · {batch} x {tokens:,} tokens of {hidden:,} features"
    print_table(titled(what, results), ["layer"], titles, lines, console)


def _errors(row: dict[str, Any], beside: bool) -> list[str]:
    """The error, and with `beside` Transformer Engine's and their ratio; "-" for a missing one."""
    errors = [row["octavo_error"], *([row["te_error"]] if beside else [])]
    cells = ["-" if one is None else f"{one:.3%}" for one in errors]
    ratio = _ratio(row)
    return [*cells, "-" if ratio is None else f"{ratio:.3f}"] if beside else cells


def _ratio(row: dict[str, Any]) -> float | None:
    """Octavo's error over Transformer Engine's; None if one is missing or Transformer Engine's is 0."""
    octavo, te = row["octavo_error"], row["te_error"]
    return octavo / te if octavo is not None and te else None
