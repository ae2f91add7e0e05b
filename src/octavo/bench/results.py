"""Results of a run with their provenance, as JSON on disk and as a table on the screen.

Each file holds the command, the commit, the date, the machine and the versions of all peers. Ratios are not stored, since they
follow from the rows of a run.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from octavo.bench.cases import ALL_CASES, AnyCase
from octavo.bench.measure import Measurement as Measured
from octavo.bench.measure import Target
from octavo.bench.peers import Entry
from octavo.hardware import Device, driver_version
from octavo.plan.flops import mfu
from octavo.storage import write_atomic

LOG_WIDTH = 160
"""Maximum width outside a terminal, where rich assumes 80 columns and would cut figures off."""

Columns = tuple[tuple[str, str, str, float], ...]
"""Title, key of the row, format and factor of the figure."""

SPEED: Columns = (
    ("tok/s", "tokens_per_second", "{:,.0f}", 1),
    ("step ms", "step_ms", "{:.1f}", 1),
    ("TFLOP/s", "tflops", "{:.1f}", 1),
    ("MFU", "mfu", "{:.1%}", 1),
    ("peak GiB", "peak_gib", "{:.1f}", 1),
    ("loss", "loss", "{:.4f}", 1),
    ("start s", "start_seconds", "{:.0f}", 1),
)
VISION: Columns = (("img/s", "images_per_second", "{:,.0f}", 1), *SPEED[1:])
KERNEL: Columns = (
    ("us", "us", "{:,.1f}", 1),
    ("MB", "bytes", "{:,.0f}", 1e-6),
    ("GB/s", "gb_per_s", "{:,.0f}", 1),
    ("of copy", "share_of_copy", "{:.1%}", 1),
)
PRODUCT: Columns = (
    ("us", "us", "{:,.1f}", 1),
    ("PyTorch us", "torch_us", "{:,.1f}", 1),
    ("TFLOP/s", "tflops", "{:,.0f}", 1),
    ("gain", "gain", "{:.3f}", 1),
)
CHECKPOINT: Columns = (
    ("GB", "bytes", "{:.1f}", 1e-9),
    ("save s", "save_seconds", "{:.1f}", 1),
    ("GB/s", "save_gb_per_second", "{:.2f}", 1),
    ("stall s", "stall_seconds", "{:.2f}", 1),
    ("whole s", "whole_seconds", "{:.1f}", 1),
    ("step ms", "step_ms", "{:.0f}", 1),
    ("writing", "step_ms_while_writing", "{:.0f}", 1),
    ("verify s", "verify_seconds", "{:.1f}", 1),
    ("restore s", "restore_seconds", "{:.1f}", 1),
)


def row(case: AnyCase, measured: Measured, target: Target) -> dict[str, Any]:
    """The row of one entry: its figures per GPU, or its error."""
    entry = measured.entry
    named = {"workload": case.name, "entry": entry.name, "head": entry.head}
    if entry.head_forward is not None:
        named["head_forward"] = entry.head_forward
    if measured.error is not None:
        return {**named, "error": measured.error}
    rate = case.units / measured.step_seconds
    flops = case.flops()
    split = flops.by_precision(layers=entry.layers, head=entry.head, head_forward=entry.head_forward)
    return {
        **named,
        case.rate: rate,
        "step_ms": measured.step_seconds * 1e3,
        "tflops": flops.total * rate / 1e12,
        "mfu": mfu({precision: work * rate for precision, work in split.items()}, target.device.gpu),
        "peak_gib": measured.peak_gib,
        "loss": measured.loss,
        "layers": entry.layers,
        **case.batch_shape,
        "steps": len(measured.seconds),
        "interleaved": measured.interleaved,
        "gpus": target.ranks,
        "build_seconds": measured.build_seconds,
        "start_seconds": measured.start_seconds,
        **measured.breakdown,
    }


def document(suite: str, command: str, target: Target, entries: Iterable[Entry], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole run, as a file of `benchmarks/`."""
    cases = [ALL_CASES[name] for one in rows if (name := one.get("workload")) in ALL_CASES]
    peers = [package for package in (*(entry.package for entry in entries), *(case.package for case in cases)) if package]
    return {
        "suite": suite,
        "command": command,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(target.device, peers, target.ranks),
        "rows": rows,
    }


