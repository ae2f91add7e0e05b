"""Measures the rows of `benchmarks.published.rows` one after another, each into its file, and plans their memory and time.

A row is measured whole: its file appears with its last entry, so an interrupted row leaves none and is measured again, and a
later call leaves out the rows whose files are complete. On a CPU the same rows train tiny models, into files of other names.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, LoraCase
from benchmarks.peers import INSTALL, Entry
from benchmarks.published.rows import ROWS, Row, machine_of, octavo_of
from benchmarks.run import CPU_RANKS, run_suite
from benchmarks.suites import SUITES
from octavo.bench import results as files
from octavo.bench.run import device_of
from octavo.errors import InputError, OctavoError, some, unknown
from octavo.hardware import GIB, is_affordable
from octavo.parallel.gathered import LAYOUTS
from octavo.plan import saved
from octavo.plan.flops import adapter_parameters
from octavo.plan.memory import Estimate, estimate
from octavo.plan.saved import BlockRecipes, Setup
from octavo.storage import check_folder

LIMIT_MINUTES = 9.0
"""Planned minutes of a row, unless it has the fewest steps; ten are the most that some machines give to a command."""
START_SECONDS = 45.0
"""Seconds from the start of an entry's processes to its first step; on two GPUs 25 to 44 were measured."""
TFLOPS, RECOMPUTED, OF_EXPERTS = 400.0, 350.0, 250.0
"""Planned TFLOP/s of a step, as of a slow peer; recomputed operations are not counted."""
PLANNED_GIB = 79
"""Memory of the planned GPU, an H100 of 80 GB."""

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Steps:
    """Timed steps of each entry of a row and those before them, and the minutes of all entries."""

    timed: int
    warmup: int
    minutes: float


def steps_of(row: Row) -> Steps:
    """As many as the suite has, or as `LIMIT_MINUTES` allow, at least two and one; between two turns is an untimed one."""
    suite, case = SUITES[row.suite], row.shape
    speed = TFLOPS
    if isinstance(case, Case):
        speed = OF_EXPERTS if case.spec.experts else RECOMPUTED if case.recompute else TFLOPS
    step = case.flops().total * case.units / (speed * 1e12)
    most = (LIMIT_MINUTES * 60 / len(row.entries) - START_SECONDS) / step
    warmup = suite.warmup if most >= suite.warmup + 1 + suite.steps else 1
    timed = max(2, min(suite.steps, math.floor(most) - warmup - 1))
    return Steps(timed, warmup, len(row.entries) * (START_SECONDS + step * (timed + warmup + 1)) / 60)


def memory_of(row: Row, gib: int = PLANNED_GIB) -> Estimate | None:
    """The largest estimate of Octavo's entries, on GPUs of so much memory; None for images, which the plan does not know."""
    case, entries = row.shape, SUITES[row.suite].entries
    if not isinstance(case, Case):
        return None
    own = [entries[name] for name in row.entries if entries[name].group is None]
    return max((estimate(_setup(case, entry, row.gpus, gib * GIB)) for entry in own), key=lambda one: one.total)


def _setup(case: Case, entry: Entry, gpus: int, memory: int) -> Setup:
    """An entry of Octavo as input of the estimate."""
    recipe = None if entry.layers == "bf16" else "delayed" if "delayed" in entry.name else "current"
    lora = isinstance(case, LoraCase)
    setup = Setup(
        case.spec,
        saved.parameters(case.spec),
        case.batch,
        case.sequence_length,
        params_bytes=2 if lora or entry.name.endswith("-bf16-states") else 4,
        blocks=() if recipe is None else (BlockRecipes(*(recipe,) * 4),) * case.spec.layers,
        head="backward" if entry.head_forward else entry.head == "fp8",
        recompute=case.recompute,
        offload=case.offload,
        accumulates=case.micro_batches > 1,
        syncs=case.sync_each,
        world=gpus,
        shard=gpus,
        context=case.context,
        tensor=case.tensor,
        expert=case.expert,
        history=1024 if recipe == "delayed" else 0,
        memory=memory,
    )
    if isinstance(case, LoraCase):
        setup = dataclasses.replace(
            setup,
            parameters=setup.parameters + adapter_parameters(case.spec, case.rank),
            frozen=setup.parameters,
            frozen_of_block=saved.block_parameters(case.spec),
            adapter_rank=case.rank,
            head_frozen=True,
            stored=entry.stored,
        )
    gathered = LAYOUTS * case.spec.layers * saved.local_block_parameters(setup, case.spec)
    return dataclasses.replace(setup, reshard=not is_affordable(gathered, memory))


def chosen(names: Sequence[str] | None) -> list[Row]:
    """The rows of these names or first parts of names, in the table's order; None: all."""
    found: set[str] = set()
    for name in names or ():
        of = {row for row in ROWS if name in (row, row.split("-")[0])}
        if not of:
            raise unknown("row of published figures", name, dict.fromkeys([*(row.split("-")[0] for row in ROWS), *ROWS]))
        found |= of
    return [row for row in ROWS.values() if names is None or row.name in found]


