"""`octavo bench`: runs a suite, writes its results, hands them back.

run_suite("one-gpu", cases=["llama-1b"], peers=["te"], command="octavo bench one-gpu --cases llama-1b --peers te")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from octavo.bench.checkpoint import Storing, measure_checkpoints
from octavo.bench.kernels import KERNELS, measure_kernels
from octavo.bench.layers import LAYERS, OCTAVO, measure_layers, transformer_engine
from octavo.bench.measure import Place, measure_case
from octavo.bench.peers import ENTRIES, PEERS, Entry
from octavo.bench.products import WORKLOADS, measure_products
from octavo.bench.results import document, render, row, version, write
from octavo.bench.suites import SUITES, Suite
from octavo.errors import InputError, unknown
from octavo.hardware import describe_device

__all__ = ["SUITES", "render", "run_suite"]

FOLDER = Path("benchmarks")
CPU_RANKS = 2
"""Ranks of the suites that need several, on a CPU, where no number is given."""
SAVES = 2
PROFILED_STEPS = 3
"""Steps whose kernels are recorded for a breakdown."""

Say = Callable[[str], None]


def run_suite(
    suite: str,
    *,
    cases: Sequence[str] | None = None,
    entries: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    steps: int | None = None,
    warmup: int | None = None,
    breakdown: bool = False,
    output: Path | None = None,
    device: str | None = None,
    gpus: int | None = None,
    folder: Path | None = None,
    saves: int = SAVES,
    restore_gpus: int | None = None,
    command: str,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure entries on cases, each entry in processes of its own, and write the results.

    Args:
        suite: a name from `SUITES`.
        cases: workloads of the suite, kernels or layers; none: the usual ones that suit the device and are installed.
        entries: of the suite's, exactly these; none: Octavo's own, or the usual ones, and peers. Entries that fail have a row
            with "error".
        peers: groups from `PEERS` that stand beside Octavo's entries; None: all that are installed.
        steps: timed steps of each entry, calls of a kernel or product, or seeds of a layer, whose median counts; None: the
            suite's number.
        warmup: steps before them, which compile, or settle the scales of a layer; None: the suite's number.
        breakdown: record where each entry's time on the GPU goes, in a few more steps.
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
        InputError: an unknown suite, case, entry, peer or device, a number of GPUs that is not there, no steps, or a suite that
            needs a GPU where there is none.
    """
    chosen = _choose(suite, cases, entries, peers)
    steps, warmup = _counts(chosen, steps, warmup, saves)
    place = _place(chosen, device, gpus)
    _check_gpu(chosen, place, breakdown)
    output = output or FOLDER
    if not chosen.entries:
        run = _run_layers if suite == "layers" else partial(_run_calls, suite)
        return run(cases or chosen.cases, place, steps, warmup, output, command, say)
    compared = _compared(chosen, entries, peers, say)
    rows: list[dict[str, Any]] = []
    for case, able in _plan(chosen, cases, compared, place, say):
        if suite == "checkpoint":
            below = folder or (output.parent if output.suffix == ".json" else output)
            how = Storing(below, _restore_ranks(place, restore_gpus), saves, steps, warmup)
            rows += [measure_checkpoints(case, entry, place=place, how=how, say=say) for entry in able]
        else:
            profiled = PROFILED_STEPS if breakdown else 0
            measured = measure_case(suite, case, able, place=place, steps=steps, warmup=warmup, profiled=profiled, say=say)
            rows += [row(case, one, place) for one in measured]
        # After each case: what hours have measured should not be lost with what comes next.
        results = document(suite, command, place, compared, rows)
        written = write(results, output)
    for path in written:
        say(f"wrote {path}")
    return results


def _run_calls(
    suite: str, names: Sequence[str], place: Place, steps: int, warmup: int, output: Path, command: str, say: Say
) -> dict[str, Any]:
    """The kernels of these names, or the products of these workloads, in this process."""
    import torch

    how: dict[str, Any] = {"iterations": steps, "warmup": warmup, "say": say}
    device = torch.device(place.where)
    if suite == "kernels":
        rows = measure_kernels([KERNELS[name] for name in names], device, **how)
    else:
        rows = measure_products([WORKLOADS[name] for name in names], device, **how)
    results = document(suite, command, place, [], rows)
    for path in write(results, output):
        say(f"wrote {path}")
    return results


