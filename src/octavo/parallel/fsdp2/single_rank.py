"""FSDP2 groups of one rank, as of experts that are spread over all ranks: their gradients need no reduction, and no copy.

FSDP2 gathers them in a flat buffer as it does for several ranks, divides that by one, and copies the quotient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from octavo.parallel.fsdp2.groups import group_of
from octavo.parallel.fsdp2.reduction import add_to_shard, before_reduction, drop_gradient, gradient_of


def use(modules: Sequence[FSDPModule]) -> None:
    """Have the gradients of these modules be those of their shards as they are. Their ranks have no replicas."""
    for module in modules:
        group = group_of(module)
        before_reduction(group, partial(_hand_over_all, group))


@torch.no_grad()
def _hand_over_all(group: Any) -> None:
    """Leave FSDP2 no gradients to reduce, unless it would change them."""
    plain = group._all_reduce_hook is None and group.gradient_divide_factor in (None, 1.0)
    if group.reduce_grads and plain:
        for parameter in group.fsdp_params:
            gradient = gradient_of(parameter)
            if gradient is not None:
                drop_gradient(parameter)
                add_to_shard(parameter, gradient)
