"""Checkpoints: a run's `checkpoints/` folder, and `octavo.save` and `octavo.load` for a user's training loop.

    shard-00001-….safetensors   model.<name> · optimizer.<state>.<name> · fp8.<module>.<operand>.… · random.<rank>.<device>
    state.json                  step, hash of the data, layout, numbers of the optimizer, recipe, head, blocks, generators
    random-1.json               generators of rank 1, and so on
    callbacks-0.bin             state of the callbacks of a run on rank 0, and so on
    manifest.json               written last: every file's size and sha256

A checkpoint is written under a temporary name, synced and renamed. A kill at any moment leaves the older ones and perhaps a
temporary folder, which the next run removes. All ranks must share a file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import nn

from octavo.checkpoint import manifest, plain
from octavo.checkpoint.joined import Optimizers, as_one
from octavo.checkpoint.manifest import OpenCheckpoint
from octavo.checkpoint.opened import Damaged
from octavo.checkpoint.pinned_buffer import PinnedBuffer
from octavo.checkpoint.reader import restore
from octavo.checkpoint.writer import aside, remove_checkpoint, remove_tree, take_snapshot, write_snapshot
from octavo.errors import InputError, OctavoError
from octavo.parallel.calls import together
from octavo.parallel.coordination import Ranks, all_ranks, writing_ranks
from octavo.storage import folder_fault, fsync_folder, local_path, path_of, shortened

_ATTEMPTS = 3  # attempts to open a checkpoint that is being replaced


@dataclass
class Checkpointer:
    """The `checkpoints/` folder of a run, which the caller has locked. Every rank creates one and makes the same calls.

    The newest `keep` checkpoints are retained; `report` receives a message for each damaged one. On exit the context waits for
    a background write and raises its error; if another exception is already propagating, the error is only reported.
    """

    folder: Path
    keep: int
    report: Callable[[str], None]
    protected: int = 0  # step of a checkpoint that is retained besides the newest
    ranks: Ranks = field(default_factory=all_ranks, init=False)
    io_ranks: Ranks = field(default_factory=writing_ranks, init=False)
    _damaged: list[Path] = field(default_factory=list)
    _buffer: PinnedBuffer = field(default_factory=PinnedBuffer)
    _background: Future[None] | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif self._background is not None:  # not `wait`, which is collective: other ranks may not call it
            lost = self._background.exception()
            if lost is not None:
                self.report(f"the checkpoint that was being written is lost: {lost}")
            self._background = None

    def clean(self) -> None:
        """Remove the leftovers of an interrupted write or removal."""

        def remove() -> None:
            for path in self.folder.glob(".tmp-*"):
                remove_tree(path)

        self.io_ranks.on_rank_0(remove)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None without checkpoints. Damaged newer ones are reported and later replaced.

        Raises:
            OctavoError: there are checkpoints, but none is whole.
        """

        def find() -> Path | None:
            path, self._damaged = manifest.newest_whole(self.folder, self.report)
            return path

        return self.io_ranks.on_rank_0(find)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Any],
        *,
        rank_files: Mapping[str, bytes] = MappingProxyType({}),
        background: bool = False,
    ) -> Path:
        """Write `step-N` with rank 0's JSON-able scalars `state`, and remove the oldest beyond `keep`. Collective.

        rank_files: content by name, of this rank, for `read_rank_file`.

        In the background it returns once the state is copied to host memory and any earlier write has ended; `poll` or `wait`
        raises the errors of the write.

        Raises:
            OctavoError: the disk is full; earlier checkpoints are intact and the temporary folder is removed.
        """
        self.wait()
        path = self.folder / f"step-{step}"
        buffer = self._buffer if background else None
        snapshot = take_snapshot(model, optimizer, {"step": step, **state}, self.io_ranks, buffer, rank_files)

        def write_and_prune() -> None:
            write_snapshot(path, snapshot, self.io_ranks, step)
            self.io_ranks.on_rank_0(lambda: self._prune(step))

        if background:
            executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # a process that ends waits for its thread
            self._background = executor.submit(write_and_prune)
            executor.shutdown(wait=False)
        else:
            write_and_prune()
        return path

    def poll(self) -> None:
        """Raise the error of a write in the background, without waiting for the write; every rank calls it in each step."""
        if self._background is None:
            return
        ended, running, failed = 0, 1, 2
        state = running
        if self._background.done():
            state = failed if self._background.exception() is not None else ended
        if self.ranks.max(state) != running:
            self.wait()

    def wait(self) -> None:
        """Wait for the write in the background, and raise its error on every rank. Collective."""
        write, self._background = self._background, None
        if write is not None:
            self.ranks.share_error(write.exception())

    def _prune(self, step: int) -> None:
        whole = [path for number, path in manifest.step_folders(self.folder) if number <= step and path not in self._damaged]
        older = [path for path in whole[self.keep :] if path.name != f"step-{self.protected}"]
        for path in [*older, *(p for p in self._damaged if p.exists() and p.name != f"step-{step}")]:
            remove_checkpoint(path, step)
        self._damaged = []


