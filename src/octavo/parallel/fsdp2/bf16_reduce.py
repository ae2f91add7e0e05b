"""Reduction of bf16 gradients among the ranks of a host: they are sent in bf16 and summed in float32.

FSDP2 widens gradients to the dtype of their sums before it sends them. Widened by the receiver they are half the bytes, on the
links and in the copy before, of the same sums: here each in the order of the ranks. Only on one host, since between hosts a
ring sends less than an exchange of all ranks with all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from octavo.kernels.attention.join import add_up
from octavo.parallel.fsdp2.adapter import Group, group_of, use_reduce_scatter


class ReduceScatter:
    """Sums in float32 of gradients in their dtype; plain: FSDP2's collective, for gradients in float32.

    FSDP2 asks for two buffers: of all gradients, then of this rank's sums. A reduction may fail between the two, so each starts
    anew.
    """

    def __init__(self, plain: Any) -> None:
        self._plain, self._allocated = plain, 0

    def begin(self) -> None:
        """The next buffer is the first."""
        self._allocated = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer: of gradients in their dtype, of sums in float32 whatever FSDP2 expects."""
        self._allocated += 1
        dtype = dtype if self._allocated == 1 else torch.float32
        return torch.empty(math.prod(map(int, size)), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sums of this rank's part to `output_tensor`."""
        if input_tensor.dtype == output_tensor.dtype:
            self._plain(output_tensor, input_tensor, group, op, async_op)
            return
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        add_up(output_tensor[None, None], parts.view(group.size(), 1, 1, -1).unbind())


def use(modules: Sequence[FSDPModule]) -> None:
    """Send the bf16 gradients of these modules as bf16, where they are summed in float32 and not averaged.

    Those of several micro-batches are in float32 already.
    """
    for group, module in {group_of(module): module for module in modules}.items():
        if group is not None:
            reduction = ReduceScatter(group.reduce_scatter)
            use_reduce_scatter(module, reduction)
            group.before_reduction("buffers", reduction.begin)
            _reduce_in_own_dtype(group)


def _reduce_in_own_dtype(group: Group) -> None:
    accumulated = False

    def choose() -> None:
        # The same choice on all ranks: not by what this one has accumulated, which may be nothing.
        nonlocal accumulated
        own = group.forces_sums and not accumulated and _are_bf16(group)
        group.reduce_in(None if own else torch.float32)  # None: the gradients' dtype
        accumulated = not group.reduces

    group.before_reduction("dtype", choose)


def _are_bf16(group: Group) -> bool:
    return all(parameter.gradient_dtype in (None, torch.bfloat16) for parameter in group.parameters)
