"""Reduction of bf16 gradients among the ranks of a host: they are sent in bf16 and summed in float32.

FSDP2 widens gradients to the dtype of their sums before it sends them. If the receiver widens them, half the bytes are sent and
copied, and the sums are the same; each is added in the order of the ranks. Only within one host: between hosts a ring sends
less than an all-to-all exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from octavo.collectives.work import reduce_scatter
from octavo.kernels.attention.join import add_up
from octavo.parallel.fsdp2.adapter import Group, group_of


class ReduceScatter:
    """Sums in float32 of gradients in bf16 or float32.

    FSDP2 allocates two float32 buffers: for all gradients, then for this rank's sums. A reduction may fail between the two, so
    each starts from scratch.
    """

    def __init__(self) -> None:
        self._dtype: torch.dtype | None = None

    def begin(self, *, bf16: bool) -> None:
        """Start a reduction: the next buffer is for gradients, in bf16 or in the dtype that FSDP2 requests."""
        self._dtype = torch.bfloat16 if bf16 else None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer into which FSDP2 copies gradients, or the one for sums."""
        dtype, self._dtype = self._dtype or dtype, None
        return torch.empty(math.prod(map(int, size)), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sums of this rank's part to `output_tensor` [m], of `input_tensor` [n · m] of all ranks."""
        if input_tensor.dtype == output_tensor.dtype:
            reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        add_up(output_tensor[None, None], parts.view(group.size(), 1, 1, -1).unbind())


def use(modules: Sequence[FSDPModule]) -> None:
    """Send the bf16 gradients of these modules as bf16, if they are summed in float32 and not averaged.

    Gradients accumulated over micro-batches are in float32 already.
    """
    for group, module in {group_of(module): module for module in modules}.items():
        if group is not None:
            reduction = ReduceScatter()
            module.set_custom_reduce_scatter(cast(Any, reduction))  # FSDP2 names no public type
            group.before_reduction("buffers", _choose_dtype(group, reduction))


def _choose_dtype(group: Group, reduction: ReduceScatter) -> Callable[[], None]:
    accumulated = False

    def choose() -> None:
        # The choice must be the same on all ranks, so it ignores this rank's accumulated gradients, which may be missing.
        nonlocal accumulated
        reduction.begin(bf16=group.forces_sums and not accumulated and _are_bf16(group))
        accumulated = not group.reduces

    return choose


def _are_bf16(group: Group) -> bool:
    return all(parameter.gradient_dtype in (None, torch.bfloat16) for parameter in group.parameters)
