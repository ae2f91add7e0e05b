"""The part of a parameter that this rank holds: ranges of its rows, and of its columns.

FSDP2 shards a parameter over its first dimension; shards may be uneven or empty. Of experts that are spread over ranks it
shards those of this rank, whose rows follow each other too. A matrix whose columns are split over other ranks is sharded over
its rows beside. Code that initialises, loads or reads shards goes through `local_shard` and never looks at placements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class LocalShard:
    """This rank's elements of a tensor; all of them if it is not sharded.

    Attributes:
        local: the elements, [rows, columns, …]; shares memory with the parameter.
        rows: indices in the first dimension of the whole. A tensor without dimensions is one row.
        columns: indices in the second dimension; all of them, or none for a tensor of fewer dimensions.
        shape: of the whole.
    """

    local: Tensor
    rows: range
    columns: range
    shape: tuple[int, ...]

    @property
    def has_whole_rows(self) -> bool:
        """True if this rank has all columns of its rows."""
        return len(self.shape) < 2 or len(self.columns) == self.shape[1]

    def numbers(self, start: int, stop: int) -> Tensor:
        """Indices in the flattened whole of the flattened elements from `start` to `stop`, int64 on their device."""
        own = torch.arange(start, stop, device=self.local.device)
        if self.has_whole_rows:
            return own + self.rows.start * math.prod(self.shape[1:])
        behind = math.prod(self.shape[2:])
        row, inside = own // (len(self.columns) * behind), own % (len(self.columns) * behind)
        return ((row + self.rows.start) * self.shape[1] + self.columns.start) * behind + inside

    @torch.no_grad()
    def copy_from(self, whole: Tensor) -> None:
        """Copy these elements out of a tensor of the whole shape, of any dtype and on any device."""
        self.local.copy_(self._columns_of(whole[self.rows.start : self.rows.stop]) if self.shape else whole)

    @torch.no_grad()
    def load(self, read: Callable[[Tensor, int], None]) -> None:
        """Fill these elements by `read(out, start)`, which fills `out` with whole rows from `start` on."""
        if not self.local.numel():
            return
        if self.has_whole_rows:
            read(self.local, self.rows.start)
            return
        rows = self.local.new_empty(len(self.rows), *self.shape[1:])
        read(rows, self.rows.start)
        self.local.copy_(self._columns_of(rows))

    def _columns_of(self, rows: Tensor) -> Tensor:
        return rows if self.has_whole_rows else rows[:, self.columns.start : self.columns.stop]


def is_shard(placement: Placement) -> bool:
    """True if the ranks of this dimension of a mesh hold different parts."""
    return type(placement) in (Shard, _StridedShard)


@torch.no_grad()
def local_shard(tensor: Tensor) -> LocalShard:
    """This rank's part of a parameter or buffer; a ValueError if it is sharded over a third dimension."""
    shape = tuple(tensor.shape)
    columns = range(shape[1] if len(shape) > 1 else 0)
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.detach(), range(shape[0] if shape else 1), columns, shape)
    if not all(isinstance(p, Replicate) or (is_shard(p) and p.dim < 2) for p in tensor.placements):  # type: ignore[attr-defined]
        raise ValueError(f"placements {tensor.placements}: only shards of rows and of columns are supported.")
    local = tensor.to_local()
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(local.shape) == tuple(sizes), (local.shape, sizes)
    # An empty shard starts after the last row.
    rows = range(offsets[0], offsets[0] + sizes[0]) if shape else range(1)
    if len(shape) > 1:
        columns = range(offsets[1], offsets[1] + sizes[1])
    return LocalShard(local, rows, columns, shape)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and each buffer once, under its first name, in the same order on every rank."""
    yield from model.named_parameters()
    yield from model.named_buffers()
