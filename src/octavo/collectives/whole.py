"""The whole of a sharded tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. Collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(type(p) is _StridedShard for p in tensor.placements):  # first the shards of each expert: torch warns of both at once
        placements = [Replicate() if type(p) is _StridedShard else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()