def _run_layers(
    names: Sequence[str], place: Place, seeds: int, settling: int, output: Path, command: str, say: Say
) -> dict[str, Any]:
    """The layers of these names, in this process."""
    import torch

    device = torch.device(place.where)
    theirs = transformer_engine(device, say)
    libraries = [OCTAVO] if theirs is None else [OCTAVO, theirs]
    rows = measure_layers([LAYERS[name] for name in names], device, libraries, seeds=seeds, settling=settling, say=say)
    results = document("layers", command, place, [] if theirs is None else [ENTRIES["te-bf16"]], rows)
    for path in write(results, output):
        say(f"wrote {path}")
    return results


def _choose(suite: str, cases: Sequence[str] | None, entries: Sequence[str] | None, peers: Sequence[str] | None) -> Suite:
    """The suite, after every name was found."""
    if suite not in SUITES:
        raise unknown("benchmark suite", suite, SUITES)
    chosen = SUITES[suite]
    if not chosen.entries and (entries or peers):
        raise InputError(f"the suite {suite} has no entries and no peers: choose what it measures with --cases.")
    if entries and peers is not None:
        raise InputError(f"entries {', '.join(entries)} are all that is compared: leave --peers out, or name peers among them.")
    for what, names, known in (
        ("case", cases or [], chosen.known),
        ("entry", entries or [], chosen.entries),
        ("group of peers", peers or [], PEERS),
    ):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    own = [group for group in PEERS if any(name.startswith(PEERS[group]) for name in chosen.entries)]
    for group in peers or ():
        if group not in own:
            raise InputError(f"peers = {group}: the suite {suite} has {'only ' + ', '.join(own) if own else 'no peers'}.")
    return chosen


def _counts(suite: Suite, steps: int | None, warmup: int | None, saves: int) -> tuple[int, int]:
    """Steps and warm-up, the suite's where none are given."""
    steps, warmup = suite.steps if steps is None else steps, suite.warmup if warmup is None else warmup
    if steps < 1 or warmup < 0:
        raise InputError(
            f"steps = {steps} and warmup = {warmup}: time at least 1 step after 0 or more "
            f"(usual: {suite.steps} and {suite.warmup})."
        )
    if saves < 1:
        raise InputError(f"saves = {saves}: save at least once in the background (usual: {SAVES}).")
    return steps, warmup


def _check_gpu(suite: Suite, place: Place, breakdown: bool) -> None:
    """Refuse what only a GPU can tell where there is none, and a breakdown of what has no steps."""
    if suite.name in ("kernels", "products") and place.device.kind != "cuda":
        raise InputError(
            f"the suite {suite.name} times {suite.name} that run on a GPU, and the device is cpu."
            " Use --device cuda where there is one."
        )
    if breakdown and (place.device.kind != "cuda" or suite.name not in ("one-gpu", "sharded")):
        raise InputError(
            f"--breakdown reads the kernels of training steps on a GPU: not those of the suite {suite.name} on {place.where}."
        )


def _compared(suite: Suite, entries: Sequence[str] | None, peers: Sequence[str] | None, say: Say) -> list[Entry]:
    """The entries by name; or Octavo's own and those of the groups, by default of all that are installed."""
    if entries or (suite.usual and peers is None):
        return [suite.entries[name] for name in entries or suite.usual]
    found, missing = [], dict[str, list[str]]()
    for name, entry in suite.entries.items():
        group = next((group for group, prefix in PEERS.items() if name.startswith(prefix)), None)
        if group is not None and peers is None and entry.package and version(entry.package) is None:
            missing.setdefault(entry.package, []).append(name)
        elif group is None or peers is None or group in peers:
            found.append(entry)
    for package, names in missing.items():
        say(f"{package} is not installed: without {', '.join(names)}")
    return found


def _plan(
    suite: Suite, cases: Sequence[str] | None, compared: list[Entry], place: Place, say: Say
) -> list[tuple[Any, list[Entry]]]:
    """Each case with the entries that run it.

    Raises:
        InputError: no case has any.
    """
    usual = suite.cpu_cases if place.device.kind == "cpu" else suite.cases
    plan = []
    for case in (suite.known[name] for name in cases or usual):
        if not cases and case.package and version(case.package) is None:
            say(f"{case.package} is not installed: without {case.name}")
            continue
        able = [entry for entry in compared if entry.builder(case) is not None]
        if unable := [entry.name for entry in compared if entry not in able]:
            say(f"{case.name}: without {', '.join(unable)}")
        if able:
            plan.append((case, able))
    if not plan:
        raise InputError(
            f"{', '.join(entry.name for entry in compared)}: none runs {', '.join(cases or usual)}. Use another case."
        )
    return plan


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
