"""FSDP's collectives by the copy engines of the GPUs of one host, beside computation: OCTAVO_COPY_ENGINE=1 in the environment.

NCCL's kernels take multiprocessors from the products that should hide them. Here buffers are symmetric memory, which the ranks
of a host see over NVLink: a rank copies the others' shards out of theirs, and adds gradients up itself. Only two barriers of
one small block each run on a multiprocessor, one before the copies, when all have written, and one behind them, before any
rank writes again.

Sums are in the order of the ranks, in the dtype of the gradients that travel, and repeat bit for bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from octavo.errors import InputError, warn
from octavo.parallel.fsdp2.reduction import Reduction, use_reduction
from octavo.parallel.storages import uses_of
from octavo.parallel.world import on_one_host

SLOT_BYTES = 1 << 21
"""Slots are multiples of it, so that groups of nearly one size share them."""


def is_asked() -> bool:
    """True if the environment asks for it."""
    return os.environ.get("OCTAVO_COPY_ENGINE", "0").lower() not in ("0", "", "false", "off", "no")


class _Slots:
    """Buffers that all ranks of a group have; one is free while no tensor shares its storage.

    FSDP2 keeps a tensor until its streams wait for the last use, as it has to for PyTorch's allocator. All ranks ask in the
    same order, so a slot is the same one on each.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._slots: list[tuple[Tensor, Any, int]] = []  # with its handle, and the uses of its storage when it is free

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor in the smallest free slot that has room, or in a new one. A new one is collective."""
        from torch.distributed import _symmetric_memory as symmetric

        size = numel * dtype.itemsize
        free = [slot for slot, _, idle in self._slots if slot.numel() >= size and uses_of(slot) == idle]
        if free:
            chosen = min(free, key=Tensor.numel)
        else:
            chosen = symmetric.empty(-(-size // SLOT_BYTES) * SLOT_BYTES, dtype=torch.uint8, device=device)
            handle = symmetric.rendezvous(chosen, group=self.group)
            self._slots.append((chosen, handle, uses_of(chosen)))
        return chosen[:size].view(dtype)

    def handle(self, tensor: Tensor) -> Any:
        """The symmetric memory that a taken tensor is at the beginning of; None for another tensor."""
        for slot, handle, _ in self._slots:
            if slot.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                return handle
        return None


class Gather:
    """FSDP2's `AllGather`: each rank copies the others' shards from their buffers into its own."""

    def __init__(self, slots: _Slots) -> None:
        self._slots = slots

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of all shards."""
        return self._slots.take(math.prod(int(side) for side in size), dtype, device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        """Fill `output_tensor`; `input_tensor` is this rank's part of it."""
        handle, shard = self._slots.handle(output_tensor), input_tensor.numel()
        handle.barrier(channel=0)
        for step in range(1, handle.world_size):
            rank = (handle.rank + step) % handle.world_size
            theirs = handle.get_buffer(rank, (shard,), output_tensor.dtype, shard * rank)
            output_tensor[rank * shard : (rank + 1) * shard].copy_(theirs)
        handle.barrier(channel=1)


class ReduceScatter(Reduction):
    """FSDP2's `ReduceScatter`: each rank copies its part of the others' gradients and adds them up."""

    def __init__(self, slots: _Slots) -> None:
        super().__init__()
        self._slots = slots

    def gradients(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of all gradients, in memory that the other ranks see."""
        return self._slots.take(numel, dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sums, or means, of this rank's part to `output_tensor`."""
        handle, shard = self._slots.handle(input_tensor), output_tensor.numel()
        means = op == dist.ReduceOp.AVG
        if not means and op != dist.ReduceOp.SUM:
            raise InputError(
                "OCTAVO_COPY_ENGINE=1 sums gradients, or averages them over their ranks; set_gradient_divide_factor asks for"
                " another division: set OCTAVO_COPY_ENGINE=0, or leave the factor out."
            )
        own = input_tensor[handle.rank * shard : (handle.rank + 1) * shard]
        others = [rank for rank in range(handle.world_size) if rank != handle.rank]
        parts = dict(zip(others, output_tensor.new_empty(len(others), shard), strict=True))
        handle.barrier(channel=0)
        for rank in others[handle.rank :] + others[: handle.rank]:  # each rank begins with another
            parts[rank].copy_(handle.get_buffer(rank, (shard,), input_tensor.dtype, shard * handle.rank))
        handle.barrier(channel=1)
        parts[handle.rank] = own
        first, second, *rest = (parts[rank] for rank in range(handle.world_size))
        torch.add(first, second, out=output_tensor)
        for term in rest:
            output_tensor.add_(term)
        if means:
            output_tensor.div_(handle.world_size)


def use(modules: Sequence[FSDPModule], mesh: DeviceMesh) -> None:
    """Have these modules' shards, over the last dimension of `mesh`, travel so; says where they cannot."""
    group = mesh.get_group(mesh.ndim - 1)
    where = "cpu" if mesh.device_type != "cuda" else "several hosts" if not on_one_host() else None
    if where is not None:
        warn(f"OCTAVO_COPY_ENGINE=1 has no effect on {where}: shards travel by the collectives of PyTorch.")
    elif group.size() > 1:
        gathers, sums = _Slots(group), _Slots(group)
        for module in modules:
            module.set_custom_all_gather(Gather(gathers))  # type: ignore[arg-type]  # its interface
            use_reduction(module, ReduceScatter(sums))