def save(path: str | Path, model: nn.Module, optimizer: Optimizers = None, **extra: Any) -> None:
    """Write weights, optimizer state, FP8 scales and histories, random states and extras to the folder `path`.

    Extras are numbers, text, None, and lists, tuples (which may come back as lists) and dicts of them, such as the
    `state_dict()` of a scheduler.

    Several optimizers of different parameters go as a list, tuple or dict; `load` takes them in the same form.

    On several ranks all call it with the same path on a shared file system; the extras of rank 0 are saved. An
    existing checkpoint is replaced once the new one is complete.

    Raises:
        InputError: an extra is of another type, the optimizer is of another model or has a state that is neither tensor nor
            number, or `path` exists and is not a checkpoint; some rank does not call it.
        OctavoError: the disk is full, or another rank failed.
    """
    requested = local_path(path, "octavo.save: path")
    one = as_one(optimizer, model, "octavo.save")
    with together("octavo.save"):
        ranks = writing_ranks()
        _save(_same_path(requested, "octavo.save", ranks), model, one, extra, ranks)


def _save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], ranks: Ranks
) -> None:
    with ranks.sharing_errors():
        state = _stored(extra)
    ranks.on_rank_0(lambda: _prepare_target(path))
    write_snapshot(path, take_snapshot(model, optimizer, state, ranks), ranks)


