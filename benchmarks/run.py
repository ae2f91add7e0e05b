"""`python -m benchmarks`: runs a suite, writes its results and returns them.

run_suite("one-gpu", cases=["llama-1b"], peers=["te"], command="python -m benchmarks one-gpu --cases llama-1b --peers te")
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.checkpoint import measure_checkpoints
from benchmarks.kernels.attention import measure_attention
from benchmarks.kernels.products import measure_products
from benchmarks.measure import Measurement, Target, measure_case, trace_name
from benchmarks.memory import measure_memory
from benchmarks.peers import ENTRIES, INSTALL, PEERS, Entry
from benchmarks.records import check_figures, check_output, document, render, row, write
from benchmarks.suites import SUITES, Suite
from benchmarks.te_layers import transformer_engine
from benchmarks.vision.plot import draw_costs
from benchmarks.vision.prices import Price, prices_with
from octavo.bench.kernels import measure_kernels
from octavo.bench.layers import OCTAVO, measure_layers
from octavo.bench.run import check_gpu, device_of
from octavo.errors import InputError, unknown
from octavo.hardware import describe_device
from octavo.run.provenance import version
from octavo.storage import check_folder

__all__ = ["check_figures", "render", "run_suite"]

CPU_RANKS = 2
"""Default number of ranks on a CPU for suites of several."""
PROFILED_STEPS = 3
"""Steps of a breakdown."""
STARTED = ("one-gpu", "lora", "sharded", "context")
"""Suites whose entries can be started several times."""
SAVES = 2
"""Default number of saves in the background."""

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
    traces: Path | None = None,
    output: Path | None = None,
    device: str | None = None,
    gpus: int | None = None,
    folder: Path | None = None,
    saves: int | None = None,
    restore_gpus: int | None = None,
    prices: Path | None = None,
    starts: int | None = None,
    command: str,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure entries on cases, each entry in separate processes; returns the document that was written.

    Arguments are the options of `python -m benchmarks`; None is an option that is absent.

    Args:
        cases: workloads of the suite, kernels or layers; None: the suite's default for the device and the installed packages.
        entries: exactly these; None: Octavo's, or the suite's default, and peers. A failed entry has a row with "error".
        peers: groups from `PEERS` beside Octavo's entries; None: all that are installed.
        steps, warmup: timed steps of each entry, at least 1, and steps before them; None: the suite's numbers.
        output: a .json file, replaced if it exists; or a folder for one new file a workload; None: the current folder.
        traces: folder for Chrome traces of the first rank, one an entry; includes a breakdown.
        prices: a TOML file with prices of machines (`benchmarks.vision.prices`), for costs of the vision suite.
        folder: parent folder of temporary checkpoints; None: beside the output.
        starts: fresh starts of each entry, one after the other, a row each; None: one.
        command: the command line, for the record.
        say: takes progress messages, a line each.

    Raises:
        InputError: an unknown suite, case, entry, peer or device, a number of GPUs that is not there, a suite that needs a
            GPU where there is none, an option of another suite, a package of a case that is missing, a folder that cannot
            be written to, results that are there already, or a file that has no prices.
    """
    chosen = _choose(suite, cases, entries, peers)
    target = _target(chosen, device, gpus)
    _check_gpu(chosen, target, "--traces" if traces else "--breakdown" if breakdown else None)
    _check_starts(chosen, starts, traces)
    output, known = output or Path(), _prices(chosen, target, prices)
    saving = _saving(chosen, target, folder, output, restore_gpus, saves)
    how: dict[str, Any] = {
        "steps": chosen.steps if steps is None else steps,
        "warmup": chosen.warmup if warmup is None else warmup,
        "say": say,
    }

    def measure(case: Any, able: list[Entry]) -> list[dict[str, Any]]:
        if saving:
            return [measure_checkpoints(case, entry, target=target, **saving, **how) for entry in able]
        rows = partial(_rows, case, target)
        options = {"target": target, "profiled": PROFILED_STEPS if breakdown or traces else 0, "traces": traces, **how}
        found: list[dict[str, Any]] = []
        for start in range(1, starts + 1) if starts else (None,):
            before = list(found)

            def finished(measured: list[Measurement], before: list[dict[str, Any]] = before) -> None:
                results.write(before + rows(measured))

            found += rows(measure_case(suite, case, able, start=start, finished=finished, **options))
        return found

    measurements: Iterable[list[dict[str, Any]]]
    if chosen.entries:
        compared = _compared(chosen, entries, peers, say)
        plan = _plan(chosen, cases, compared, target, say)
        check_output(suite, [case.name for case, _ in plan], output, say)
        _make_trace_folder(traces, plan)
        measurements = (measure(case, able) for case, able in plan)
    else:
        check_output(suite, [], output, say)
        compared, found = _measure_here(chosen, cases or chosen.cases, target, **how)
        measurements = [found]
    results = _Results(output, lambda rows: document(suite, command, target, compared, rows, known))
    for found in measurements:
        written = results.write(found)
        results.rows += found
    pictures = [draw_costs(path) for path in written] if suite == "vision" else []
    for file in filter(None, (*written, *pictures)):
        say(f"wrote {file}")
    return results.document