def measure(
    *,
    cases: Sequence[str] | None = None,
    gpus: int | None = None,
    device: str | None = None,
    folder: Path | None = None,
    minutes: float | None = None,
    command: str,
    say: Say = lambda line: None,
) -> list[dict[str, Any]]:
    """Measure the chosen rows that have no complete file in `folder`; returns the documents that were written.

    Args:
        cases: names of rows; None: all.
        gpus: GPUs that the rows may use (on a CPU: ranks); None: all.
        folder: of the files; None: the current one.
        minutes: no row is started that is planned to end later, counted from the call.
        command: the command line, for the record.
        say: takes progress messages, a line each.

    Raises:
        InputError: an unknown row or device, more GPUs than there are, fewer than a row needs, a package of a case that is
            missing, a folder that cannot be written to, or no row that ends in time.
    """
    begun, found = time.perf_counter(), device_of(device)
    on_gpu, folder = found.type == "cuda", folder or Path()
    count = torch.cuda.device_count() if on_gpu else max(gpus or 0, CPU_RANKS)
    if gpus is not None and not 1 <= gpus <= count:
        raise InputError(f"--gpus {gpus}: use 1 to {count}" + (", the GPUs that torch sees." if on_gpu else " ranks on a CPU."))
    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes {minutes:g} is not a time above 0: give one such as 10, or leave it out.")
    check_folder(folder, "--output")
    here = {name: row if on_gpu else row.tiny() for name, row in ROWS.items()}
    rows, most = [here[row.name] for row in chosen(cases)], gpus or count
    _check_ranks(rows, most, [name for name, row in here.items() if row.gpus <= most])
    left = [row for row in rows if not _is_there(row, folder, say)]
    for package in {row.shape.package for row in left}:
        if package is not None and importlib.util.find_spec(package) is None:
            names = ", ".join(row.name for row in left if row.shape.package == package)
            raise InputError(
                f"{names}: {package} is not installed. Install it by {INSTALL[package]}, or leave them out of --cases."
            )
    documents: list[dict[str, Any]] = []
    for number, row in enumerate(left):
        how = steps_of(row) if on_gpu else Steps(2, 1, 0.0)
        passed = (time.perf_counter() - begun) / 60
        if minutes is not None and passed + how.minutes > minutes:
            rest = f"{row.name} is planned to take {how.minutes:.1f} minutes, and {max(0.0, minutes - passed):.1f} are left"
            if not number:
                raise InputError(
                    f"--minutes {minutes:g}: {rest}. Use --minutes {math.ceil(how.minutes + 0.1)}, or other --cases."
                )
            say(f"{rest}: repeat the command for {', '.join(one.name for one in left[number:])}")
            break
        documents.append(_measured(row, how, device or found.type, folder, command, say))
    return documents


def check_octavo(documents: Iterable[dict[str, Any]]) -> None:
    """Check that each row has a figure of Octavo's.

    Raises:
        OctavoError: names the rows without one.
    """
    if without := [document["published"] for document in documents if not octavo_of(document["rows"])]:
        raise OctavoError(
            f"no figure of Octavo's in {some(without)}: the reasons are in the files, and a repeated call replaces them."
        )


def _check_ranks(rows: Iterable[Row], gpus: int, fit: Sequence[str]) -> None:
    """Refuse rows of more ranks than there are, and name those that fit."""
    if large := [row for row in rows if row.gpus > gpus]:
        need = ", ".join(f"{row.name} {row.gpus}" for row in large)
        most = max(row.gpus for row in large)
        raise InputError(f"gpus = {gpus}, and these need more: {need}. Use --gpus {most}, or --cases {','.join(fit)}.")


def _is_there(row: Row, folder: Path, say: Say) -> bool:
    """True if a row's file is complete."""
    path = row.file_in(folder)
    if not path.is_file():
        return False
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        document = None
    if complete := row.is_complete(document):
        say(f"{row.name}: {path} is there, measured on {machine_of(document)}")
    else:
        say(f"{row.name}: {path} is not complete, and is replaced")
    return complete


def _measured(row: Row, how: Steps, device: str, folder: Path, command: str, say: Say) -> dict[str, Any]:
    """Measure a row and write its file, whole or not at all."""
    say(f"{row.name}: {row.workload}; {how.timed} steps after {how.warmup}, {row.gpus} ranks")
    with tempfile.TemporaryDirectory(prefix="octavo-published-") as place:
        found = run_suite(
            row.suite,
            cases=[row.case],
            entries=row.entries,
            steps=how.timed,
            warmup=how.warmup,
            output=Path(place) / row.file,
            device=device,
            gpus=row.gpus,
            command=command,
            say=lambda line: None if place in line else say(line),
        )
    document = {**found, "suite": "published", "published": row.name}
    files.write({row.file_in(folder): document})
    say(f"wrote {row.file_in(folder)}")
    return document
