"""Reduction of bf16 gradients among the ranks of a host: they travel in bf16 and are summed in float32.

FSDP2 widens gradients to the dtype of their sums before it sends them. Widened by the receiver they are half the bytes, on the
links and in the copy before, of the same sums: here each in the order of the ranks. Only on one host, since between hosts a
ring sends less than an exchange of all ranks with all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from octavo.kernels.attention.join import add_up


class ReduceScatter:
    """FSDP2's `ReduceScatter` for gradients of their own dtype, with sums in float32.

    FSDP2 allocates two buffers for a reduction, in both of which it expects the dtype of the gradients.
    """

    def __init__(self, plain: Any) -> None:
        self._plain = plain  # FSDP2's own, for other gradients
        self._allocated = 0

    def begin(self) -> None:
        """The next buffer is the first, whatever became of the reduction before."""
        self._allocated = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """First the buffer of all gradients, then that of this rank's sums."""
        self._allocated += 1
        return torch.empty(*size, dtype=dtype if self._allocated == 1 else torch.float32, device=device)

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
    """Have bf16 gradients of these modules travel so, where they are summed in float32 and not averaged.

    Those of several micro-batches are in float32 already.
    """
    groups: dict[Any, FSDPModule] = {module._get_fsdp_state()._fsdp_param_group: module for module in modules}
    groups.pop(None, None)  # a module without parameters of its own
    for group, module in groups.items():
        _reduce_in_own_dtype(module, group)


def _reduce_in_own_dtype(module: FSDPModule, group: Any) -> None:
    exchange, reduce = ReduceScatter(group._reduce_scatter_comm), group.post_backward
    module.set_custom_reduce_scatter(exchange)  # type: ignore[arg-type]  # its interface
    accumulates = False

    def post_backward(*unused: Any) -> None:
        # The same choice on all ranks: not by what this one has accumulated, which may be nothing.
        nonlocal accumulates
        exchange.begin()
        accumulates = accumulates or not group.reduce_grads
        own = group.force_sum_reduction_for_comms and not accumulates and _are_bf16(group.fsdp_params)
        group._reduce_dtype = None if own else torch.float32  # None: of the gradients' own dtype
        reduce(*unused)
        accumulates = accumulates and not group.reduce_grads

    group.post_backward = post_backward


def _are_bf16(parameters: Sequence[Any]) -> bool:
    gathered = [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]
    return all(whole.grad is None or whole.grad.dtype == torch.bfloat16 for whole in gathered)
