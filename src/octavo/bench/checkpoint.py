"""The checkpoint suite: time of a save, pause of training, time of a restore, and equality of the restored state.

One group of processes trains, saves in the foreground, then in the background. A second group, with another number of ranks
and other weights, restores the last checkpoint. The sha256 of gathered weights, moments and FP8 state must be the same, and so
must the next loss; otherwise the row has an error and no figures.

The first save in the background allocates the pinned buffer that later ones reuse, so `stall_seconds` is that of the last one.
A checkpoint of the 8B shape has 96 GB (weights and two moments in float32), so the disk holds one at a time. Where the host's
page cache holds the files, `restore_seconds` is the time of the cache and not of the disk.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.cases import Case
from octavo.bench.group import Answers, Group
from octavo.bench.measure import Target, largest
from octavo.bench.peers import SEED, Entry

LOSS_TOLERANCE = 1e-3
"""Of the next loss, relative: the same weights and tokens, summed over another number of ranks."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of the suite.

    Attributes:
        folder: parent of a temporary folder for the checkpoints.
        restore_ranks: ranks that restore.
        saves: saves in the background; the last is measured.
        steps: timed steps without a write.
        warmup: steps before them.
    """

    folder: Path
    restore_ranks: int
    saves: int
    steps: int
    warmup: int


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a state: sha256 by name, and the loss of the next step."""

    digests: dict[str, str]
    loss: float


class _Failed(Exception):
    """A group of processes failed; the message has the reason."""


def measure_checkpoints(
    case: Case, entry: Entry, *, target: Target, options: CheckpointOptions, say: Callable[[str], None]
) -> dict[str, Any]:
    """The row of one entry: its figures, or its error with the figures so far."""
    known: dict[str, Any] = {"workload": case.name, "entry": entry.name, "head": entry.head}
    known |= {"gpus": target.ranks, "restore_gpus": options.restore_ranks}
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".octavo-checkpoint-", dir=options.folder) as folder:
        try:
            saved = _save(case, entry, target, options, Path(folder), known, say)
            restored = _restore(case, entry, target, options, folder, known)
            say(f"{case.name}: verified in {known['verify_seconds']:.1f} s, restored in {known['restore_seconds']:.1f} s")
        except _Failed as failure:
            known["error"] = str(failure)
        else:
            if (fault := difference(saved, restored)) is not None:
                known["error"] = fault
    if "error" in known:
        say(f"{case.name}: {entry.name} failed: {known['error']}")
    return known


def _save(
    case: Case,
    entry: Entry,
    target: Target,
    options: CheckpointOptions,
    folder: Path,
    known: dict[str, Any],
    say: Callable[[str], None],
) -> Fingerprint:
    """Train and save; the last checkpoint stays in `folder`."""
    group = _group(case, entry, target, target.ranks)
    try:
        _ask(group, "build")
        known["build_seconds"] = time.perf_counter() - group.started
        _ask(group, "warm_up", steps=options.warmup)
        known["step_ms"] = _median_ms(_ask(group, "steps", steps=options.steps))
        say(f"{case.name}: {entry.name}: {known['step_ms']:.1f} ms a step")
        answers = _ask(group, "save", folder=str(folder), step=0)
        known |= {"bytes": answers[0]["bytes"], "save_seconds": largest(answers, "seconds")}
        known["save_gb_per_second"] = known["bytes"] / known["save_seconds"] / 1e9
        say(f"{case.name}: saved {known['bytes'] / 1e9:.1f} GB in {known['save_seconds']:.1f} s")
        for step in range(1, options.saves + 1):
            shutil.rmtree(folder / f"step-{step - 1}")
            digests = _ask(group, "digests")[0]["digests"] if step == options.saves else {}
            known |= _in_background(_ask(group, "save_behind", folder=str(folder), step=step))
            known.setdefault("first_stall_seconds", known["stall_seconds"])
            say(
                f"{case.name}: in the background: stalled {known['stall_seconds']:.2f} s, "
                f"whole after {known['whole_seconds']:.1f} s"
            )
        return Fingerprint(digests, known["loss"])
    finally:
        group.close()


def _in_background(answers: Answers) -> dict[str, Any]:
    return {
        **{key: largest(answers, key) for key in ("stall_seconds", "whole_seconds")},
        "step_ms_while_writing": _median_ms(answers),
        "steps_while_writing": len(answers[0]["seconds"]),
        "loss": statistics.fmean(answer["loss"] for answer in answers),
    }


def _restore(
    case: Case, entry: Entry, target: Target, options: CheckpointOptions, folder: str, known: dict[str, Any]
) -> Fingerprint:
    """Restore the checkpoint in `folder` over weights of another seed."""
    group = _group(case, entry, target, options.restore_ranks)
    try:
        _ask(group, "build", seed=SEED + 1)
        answers = _ask(group, "restore", folder=folder)
        known |= {key: largest(answers, key) for key in ("verify_seconds", "restore_seconds")}
        known["restore_gb_per_second"] = known["bytes"] / known["restore_seconds"] / 1e9
        digests = _ask(group, "digests")[0]["digests"]
        loss = statistics.fmean(answer["loss"] for answer in _ask(group, "next_loss"))
        known |= {"restored_loss": loss, "tensors_compared": len(digests)}
        return Fingerprint(digests, loss)
    finally:
        group.close()


def difference(saved: Fingerprint, restored: Fingerprint) -> str | None:
    """The first difference as a sentence; None where the two are equal."""
    for name, digest in saved.digests.items():
        if restored.digests.get(name) != digest:
            return f"{name} was restored with other content than was saved"
    if not abs(restored.loss - saved.loss) <= LOSS_TOLERANCE * abs(saved.loss):
        return f"the next loss is {restored.loss} after restoring, and was {saved.loss}"
    return None


def _group(case: Case, entry: Entry, target: Target, ranks: int) -> Group:
    return Group(["checkpoint", entry.name, case.name], device=target.torch_device, ranks=ranks)


def _ask(group: Group, do: str, **arguments: Any) -> Answers:
    answers = group.ask(do, **arguments)
    if group.error is not None:
        raise _Failed(group.error)
    return answers


def _median_ms(answers: Answers) -> float:
    return statistics.median(answers[0]["seconds"]) * 1e3
