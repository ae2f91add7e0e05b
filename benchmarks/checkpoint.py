"""The checkpoint suite: time of a save, pause of training, time of a restore, and equality of the restored state.

One group of processes trains, saves in the foreground, then in the background. A second group, with another number of ranks
and other weights, restores the last checkpoint. The sha256 of gathered weights, moments and FP8 state must be the same, and so
must the next loss; otherwise the row has an error. The first save in the background allocates the pinned buffer that later ones
reuse, so `stall_seconds` is that of the last one. The disk holds one checkpoint at a time: the 8B shape has 96 GB. If the
host's page cache holds the files, `restore_seconds` is the time of the cache and not of the disk.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import Case
from benchmarks.group import Answers, EntryFailed, Group
from benchmarks.measure import Target, largest
from benchmarks.peers import SEED, Entry

LOSS_TOLERANCE = 1e-3
"""Of the next loss, relative: the same weights and tokens, summed over another number of ranks."""


class Fingerprint(NamedTuple):
    """Identity of a state: sha256 by name, and the loss of the next step."""

    digests: dict[str, str]
    loss: float


def measure_checkpoints(
    case: Case,
    entry: Entry,
    *,
    target: Target,
    folder: Path,
    restore_ranks: int,
    saves: int,
    steps: int,
    warmup: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The row of one entry: its figures, or its error with the figures so far.

    Args:
        folder: parent of a temporary folder for the checkpoints.
        restore_ranks: number of ranks that restore.
        saves: saves in the background; the last is measured.
        steps, warmup: timed steps without a write, and steps before them.
    """
    row: dict[str, Any] = {"workload": case.name, "entry": entry.name, "head": entry.head}
    row |= {"gpus": target.ranks, "restore_gpus": restore_ranks}

    def group(ranks: int) -> contextlib.closing[Group]:
        return contextlib.closing(Group("checkpoint", entry.name, case.name, device=target.torch_device, ranks=ranks))

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".octavo-checkpoint-", dir=folder) as checkpoints:
        try:
            with group(target.ranks) as training:
                training.ask("build")
                row["build_seconds"] = time.perf_counter() - training.started
                training.ask("warm_up", steps=warmup)
                row["step_ms"] = _median_ms(training.ask("steps", steps=steps))
                say(f"{case.name}: {entry.name}: {row['step_ms']:.1f} ms a step")
                saved = _save(training, Path(checkpoints), saves, row, lambda text: say(f"{case.name}: {text}"))
            with group(restore_ranks) as restoring:
                restored = _restore(restoring, checkpoints, row)
            say(f"{case.name}: verified in {row['verify_seconds']:.1f} s, restored in {row['restore_seconds']:.1f} s")
            if (fault := difference(saved, restored)) is not None:
                row["error"] = fault
        except EntryFailed as failure:
            row["error"] = str(failure)
    if "error" in row:
        say(f"{case.name}: {entry.name} failed: {row['error']}")
    # JSON has no NaN; a loss that is one is in the error.
    return {key: value for key, value in row.items() if not isinstance(value, float) or math.isfinite(value)}


def _save(group: Group, folder: Path, saves: int, row: dict[str, Any], say: Callable[[str], None]) -> Fingerprint:
    """Save in the foreground, then in the background; the last checkpoint stays in `folder`."""
    answers = group.ask("save", folder=str(folder), step=0)
    row |= {"bytes": answers[0]["bytes"], "save_seconds": largest(answers, "seconds")}
    row["save_gb_per_second"] = row["bytes"] / row["save_seconds"] / 1e9
    say(f"saved {row['bytes'] / 1e9:.1f} GB in {row['save_seconds']:.1f} s")
    digests: dict[str, str] = {}
    for step in range(1, saves + 1):
        shutil.rmtree(folder / f"step-{step - 1}")
        if step == saves:
            digests = group.ask("digests")[0]["digests"]
        answers = group.ask("save_behind", folder=str(folder), step=step)
        row |= {key: largest(answers, key) for key in ("stall_seconds", "whole_seconds")}
        row |= {"step_ms_while_writing": _median_ms(answers), "steps_while_writing": len(answers[0]["seconds"])}
        row["loss"] = statistics.fmean(answer["loss"] for answer in answers)
        row.setdefault("first_stall_seconds", row["stall_seconds"])
        say(f"in the background: stalled {row['stall_seconds']:.2f} s, whole after {row['whole_seconds']:.1f} s")
    return Fingerprint(digests, row["loss"])


def _restore(group: Group, folder: str, row: dict[str, Any]) -> Fingerprint:
    """Restore the checkpoint in `folder` over weights of another seed."""
    group.ask("build", seed=SEED + 1)
    answers = group.ask("restore", folder=folder)
    row |= {key: largest(answers, key) for key in ("verify_seconds", "restore_seconds")}
    row["restore_gb_per_second"] = row["bytes"] / row["restore_seconds"] / 1e9
    digests = group.ask("digests")[0]["digests"]
    row["restored_loss"] = statistics.fmean(answer["loss"] for answer in group.ask("next_loss"))
    row["tensors_compared"] = len(digests)
    return Fingerprint(digests, row["restored_loss"])


def difference(saved: Fingerprint, restored: Fingerprint) -> str | None:
    """The first difference as a sentence; None if the two are equal."""
    for name, digest in saved.digests.items():
        if restored.digests.get(name) != digest:
            return f"{name} was restored with other content than was saved"
    if not abs(restored.loss - saved.loss) <= LOSS_TOLERANCE * abs(saved.loss):
        return f"the next loss is {restored.loss} after restoring, and was {saved.loss}"
    return None


def _median_ms(answers: Answers) -> float:
    return statistics.median(answers[0]["seconds"]) * 1e3
