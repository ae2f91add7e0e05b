"""SMP's checkpoints under tensor parallelism: all tensor ranks save together, to a folder `tp{n}-{r}` each or to one for all.

SMP's example scripts save over `model.process_group`, the ranks with one tensor rank's parts, to `tp{n}-{r}`. In Octavo the
groups of all tensor ranks write one checkpoint of whole tensors, which loads at any degree. With one folder each, entries that
are not parts of a matrix, such as states of random generators, are stored per tensor rank: the rank is a prefix of their
names, which the metadata of its folder omit.

A reader of a folder without a checkpoint looks for folders `tp{n}-{r}` in it, or beside it if it has such a name itself;
likewise `ep{n}-{r}`, which SMP's scripts write for each `ep_rank` (`octavo.compat.smp.folders`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.tensor import DTensor

from octavo.collectives.blocks import BlockTensor, as_held, parameters_of
from octavo.compat.smp.init import replica_group
from octavo.compat.smp.state_dicts import states_in
from octavo.errors import InputError
from octavo.parallel import world
from octavo.parallel.shards import replicas_of

_PER_RANK = "octavo_tp"
"""Prefix of the names of per-rank entries, before the tensor rank."""
_FOLDER = re.compile(r"(tp|ep)(\d+)-(\d+)")


class Among(NamedTuple):
    """The ranks that save a state together.

    Attributes:
        group: the ranks; None for all.
        folders: one folder ("one") or one per tensor rank ("each"); None without tensor parallelism.
    """

    group: dist.ProcessGroup | None
    folders: str | None = None


def among(state: Any, group: dist.ProcessGroup | None, place: str | None) -> Among:
    """The ranks that must save a state together: all tensor ranks if it has parts of matrices, else the script's group.

    place: the folder. Collective over these ranks.

    Raises:
        InputError: the ranks give neither one folder nor one per tensor rank, or give one for the local rows of several.
    """
    ranks, part = world.state, next(_parts_in(state), None)
    if part is None:
        return Among(group)
    members = set(range(ranks.world_size)) if group is None else set(dist.get_process_group_ranks(group))
    if ranks.tp_size == 1:  # a mesh other than the tensor ranks of octavo.init
        if group is not None:
            replicas_of(part)  # refuses states that some ranks would save in part
        return Among(group)
    if members.issuperset(dist.get_process_group_ranks(ranks.tp_process_group)):
        return Among(group, "one")
    held = as_held(part)
    assert isinstance(held, DTensor)  # FSDP shards every parameter
    replicas = replicas_of_part(held)
    if not any(members.issuperset(replica) for replica in replicas):
        _check_apart(place)
        return Among(group)
    together = replica_group(len(replicas[0]))
    places: list[Any] = [None] * dist.get_world_size(together)
    dist.all_gather_object(places, (ranks.tp_rank, place), group=together)
    by_rank = [{str(folder) for rank, folder in places if rank == each} for each in range(ranks.tp_size)]
    distinct = set().union(*by_rank)
    if len(distinct) == 1:
        return Among(together, "one")
    if any(len(each) > 1 for each in by_rank) or len(distinct) < ranks.tp_size:
        raise InputError(
            f"save: ranks write one checkpoint and give the folders {', '.join(map(repr, sorted(distinct)))}: give one, or a "
            f"folder for each of the {ranks.tp_size} tensor ranks, tp{ranks.tp_size}-{{tp_rank}}."
        )
    return Among(together, "each")


def separated(state: Any, of: Among, place: str | None) -> Any:
    """A state for the common save: with a folder for each tensor rank, names of per-rank entries begin with the rank.

    Raises:
        InputError: one folder, although tensors that are not parts of a matrix differ between tensor ranks.
    """
    if of.folders is None:
        return state
    shared, per_rank = _split(state)
    if of.folders == "each":
        return {**shared, f"{_PER_RANK}{world.state.tp_rank}": per_rank}
    _check_one_folder(per_rank, of.group, place)
    return state


def replicas_of_part(value: Tensor) -> list[list[int]]:
    """The ranks of each replica that hold shards of this tensor rank's part or of whole experts, in order."""
    held, ranks = as_held(value), world.state
    replicas = replicas_of(held)
    if not _is_spread(held):
        return replicas
    return [[rank for rank in replica if rank % ranks.tp_size == ranks.tp_rank] for replica in replicas]


def _parts_in(state: Any) -> Iterator[Tensor]:
    """Parts of matrices and whole experts in a state, including the models whose local rows it contains."""
    if isinstance(state, BlockTensor) or _is_spread(state):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _parts_in(value)
        for entry in states_in(state):
            model = entry.model()
            blocks = {} if model is None else parameters_of(model)
            yield from (BlockTensor(p.detach(), block) for p, block in blocks.items() if block is not None)


def _is_spread(entry: Any) -> bool:
    """True for a tensor whose shards are on several tensor ranks, such as whole experts."""
    if not isinstance(entry, DTensor):
        return False
    return len({rank % world.state.tp_size for rank in entry.device_mesh.mesh.flatten().tolist()}) > 1


