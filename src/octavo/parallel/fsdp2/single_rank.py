"""FSDP2 groups of one rank, as of experts distributed over all ranks: their gradients need no reduction and no copy.

FSDP2 gathers them in a flat buffer as it does for several ranks, divides that by one, and copies the quotient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule

from octavo.parallel.fsdp2.adapter import Group, groups_of


def use(modules: Sequence[FSDPModule]) -> None:
    """Use the gradients of these modules directly as those of their shards. The modules have no replicas."""
    for group in groups_of(modules):
        group.before_reduction("hand over", partial(_hand_over_all, group))


@torch.no_grad()
def _hand_over_all(group: Group) -> None:
    """Move gradients to the shards before FSDP2 reduces them, unless it would change their values."""
    if group.reduces and not group.has_hook and group.divides_by in (None, 1.0):
        for parameter in group.parameters:
            gradient = parameter.gradient()
            if gradient is not None:
                parameter.drop_gradient()
                parameter.add_to_shard(gradient)
