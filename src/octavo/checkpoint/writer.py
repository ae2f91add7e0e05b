"""Writes a checkpoint: a snapshot of the state, then a folder that appears complete or not at all.

`take_snapshot` runs on the training thread, between steps. `write_snapshot` does not touch the model, and may run in the
background while training changes the weights. Each rank writes its pieces, and rank 0 the rest: the temporary folder, the
scalars, the manifest, the renames. An error on any rank is raised on all, after the temporary folder is removed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from octavo.checkpoint import manifest, shard_io
from octavo.checkpoint.failpoints import failpoint
from octavo.checkpoint.joined import class_name
from octavo.checkpoint.manifest import STATE
from octavo.checkpoint.optimizer_state import group_names, group_scalars, named_states, state_scalars
from octavo.checkpoint.pinned_buffer import PinnedBuffer
from octavo.checkpoint.rng_state import random_scalars, random_tensors
from octavo.errors import InputError
from octavo.fp8 import recipe as recipes
from octavo.fp8.scaling import state_records, states_of
from octavo.groups import first_fsdp1
from octavo.models.convert import conversion_of
from octavo.models.decoder import Decoder
from octavo.models.lora import adapted
from octavo.nn.plain_names import stored_names
from octavo.parallel.coordination import Ranks
from octavo.parallel.shards import named_tensors
from octavo.parallel.world import state as world
from octavo.storage import fsync_folder, fsync_tree, write_atomic
from octavo.stored_names import record_name


@dataclass(frozen=True)
class Snapshot:
    """The tensors, and small files by name, that this rank writes; the disk bytes are those of all ranks."""

    pieces: list[shard_io.TensorPiece]
    files: dict[str, bytes]
    bytes_needed: int


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, shared ones (tied embeddings) once; sharded by FSDP2, or parts of a block.

    For a model with adapters only the trained parameters: its frozen weights are in another folder.

    Raises:
        InputError: a module is wrapped by FSDP1.
    """
    if flat := first_fsdp1(model):
        raise InputError(
            f"{flat} is PyTorch's FullyShardedDataParallel: octavo.save and octavo.load do not know the names in its flat "
            "parameters. Use its state_dict with torch.distributed.checkpoint, or shard by octavo.transform."
        )
    # First, as FSDP2 then restores its shards. Some wrappers remove their name here but not in `named_parameters`, so only the
    # tensors of the entries matter. An outer wrapper may gather the model in its state_dict.
    state = nn.Module.state_dict(model, keep_vars=True)
    persistent = {id(tensor) for tensor in state.values()}
    scratch = {name for name, buffer in model.named_buffers() if name not in state and id(buffer) not in persistent}
    named = dict(named_tensors(model))
    if adapted(model) is not None:
        scratch |= named.keys() - {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: named[name].detach() for name in dict.fromkeys((*state, *named)) if name in named and name not in scratch}


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the state by its name on disk; not copied."""
    stored = stored_names(model)
    tensors = {f"model.{stored.get(name, name)}": tensor for name, tensor in weights(model).items()}
    if optimizer is not None:
        for name, states in named_states(model, optimizer).items():
            name = stored.get(name, name)
            tensors |= {f"optimizer.{key}.{name}": v for key, v in states.items() if isinstance(v, torch.Tensor)}
    tensors |= {f"fp8.{record_name(name, stored)}": tensor for name, tensor in state_records(model).items()}
    return tensors | {f"random.{rank}.{device}": tensor for device, tensor in random_tensors().items()}


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    ranks: Ranks,
    buffer: PinnedBuffer | None = None,
    rank_files: Mapping[str, bytes] = MappingProxyType({}),
) -> Snapshot:
    """The current state. With a buffer it is copied and may be written later; otherwise write it at once.

    rank_files: further files of this rank, name → content.

    Raises:
        InputError: the optimizer has states that a checkpoint cannot hold.
        OctavoError: another rank failed, or there is no memory for the copy.
    """
    with ranks.sharing_errors():
        pieces = shard_io.pieces_of(collect(model, optimizer, ranks.rank))
        scalars = random_scalars()
        if ranks.rank == 0:
            stored = stored_names(model)
            record = {
                **state,
                "random": scalars,
                "tensor_ranks": world.tp_size,
                "groups": group_scalars(optimizer),
                "group_names": [[stored.get(name, name) for name in group] for group in group_names(model, optimizer)],
                "optimizer_class": None if optimizer is None else class_name(optimizer),
                "optimizer": {stored.get(name, name): values for name, values in state_scalars(model, optimizer).items()},
                "recipe": _recipe_record(model),
                "fp8_head": getattr(model, "fp8_head", None),
                "spec": spec_record(model),
                "lora": None if (adapters := adapted(model)) is None else adapters.record,
                "blocks": None if (way := conversion_of(model)) is None else way.layout,
            }
            files = {STATE: json.dumps(record, allow_nan=False, indent=1).encode()}
        else:
            files = {f"random-{ranks.rank}.json": json.dumps(scalars).encode()}
        files |= {rank_file_name(name, ranks.rank): content for name, content in rank_files.items()}
    pieces = shard_io.deduplicate(pieces, ranks)
    if buffer is not None:
        with ranks.sharing_errors():
            copies = buffer.copy([piece.data for piece in pieces])
            pieces = [dataclasses.replace(piece, data=copy) for piece, copy in zip(pieces, copies, strict=True)]
    bytes_needed = ranks.sum(shard_io.bytes_needed(pieces) + sum(2 * len(content) for content in files.values()))
    return Snapshot(pieces, files, bytes_needed)


def write_snapshot(path: Path, snapshot: Snapshot, ranks: Ranks, step: int | None = None) -> None:
    """Write a snapshot so that `path` is complete, or unchanged on any error. Collective.

    Raises:
        OctavoError: a disk is full, or another rank failed; earlier checkpoints are intact, the temporary folder is removed.
    """
    temporary = path.parent / ranks.on_rank_0(lambda: _make_temporary(path, snapshot.bytes_needed))
    remove = partial(shutil.rmtree, temporary, ignore_errors=True)

    def finish() -> None:
        try:
            with shard_io.explaining_full_disk(path.parent, snapshot.bytes_needed):
                _write_rest(temporary, snapshot.files, step)
                manifest.write_manifest(temporary, step, files, ranks=ranks.size, tensors=tensors)
                _put_in_place(temporary, path, step)
        except BaseException:
            remove()  # before the other ranks raise
            raise

    with ranks.sharing_errors(undo=remove), shard_io.explaining_full_disk(path.parent, snapshot.bytes_needed):
        own_entries = shard_io.write_shard(temporary, snapshot.pieces, ranks.rank, step)
        if ranks.rank:
            for name, content in snapshot.files.items():
                write_atomic(temporary / name, content)
    gathered = ranks.gather((own_entries, shard_io.tensor_entries(snapshot.pieces)))
    files = {name: entry for each, _ in gathered for name, entry in each.items()}
    tensors = {name: entry for _, each in gathered for name, entry in each.items()}
    ranks.on_rank_0(finish)


def _make_temporary(path: Path, bytes_needed: int) -> str:
    """Create a temporary folder next to `path`; returns its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{path.name}-{os.getpid()}"
    with shard_io.explaining_full_disk(path.parent, bytes_needed):
        shard_io.check_space(path.parent, bytes_needed)
        temporary.mkdir()
    return temporary.name