def _split(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(entries of all tensor ranks: parts of matrices and whole experts; entries of this rank), both nested as in `state`."""
    shared: dict[Any, Any] = {}
    per_rank: dict[Any, Any] = {}
    for key, entry in state.items():
        if isinstance(entry, Mapping) and entry:
            parts, others = _split(entry)
            shared |= {key: parts} if parts else {}
            per_rank |= {key: others} if others else {}
        elif isinstance(entry, BlockTensor) or _is_spread(entry):
            shared[key] = entry
        else:
            per_rank[key] = entry
    return shared, per_rank


def _check_one_folder(per_rank: Mapping[Any, Any], group: dist.ProcessGroup | None, place: str | None) -> None:
    """Refuse one folder for tensors that differ between tensor ranks. Collective."""
    tensors = dict(_tensors_in(per_rank))
    sharded = [name for name, value in tensors.items() if isinstance(value, DTensor)]
    digests = {name: _digest(value) for name, value in tensors.items() if name not in sharded}
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, digests, group=group)
    others = [name for name, digest in digests.items() if any(each.get(name) != digest for each in of_ranks)]
    if sharded or others:
        n = world.state.tp_size
        way = "FSDP.optim_state_dict(model, optimizer) has an optimizer's states as parts of the whole." if sharded else ""
        raise InputError(
            f"save: {(sharded or others)[0]} is not the same on the {n} tensor ranks, which give one folder, {place!r}: give "
            f"one for each, tp{n}-{{tp_rank}}, or leave it out. {way}".rstrip()
        )


def _tensors_in(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, by their names in a checkpoint."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _tensors_in(value, f"{name}.{key}" if name else str(key))


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _check_apart(place: str | None) -> None:
    """Refuse one folder for local rows of several tensor ranks, which would overwrite each other. Collective over them."""
    places: list[Any] = [None] * world.state.tp_size
    dist.all_gather_object(places, place, group=world.state.tp_process_group)
    if place is not None and len(set(places)) < len(places):
        raise InputError(
            f"save: several tensor ranks give the folder {place!r} for their local rows: put tp_rank into its name, or give "
            "process_group=model.process_group, whose ranks have all rows."
        )


def entries_of_folder(metadata: Any, results: list[Any], here: list[Any]) -> tuple[Any, list[Any]]:
    """(metadata, results) of a folder: shared entries, and those of its own tensor rank without the rank's prefix.

    here: the results of the folder's ranks.
    """
    owners = {owner[0] for each in here for result in each if (owner := _owner(result.index.fqn)) is not None}
    assert len(owners) <= 1, owners

    def renamed(name: str) -> str | None:
        owner = _owner(name)
        return name if owner is None else owner[1] if owner[0] in owners else None

    def entries(table: Mapping[str, Any] | None) -> dict[str, Any]:
        named = [(renamed(name), value) for name, value in (table or {}).items()]
        return {name: value for name, value in named if name is not None}

    paths = {name: path[1:] if _owner(name) else path for name, path in (metadata.planner_data or {}).items()}
    told = replace(metadata, state_dict_metadata=entries(metadata.state_dict_metadata), planner_data=entries(paths))
    named_results = [
        [replace(one, index=replace(one.index, fqn=name)) for one in each if (name := renamed(one.index.fqn)) is not None]
        for each in results
    ]
    return told, named_results


def _owner(name: str) -> tuple[str, str] | None:
    """(prefix of the tensor rank, the name without it) of a per-rank entry; None for others."""
    first, _, rest = name.partition(".")
    return (first, rest) if re.fullmatch(rf"{_PER_RANK}\d+", first) else None


def patched_reader() -> dict[str, Callable[..., Any]]:
    """A `FileSystemReader.read_metadata` that finds the folders of tensor ranks."""
    original = FileSystemReader.read_metadata

    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        settle(self)
        return original(self, *args, **kwargs)

    return {"read_metadata": read_metadata}


def settle(reader: Any) -> None:
    """Redirect a reader of a folder without a checkpoint to the folder of a tensor or expert rank, if there is one.

    Raises:
        InputError: there are folders of several degrees.
    """
    if type(getattr(reader, "fs", None)) is not FileSystem:
        return
    path = Path(str(reader.path))
    if (path / ".metadata").is_file():
        return
    root = path.parent if _FOLDER.fullmatch(path.name) else path
    by_degree: dict[tuple[str, int], dict[int, Path]] = {}
    for folder in root.glob("?p*-*"):
        if (match := _FOLDER.fullmatch(folder.name)) and (folder / ".metadata").is_file():
            by_degree.setdefault((match[1], int(match[2])), {})[int(match[3])] = folder
    if not by_degree:
        return
    if len(by_degree) > 1:
        kinds = {kind for kind, _ in by_degree}
        words = "tensor and expert" if len(kinds) > 1 else "tensor" if "tp" in kinds else "expert"
        degrees = ", ".join(f"{kind}{degree}-{min(each)}" for (kind, degree), each in sorted(by_degree.items()))
        raise InputError(
            f"load: {str(root)!r} has checkpoints of several {words} degrees, {degrees}: give one of these folders."
        )
    (kind, degree), folders = next(iter(by_degree.items()))
    wanted = world.state.tp_rank if kind == "tp" else world.state.ep_rank
    chosen = folders.get(wanted % degree, folders[min(folders)])
    reader.path = reader.fs.init_path(str(chosen))
