"""All-gather of one large matrix into the memory that forward reads, as that of an embedding or a head.

FSDP2 casts the shards of a group into one buffer, copies that into the buffer of the collective, and copies each parameter out
of it between the kernels of the forward. One matrix sharded by rows needs none of that: each rank casts its rows to their place
in the whole matrix, and the collective fills in those of the others. For an embedding of 8B the last copy alone reads and
writes a GB while forward waits, and the buffer holds a second GB. Groups of several matrices are left to FSDP2: each parameter
here takes a collective of its own, which waits for multiprocessors and for the other ranks.

The matrix is in the memory of the computing stream, where FSDP2 frees it, so its gathering begins behind all that is enqueued
there: it overlaps with the part before, which prefetches it, and not with those before that. An asynchronous `unshard` of the
caller's own is FSDP2's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.profiler import record_function

from octavo.parallel.fsdp2.groups import group_of, one_is_large

# PyTorch 2.12 renamed it, and warns of the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _InPlace(AllGatherResult):
    """FSDP2's record of a gathering that nothing has waited for, of one into the parameters' own memory."""


def use(modules: Sequence[FSDPModule]) -> None:
    """Gather the parameters of these modules so whenever a group is fit for it, which it need not be yet."""
    for group in dict.fromkeys(group_of(module) for module in modules):
        if group is not None and isinstance(group.mesh_info, FSDPMeshInfo) and group._all_gather_process_group.size() > 1:
            _Gathering(group).install()


class _Gathering:
    """The gatherings of one group of parameters, by FSDP2's own methods where it is not fit."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.plain_unshard, self.plain_wait = group.unshard, group.wait_for_unshard
        self.plain_finalize = group.finalize_backward

    def install(self) -> None:
        """Run in place of FSDP2's gathering of the group, and behind its clearing at the end of a backward."""
        self.group.unshard, self.group.wait_for_unshard = self.unshard, self.wait_for_unshard
        self.group.finalize_backward = self.finalize_backward

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather, unless that is over or under way."""
        group = self.group
        there = group._all_gather_result is not None or group.is_unsharded
        unwanted = not group.unshard_in_backward and group._training_state == TrainingState.PRE_BACKWARD
        if async_op or there or unwanted or not _is_fit(group):
            self.plain_unshard(async_op)
            return
        with record_function(group._with_fqn("FSDP::all_gather")):
            group._all_gather_result = _gather(group)

    def wait_for_unshard(self) -> None:
        """Have the current stream wait for the gathering, and give the modules their whole parameters."""
        group = self.group
        result = group._all_gather_result
        if not isinstance(result, _InPlace):
            self.plain_wait()
            return
        if group._training_state == TrainingState.FORWARD and (before := group.comm_ctx.all_gather_state) is not None:
            # The buffer of the part before, which FSDP2 keeps until the next part has waited.
            group._wait_all_gather_streams_on_event(before.event)
            group.comm_ctx.all_gather_state = None
        group.device_handle.current_stream().wait_event(result.all_gather_event)
        for parameter in group.fsdp_params:
            parameter.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = None

    def finalize_backward(self) -> None:
        """End a backward; what it has gathered for a forward that was behind it already is freed, as FSDP2's buffer is."""
        left = isinstance(self.group._all_gather_result, _InPlace)
        self.plain_finalize()  # has the current stream wait
        if left:
            for parameter in self.group.fsdp_params:
                parameter.free_unsharded_param()


def _is_fit(group: Any) -> bool:
    """True if FSDP2 would only cast and gather, and one matrix is nearly all of it; the same on all ranks."""
    default = type(group._all_gather_comm) is DefaultAllGather and group._reshard_after_forward_event is None
    sizes = [parameter._orig_size.numel() for parameter in group.fsdp_params]
    return default and one_is_large(sizes) and all(map(_is_cast_alone, group.fsdp_params))


def _is_cast_alone(parameter: Any) -> bool:
    """True if the whole of a parameter is the shards, cast, of one rank behind the other."""
    by_rows = parameter.fsdp_placement.dim == 0 and parameter.sharded_state == ShardedState.SHARDED
    return by_rows and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather") and not parameter.offload_to_cpu


@torch.no_grad()
def _gather(group: Any) -> _InPlace:
    """Begin to gather the parameters of a group into their own memory."""
    ranks, device = group._all_gather_process_group, group.device_handle
    wholes = [_allocate(parameter, ranks.size()) for parameter in group.fsdp_params]
    _, stream = group.comm_ctx.get_all_gather_streams(False, group._training_state)
    stream.wait_stream(device.current_stream())  # which may still use the memory that it has freed
    # Autograd has saved views of a matrix that is freed and gathered again, with the same values.
    with device.stream(stream), _unsafe_preserve_version_counter(tuple(wholes)):
        for parameter, whole in zip(group.fsdp_params, wholes, strict=True):
            shard = parameter._sharded_param_data  # with zeros where this rank has fewer rows than the first
            own = whole.narrow(0, ranks.rank() * shard.numel(), shard.numel())
            own.copy_(shard)
            _all_gather(whole, own, group=ranks)
        return _InPlace(wholes[0], stream.record_event(), None, [], [], [])


@torch.inference_mode(False)  # a later forward may save it for backward
def _allocate(parameter: Any, ranks: int) -> Tensor:
    """The memory of a whole `FSDPParam`, of the current stream: the rows of all ranks, padding behind them."""
    shard = parameter._sharded_param_data
    parameter.init_all_gather_outputs([shard.numel()], [parameter.param_dtype or shard.dtype], ranks, parameter.device)
    parameter.alloc_all_gather_outputs()
    (whole,) = parameter.all_gather_outputs
    assert isinstance(whole, Tensor)
    return whole
