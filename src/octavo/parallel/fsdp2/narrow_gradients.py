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
    """FSDP2's `ReduceScatter` for gradients of their own dtype: sums in `wide`."""

    def __init__(self, wide: torch.dtype) -> None:
        self._wide = wide
        self._allocated = 0

    def begin(self) -> None:
        """The next buffer is of gradients, whatever became of the reduction before."""
        self._allocated = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of all gradients, then that of this rank's sums."""
        self._allocated += 1
        return torch.empty(*size, dtype=dtype if self._allocated == 1 else self._wide, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sums, or means, of this rank's part to `output_tensor`."""
        if input_tensor.dtype == output_tensor.dtype:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
            return
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        add_up(output_tensor[None, None], parts.view(group.size(), 1, 1, -1).unbind())
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        else:
            assert op == dist.ReduceOp.SUM


def use(modules: Sequence[FSDPModule], wide: torch.dtype) -> None:
    """Have gradients of these modules, which are summed, travel so, where their dtype is narrower than `wide`.

    Those of several micro-batches are in `wide` already.
    """
    groups: dict[Any, FSDPModule] = {module._get_fsdp_state()._fsdp_param_group: module for module in modules}
    groups.pop(None, None)  # a module without parameters of its own
    for group, module in groups.items():
        _reduce_in_own_dtype(module, group, wide)


def _reduce_in_own_dtype(module: FSDPModule, group: Any, wide: torch.dtype) -> None:
    exchange, reduce = ReduceScatter(wide), group.post_backward
    module.set_custom_reduce_scatter(exchange)  # type: ignore[arg-type]  # its interface

    def post_backward(*unused: Any) -> None:
        exchange.begin()
        group._reduce_dtype = None if _are_narrow(group.fsdp_params, wide) else wide  # None: the dtype of the gradients
        reduce(*unused)

    group.post_backward = post_backward


def _are_narrow(parameters: Sequence[Any], wide: torch.dtype) -> bool:
    """True if the gradients, of a single micro-batch, are of fewer bits than `wide`."""
    if any(parameter.unsharded_accumulated_grad is not None for parameter in parameters):
        return False
    gathered = [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]
    return all(whole.grad is None or whole.grad.dtype.itemsize < wide.itemsize for whole in gathered)
