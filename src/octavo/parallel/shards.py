"""The local shard of a parameter: the rows that this rank holds.

FSDP2 shards a parameter over its first dimension; shards may be uneven or empty. Of experts that are spread over ranks it
shards those of this rank, whose rows follow each other too. Code that initialises, loads or reads shards goes through
`local_shard` and never looks at placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class LocalShard:
    """This rank's rows of a tensor; all rows if it is not sharded.

    Attributes:
        local: rows `start`, `start + 1`, … of the whole; shares memory with the parameter.
        start: the first row. A tensor without dimensions is one row.
        shape: of the whole.
    """

    local: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def first_element(self) -> int:
        """Index of the first element in the flattened whole."""
        return self.start * math.prod(self.shape[1:])

    @torch.no_grad()
    def copy_from(self, whole: Tensor) -> None:
        """Copy these rows out of a tensor of the whole shape, of any dtype and on any device."""
        self.local.copy_(whole[self.start : self.start + len(self.local)] if self.shape else whole)


def is_shard(placement: Placement) -> bool:
    """True if the ranks of this dimension of a mesh hold different parts."""
    return type(placement) in (Shard, _StridedShard)


@torch.no_grad()
def local_shard(tensor: Tensor) -> LocalShard:
    """This rank's rows of a parameter or buffer; a ValueError if it is sharded over another dimension than the first."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.detach(), 0, shape)
    if not all(isinstance(p, Replicate) or (is_shard(p) and p.dim == 0) for p in tensor.placements):  # type: ignore[attr-defined]
        raise ValueError(f"placements {tensor.placements}: only shards of whole rows are supported.")
    local = tensor.to_local()
    rows, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(local.shape) == tuple(rows), (local.shape, rows)
    # An empty shard starts after the last row.
    return LocalShard(local, offset[0] if shape else 0, shape)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and each buffer once, under its first name, in the same order on every rank."""
    yield from model.named_parameters()
    yield from model.named_buffers()
