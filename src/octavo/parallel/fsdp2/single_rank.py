"""FSDP2 groups of one rank, as of experts that are spread over all ranks: their gradients need no reduction, and no copy.

FSDP2 gathers them in a flat buffer as it does for several ranks, divides that by one, and copies the quotient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from octavo.parallel.fsdp2.reduction import before_reduction, group_of


def use(modules: Sequence[FSDPModule]) -> None:
    """Have the gradients of these modules be those of their shards as they are. Their ranks have no replicas."""
    for module in modules:
        group = group_of(module)
        before_reduction(group, partial(_hand_over_all, group))


def _hand_over_all(group: Any) -> None:
    """Leave FSDP2 no gradients to reduce, unless it would change them."""
    plain = group._all_reduce_hook is None and group.gradient_divide_factor in (None, 1.0)
    if group.reduce_grads and plain:
        for parameter in group.fsdp_params:
            _hand_over(parameter)


@torch.no_grad()
def _hand_over(parameter: Any) -> None:
    """Make the gradient of a gathered parameter that of its shard."""
    if not hasattr(parameter, "_unsharded_param"):  # no forward yet
        return
    parameter.accumulate_unsharded_grad_if_needed()
    if parameter.unsharded_accumulated_grad is not None:
        gradient = parameter.unsharded_accumulated_grad_data
    elif parameter.unsharded_param.grad is not None:
        gradient = parameter.unsharded_grad_data
    else:
        return
    parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None
    shard = parameter.sharded_param
    gradient = gradient.to(shard.dtype).contiguous()
    if shard.grad is None:
        shard.grad = parameter.to_sharded_dtensor(gradient)
    else:
        shard.grad._local_tensor += gradient
    for hook in (shard._post_accumulate_grad_hooks or {}).values():
        hook(shard)
