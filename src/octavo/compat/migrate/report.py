"""The report of `octavo migrate`, as text and as JSON: a script's uses of other libraries, their effect here, changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.compat.migrate.estimators import told
from octavo.compat.migrate.names import OTHERS
from octavo.compat.migrate.script import Script, Use
from octavo.compat.migrate.trainers import is_trainer

_MARKS = {"same": " ", "accepted": "·", "differs": "!", "absent": "x", None: "x"}
_LEGEND = {"accepted": "accepted, without effect", "differs": "look at this", "absent": "not there: to change first"}
_NOT_THERE = "not in Octavo's compatibility layer"


def figures(script: Script) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "script": str(script.path),
        "runs_unchanged": runs_unchanged(script),
        "read_whole": not script.notes,
        "uses": [_row(use) for use in script.uses],
        "needs_gpu": [{"line": line, "what": text} for line, text in script.needs_gpu],
        "estimators": [told(estimator, _folder(script)) for estimator in script.estimators],
        "notes": script.notes,
    }


def runs_unchanged(script: Script) -> bool:
    """True if no name in the script is absent, and no call of an estimator is refused."""
    return not _absent(script) and not any(told(estimator, _folder(script))["refused"] for estimator in script.estimators)


def _folder(script: Script) -> Path:
    """The folder in which a script runs: for a notebook the folder that contains it."""
    return script.path.parent if script.path.suffix == ".ipynb" else Path()


def _absent(script: Script) -> list[Use]:
    return [use for use in script.uses if use.row is None or use.row.status == "absent"]


def lines(script: Script) -> list[str]:
    """The report as text."""
    if not script.uses and not script.estimators:
        read = ", as far as it is read" if script.notes else ""
        nothing = f"{script.path}: nothing of SMP, Transformer Engine, FSDP1, Accelerate or SageMaker's SDK{read}."
        return [nothing, *(f"! {note}" for note in script.notes)]
    libraries = ", ".join(dict.fromkeys(use.library for use in script.uses)) or "other libraries"
    count, of_cells = len(script.uses), "; code cell:line" if script.cells else ""
    report = [f"{script.path}: {count} use{'' if count == 1 else 's'} of {libraries}{of_cells}."]
    first: dict[str, str] = {}
    for use in script.uses:
        row, mark = _row(use), _MARKS[use.row.status if use.row else None]
        if use.name in first:
            report.append(f"{mark} {script.place(use.line):>4}  {use.name} (as in line {first[use.name]})")
            continue
        first[use.name] = script.place(use.line)
        report.append(f"{mark} {script.place(use.line):>4}  {use.name}")
        report.append(f"        here: {row['here']}")
        if row["change"]:
            report.append(f"        in Octavo's names: {row['change']}")
    for line, text in script.needs_gpu:
        report.append(f"! {script.place(line):>4}  {text}")
        report.append("        here: needs a GPU; everything else runs on a CPU too")
    report += [f"! {note}" for note in script.notes]
    for estimator in script.estimators:
        call = told(estimator, _folder(script))
        report.append(f"Estimator: {call['ranks']}.")
        report += [f"  {name} has no meaning outside of AWS" for name in call["meaningless"]]
        report += [f"x {fault}" for fault in call["refused"]]
        report += [f"! {fault}" for fault in call["unchecked"]]
    marks = {use.row.status if use.row else "absent" for use in script.uses} | (
        {"differs"} if script.needs_gpu or script.notes else set()
    )
    legend = [f"{_MARKS[status]} {text}" for status, text in _LEGEND.items() if status in marks]
    report += ["", *([f"({'; '.join(legend)})"] if legend else []), *_end(script)]
    return report


def _end(script: Script) -> list[str]:
    change = [f"{use.name} (line {script.place(use.line)})" for use in _absent(script)]
    if any(told(estimator, _folder(script))["refused"] for estimator in script.estimators):
        change.append("the arguments of an estimator marked x")
    if change:
        return [f"To change first: {', '.join(change)}."]
    if not script.uses:
        return ["Its estimator is Octavo's already."]
    if script.is_module:
        names = "As far as it is read, every name is there" if script.notes else "Every name is there"
        return [f"{names}. It is a module: run the script that imports it."]
    unchecked = any(told(estimator, _folder(script))["unchecked"] for estimator in script.estimators)
    hedges = ("refused", "has to be installed")
    refused = any(each in use.row.here for use in script.uses if use.row is not None for each in hedges)
    runs = "As far as it is read, it runs unchanged" if script.notes or refused or unchecked else "It runs unchanged"
    runs += " on a GPU" if script.needs_gpu else ""
    starts = bool(script.estimators) or any(is_trainer(use.name) for use in script.uses)
    jobs = starts and all(use.library in ("SageMaker SDK", OTHERS) for use in script.uses)
    return [
        "Names, arguments and constants are read here; other values that Octavo cannot honour are refused in the run.",
        *_way(script, runs, jobs),
    ]


def _way(script: Script, runs: str, jobs: bool) -> list[str]:
    if script.path.suffix == ".ipynb":
        install = "import octavo.compat.smp, octavo.compat.te; octavo.compat.te.install(); octavo.compat.smp.install()"
        jobs_here = "import octavo.compat.sdk; octavo.compat.sdk.install_if_absent()"
        where = " where SageMaker's SDK is not installed, " if jobs else ", "
        return [f"{runs}{where}with this in its first cell: {jobs_here if jobs else install}"]
    if jobs:
        return [
            f"{runs}: python -m octavo.compat {script.path}",
            f"or import {'PyTorch' if script.estimators else 'ModelTrainer'} from octavo.launch; the call stays.",
        ]
    return [
        f"{runs}: python -m octavo.compat {script.path}",
        f"or on several GPUs: torchrun --nproc-per-node 8 -m octavo.compat {script.path}",
    ]


def _row(use: Use) -> dict[str, Any]:
    row = use.row
    status, here, change = ("absent", _NOT_THERE, "") if row is None else (row.status, row.here, row.change)
    where = {"line": use.line, "name": use.name, "library": use.library}
    return {**where, "status": status, "here": here, "change": change}


def summary(scripts: Sequence[Script]) -> dict[str, Any]:
    """Several reports as one JSON document."""
    return {"scripts": [figures(script) for script in scripts]}