def machine(device: Device, peers: Iterable[str], gpus: int = 1) -> dict[str, Any]:
    """Device, driver and versions, those of the peers included; `count`: GPUs in use."""
    on_gpu = device.kind == "cuda"
    return {
        "gpu": device.name if on_gpu else None,
        "cpu": None if on_gpu else device.name,
        "count": gpus if on_gpu else 0,
        "driver": driver_version() if on_gpu else None,
        "torch": version("torch"),
        "triton": version("triton"),
        "peers": {package: version(package) for package in peers},
    }


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this code: from OCTAVO_COMMIT (for a copy without .git), else from git, else None."""
    if named := os.environ.get("OCTAVO_COMMIT"):
        return named
    here = Path(__file__)
    try:
        # An installed package may lie in another repository's folder: the right repository tracks this file.
        subprocess.run(["git", "ls-files", "--error-unmatch", here.name], cwd=here.parent, capture_output=True, check=True)
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def write(results: dict[str, Any], output: Path) -> list[Path]:
    """Write a run: into `output` if that is a .json file, else into that folder as SUITE-WORKLOAD.json, one a workload.

    Kernels, products and layers are one file each.
    """
    if output.suffix == ".json":
        files = {output: results}
    elif results["suite"] in ("kernels", "products", "layers"):
        files = {output / f"{results['suite']}.json": results}
    else:
        files = {
            output / f"{results['suite']}-{workload}.json": {**results, "rows": rows_of(results, workload)}
            for workload in workloads(results)
        }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return list(files)


def workloads(results: dict[str, Any]) -> list[str]:
    """The workloads of a run, in order."""
    return list(dict.fromkeys(row["workload"] for row in results["rows"]))


def rows_of(results: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    """The rows of one workload."""
    return [row for row in results["rows"] if row["workload"] == workload]


def best_peer(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest row that is not Octavo's, or None."""
    timed = [row for row in rows if "error" not in row and speed(row) is not None]
    peers = [row for row in timed if not row["entry"].startswith("octavo-")]
    return max(peers, key=lambda row: speed(row) or 0.0, default=None)


def speed(row: dict[str, Any]) -> float | None:
    """Tokens or images a second; None where the row has neither."""
    return row.get("tokens_per_second", row.get("images_per_second"))


def render(results: dict[str, Any], console: Console) -> None:
    """Print a table for each workload, with each entry's speed over that of the best peer where there is one."""
    if results["suite"] == "kernels":
        _print_table(_titled("kernels", results, "kernel", "shape"), results["rows"], KERNEL, console)
        return
    if results["suite"] == "products":
        _print_table(_titled("products", results, "product", "rows x columns x summed"), results["rows"], PRODUCT, console)
        return
    if results["suite"] == "layers":
        _print_errors(results, console)
        return
    for workload in workloads(results):
        rows = rows_of(results, workload)
        columns = CHECKPOINT if results["suite"] == "checkpoint" else SPEED
        if any("images_per_second" in entry for entry in rows):
            columns = VISION
        _print_table(_titled(f"{results['suite']} · {workload}", results, "entry", "head"), rows, columns, console)
        if any("kernel_ms" in entry for entry in rows):
            _print_breakdown(f"{workload} · kernel ms a step", rows, console)


def _titled(what: str, results: dict[str, Any], *first: str) -> Table:
    """An empty table with the machine in its title, and its first columns."""
    machine = results["machine"]
    name = f"{machine['count']} x {machine['gpu']}" if machine["count"] > 1 else machine["gpu"] or machine["cpu"]
    title = f"{what} · {name} · torch {machine['torch']}"
    table = Table(title=title, box=SIMPLE, pad_edge=False, title_justify="left")
    for name in first:
        table.add_column(name)
    return table


