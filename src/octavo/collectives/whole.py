"""Gathers a tensor that is sharded by FSDP2 or held in blocks: every rank gets the whole, for exports and optimizers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from octavo.collectives.blocks import BlockTensor, local_of


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every rank: each rank's rows [n, …] or block → [N, …]. Collective if ranks hold parts."""
    if isinstance(tensor, BlockTensor):
        return _joined(tensor)
    if not isinstance(tensor, DTensor):
        return tensor
    if any(type(p) is _StridedShard for p in tensor.placements):  # first each expert's shards: torch warns of both at once
        placements = [Replicate() if type(p) is _StridedShard else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


@torch.no_grad()
def _joined(tensor: BlockTensor) -> Tensor:
    """The whole of a block: each rank's part is broadcast and copied to its place."""
    block, held = tensor.block, tensor.held
    # DTensor's redistribution fails without elements.
    local_part = whole_tensor(held).detach().contiguous() if held.numel() else local_of(held).new_empty(held.shape)
    group = block.joined_by() if len(block.parts) > 1 else None
    whole = local_part.new_empty(block.shape)
    for rank, part in enumerate(block.parts):
        local = local_part if rank == block.rank else local_part.new_empty(part.local_shape)
        if local.numel() and group is not None:
            dist.broadcast(local.view(-1).view(torch.uint8), group=group, group_src=rank)  # backends lack some dtypes
        for box in part.counted:
            whole[box.in_whole] = local[box.in_local]
    return whole