def _rows(case: Any, target: Target, measured: list[Measurement]) -> list[dict[str, Any]]:
    return [row(case, one, target) for one in measured]


@dataclass
class _Results:
    """The rows of the cases so far, in `output` as `made_of` makes a document of them."""

    output: Path
    made_of: Callable[[list[dict[str, Any]]], dict[str, Any]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)  # as it was last written

    def write(self, found: list[dict[str, Any]]) -> list[Path]:
        """Write these rows too, so that a later failure of the suite loses none of them. Returns the files."""
        self.document = self.made_of(self.rows + found)
        return write(self.document, self.output)


def _saving(
    suite: Suite, target: Target, folder: Path | None, output: Path, restore_gpus: int | None, saves: int | None
) -> dict[str, Any]:
    """The arguments that only `measure_checkpoints` takes; none outside of the checkpoint suite."""
    if suite.name != "checkpoint":
        asked = {"--folder": folder, "--restore-gpus": restore_gpus, "--saves": saves}
        if given := [f"{option} {value}" for option, value in asked.items() if value is not None]:
            raise InputError(f"{', '.join(given)}: only the suite checkpoint saves. Leave this out of the suite {suite.name}.")
        return {}
    ranks = max(1, target.ranks // 2) if restore_gpus is None else restore_gpus
    if target.device.kind == "cuda" and ranks > target.ranks:
        raise InputError(f"restore_gpus = {ranks}: use 1 to {target.ranks} of the GPUs that save.")
    if folder is not None:
        check_folder(folder, "--folder")
    beside = output.parent if output.suffix == ".json" else output
    return {"folder": folder or beside, "restore_ranks": ranks, "saves": SAVES if saves is None else saves}


def _prices(suite: Suite, target: Target, path: Path | None) -> tuple[Price, ...]:
    """The prices for costs; none outside of the vision suite."""
    if suite.name == "vision":
        return prices_with(path, target.device.name if target.device.kind == "cuda" else None)
    if path is not None:
        raise InputError(f"--prices {path}: only the suite vision has costs. Leave it out of the suite {suite.name}.")
    return ()


def _measure_here(
    suite: Suite, names: Sequence[str], target: Target, *, steps: int, warmup: int, say: Say
) -> tuple[list[Entry], list[dict[str, Any]]]:
    """Peers and rows of a suite of kernels, products or layers, measured in this process."""
    device = torch.device(target.torch_device)
    chosen = [suite.known[name] for name in dict.fromkeys(names)]
    timed: dict[str, Callable[..., list[dict[str, Any]]]] = {
        "kernels": measure_kernels,
        "products": measure_products,
        "attention": measure_attention,
        "memory": measure_memory,
    }
    if suite.name in timed:
        return [], timed[suite.name](chosen, device, iterations=steps, warmup=warmup, say=say)
    theirs = transformer_engine(device, say)
    libraries = [OCTAVO] if theirs is None else [OCTAVO, theirs]
    rows = measure_layers(chosen, device, libraries, seeds=steps, settling=warmup, say=say)
    return [] if theirs is None else [ENTRIES["te-bf16"]], rows


def _choose(suite: str, cases: Sequence[str] | None, entries: Sequence[str] | None, peers: Sequence[str] | None) -> Suite:
    """The suite, after a check of every name."""
    if suite not in SUITES:
        raise unknown("benchmark suite", suite, SUITES)
    chosen = SUITES[suite]
    if not chosen.entries and (entries or peers):
        raise InputError(f"the suite {suite} has no entries and no peers: choose what it measures with --cases.")
    if entries and peers is not None:
        raise InputError(f"entries {', '.join(entries)} are all that is compared: leave --peers out, or name peers among them.")
    asked = (("case", cases, chosen.known), ("entry", entries, chosen.entries), ("group of peers", peers, PEERS))
    for what, names, known in asked:
        for name in names or ():
            if name not in known:
                raise unknown(what, name, known)
    groups = [group for group in PEERS if any(entry.group == group for entry in chosen.entries.values())]
    for group in peers or ():
        if group not in groups:
            raise InputError(f"peers = {group}: the suite {suite} has {'only ' + ', '.join(groups) if groups else 'no peers'}.")
    return chosen


def _make_trace_folder(traces: Path | None, plan: list[tuple[Any, list[Entry]]]) -> None:
    """Make the folder of traces, in which none of these may exist."""
    if traces is None:
        return
    check_folder(traces, "--traces")
    names = [trace_name(case.name, entry.name) for case, able in plan for entry in able]
    if there := [name for name in names if (traces / name).exists()]:
        raise InputError(f"{traces / there[0]} exists: give --traces another folder, or move its files away.")
    traces.mkdir(parents=True, exist_ok=True)


def _check_gpu(suite: Suite, target: Target, profile: str | None) -> None:
    """Refuse kernels without a GPU, and a profile (its option) without a GPU or without training steps."""
    if suite.name in ("kernels", "products", "attention", "memory"):
        check_gpu(suite.name, torch.device(target.device.kind))
    if profile and (target.device.kind != "cuda" or suite.name not in ("one-gpu", "lora", "sharded", "context", "vision")):
        raise InputError(
            f"{profile} reads the kernels of training steps on a GPU: not those of the suite {suite.name}"
            f" on {target.torch_device}."
        )


def _check_starts(suite: Suite, starts: int | None, traces: Path | None) -> None:
    """Refuse several starts where rows or traces would overwrite each other."""
    if starts and suite.name not in STARTED:
        raise InputError(f"--starts {starts}: only the suites {', '.join(STARTED)} start an entry several times.")
    if starts and traces:
        raise InputError(f"--starts {starts}: the traces of all starts have one name. Leave --traces out.")


def _compared(suite: Suite, entries: Sequence[str] | None, peers: Sequence[str] | None, say: Say) -> list[Entry]:
    """The entries by name; or Octavo's with those of the groups of peers, by default all that are installed."""
    if entries or (suite.usual and peers is None):
        return [suite.entries[name] for name in dict.fromkeys(entries or suite.usual)]
    found: list[Entry] = []
    missing: dict[str, list[str]] = {}
    for name, entry in suite.entries.items():
        absent = None if peers is not None else next((package for package in entry.packages if version(package) is None), None)
        if absent is not None:
            missing.setdefault(absent, []).append(name)
        elif entry.group is None or peers is None or entry.group in peers:
            found.append(entry)
    for package, names in missing.items():
        say(_absence(package, names))
    return found


def _absence(package: str, names: Iterable[str]) -> str:
    return f"{package} is not installed: without {', '.join(names)}. Install it by {_install(package)}"


def _install(package: str) -> str:
    """The command that installs a package."""
    return INSTALL.get(package, f"pip install {package}")


def _is_missing(package: str | None) -> bool:
    """True for a package that is neither installed nor importable from a folder."""
    return package is not None and version(package) is None and importlib.util.find_spec(package) is None


def _plan(
    suite: Suite, cases: Sequence[str] | None, compared: list[Entry], target: Target, say: Say
) -> list[tuple[Any, list[Entry]]]:
    """Each case with the entries that support it; an InputError without any."""
    usual = (suite.tiny,) if target.device.kind == "cpu" else suite.cases
    chosen = [suite.known[name] for name in dict.fromkeys(cases or usual)]
    plan = []
    for case in _installed(chosen, compared, named=bool(cases), say=say):
        for degree, use in _groups(case):
            if target.ranks % degree:
                raise InputError(
                    f"{case.name}: {degree} GPUs {use}, and {target.ranks} ranks are no multiple of that. Use "
                    f"--gpus {max(1, round(target.ranks / degree)) * degree}."
                )
        able = [entry for entry in compared if entry.trains(case) and (target.ranks == 1 or not entry.alone)]
        if unable := [entry.name for entry in compared if entry not in able]:
            say(f"{case.name}: without {', '.join(unable)}")
        if able:
            plan.append((case, able))
    if not plan:
        raise InputError(
            f"{', '.join(entry.name for entry in compared)}: none runs {', '.join(cases or usual)}. Use another case."
        )
    return plan


def _installed(cases: list[Any], compared: list[Entry], *, named: bool, say: Say) -> list[Any]:
    """The cases that lack no package; an InputError if none is left, and for one that was named. Those of no entry stay."""
    absent: dict[str, list[str]] = {}
    left = []
    for case in cases:
        if _is_missing(case.package) and any(entry.trains(case) for entry in compared):
            absent.setdefault(case.package, []).append(case.name)
        else:
            left.append(case)
    for package, names in absent.items():
        if named or not left:
            raise InputError(f"{', '.join(names)}: {package} is not installed. Install it by {_install(package)}.")
        say(_absence(package, names))
    return left


def _groups(case: Any) -> list[tuple[int, str]]:
    """(GPUs of a group, their common work) of a case."""
    if not isinstance(case, Case):
        return []
    return [(case.context, "share each sequence"), (case.expert, "hold the experts"), (case.tensor, "hold each matrix")]


def _target(suite: Suite, asked: str | None, gpus: int | None) -> Target:
    """The device and the number of ranks."""
    device = device_of(asked)
    count = torch.cuda.device_count()
    on_gpu = device.type == "cuda"
    least, most = suite.ranks
    ranks = gpus or (1 if suite.alone else most or (count if on_gpu else CPU_RANKS))
    if ranks < least or (most is not None and ranks > most):
        allowed = f"{least} at least" if most is None else f"{most}"
        raise InputError(
            f"gpus = {ranks}: the suite {suite.name} needs {allowed}. Use --gpus {most or least} or another suite."
        )
    if most == 1 or (suite.alone and ranks == 1):
        name = f"cuda:{device.index or 0}" if on_gpu else "cpu"
        return Target(describe_device(name), name)
    if on_gpu and (":" in str(device) or ranks > count):
        raise InputError(f"device {device} and gpus = {ranks}: torch sees {count} GPUs. Use --device cuda --gpus {count}.")
    return Target(describe_device("cuda:0" if on_gpu else "cpu"), device.type, ranks)
