"""Results of a run with their provenance, as JSON on disk and as a table on the screen.

Each file holds the command, the commit, the date, the machine and the versions of all peers. Ratios follow from the rows of a
run and are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import ALL_CASES, AnyCase, VisionCase
from benchmarks.files import does_not_fit
from benchmarks.measure import Measurement as Measured
from benchmarks.measure import Target
from benchmarks.peers import Entry
from benchmarks.vision.costs import FIGURES, figures_of, measured, unpriced, with_published
from benchmarks.vision.prices import Price, as_records
from octavo.bench import results as files
from octavo.bench.results import KERNEL, Columns, print_errors, print_rows, print_table, titled
from octavo.plan.flops import mfu

_WHOLE = ("kernels", "products", "attention", "memory", "layers")
"""Suites with one file for all workloads."""

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
REPLICAS: Columns = (VISION[0], ("all", "images_per_second_total", "{:,.0f}", 1), *VISION[1:])
PRODUCT: Columns = (
    ("us", "us", "{:,.1f}", 1),
    ("PyTorch us", "torch_us", "{:,.1f}", 1),
    ("TFLOP/s", "tflops", "{:,.0f}", 1),
    ("gain", "gain", "{:.3f}", 1),
)
ATTENTION: Columns = (
    ("forward us", "forward_us", "{:,.0f}", 1),
    ("backward us", "backward_us", "{:,.0f}", 1),
    ("TFLOP/s", "forward_tflops", "{:,.0f}", 1),
    ("backward", "backward_tflops", "{:,.0f}", 1),
    ("both", "tflops", "{:,.0f}", 1),
)
MEMORY: Columns = (
    *SPEED[:2],
    ("peak GiB", "peak_gib", "{:.2f}", 1),
    ("estimate", "estimated_gib", "{:.2f}", 1),
    ("host GiB", "host_gib", "{:.1f}", 1),
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
    named: dict[str, Any] = {"workload": case.name, "entry": entry.name, "head": entry.head}
    if entry.head_forward is not None:
        named["head_forward"] = entry.head_forward
    if measured.start is not None:
        named["start"] = measured.start
    if measured.error is not None:
        return {**named, "error": measured.error}
    rate = case.units / measured.step_seconds
    flops = case.flops()
    split = flops.by_precision(layers=entry.layers, head=entry.head, head_forward=entry.head_forward)
    return {
        **named,
        case.rate: rate,
        **({"images_per_second_total": rate * target.ranks} if isinstance(case, VisionCase) else {}),
        "step_ms": measured.step_seconds * 1e3,
        "each_step_ms": [seconds * 1e3 for seconds in measured.seconds],
        "tflops": flops.total * rate / 1e12,
        "mfu": mfu({precision: work * rate for precision, work in split.items()}, target.device.gpu),
        "peak_gib": measured.peak_gib,
        "loss": measured.loss,
        "loss_step": measured.loss_step,
        "layers": entry.layers,
        "attention": measured.attention,
        **({} if measured.attention_errors is None else {"attention_errors": measured.attention_errors}),
        **({} if measured.experts is None else {"experts": measured.experts}),
        **({} if measured.reshard_after_forward is None else {"reshard_after_forward": measured.reshard_after_forward}),
        **({"products": measured.products} if any(measured.products) else {}),
        **({"exchanges": measured.exchanges} if measured.exchanges else {}),
        "batch": case.batch,
        **({} if case.micro_batches == 1 else {"micro_batches": case.micro_batches}),
        **({"image_size": case.image_size} if isinstance(case, VisionCase) else {}),
        "sequence_length": case.sequence_length,
        "steps": len(measured.seconds),
        "interleaved": measured.interleaved,
        "gpus": target.ranks,
        "build_seconds": measured.build_seconds,
        "start_seconds": measured.start_seconds,
        **measured.breakdown,
    }


def document(
    suite: str,
    command: str,
    target: Target,
    entries: Iterable[Entry],
    rows: list[dict[str, Any]],
    prices: Sequence[Price] = (),
) -> dict[str, Any]:
    """A whole run, as a file of `benchmarks/results`, with the prices that its costs follow from."""
    cases = [ALL_CASES[name] for one in rows if (name := one.get("workload")) in ALL_CASES]
    peers = [package for entry in entries for package in entry.packages] + [case.package for case in cases if case.package]
    more = {"prices": as_records(prices)} if prices else {}
    return files.document(suite, command, target.device, rows, ranks=target.ranks, peers=peers, **more)


def check_output(suite: str, workloads: Sequence[str], output: Path, say: Callable[[str], None]) -> None:
    """Refuse, before a run, an `output` that cannot be written, or a folder with earlier results.

    say: takes a message about a file that will be replaced.

    Raises:
        InputError: names the file or folder in the way.
    """
    files.check_output(_files(suite, workloads, output), output, say)


def write(results: dict[str, Any], output: Path) -> list[Path]:
    """Write a run: into `output` if that is a .json file, else into that folder as SUITE-WORKLOAD.json, one a workload.

    Kernels, products and layers are one file each.
    """
    if output.suffix == ".json":
        written = {output: results}
    elif results["suite"] in _WHOLE:
        written = {_files(results["suite"], [], output)[0]: results}
    else:
        workloads = _by_workload(results)
        paths = _files(results["suite"], list(workloads), output)
        written = {path: {**results, "rows": rows} for path, rows in zip(paths, workloads.values(), strict=True)}
    files.write(written)
    return list(written)


def _files(suite: str, workloads: Sequence[str], folder: Path) -> list[Path]:
    """The files of a run in a folder."""
    return [folder / f"{suite}.json"] if suite in _WHOLE else [folder / f"{suite}-{workload}.json" for workload in workloads]


def _by_workload(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in results["rows"]:
        rows.setdefault(one["workload"], []).append(one)
    return rows


def check_figures(results: dict[str, Any]) -> None:
    """Check that each workload has a figure; in the suite context "does not fit" is one.

    Raises:
        OctavoError: names the workloads of which every entry failed.
    """
    found: dict[str, bool] = {}
    for one in results["rows"]:
        if results["suite"] == "layers":
            name, has = one["layer"], one["octavo_error"] is not None or one["te_error"] is not None
        else:
            name, has = one["workload"], "error" not in one or (results["suite"] == "context" and does_not_fit(one))
        found[name] = found.get(name, False) or has
    files.check_figures(found)


def best_peer(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest row that is not Octavo's, or None."""
    peers = [row for row in rows if speed(row) and not row["entry"].startswith("octavo-")]
    return max(peers, key=speed, default=None)


