"""`octavo bench`: runs a suite, writes its results, hands them back.

run_suite("one-gpu", cases=["llama-1b"], entries=["octavo-delayed", "ao-tensorwise"], steps=20, warmup=5,
          output=None, device=None, command="octavo bench one-gpu llama-1b")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.cases import CASES
from octavo.bench.measure import measure_case
from octavo.bench.peers import ENTRIES
from octavo.bench.results import document, render, row, write
from octavo.errors import InputError, unknown
from octavo.hardware import Device, describe_device

__all__ = ["STEPS", "SUITES", "WARMUP", "render", "run_suite"]

SUITES = ("one-gpu",)
STEPS = 20
WARMUP = 5
FOLDER = Path("benchmarks")
CPU_CASES = ["tiny"]
"""What is measured on a CPU when no case is named; on a GPU, everything else."""


def run_suite(
    suite: str,
    *,
    cases: Sequence[str] | None = None,
    entries: Sequence[str] | None = None,
    steps: int = STEPS,
    warmup: int = WARMUP,
    output: Path | None = None,
    device: str | None = None,
    command: str,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure entries on cases, one process an entry, and write the results.

    Args:
        suite: "one-gpu".
        cases: names from `CASES`; none: all that suit the device.
        entries: names from `ENTRIES`; none: all. Entries that fail have a row with "error".
        steps: timed steps of each entry, whose median counts.
        warmup: steps before them, which compile.
        output: a .json file, or a folder for one file a workload; None: `benchmarks/`.
        device: as torch names it; None: the GPU if there is one.
        command: what the user typed, for the record.
        say: is told what happens, a line at a time.

    Returns:
        The document as it was written, with the rows of all cases.

    Raises:
        InputError: an unknown suite, case, entry or device, or no steps.
    """
    for what, names, known in (
        ("benchmark suite", [suite], SUITES),
        ("case", cases or [], CASES),
        ("entry", entries or [], ENTRIES),
    ):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    if steps < 1 or warmup < 0:
        raise InputError(
            f"steps = {steps} and warmup = {warmup}: time at least 1 step after 0 or more (usual: {STEPS} and {WARMUP})."
        )
    place, where = _device(device)
    chosen = cases or (CPU_CASES if place.kind == "cpu" else [name for name in CASES if name not in CPU_CASES])
    compared = [ENTRIES[name] for name in entries or ENTRIES]
    rows = []
    for case in (CASES[name] for name in chosen):
        measured = measure_case(case, compared, device=place, where=where, steps=steps, warmup=warmup, say=say)
        rows += [row(case, one, place) for one in measured]
    results = document(suite, command, place, compared, rows)
    for path in write(results, output or FOLDER):
        say(f"wrote {path}")
    return results


def _device(asked: str | None) -> tuple[Device, str]:
    """The device, and its name as torch writes it."""
    import torch

    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InputError(f"device {asked!r} is not a device's name: use cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {asked!r} has no benchmarks: use cpu or cuda.")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"device {asked!r} is not there: torch sees {count} GPUs. Use {'cuda:0' if count else 'cpu'}.")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    return describe_device(device), str(device)
