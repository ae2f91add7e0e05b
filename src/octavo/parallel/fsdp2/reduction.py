"""The hook in front of FSDP2's reduction of a group's gradients, and the buffers of an exchange in place of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from octavo.parallel.fsdp2.groups import group_of


def before_reduction(group: Any, action: Callable[[], None]) -> None:
    """Call `action` in every backward when the gradients of a group are complete, reduced then or not."""
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        action()
        reduce(*unused)

    group.post_backward = post_backward


def gradient_of(parameter: Any) -> Tensor | None:
    """The gradient of a gathered `FSDPParam`, of all micro-batches; None without one."""
    if not hasattr(parameter, "_unsharded_param"):  # no forward yet
        return None
    parameter.accumulate_unsharded_grad_if_needed()
    if parameter.unsharded_accumulated_grad is not None:
        return cast(Tensor, parameter.unsharded_accumulated_grad_data)
    return None if parameter.unsharded_param.grad is None else cast(Tensor, parameter.unsharded_grad_data)


def drop_gradient(parameter: Any) -> None:
    """Leave FSDP2 no gradient of an `FSDPParam` to reduce."""
    parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None


def holds_gradients(group: Any) -> bool:
    """True if a group has gradients of backwards that its ranks have not reduced, or not over the replicas."""
    parameters = _once_gathered(group)
    unreduced = any(p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None for p in parameters)
    return unreduced or group._partial_reduce_output is not None


def drop_gradients(group: Any) -> None:
    """Drop the gradients of `holds_gradients`."""
    for parameter in _once_gathered(group):
        drop_gradient(parameter)
    group._partial_reduce_output = None


def _once_gathered(group: Any) -> list[Any]:
    """The `FSDPParam`s of a group that have had a whole parameter."""
    return [parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]


def add_to_shard(parameter: Any, gradient: Tensor) -> None:
    """Make a gradient of its shard that of an `FSDPParam`, or add it."""
    shard = parameter.sharded_param
    gradient = gradient.to(shard.dtype).contiguous()
    if shard.grad is None:
        shard.grad = parameter.to_sharded_dtensor(gradient)
    else:
        shard.grad._local_tensor += gradient
    for hook in (shard._post_accumulate_grad_hooks or {}).values():
        hook(shard)


class Reduction:
    """Base of a `ReduceScatter` for FSDP2, which asks it for two buffers: of all gradients, then of this rank's sums.

    A reduction may fail between the two, so each starts anew.
    """

    def __init__(self) -> None:
        self._allocated = 0

    def begin(self) -> None:
        """The next buffer is the first."""
        self._allocated = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's request, of the dtype of the gradients."""
        self._allocated += 1
        make = self.gradients if self._allocated == 1 else self.sums
        return make(math.prod(int(side) for side in size), dtype, device)

    def gradients(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of all gradients."""
        return torch.empty(numel, dtype=dtype, device=device)

    def sums(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of this rank's sums, which outlives the reduction."""
        return torch.empty(numel, dtype=dtype, device=device)


def use_reduction(module: FSDPModule, reduction: Reduction) -> None:
    """Reduce the gradients of a module by this `Reduction`, which has FSDP2's `__call__`."""
    module.set_custom_reduce_scatter(cast(ReduceScatter, reduction))
    before_reduction(group_of(module), reduction.begin)
