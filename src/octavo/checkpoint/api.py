"""Checkpoints: one folder, whole or absent.

    checkpoints/step-120/
        shard-00001-….safetensors   model.<name> · optimizer.<state>.<name> · fp8.<module>.<operand>.… · random.<rank>.<device>
        state.json                  step, hash of the data, device and threads, numbers of the optimizer, generators, recipe
        random-1.json               generators of the second rank, and so on; those of the first are in state.json
        manifest.json               written last: every file's size and sha256 (`octavo.checkpoint.manifest`)

A checkpoint is written under a temporary name beside its place, synced and renamed, so that a kill at any moment leaves the
old ones and perhaps a temporary folder, which the next run removes. It costs a second copy of everything on disk while it
is written. Names are those of Octavo's parameters, never positions, so any layout of ranks reads it: each rank writes what it
holds and reads what it needs. All ranks have to see one file system.

`save` and `load` are the same format for a training loop of the user's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from octavo.checkpoint import manifest, optimizer_state, shard_io
from octavo.checkpoint.pinned_buffer import Staging
from octavo.checkpoint.rng_state import restore_random, seed_beside
from octavo.checkpoint.writer import STATE, Background, aside, random_file, remove_checkpoint, take, weights, write
from octavo.errors import InputError
from octavo.fp8 import recipe as recipes
from octavo.fp8.scaling import check_state_records, load_state_records
from octavo.parallel.coordination import Ranks, all_ranks, writing_ranks
from octavo.storage import fsync_folder


@dataclass
class Checkpointer:
    """The `checkpoints/` folder of a run, of which the caller holds the lock. Every rank has one and calls it alike.

    As a context it ends with nothing in flight: a write in the background is waited for, and its failure raised, or only
    reported where another exception is on its way.

    Args:
        folder: where the `step-N` folders are.
        keep: newest checkpoints that are kept.
        report: takes one message for each damaged checkpoint.
    """

    folder: Path
    keep: int
    report: Callable[[str], None]
    _damaged: list[Path] = field(default_factory=list)
    _staging: Staging = field(default_factory=Staging)
    _background: Background | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif self._background is not None:  # not `wait`: the other ranks may be anywhere
            self._background.join()
            if self._background.fault is not None:
                self.report(f"the checkpoint that was being written is lost: {self._background.fault}")
            self._background = None

    def clean(self) -> None:
        """Remove what an interrupted write or removal left behind."""

        def remove() -> None:
            for path in self.folder.glob(".tmp-*"):
                shutil.rmtree(path)

        writing_ranks().on_rank_0(remove)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None if there never was one; damaged newer ones are reported and later replaced.

        Rank 0 looks, and all ranks get what it found.

        Raises:
            OctavoError: there are checkpoints, but none is whole.
        """

        def look() -> Path | None:
            path, self._damaged = manifest.newest_whole(self.folder, self.report)
            return path

        return writing_ranks().on_rank_0(look)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Any],
        *,
        background: bool = False,
    ) -> Path:
        """Write `step-N` and remove the checkpoints that are no longer kept; collective.

        In the background only the copy to host memory is waited for, and for an earlier write that has not ended. What goes
        wrong later is raised by `poll` or `wait`.

        Args:
            step: number of the step that the checkpoint is of.
            model: whose weights and FP8 state are saved.
            optimizer: of the model, or None.
            state: JSON-able scalars; rank 0's are kept.
            background: return when the state is copied.

        Raises:
            OctavoError: the disk is full; earlier checkpoints are intact and nothing is left behind.
        """
        self.wait()
        ranks, path = writing_ranks(), self.folder / f"step-{step}"
        snapshot = take(model, optimizer, {"step": step, **state}, ranks, self._staging if background else None)

        def write_and_prune() -> None:
            write(path, snapshot, ranks, step)
            ranks.on_rank_0(lambda: self._prune(step))

        if background:
            self._background = Background(write_and_prune)
        else:
            write_and_prune()
        return path

    @property
    def failed(self) -> bool:
        """Whether the write in the background has failed, as far as this rank knows; speaks to no other rank."""
        return self._background is not None and self._background.done and self._background.fault is not None

    def poll(self) -> None:
        """Raise what went wrong in the background, as `wait` does, but wait for nothing; every rank calls it in each step.

        Over ranks this is one small all-reduce while something is being written, else nothing.
        """
        if self._background is None:
            return
        running, failed = 1, 2
        state = failed if self.failed else 0 if self._background.done else running
        if all_ranks().max(state) != running:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is in flight any more. Every rank calls it.

        Raises:
            OctavoError: the write failed: the disk is full, or (naming it) another rank could not.
        """
        write, self._background = self._background, None
        if write is not None:
            write.join()
            all_ranks().share_error(write.fault)

    def _prune(self, step: int) -> None:
        whole = [path for number, path in manifest.step_folders(self.folder) if number <= step and path not in self._damaged]
        for path in [*whole[self.keep :], *(p for p in self._damaged if p.exists() and p.name != f"step-{step}")]:
            remove_checkpoint(path, step)
        self._damaged = []


def _temporaries(path: Path) -> list[tuple[Path, int]]:
    """Temporary folders of writes to `path`, with the process that began each."""
    name = re.compile(rf"\.tmp-{re.escape(path.name)}-(\d+)")
    if not path.parent.is_dir():
        return []
    return [(entry, int(match[1])) for entry in path.parent.iterdir() if (match := name.fullmatch(entry.name))]


def _runs_elsewhere(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _finish_replacement(path: Path) -> None:
    """Put the new checkpoint in its place if a replacement was killed between its two renames.

    Then the old one is aside and the new one is whole under its temporary name. An old one alone is what a kill after both
    renames left: if `path` is gone then, its owner deleted it.
    """
    if path.exists() or not (aside(path) / manifest.MANIFEST).is_file():
        return
    whole = [entry for entry, _ in _temporaries(path) if (entry / manifest.MANIFEST).is_file()]
    if whole:
        whole[0].rename(path)
        fsync_folder(path.parent)


def read_state(path: Path) -> dict[str, Any]:
    """The scalars of a checkpoint that was verified."""
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


@dataclass
class _Restored:
    """What a checkpoint's tensors are read into, by the names they have on disk without the first part."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    records: dict[str, torch.Tensor]
    draws: dict[str, torch.Tensor]
    draws_of: int  # the rank whose generators they are

    def content(self) -> dict[str, torch.Tensor]:
        """By the names on disk."""
        parts = {
            "model": self.weights,
            "optimizer": self.moments,
            "fp8": self.records,
            f"random.{self.draws_of}": self.draws,
        }
        return {f"{prefix}.{name}": tensor for prefix, part in parts.items() for name, tensor in part.items()}


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Put a verified checkpoint into a model and its optimizer, random states last; returns its scalars. Collective.

    Each rank reads its slices alone, whatever the ranks were that wrote them. A rank that the checkpoint has no random states
    of starts its generators from those of rank 0 and its own number.

    Raises:
        InputError: it is of another model or optimizer; nothing was changed then.
    """
    ranks = writing_ranks()
    stored = ranks.on_rank_0(lambda: shard_io.open_shards(path))
    with ranks.sharing_errors():
        state = read_state(path)
        groups = state.pop("groups")
        scalars: dict[str, dict[str, Any]] = state.pop("optimizer", {})
        recipe = _recipe_from(state.pop("recipe"))
        into = _prepare(stored, ranks, model, optimizer, groups)
        if optimizer is not None:
            optimizer_state.check_scalars(path, model, optimizer, scalars)
        if recipe is not None:
            check_state_records(model, into.records)
    with ranks.sharing_errors():
        stored.read(into.content())
    with ranks.sharing_errors():
        if recipe is not None:
            load_state_records(model, into.records, recipe)
        if optimizer is not None:
            optimizer_state.install_moments(model, optimizer, into.moments, groups)
            optimizer_state.install_scalars(model, optimizer, scalars)
        draws = state.pop("random")
        if into.draws_of:
            draws = json.loads((path / random_file(into.draws_of)).read_text(encoding="utf-8"))
        restore_random(into.draws, draws)
        if into.draws_of != ranks.rank:
            seed_beside(into.draws, ranks.rank)
    return state


def _prepare(
    stored: shard_io.Stored,
    ranks: Ranks,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    groups: list[dict[str, Any]],
) -> _Restored:
    """Tensors for what a checkpoint has, the model's own where it has them, after all was found to fit."""
    found = stored.layout
    own = weights(model)
    shard_io.check_layout(stored.folder, shard_io.part_of(found, "model."), shard_io.layout_of(own))
    moments: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        states = shard_io.part_of(found, "optimizer.")
        moments = optimizer_state.allocate_moments(stored.folder, model, optimizer, states, groups)
    draws_of = ranks.rank if f"random.{ranks.rank}.cpu" in found else 0
    records, draws = (_empty(shard_io.part_of(found, prefix)) for prefix in ("fp8.", f"random.{draws_of}."))
    return _Restored(own, moments, records, draws, draws_of)


