"""PyTorch's FSDP around models that are not transformed, with the process groups of `torch.sagemaker.init`.

Hybrid strategies shard over hybrid_shard_degree ranks, or over the ranks of a host if that is 0. PyTorch's default is the
number of devices that a process sees: 1 on a CPU, where no gradients would be averaged.

Optimizer states are loaded as shards over the model's group, as SMP's `process_group` argument requests. PyTorch's function
shards them over all ranks, and FSDP with smaller groups would use the wrong rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

from octavo.compat.smp.fsdp import IN_HOST, resolved
from octavo.compat.smp.init import cached, is_initialized
from octavo.compat.smp.init import state as smp_state
from octavo.errors import InputError
from octavo.parallel.world import state as ranks

_SIGNATURE = inspect.signature(FullyShardedDataParallel.__init__)


def with_ranks(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """FSDP's arguments, without `self`, with the strategy and groups of `init`, unless the call has groups.

    Raises:
        InputError: hybrid_shard_degree does not divide the ranks.
    """
    if not (is_initialized() and dist.is_initialized()):
        return args, kwargs
    call = _SIGNATURE.bind(model, *args, **kwargs)
    if call.arguments.get("process_group") is not None or call.arguments.get("device_mesh") is not None:
        return args, kwargs  # the script's, or those of an enclosing FSDP
    degree, strategy = resolved(smp_state.hybrid_shard_degree, call.arguments.get("sharding_strategy"))
    if degree == 1:  # PyTorch turns a hybrid strategy over groups of one rank into NO_SHARD within each
        strategy = ShardingStrategy.NO_SHARD
    call.arguments["sharding_strategy"] = strategy
    if strategy in IN_HOST:
        mesh = cached("plain", degree, lambda: _mesh(degree))
        call.arguments["process_group"] = mesh.get_group("hybrid_shard"), mesh.get_group("replicate")
    else:
        cached("plain", 0, lambda: None)  # over all ranks; NO_SHARD averages over all of them too
    return call.args[1:], call.kwargs


def _mesh(degree: int) -> DeviceMesh:
    """[replicate, shard] with `degree` ranks a shard group."""
    if ranks.world_size % degree:
        raise InputError(
            f"a shard group of {degree} ranks does not fit {ranks.world_size} ranks: it divides them. Set hybrid_shard_degree "
            "in torch.sagemaker.init."
        )
    names = ("replicate", "hybrid_shard")
    return init_device_mesh(ranks.device.type, (ranks.world_size // degree, degree), mesh_dim_names=names)


def group_of(state: Mapping[str, Any], of_script: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group over which a state is sharded; None for all ranks. of_script: the group without shards."""
    group = next((value._process_group for value in state.values() if isinstance(value, ShardedTensor)), of_script)
    return None if group is None or dist.get_world_size(group) == dist.get_world_size() else group


def load_optimizer(key: str, reader: Any, planner: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    """An optimizer's state, `key` of a checkpoint, in shards over a group, for `optim_state_dict_to_load`."""
    metadata = reader.read_metadata()
    paths = {name: path for name, path in metadata.planner_data.items() if path[0] == key}
    device, devices = ranks.device, max(1, torch.cuda.device_count())
    state: dict[str, Any] = {}
    for name in paths:
        stored = metadata.state_dict_metadata[name]
        if isinstance(stored, BytesStorageMetadata):
            state[name] = None
            continue
        whole = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
        if whole.numel() > 1:
            state[name] = _create_chunk_sharded_tensor(whole, group.rank(), group.size(), devices, group)
        else:
            state[name] = whole
    load(state, storage_reader=reader, planner=planner, process_group=group)
    nested: dict[Any, Any] = {}
    for name, value in state.items():
        set_element(nested, paths[name], value)
    return nested
