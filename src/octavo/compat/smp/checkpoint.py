"""SMP's distributed checkpoints (`save`, `async_save`, `load`), in the format of torch.distributed.checkpoint.

A DTensor over more ranks than the process group is saved as this rank's rows (SMP's local checkpoints: one folder per rank).
With tensor parallelism the shard groups of all tensor ranks save together: `octavo.compat.smp.tensor_folders`.
Reading one of PyTorch's checkpoints unpickles its metadata, as PyTorch itself does: read only folders that you trust.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from octavo.collectives.blocks import has_part, local_of
from octavo.compat.smp import tensor_folders
from octavo.compat.smp.asynchronous import DEFAULT_ASYNC_REQUEST_QUEUE, AsyncCallsQueue
from octavo.compat.smp.state_dicts import Fp8State, states_in, with_shards
from octavo.errors import InputError
from octavo.launch.addresses import check_address, expanded
from octavo.parallel.calls import together
from octavo.parallel.shards import like, local_shard
from octavo.process import process
from octavo.storage import folder_fault, local_path


def _is_remote(path: Any) -> bool:
    """True for a URL, which is opened with fsspec; a Path never is, since it drops a slash."""
    return isinstance(path, str) and _REMOTE.match(path) is not None


def _place(path: Any) -> str:
    """A URL with a scheme known to fsspec, in lower case, or a path with ~ expanded.

    Raises:
        InputError: neither, or a scheme that needs another package.
    """
    if not _is_remote(path):
        return str(_folder(path))
    kind, separator, rest = path.partition(":")
    address = f"{kind.lower()}{separator}{rest}"
    check_address(address, f"checkpoint_id = {path!r}")
    return address


def _folder(path: Any) -> Path:
    """A path with ~ expanded; a Path that was built from a URL is refused, with the URL in the message."""
    return expanded(str(path), "checkpoint_id") if isinstance(path, Path) else local_path(path, "checkpoint_id")


def _check_writable(path: Any) -> None:
    """Refuse a path at which no folder can be created."""
    if path is not None and not _is_remote(path) and (fault := folder_fault(_folder(path))):
        raise InputError(f"save: checkpoint_id = {str(path)!r} cannot be used: {fault}")


_PREPARED = ContextVar("octavo_prepared", default=False)
"""True within a save of this module: PyTorch's patched functions then write the state unchanged."""
_REMOTE = re.compile(r"[A-Za-z][\w+.-]+://|[A-Za-z][\w+.-]+::")


class DistributedFileSystemReader(FileSystemReader):
    """Reads a checkpoint from a local folder, or through fsspec from a URL such as s3://…."""

    def __new__(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's fsspec class for a URL, else this one."""
        return FsspecReader(_place(path), *args, **kwargs) if _is_remote(path) else super().__new__(cls)

    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_place(path), *args, **kwargs)


class DistributedFileSystemWriter(FileSystemWriter):
    """Writes a checkpoint to a local folder, or through fsspec to a URL such as s3://…."""

    def __new__(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's fsspec class for a URL, else this one."""
        return FsspecWriter(_place(path), *args, **kwargs) if _is_remote(path) else super().__new__(cls)

    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_place(path), *args, **kwargs)