def _stored(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Extras as JSON: unchanged, or marked by type if JSON would change them or cannot represent them.

    A scheduler's state has keys that are numbers (the milestones of MultiStepLR) and infinities (ReduceLROnPlateau).
    """
    as_is: dict[str, Any] = {}
    marked: dict[str, Any] = {}
    for key, value in extra.items():
        try:
            json.dumps(value, allow_nan=False)
            plainly = _keys_are_text(value)
        except (TypeError, ValueError, RecursionError):
            plainly = False
        try:
            (as_is if plainly else marked)[key] = value if plainly else plain.to_json(value)
        except TypeError as error:
            raise InputError(
                f"octavo.save: extra {key!r} cannot be stored ({error}): give numbers, text, None, and lists, tuples and dicts "
                "of them; of a scheduler its state_dict()."
            ) from None
    return {"extra": as_is, **({"marked_extra": marked} if marked else {})}


def _keys_are_text(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _keys_are_text(item) for key, item in value.items())
    return all(map(_keys_are_text, value)) if isinstance(value, list | tuple) else True


def load(path: str | Path, model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Load a checkpoint of `save` into `model` and `optimizer`, or several in `save`'s form, and return the extras.

    FP8 scales and histories and the random states of torch, numpy and Python are restored too, so that a loop continues with
    the same bits. On several ranks all call it; their number and the model's layout may differ from those of the save.

    Raises:
        InputError: there is no checkpoint at `path`, it is of another model or optimizer, or some rank does not call this;
            nothing was changed.
        OctavoError: the checkpoint is damaged, or is being replaced; nothing was changed.
    """
    requested = local_path(path, "octavo.load: path")
    one = as_one(optimizer, model, "octavo.load")
    with together("octavo.load"):
        ranks = writing_ranks()
        path = _same_path(requested, "octavo.load", ranks)
        state = restore(path, model, one, ranks, _open_saved)
    try:
        marked = {key: plain.from_json(stored) for key, stored in state.get("marked_extra", {}).items()}
    except ValueError as error:
        raise Damaged(f"the extras in {path} are none of octavo.save: {error}") from None
    return {**state.get("extra", {}), **marked}


def _same_path(requested: Path, call: str, ranks: Ranks) -> Path:
    """The resolved path, which must equal rank 0's: all ranks write to one folder."""
    with path_of(f"{call}: path", str(requested)):
        path = requested.resolve()
    here = str(requested.absolute())
    first = ranks.on_rank_0(lambda: here)
    with ranks.sharing_errors():
        if here != first:
            raise InputError(
                f"{call}: path is {shortened(here)!r} on rank {ranks.rank} and {shortened(first)!r} on rank 0, but a "
                "checkpoint is one folder for all ranks. Give the same path on every rank."
            )
    return path


def _open_saved(path: Path) -> OpenCheckpoint:
    """The checkpoint at `path`; during a replacement, or after a kill in it, the new one under its temporary name."""
    # Nothing is renamed: the save may still be running, and the folder may be read-only.
    failure: OctavoError = InputError(f"octavo.load: there is no checkpoint at {path}.")
    for _ in range(_ATTEMPTS):
        for folder in [path, *_unfinished_replacements(path)]:
            if folder.is_dir():
                try:
                    return OpenCheckpoint(folder)
                except Damaged as damaged:  # or just being replaced
                    failure = damaged
    raise failure


def _prepare_target(path: Path) -> None:
    """Refuse to replace a path that is not a checkpoint, and remove leftovers of earlier saves to it."""
    with path_of("octavo.save: path", str(path)):
        there = path.exists()
    if there and not (path / manifest.MANIFEST).is_file():
        raise InputError(f"octavo.save: {path} exists and is not a checkpoint; give a folder that does not exist yet.")
    if fault := folder_fault(path):
        raise InputError(f"octavo.save: path = {str(path)!r} cannot be used: {fault}")
    _finish_replacement(path)
    for leftover in [*(folder for folder, pid in _temporaries(path) if not _runs_elsewhere(pid)), aside(path)]:
        with contextlib.suppress(FileNotFoundError):
            remove_tree(leftover)


def _finish_replacement(path: Path) -> None:
    """After a kill between the two renames, move the complete new checkpoint from its temporary name into place."""
    for folder in _unfinished_replacements(path)[:1]:
        folder.rename(path)
        fsync_folder(path.parent)


def _unfinished_replacements(path: Path) -> list[Path]:
    """Complete new checkpoints under a temporary name, after the first of the two renames of a replacement."""
    # A kill after both renames leaves only an old one: if `path` does not exist then, the user has deleted it.
    if path.exists() or not (aside(path) / manifest.MANIFEST).is_file():
        return []
    return [folder for folder, _ in _temporaries(path) if (folder / manifest.MANIFEST).is_file()]


def _temporaries(path: Path) -> list[tuple[Path, int]]:
    """Temporary folders of writes to `path`, and the pid of each writer."""
    name = re.compile(rf"\.tmp-{re.escape(path.name)}-(\d+)")
    if not path.parent.is_dir():
        return []
    return [(entry, int(match[1])) for entry in path.parent.iterdir() if (match := name.fullmatch(entry.name))]


def _runs_elsewhere(pid: int) -> bool:
    """True if another process with this pid is alive."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
