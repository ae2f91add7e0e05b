"""Maxima of amaxes over a group of ranks, for current scaling: through GPU memory that the ranks write, or by all-reduce."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.collectives.copies import reached
from octavo.kernels.peers import join_largest_
from octavo.kernels.quantize.cast_scaled import scale_from_amax

ROOM = 1024
"""Most amaxes of a join through GPU memory; more are joined by an all-reduce."""


class Joins:
    """The joins of one model's amaxes; all ranks make the same joins in the same order.

    Holds the memory of each group that has joined amaxes on GPUs, or the reason why it has none.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[dist.ProcessGroup, torch.device], _Memory | str] = {}

    def largest_(self, amaxes: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The largest of all ranks' amaxes, float32 [n] or [], contiguous, in place. Collective."""
        memory = self._memory(amaxes, group)
        if memory is None:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        else:
            memory.join_(amaxes)
        return amaxes

    def scale(self, amaxes: Tensor, groups: Sequence[dist.ProcessGroup], fp8_max: float, power_of_two: bool) -> Tensor:
        """Scales [n] or [] of the maxima over all groups; `amaxes`, of their shape, becomes the maxima in place. Collective."""
        for group in groups[:-1]:
            self.largest_(amaxes, group)
        for group in groups[-1:]:
            if (memory := self._memory(amaxes, group)) is not None:
                return memory.join_(amaxes, fp8_max, power_of_two)
            self.largest_(amaxes, group)
        return scale_from_amax(amaxes, fp8_max, power_of_two)

    def methods(self) -> list[str]:
        """The method of each group of GPUs that has joined amaxes, in words."""
        return [
            f"amaxes of {group.size()} ranks: " + ("by their memory" if isinstance(memory, _Memory) else f"by NCCL: {memory}")
            for (group, _), memory in self._of.items()
        ]

    def _memory(self, amaxes: Tensor, group: dist.ProcessGroup) -> _Memory | None:
        if amaxes.device.type != "cuda" or not 0 < amaxes.numel() <= ROOM:
            return None
        if (memory := self._of.get((group, amaxes.device))) is None:
            if torch.cuda.is_current_stream_capturing():
                return None
            memory = reached(group, functools.partial(_Memory, group, amaxes.device))
            self._of[group, amaxes.device] = memory
        return None if isinstance(memory, str) else memory


class _Memory:
    """This rank's slots, which the other ranks write, and the addresses of the other ranks' slots. Collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # as in `copies`
        import torch.distributed._symmetric_memory as symmetric_memory

        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        shape = 2, size, ROOM
        with torch.inference_mode(False):  # an evaluation may allocate it, and training writes it
            self._slots = symmetric_memory.empty(*shape, dtype=torch.int64, device=device)
            self._slots.zero_()
            torch.cuda.synchronize(device)
            self._handle = symmetric_memory.rendezvous(self._slots, group)
            others = [self._handle.get_buffer(rank, shape, torch.int64).data_ptr() for rank in range(size)]
            self._peers = torch.tensor(others, dtype=torch.int64, device=device)
            self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._stream = torch.cuda.current_stream(device)

    def join_(self, amaxes: Tensor, fp8_max: float | None = None, power_of_two: bool = False) -> Tensor:
        """The largest of all ranks, in place; returns them, or with `fp8_max` their scales."""
        stream = torch.cuda.current_stream(amaxes.device)
        if stream != self._stream:  # joins run one after the other
            stream.wait_stream(self._stream)
            self._stream = stream
        arguments = amaxes, self._slots, self._peers, self._number
        scales = join_largest_(*arguments, rank=self._rank, fp8_max=fp8_max, power_of_two=power_of_two)
        return amaxes if scales is None else scales