@dataclass
class PyTorchDistSaveShardedStrategy:
    """The only value for `sharded_strategy`: PyTorch's format."""

    backend: str = "torch_dist"
    version: int = 1


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Write a state dict in PyTorch's distributed format. Collective over `process_group`; None: all ranks.

    The last four arguments are SMP's, without effect.
    """
    state, group = _checked("save", state_dict, checkpoint_id, storage_writer, process_group)
    _write(state, checkpoint_id, storage_writer, planner, group)


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: Any = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Copy a state dict to host memory and `save` it in a background thread; `maybe_finalize_async_calls` raises its error.

    The save is synchronous over a group other than all ranks, a sharded model's, or its replicas'.
    """
    state, over = _checked("async_save", state_dict, checkpoint_id, storage_writer, process_group)
    there, group = _background_group(over)
    if not there:
        _write(state, checkpoint_id, storage_writer, planner, over)
        return
    copied = tree_map(_copied, state)
    alone = group is None  # one rank: no agreement needed
    (queue or DEFAULT_ASYNC_REQUEST_QUEUE).schedule(
        lambda: _write(copied, checkpoint_id, storage_writer, planner, group, alone=alone)
    )


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Read a checkpoint of `save` into a state dict: tensors in place, other values replaced. Collective.

    Raises:
        InputError: no folder, no checkpoint in it, or the checkpoint of another state dict.
    """
    reader = storage_reader
    if reader is None:
        if checkpoint_id is None:
            raise InputError("load: give checkpoint_id, the folder of the checkpoint, or storage_reader.")
        reader = DistributedFileSystemReader(checkpoint_id)
    tensor_folders.settle(reader)
    path = getattr(reader, "path", checkpoint_id)
    remote = isinstance(reader, FsspecReader) or "://" in str(path)
    if not remote and not os.path.isfile(os.path.join(str(path), ".metadata")):  # noqa: PTH113, PTH118
        raise InputError(f"load: there is not a checkpoint in {str(path)!r}: give the folder that save or async_save wrote.")
    with _together("load", process_group):
        pass
    # Rows share the memory of the state's tensors; `read_back` copies other values.
    rows = _of_group(state_dict, process_group)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a script of one process
            state_dict_loader.load(rows, storage_reader=reader, planner=planner, process_group=process_group)
    except CheckpointException as error:
        fault = next(iter(error.failures.values()))[0]
        if isinstance(fault, InputError):
            raise fault from None
        if not isinstance(fault, RuntimeError | ValueError | KeyError):
            raise
        at_any = ""
        if "Size mismatch" in str(fault):
            at_any = (
                " A folder of one rank's rows, and optimizer.state_dict() in a local state, load only at the degrees that "
                "saved them; states over model.process_group, and FSDP.optim_state_dict(model, optimizer), load at any."
            )
        raise InputError(
            f"load: the checkpoint {str(path)!r} does not fit this state dict: {str(fault).rstrip('.')}. Load into the "
            f"model, and under the keys, that saved it.{at_any}"
        ) from None
    read_back(state_dict, rows)


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = False) -> None:
    """Create an optimizer's states by a step with zero gradients, which changes no parameter.

    skip_empty_param: no effect: a parameter without elements on this rank gets a state without elements.
    """
    if optimizer.state:
        return
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
    for parameter, grad in gradients:
        parameter.grad = grad
    for states in optimizer.state.values():
        if isinstance(step := states.get("step"), Tensor):
            step.zero_()


def _write(
    state: Any, checkpoint_id: Any, writer: Any, planner: Any, group: dist.ProcessGroup | None, *, alone: bool = False
) -> None:
    if writer is None:
        if checkpoint_id is None:
            raise InputError("save: give checkpoint_id, the folder of the checkpoint, or storage_writer.")
        writer = DistributedFileSystemWriter(checkpoint_id)
    token = _PREPARED.set(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist
            state_dict_saver.save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    finally:
        _PREPARED.reset(token)


def _checked(
    call: str, state_dict: Any, checkpoint_id: Any, writer: Any, group: dist.ProcessGroup | None
) -> tuple[Any, dist.ProcessGroup | None]:
    """The state to write and the ranks that write it, once the ranks have one folder that can be written. Collective."""
    if writer is None:
        _check_writable(checkpoint_id)
    with _together(call, group):
        prepared = _prepared(state_dict, group, _place_of(checkpoint_id, writer), _of_group)
        _check_folder(checkpoint_id, writer, group)
    return prepared


def _together(call: str, group: dist.ProcessGroup | None) -> contextlib.AbstractContextManager[None]:
    """A barrier over all ranks; without effect for a call over a group."""
    return together(f"torch.sagemaker's {call}") if group is None else contextlib.nullcontext()


def _place_of(checkpoint_id: Any, writer: Any) -> str | None:
    path = getattr(writer, "path", checkpoint_id)
    return None if path is None else str(path)


def _check_folder(checkpoint_id: Any, writer: Any, group: dist.ProcessGroup | None) -> None:
    """Refuse different folders for one checkpoint that the ranks of a group write together. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, _place_of(checkpoint_id, writer), group=group)
    if len(set(places)) > 1:
        folders = ", ".join(map(repr, sorted(set(places), key=str)))
        raise InputError(
            f"save: ranks write one checkpoint and give the folders {folders}: give one, or for a folder a rank process_group, "
            "the ranks with the same shard."
        )


def _of_group(state: Any, group: dist.ProcessGroup | None) -> Any:
    """A state for a save over a group: DTensors beyond the group become this rank's rows, and local rows become DTensors.

    Likewise for the ShardedTensors in a local state of PyTorch's FSDP. Views of them, which `use_orig_params` adds, are left
    out with several ranks: other ranks have different views under the same names.
    """
    members = set(dist.get_process_group_ranks(group)) if group is not None else None

    def together(value: Tensor) -> bool:
        if members is None or _covers(members, value):
            return True
        if len(_shards_of(members, value)) > 1:
            raise InputError(
                f"the ranks {sorted(members)} of process_group hold some rows of a model's tensor each, and not all of them: "
                "give the ranks with the same shard, for a folder of them, or model.process_group, whose ranks have all rows."
            )
        return False

    def rows(value: Any) -> Any:
        if isinstance(value, ShardedTensor) and not _is_among(members, value):
            return value.local_tensor()
        if isinstance(value, Fp8State):
            return bytes(value)  # its rows are replaced
        return local_shard(value).local if has_part(value) and not together(value) else value

    def mapped(value: Any) -> Any:
        if isinstance(value, Mapping):
            entries = with_shards(value, together)
            shards = [x for x in entries.values() if isinstance(x, ShardedTensor) and _is_among(members, x)]
            return {key: mapped(entry) for key, entry in entries.items() if not _is_view(entry, shards)}
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size) and not hasattr(value, "_fields"):
            return type(value)(mapped(entry) for entry in value)
        return rows(value)

    return mapped(state)


