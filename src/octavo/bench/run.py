"""`octavo bench`: runs a suite, writes its results, hands them back.

run_suite("one-gpu", cases=["llama-1b"], entries=["octavo-delayed", "ao-tensorwise"], command="octavo bench one-gpu llama-1b")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.cases import CASES
from octavo.bench.checkpoint import Storing, measure_checkpoints
from octavo.bench.measure import Place, measure_case
from octavo.bench.results import document, render, row, write
from octavo.bench.suites import SUITES, Suite
from octavo.errors import InputError, unknown
from octavo.hardware import describe_device

__all__ = ["STEPS", "SUITES", "WARMUP", "render", "run_suite"]

STEPS = 20
WARMUP = 5
FOLDER = Path("benchmarks")
CPU_RANKS = 2
"""Ranks of the suites that need several, on a CPU, where no number is given."""
SAVES = 2


def run_suite(
    suite: str,
    *,
    cases: Sequence[str] | None = None,
    entries: Sequence[str] | None = None,
    steps: int = STEPS,
    warmup: int = WARMUP,
    output: Path | None = None,
    device: str | None = None,
    gpus: int | None = None,
    folder: Path | None = None,
    saves: int = SAVES,
    restore_gpus: int | None = None,
    command: str,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure entries on cases, each entry in processes of its own, and write the results.

    Args:
        suite: a name from `SUITES`.
        cases: names from `CASES`; none: those of the suite that suit the device.
        entries: of the suite's; none: the usual ones. Entries that fail have a row with "error".
        steps: timed steps of each entry, whose median counts.
        warmup: steps before them, which compile.
        output: a .json file, or a folder for one file a workload; None: `benchmarks/`.
        device: as torch names it; None: the GPU if there is one.
        gpus: of the suites that use several: how many, on a CPU ranks; None: all.
        folder: of the checkpoint suite: where checkpoints are written and removed again; None: beside the output.
        saves: of the checkpoint suite: saves in the background, of which the last is measured.
        restore_gpus: of the checkpoint suite: how many restore; None: half of those that save.
        command: what the user typed, for the record.
        say: is told what happens, a line at a time.

    Returns:
        The document as it was written, with the rows of all cases.

    Raises:
        InputError: an unknown suite, case, entry or device, a number of GPUs that is not there, or no steps.
    """
    chosen = _choose(suite, cases, entries)
    if steps < 1 or warmup < 0:
        raise InputError(
            f"steps = {steps} and warmup = {warmup}: time at least 1 step after 0 or more (usual: {STEPS} and {WARMUP})."
        )
    if saves < 1:
        raise InputError(f"saves = {saves}: save at least once in the background (usual: {SAVES}).")
    place = _place(chosen, device, gpus)
    usual_cases = chosen.cpu_cases if place.device.kind == "cpu" else chosen.cases
    compared = [chosen.entries[name] for name in entries or chosen.usual or chosen.entries]
    output = output or FOLDER
    rows: list[dict[str, Any]] = []
    for case in (CASES[name] for name in cases or usual_cases):
        if suite == "checkpoint":
            below = folder or (output.parent if output.suffix == ".json" else output)
            how = Storing(below, _restore_ranks(place, restore_gpus), saves, steps, warmup)
            rows += [measure_checkpoints(case, entry, place=place, how=how, say=say) for entry in compared]
        else:
            measured = measure_case(suite, case, compared, place=place, steps=steps, warmup=warmup, say=say)
            rows += [row(case, one, place) for one in measured]
        # After each case: what hours have measured should not be lost with what comes next.
        results = document(suite, command, place, compared, rows)
        written = write(results, output)
    for path in written:
        say(f"wrote {path}")
    return results


def _choose(suite: str, cases: Sequence[str] | None, entries: Sequence[str] | None) -> Suite:
    """The suite, after every name was found."""
    if suite not in SUITES:
        raise unknown("benchmark suite", suite, SUITES)
    chosen = SUITES[suite]
    for what, names, known in (("case", cases or [], CASES), ("entry", entries or [], chosen.entries)):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    return chosen


def _place(suite: Suite, asked: str | None, gpus: int | None) -> Place:
    """The device and how many of it."""
    import torch

    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InputError(f"device {asked!r} is not a device's name: use cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {asked!r} has no benchmarks: use cpu or cuda.")
    count = torch.cuda.device_count()
    on_gpu = device.type == "cuda"
    if on_gpu and (device.index or 0) >= count:
        raise InputError(f"device {asked!r} is not there: torch sees {count} GPUs. Use {'cuda:0' if count else 'cpu'}.")
    least, most = suite.ranks
    ranks = gpus or (most or (count if on_gpu else CPU_RANKS))
    if ranks < least or (most is not None and ranks > most):
        allowed = f"{least} at least" if most is None else f"{most}"
        raise InputError(
            f"gpus = {ranks}: the suite {suite.name} needs {allowed}. Use --gpus {most or least} or another suite."
        )
    if most == 1:
        where = f"cuda:{device.index or 0}" if on_gpu else "cpu"
        return Place(describe_device(where), where)
    if on_gpu and (":" in str(device) or ranks > count):
        raise InputError(f"device {device} and gpus = {ranks}: torch sees {count} GPUs. Use --device cuda --gpus {count}.")
    return Place(describe_device("cuda:0" if on_gpu else "cpu"), device.type, ranks)


def _restore_ranks(place: Place, asked: int | None) -> int:
    ranks = max(1, place.ranks // 2) if asked is None else asked
    if ranks < 1 or (place.device.kind == "cuda" and ranks > place.ranks):
        raise InputError(f"restore_gpus = {ranks}: use 1 to {place.ranks} of the GPUs that save.")
    return ranks
