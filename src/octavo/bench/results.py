"""A run's figures with where they come from: rows, machine, commit; as JSON on disk and as a table on the screen.

A figure without provenance is not a figure: each file holds the command, the commit, the date, the machine and the versions of
everything that was compared. Ratios are drawn within a run and not stored, since they follow from the rows.
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

from octavo.bench.cases import Case
from octavo.bench.measure import Measurement as Measured
from octavo.bench.measure import Place
from octavo.bench.peers import Entry
from octavo.hardware import Device, driver_version
from octavo.plan.flops import from_hf_config, mfu
from octavo.storage import write_atomic

LOG_WIDTH = 160
"""Columns at most in what is not a terminal, where rich assumes 80 and would cut figures off."""

Columns = tuple[tuple[str, str, str, float], ...]
"""Title, key of the row, text of the figure, and what the figure is multiplied by."""

SPEED: Columns = (
    ("tok/s", "tokens_per_second", "{:,.0f}", 1),
    ("step ms", "step_ms", "{:.1f}", 1),
    ("TFLOP/s", "tflops", "{:.1f}", 1),
    ("MFU", "mfu", "{:.1%}", 1),
    ("peak GiB", "peak_gib", "{:.1f}", 1),
    ("loss", "loss", "{:.4f}", 1),
    ("start s", "start_seconds", "{:.0f}", 1),
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


def row(case: Case, measured: Measured, place: Place) -> dict[str, Any]:
    """The row of one entry: its figures per GPU, or its error."""
    entry = measured.entry
    named = {"workload": case.name, "entry": entry.name, "head": entry.head}
    if measured.error is not None:
        return {**named, "error": measured.error}
    rate = case.tokens / measured.step_seconds
    flops = from_hf_config(case.hf_config(), case.sequence_length)
    split = flops.by_precision(layers=entry.layers, head=entry.head)
    return {
        **named,
        "tokens_per_second": rate,
        "step_ms": measured.step_seconds * 1e3,
        "tflops": flops.total * rate / 1e12,
        "mfu": mfu({precision: work * rate for precision, work in split.items()}, place.device.gpu),
        "peak_gib": measured.peak_gib,
        "loss": measured.loss,
        "layers": entry.layers,
        "batch": case.batch,
        "sequence_length": case.sequence_length,
        "steps": len(measured.seconds),
        "interleaved": measured.interleaved,
        "gpus": place.ranks,
        "build_seconds": measured.build_seconds,
        "start_seconds": measured.start_seconds,
    }


def document(suite: str, command: str, place: Place, entries: Iterable[Entry], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole run as `benchmarks/` keeps it."""
    return {
        "suite": suite,
        "command": command,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(place.device, entries, place.ranks),
        "rows": rows,
    }


def machine(device: Device, entries: Iterable[Entry], gpus: int = 1) -> dict[str, Any]:
    """What the figures were measured on, and the versions of what was compared; `count` is of the GPUs that were used."""
    on_gpu = device.kind == "cuda"
    return {
        "gpu": device.name if on_gpu else None,
        "cpu": None if on_gpu else device.name,
        "count": gpus if on_gpu else 0,
        "driver": driver_version() if on_gpu else None,
        "torch": version("torch"),
        "triton": version("triton"),
        "peers": {entry.package: version(entry.package) for entry in entries if entry.package},
    }


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this code: from OCTAVO_COMMIT, which a copy of a checkout needs, else from git, else unknown."""
    if named := os.environ.get("OCTAVO_COMMIT"):
        return named
    here = Path(__file__)
    try:
        # An installed package may lie in a folder of somebody else's repository: only one that tracks this file is ours.
        subprocess.run(["git", "ls-files", "--error-unmatch", here.name], cwd=here.parent, capture_output=True, check=True)
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def write(results: dict[str, Any], output: Path) -> list[Path]:
    """Write a run: into `output` if that is a .json file, else into that folder as SUITE-WORKLOAD.json, one a workload."""
    if output.suffix == ".json":
        files = {output: results}
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
    timed = [row for row in rows if "error" not in row and "tokens_per_second" in row]
    peers = [row for row in timed if not row["entry"].startswith("octavo-")]
    return max(peers, key=lambda row: row["tokens_per_second"], default=None)


def render(results: dict[str, Any], console: Console) -> None:
    """Print a table for each workload, with each entry's speed over that of the best peer where there is one."""
    place = results["machine"]
    columns = CHECKPOINT if results["suite"] == "checkpoint" else SPEED
    for workload in workloads(results):
        rows = rows_of(results, workload)
        best = best_peer(rows)
        where = f"{place['count']} x {place['gpu']}" if place["count"] > 1 else place["gpu"] or place["cpu"]
        title = f"{results['suite']} · {workload} · {where} · torch {place['torch']}"
        table = Table(title=title, box=SIMPLE, pad_edge=False, title_justify="left")
        table.add_column("entry")
        table.add_column("head")
        for name, *_ in columns:
            table.add_column(name, justify="right")
        if best:
            table.add_column("vs peer", justify="right")
        for entry in rows:
            failed = "error" in entry
            figures = ["failed", *["-"] * (len(columns) - 1)] if failed else [_figure(entry, column) for column in columns]
            if best:
                figures.append("-" if failed else f"{entry['tokens_per_second'] / best['tokens_per_second']:.3f}")
            table.add_row(entry["entry"], entry["head"], *figures)
        if not console.is_terminal:
            wide = Console(width=LOG_WIDTH)
            table.width = Measurement.get(wide, wide.options, table).maximum
        console.print(table, crop=console.is_terminal)
        for entry in rows:
            if "error" in entry:
                console.print(f"{entry['entry']}: {entry['error']}", markup=False, highlight=False)


def _figure(entry: dict[str, Any], column: tuple[str, str, str, float]) -> str:
    _, key, text, factor = column
    return "-" if entry.get(key) is None else text.format(entry[key] * factor)