def _is_among(members: set[int] | None, value: ShardedTensor) -> bool:
    """True if these ranks hold all shards of the tensor."""
    return members is None or members.issuperset(dist.get_process_group_ranks(value._process_group or dist.group.WORLD))


def _is_view(value: Any, shards: list[ShardedTensor]) -> bool:
    """True for a tensor that shares memory with one of the shards, or is empty."""
    if not shards or not isinstance(value, Tensor) or isinstance(value, ShardedTensor | DTensor):
        return False
    memory = value.untyped_storage().data_ptr()
    return value.numel() == 0 or any(memory == shard.local_tensor().untyped_storage().data_ptr() for shard in shards)


def _covers(members: set[int], value: Tensor) -> bool:
    """True if the ranks include a whole replica: all rows of a tensor rank's part."""
    return any(members.issuperset(replica) for replica in tensor_folders.replicas_of_part(value))


def _shards_of(members: set[int], value: Tensor) -> set[int]:
    """The shards of a tensor that the ranks hold, by number."""
    replicas = tensor_folders.replicas_of_part(value)
    return {shard for replica in replicas for shard, rank in enumerate(replica) if rank in members}


def of_models(state: Any, group: dist.ProcessGroup | None) -> Any:
    """A state for PyTorch's `save` and `load`: by `_of_group` if it contains a model's state, else unchanged."""
    return _of_group(state, group) if next(states_in(state), None) is not None else state


def to_save(state: Any, group: dist.ProcessGroup | None, writer: Any) -> tuple[Any, dist.ProcessGroup | None]:
    """(a state for PyTorch's `save`, the ranks that save it together). Collective over the tensor ranks of a group."""
    if _PREPARED.get():
        return state, group
    return _prepared(state, group, _place_of(None, writer), of_models)


def _prepared(
    state: Any, group: dist.ProcessGroup | None, place: str | None, rows: Callable[[Any, Any], Any]
) -> tuple[Any, dist.ProcessGroup | None]:
    """(the rows of a state that ranks save together, these ranks)."""
    among = tensor_folders.among(state, group, place)
    prepared = rows(state, among.group)
    return tensor_folders.separated(prepared, among, place), among.group


def read_back(state: dict[str, Any], rows: Mapping[str, Any]) -> None:
    """Copy the loaded values of `rows`, from `_of_group(state)`, back into the state."""
    for key in state:
        if key in rows:
            state[key] = _loaded(state[key], rows[key])


def _loaded(old: Any, new: Any) -> Any:
    """`old` with the loaded values: tensors, dictionaries and lists in place, tuples rebuilt, others replaced by `new`."""
    if isinstance(old, Mapping | list):
        for key in [key for key in old if key in new] if isinstance(old, Mapping) else range(len(old)):
            old[key] = _loaded(old[key], new[key])  # type: ignore[index]
        return old
    if type(old) is tuple and len(old) == len(new):
        return tuple(_loaded(*pair) for pair in zip(old, new, strict=True))
    if isinstance(old, Fp8State):
        return old.loaded(new)
    return old if isinstance(old, Tensor) else new


def _copied(value: Any) -> Any:
    if has_part(value):
        return like(value, local_of(value).detach().to("cpu", copy=True))
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _gloo_group(members: list[int]) -> Any:
    world, group = process.background_groups.get(tuple(members), (None, None))
    return group if world is dist.group.WORLD else None


def make_background_groups(groups: list[list[int]]) -> None:
    """Create gloo groups for background saves: two threads may not share a group. Collective over all ranks."""
    for members in groups:
        if len(members) > 1 and _gloo_group(members) is None:
            process.background_groups[tuple(members)] = dist.group.WORLD, dist.new_group(members, backend="gloo")


def _background_group(group: dist.ProcessGroup | None) -> tuple[bool, dist.ProcessGroup | None]:
    """(True if a save over this group can run in the background, the group of the background thread)."""
    if not dist.is_initialized():
        return True, None
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    background = _gloo_group(members)
    return background is not None or len(members) == 1, background


def load_optimizer(model_state: Mapping[str, Any], key: str, reader: Any, planner: Any, group: Any) -> dict[str, Any]:
    """`{key: optimizer state}` of a checkpoint, sharded like the model's parameters, for `FSDP.optim_state_dict_to_load`."""
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        path = metadata.planner_data[name]
        if path[0] != key:
            continue
        state[name] = b""
        if hasattr(stored, "size"):
            parameter = model_state.get(path[2]) if path[1] == "state" and len(path) > 3 else None
            alike = parameter if has_part(parameter) and parameter.shape == stored.size else None
            dtype = stored.properties.dtype
            state[name] = (
                torch.zeros(stored.size, dtype=dtype, device="cpu") if alike is None else torch.zeros_like(alike, dtype=dtype)
            )
    state_dict_loader.load(state, storage_reader=reader, planner=planner, process_group=group)
    nested: dict[str, Any] = {}
    for name, value in state.items():
        set_element(nested, metadata.planner_data[name], value)
    return nested