def _print_table(table: Table, rows: list[dict[str, Any]], columns: Columns, console: Console) -> None:
    """Fill and print a table: two names a row, the figures, and the ratio to the best peer if there is one."""
    best = best_peer(rows)
    for name, *_ in columns:
        table.add_column(name, justify="right")
    if best:
        table.add_column("vs peer", justify="right")
    for entry in rows:
        failed = "error" in entry
        figures = ["failed", *["-"] * (len(columns) - 1)] if failed else [_figure(entry, column) for column in columns]
        if best:
            figures.append("-" if failed else f"{(speed(entry) or 0.0) / (speed(best) or 1.0):.3f}")
        table.add_row(*_names(entry), *figures)
    _print_whole(table, console)
    for entry in rows:
        if "error" in entry:
            console.print(f"{_names(entry)[0]}: {entry['error']}", markup=False, highlight=False)


def _names(entry: dict[str, Any]) -> tuple[str, str]:
    """The first two columns: entry and head, or kernel and shape."""
    if "shape" in entry:
        named = (entry[key] for key in ("workload", "precision", "product") if key in entry)
        return " ".join(named), " x ".join(f"{size:,}" for size in entry["shape"])
    return entry["entry"], entry["head"]


def _print_breakdown(title: str, rows: list[dict[str, Any]], console: Console) -> None:
    """Kinds of kernels down, entries across."""
    told = [entry for entry in rows if "kernel_ms" in entry]
    table = Table(title=title, box=SIMPLE, pad_edge=False, title_justify="left")
    table.add_column("kind")
    for entry in told:
        table.add_column(entry["entry"], justify="right")
    most = {kind: max(entry["kernel_ms"].get(kind, 0.0) for entry in told) for entry in told for kind in entry["kernel_ms"]}
    for kind in sorted(most, key=lambda kind: most[kind], reverse=True):
        table.add_row(kind, *(f"{entry['kernel_ms'].get(kind, 0.0):.2f}" for entry in told))
    table.add_row("all", *(f"{sum(entry['kernel_ms'].values()):.2f}" for entry in told))
    _print_whole(table, console)


def _print_errors(results: dict[str, Any], console: Console) -> None:
    """A table for each layer, tensors down; for each recipe both libraries' errors and their ratio."""
    rows = results["rows"]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    for layer in dict.fromkeys(row["layer"] for row in rows):
        table = _titled(f"layers · {layer} · relative error", results, "tensor")
        for recipe in recipes:
            for title in (recipe, "te", "ratio"):
                table.add_column(title, justify="right")
        of = {(row["tensor"], row["recipe"]): row for row in rows if row["layer"] == layer}
        for tensor in dict.fromkeys(tensor for tensor, _ in of):
            table.add_row(tensor, *(text for recipe in recipes for text in _errors(of[tensor, recipe])))
        _print_whole(table, console)
        failures = {f"{recipe}: {one[key]}" for (_, recipe), one in of.items() for key in one if key.endswith("_failed")}
        for text in sorted(failures):
            console.print(text, markup=False, highlight=False)
    compared = [row for row in rows if _ratio(row) is not None]
    if compared:
        worst = max(compared, key=lambda row: _ratio(row) or 0.0)
        where = ", ".join(worst[key] for key in ("layer", "recipe", "tensor"))
        console.print(f"largest ratio to Transformer Engine's error: {_ratio(worst):.3f} ({where})", highlight=False)


def _errors(row: dict[str, Any]) -> list[str]:
    """Both errors and their ratio, "-" for a missing one."""
    found = [row["octavo_error"], row["te_error"]]
    ratio = _ratio(row)
    return [*("-" if one is None else f"{one:.3%}" for one in found), "-" if ratio is None else f"{ratio:.3f}"]


def _ratio(row: dict[str, Any]) -> float | None:
    """Octavo's error over Transformer Engine's; None where one is missing, or Transformer Engine's is 0."""
    octavo, te = row["octavo_error"], row["te_error"]
    return octavo / te if octavo is not None and te else None


def _print_whole(table: Table, console: Console) -> None:
    """Print a table; outside a terminal in its full width."""
    if not console.is_terminal:
        wide = Console(width=LOG_WIDTH)
        table.width = Measurement.get(wide, wide.options, table).maximum
    console.print(table, crop=console.is_terminal)


def _figure(entry: dict[str, Any], column: tuple[str, str, str, float]) -> str:
    _, key, text, factor = column
    return "-" if entry.get(key) is None else text.format(entry[key] * factor)