def speed(row: dict[str, Any]) -> float:
    """Tokens or images a second; 0 for a row with neither."""
    return row.get("tokens_per_second", row.get("images_per_second", 0.0))


def spreads(rows: list[dict[str, Any]]) -> list[str]:
    """For each entry and workload that was started several times: its range of step times, in a sentence."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if "start" in row and "error" not in row:
            times.setdefault(f"{row['workload']}: {row['entry']}", []).append(row["step_ms"])
    return [
        f"{name}: {min(ms):.1f} to {max(ms):.1f} ms a step in {len(ms)} starts, a spread of {max(ms) / min(ms) - 1:.1%}"
        for name, ms in times.items()
    ]


def render(results: dict[str, Any], console: Console) -> None:
    """Print a table for each workload, with each entry's speed over that of the best peer, if any."""
    suite, rows = results["suite"], results["rows"]
    if suite == "kernels":
        _print_rows(titled(suite, results), ("kernel", "shape"), KERNEL, rows, console)
    elif suite == "attention":
        _print_rows(titled(suite, results), ("workload", "kernel"), ATTENTION, rows, console)
    elif suite == "memory":
        _print_rows(titled(suite, results), ("workload", "settings"), MEMORY, rows, console)
    elif suite == "products":
        _print_rows(titled(suite, results), ("product", "rows x columns x summed"), PRODUCT, rows, console)
    elif suite == "layers":
        print_errors(results, console)
    else:
        for workload, rows in _by_workload(results).items():
            columns = CHECKPOINT if suite == "checkpoint" else SPEED
            if isinstance(ALL_CASES.get(workload), VisionCase) or any("images_per_second" in row for row in rows):
                columns = REPLICAS if suite == "vision" else VISION
            _print_rows(titled(f"{suite} · {workload}", results), ("entry", "head"), columns, rows, console)
            for line in spreads(rows):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if any("kernel_ms" in row for row in rows):
                _print_breakdown(f"{workload} · kernel ms a step", rows, console)
        if suite == "vision":
            _print_costs(results, console)


def _print_rows(title: str, names: Sequence[str], columns: Columns, rows: list[dict[str, Any]], console: Console) -> None:
    """A line for each row: two names, the figures, and the ratio to the best peer if there is one; then the errors."""
    best = best_peer(rows)
    ratio = None if best is None else lambda row: f"{speed(row) / speed(best):.3f}"
    print_rows(title, names, columns, rows, console, names_of=_names, ratio=ratio)


def _names(row: dict[str, Any]) -> tuple[str, str]:
    """The first two columns: entry and head, or kernel and shape."""
    if "settings" in row:
        return row["workload"], row["settings"]
    if "pairs" in row:
        return row["workload"], row["entry"]
    if "shape" in row:
        named = " ".join(row[key] for key in ("workload", "precision", "product") if key in row)
        return named, " x ".join(f"{size:,}" for size in row["shape"])
    return row["entry"] + (f", start {row['start']}" if "start" in row else ""), row["head"]


def _print_breakdown(title: str, rows: list[dict[str, Any]], console: Console) -> None:
    """Kinds of kernels down, entries across."""
    times = {_names(row)[0]: row["kernel_ms"] for row in rows if "kernel_ms" in row}
    most: dict[str, float] = {}
    for kinds in times.values():
        for kind, ms in kinds.items():
            most[kind] = max(ms, most.get(kind, 0.0))
    lines = [
        [kind, *(f"{kinds.get(kind, 0.0):.2f}" for kinds in times.values())]
        for kind in sorted(most, key=lambda kind: most[kind], reverse=True)
    ]
    lines.append(["all", *(f"{sum(kinds.values()):.2f}" for kinds in times.values())])
    print_table(title, ["kind"], list(times), lines, console)


def _print_costs(results: dict[str, Any], console: Console) -> None:
    """Rows of all workloads beside the published ones, with their costs."""
    rows = measured(results)
    if not rows:
        return
    rows = with_published(rows)
    lines = [[row.figures, row.machine, row.workload, row.entry, str(row.batch), *figures_of(row)] for row in rows]
    names = ("figures", "machine", "workload", "entry", "batch")
    print_table(titled("vision · cost", results), names, FIGURES, lines, console)
    if (missing := unpriced(results)) is not None:
        console.print(missing, markup=False, highlight=False, soft_wrap=True)