def rank_file_name(name: str, rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"{name}-{rank}.bin"


def _write_rest(temporary: Path, files: Mapping[str, bytes], step: int | None) -> None:
    """After all tensors: write the scalars of rank 0, and this rank's files."""
    failpoint("after-shards", step)
    for name, content in files.items():
        write_atomic(temporary / name, content)
    failpoint("before-manifest", step)


def _put_in_place(temporary: Path, path: Path, step: int | None) -> None:
    """Replace the old folder by the complete new one."""
    fsync_tree(temporary)
    failpoint("before-rename", step)
    replaced = _set_aside(path) if path.exists() or path.is_symlink() else None
    try:
        temporary.rename(path)
    except BaseException:
        if replaced is not None:
            replaced.rename(path)
        raise
    fsync_folder(path.parent)
    failpoint("after-rename", step)
    if replaced is not None:
        remove_tree(replaced)


def remove_checkpoint(path: Path, step: int | None = None) -> None:
    """Rename a checkpoint, then remove it: a half-removed folder must not look like a damaged checkpoint."""
    hidden = _set_aside(path)
    if not hidden.is_symlink():
        (hidden / manifest.MANIFEST).unlink(missing_ok=True)
    failpoint("while-pruning", step)
    remove_tree(hidden)


def aside(path: Path) -> Path:
    """The hidden name of a checkpoint that is to be removed."""
    return path.parent / f".tmp-old-{path.name}"


def _set_aside(path: Path) -> Path:
    hidden = aside(path)
    if hidden.exists() or hidden.is_symlink():
        remove_tree(hidden)
    path.rename(hidden)
    return hidden


def remove_tree(path: Path) -> None:
    """Remove a folder; for a symbolic link only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def spec_record(model: nn.Module) -> dict[str, Any] | None:
    """The parts of a decoder's spec that weights' shapes do not determine; None for a model's original code."""
    if not isinstance(model, Decoder):
        return None
    spec = model.spec
    return {
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "activation": spec.activation,
        "parallel": spec.parallel,
        "norm_eps": spec.norm_eps,
        "rotary": dict(spec.rotary),
        **({"experts_of_a_token": spec.top_k, "normalized": spec.normalized} if spec.experts else {}),
        **({"sinkhorn": spec.assignment == "sinkhorn"} if spec.experts else {}),  # it weights experts differently
    }


def _recipe_record(model: nn.Module) -> dict[str, Any] | None:
    """The recipe of the model's FP8 state as JSON values; loading the amax histories needs it."""
    # Prefer the autocast's recipe: layers with a separate recipe get theirs when the model is built.
    states = sorted((state for _, state in states_of(model)), key=lambda state: state.override is not None)
    used = [state.history_recipe for state in states] + [state.recipe for state in states]
    recipe = next((recipe for recipe in used if recipe is not None), None)
    if recipe is None:
        return None
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.init}
    return {"name": recipe.name, **{k: v.name if isinstance(v, recipes.Format) else v for k, v in fields.items()}}