def _empty(layout: shard_io.Layout) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}


class StoredWeights(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint under Octavo's parameter names, each read whole onto the CPU when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._stored = shard_io.open_shards(path)
        self.layout = shard_io.part_of(self._stored.layout, "model.")

    def __getitem__(self, name: str) -> torch.Tensor:
        (tensor,) = _empty({name: self.layout[name]}).values()
        self._stored.read({f"model.{name}": tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def read_weights(path: Path) -> StoredWeights:
    """The weights of a checkpoint.

    Its files are not compared with its manifest here: `manifest.newest_whole` and `manifest.verify` do that.
    """
    return StoredWeights(path)


def save(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any) -> None:
    """Write weights, optimizer state, FP8 scales and histories, random states and JSON-able extras to the folder `path`.

    Over ranks every rank calls it with the same path, on a file system that all see; each writes its part, and rank 0's extras
    are kept. A checkpoint that is already there is replaced once the new one is whole. What an interrupted `save` to the same
    path left beside it is removed.

    Raises:
        InputError: an extra is not JSON, the optimizer keeps what is neither tensor nor number, or `path` is something other
            than a checkpoint.
        OctavoError: the disk is full, or another rank failed.
    """
    path, ranks = Path(path).absolute(), writing_ranks()
    with ranks.sharing_errors():
        for key, value in extra.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"octavo.save: extra {key!r} cannot be written as JSON ({error}); pass numbers, text, lists or dicts."
                ) from None
    ranks.on_rank_0(lambda: _make_way(path))
    write(path, take(model, optimizer, {"extra": extra}, ranks), ranks)


def _make_way(path: Path) -> None:
    """Refuse to replace what is no checkpoint, and remove what earlier saves to `path` left behind."""
    if path.exists() and not (path / manifest.MANIFEST).is_file():
        raise InputError(f"octavo.save: {path} exists and is not a checkpoint; give a folder that does not exist yet.")
    _finish_replacement(path)
    for leftover in [*(entry for entry, pid in _temporaries(path) if not _runs_elsewhere(pid)), aside(path)]:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(leftover)


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Put what `save` wrote into `model` and `optimizer`, and return the extras.

    FP8 scales and histories and the random states of torch, numpy and Python are restored too, so that a loop continues with
    the same bits. Over ranks every rank calls it; their number and the layout of the model may differ from those of the save.

    Raises:
        InputError: there is no checkpoint at `path`, or it is of another model; nothing was changed then.
        OctavoError: the checkpoint is damaged.
    """
    path = Path(path).absolute()

    def look() -> None:
        _finish_replacement(path)
        if not path.is_dir():
            raise InputError(f"octavo.load: there is no checkpoint at {path}.")
        manifest.verify(path)

    writing_ranks().on_rank_0(look)
    state = restore(path, model, optimizer)
    extra: dict[str, Any] = state.get("extra", {})
    return extra


def check_weights(path: Path, wanted: shard_io.Layout) -> None:
    """Refuse a checkpoint whose weights are not those of the model that `wanted` describes (InputError names them)."""
    found = writing_ranks().on_rank_0(lambda: shard_io.open_shards(path).layout)
    shard_io.check_layout(path, shard_io.part_of(found, "model."), wanted)


def weights_layout(model: nn.Module) -> shard_io.Layout:
    """Names, shapes and dtypes of what a checkpoint of `model` holds as weights; a model on the meta device will do."""
    return shard_io.layout_of(weights(model))


def _recipe_from(record: dict[str, Any] | None) -> recipes.Recipe | None:
    if record is None:
        return None
    values = {k: recipes.Format[v] if k == "fp8_format" else v for k, v in record.items() if k != "name"}
    return recipes.RECIPES[record["name"]](**values)
