"""How a checkpoint comes to disk: everything is taken at one moment, then written; a folder appears whole or not at all.

`take` runs on the training thread, where the state stands still; `write` touches nothing of the model and may run in the
background while training changes the weights. Over ranks each writes its own part and the first one does what is done once:
the temporary folder, the scalars, the manifest, the renames. A fault on any rank is raised on all, after the temporary folder
is gone again. All ranks have to see one file system.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.checkpoint import manifest, shard_io
from octavo.checkpoint.failpoints import failpoint
from octavo.checkpoint.optimizer_state import group_scalars, state_scalars, states_by_name
from octavo.checkpoint.pinned_buffer import Staging
from octavo.checkpoint.rng_state import random_scalars, random_tensors
from octavo.fp8 import recipe as recipes
from octavo.fp8.scaling import state_records, states_of
from octavo.parallel.coordination import Ranks
from octavo.storage import fsync_folder, fsync_tree, write_atomic

STATE = "state.json"


def random_file(rank: int) -> str:
    """Where the generators of a rank other than the first are, those that are no tensors."""
    return f"random-{rank}.json"


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment, this rank's share of it.

    Attributes:
        parts: tensors that this rank writes.
        texts: small files by name, `state.json` on rank 0.
        needed: bytes that all ranks together will write.
    """

    parts: list[shard_io.Part]
    texts: dict[str, str]
    needed: int


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers; one that is shared (tied embeddings) is there once. Under FSDP2 they are DTensors."""
    kept = model.state_dict().keys()  # first: FSDP2 puts its shards back in place when it is asked for them
    named = dict([*model.named_parameters(), *model.named_buffers()])
    return {name: named[name].detach() for name in kept if name in named}


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of a run's state, by the name it has on disk; not copied."""
    content = {f"model.{name}": tensor for name, tensor in weights(model).items()}
    if optimizer is not None:
        for name, states in states_by_name(model, optimizer).items():
            content |= {f"optimizer.{key}.{name}": v for key, v in states.items() if isinstance(v, torch.Tensor)}
    content |= {f"fp8.{name}": tensor for name, tensor in state_records(model).items()}
    return content | {f"random.{rank}.{device}": tensor for device, tensor in random_tensors().items()}


def take(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    ranks: Ranks,
    staging: Staging | None = None,
) -> Snapshot:
    """The state as it is now. With `staging` it is copied and may be written later, else it has to be written at once.

    Raises:
        InputError: the optimizer keeps what a checkpoint cannot hold.
        OctavoError: another rank could not, or there is no memory for the copy.
    """
    with ranks.sharing_errors():
        parts = shard_io.parts_of(collect(model, optimizer, ranks.rank))
        scalars = random_scalars()
        if ranks.rank == 0:
            record = {
                **state,
                "random": scalars,
                "groups": group_scalars(optimizer),
                "optimizer": state_scalars(model, optimizer),
                "recipe": _recipe_record(model),
            }
            texts = {STATE: json.dumps(record, allow_nan=False, indent=1)}
        else:
            texts = {random_file(ranks.rank): json.dumps(scalars)}
    parts = shard_io.share_out(parts, ranks)
    if staging is not None:
        with ranks.sharing_errors():
            copies = staging.copy([part.data for part in parts])
            parts = [dataclasses.replace(part, data=copy) for part, copy in zip(parts, copies, strict=True)]
    needed = ranks.sum(shard_io.bytes_needed(parts) + sum(2 * len(text) for text in texts.values()))
    return Snapshot(parts, texts, needed)


def write(path: Path, snapshot: Snapshot, ranks: Ranks, step: int | None = None) -> None:
    """Write a snapshot so that `path` is whole, or on any failure as it was before. Collective.

    Raises:
        OctavoError: a disk is full, or another rank failed; earlier checkpoints are intact and nothing is left behind.
    """
    temporary = path.parent / ranks.on_rank_0(lambda: _begin(path, snapshot.needed))

    def remove() -> None:
        shutil.rmtree(temporary, ignore_errors=True)

    def finish() -> None:
        try:
            with shard_io.space_named(path.parent, snapshot.needed):
                _finish(temporary, path, snapshot.texts, known, step)
        except BaseException:
            remove()  # before the others hear of it
            raise

    with ranks.sharing_errors(undo=remove), shard_io.space_named(path.parent, snapshot.needed):
        entries = shard_io.write_shard(temporary, snapshot.parts, ranks.rank, step)
        if ranks.rank:
            for name, text in snapshot.texts.items():
                write_atomic(temporary / name, text)
    known = {name: entry for each in ranks.gather(entries) for name, entry in each.items()}
    ranks.on_rank_0(finish)


def _begin(path: Path, needed: int) -> str:
    """The name of a fresh temporary folder beside `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shard_io.check_space(path.parent, needed)
    temporary = path.parent / f".tmp-{path.name}-{os.getpid()}"
    with shard_io.space_named(path.parent, needed):
        temporary.mkdir()
    return temporary.name


def _finish(temporary: Path, path: Path, texts: Mapping[str, str], known: shard_io.FileEntries, step: int | None) -> None:
    """What follows when all tensors are on disk: scalars, manifest, and the new folder in place of the old."""
    failpoint("after-shards", step)
    for name, text in texts.items():
        write_atomic(temporary / name, text)
    failpoint("before-manifest", step)
    manifest.write_manifest(temporary, step, known)
    fsync_tree(temporary)
    failpoint("before-rename", step)
    replaced = set_aside(path) if path.exists() else None
    try:
        temporary.rename(path)
    except BaseException:
        if replaced is not None:
            replaced.rename(path)
        raise
    fsync_folder(path.parent)
    failpoint("after-rename", step)
    if replaced is not None:
        shutil.rmtree(replaced)


def remove_checkpoint(path: Path, step: int | None = None) -> None:
    """Remove a checkpoint, out of sight first: a half-removed folder must not look like a damaged checkpoint."""
    doomed = set_aside(path)
    (doomed / manifest.MANIFEST).unlink(missing_ok=True)
    failpoint("while-pruning", step)
    shutil.rmtree(doomed)


def aside(path: Path) -> Path:
    """Where a checkpoint waits out of sight until it is removed."""
    return path.parent / f".tmp-old-{path.name}"


def set_aside(path: Path) -> Path:
    """Move a checkpoint there."""
    place = aside(path)
    if place.exists():
        shutil.rmtree(place)
    path.rename(place)
    return place


class Background:
    """A write that goes on in a thread of its own. A process that ends waits for it."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.fault: BaseException | None = None
        self._write = write
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.fault = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end; `fault` is final then."""
        self._thread.join()


def _recipe_record(model: nn.Module) -> dict[str, Any] | None:
    """The recipe that the model's FP8 state was made under: without it histories could not be given their places again."""
    states = [state for _, state in states_of(model) if state.recipe is not None]
    # Layers with a recipe of their own have it again when the model is built again; the autocast's is that of the others.
    recipe = next((state.recipe for state in sorted(states, key=lambda state: state.override is not None)), None)
    if recipe is None:
        return None
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.init}
    return {"name": recipe.name, **{k: v.name if isinstance(v, recipes.Format) else v for k, v in fields.items()}}
