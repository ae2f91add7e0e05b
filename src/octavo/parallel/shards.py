"""The part of a parameter that this rank holds, for any sharding: used to initialise, load or write parts.

FSDP2 shards a parameter over its first dimension; shards may be uneven or empty. If experts are distributed over ranks, it
shards this rank's experts. A parameter with a declared block (`octavo.collectives.blocks`) is several ranges of the whole
already, and FSDP2 shards these ranges. `named_tensors` gives the tensors of a model by name, with their blocks, and
`local_shard` the part. Placements are read here and in `octavo.collectives.whole`, which gathers whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from octavo.collectives.blocks import (
    Block,
    BlockTensor,
    Part,
    as_held,
    counted_of,
    has_part,
    local_of,
    parameters_of,
    part_of,
    with_block,
)
from octavo.errors import InputError


@dataclass(frozen=True)
class LocalShard:
    """This rank's elements of a tensor; all of them if it is not sharded.

    Attributes:
        local: the elements, with padding; shares memory with the parameter.
        part: their places in the whole.
    """

    local: Tensor
    part: Part

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.part.shape

    def numbers(self, start: int, stop: int) -> Tensor:
        """Indices in the flattened whole of the flattened elements from `start` to `stop`, int64 on their device.

        -1 for padding.
        """
        local = torch.arange(start, stop, device=self.local.device)
        if self.part.is_consecutive:
            return local + self.part.first
        numbers, padding = torch.zeros_like(local), torch.zeros_like(local, dtype=torch.bool)
        of_local, of_whole = math.prod(self.local.shape), math.prod(self.shape)
        for indices, size in zip(self.part.indices, self.shape, strict=True):
            of_local, of_whole = of_local // max(1, len(indices)), of_whole // max(1, size)
            places = [torch.arange(run.start, run.stop, device=local.device) for run in indices.ranges]
            place = torch.cat([*places, local.new_full((indices.padding,), -1)])[local // of_local % len(indices)]
            padding |= place < 0
            numbers += place * of_whole
        return numbers.masked_fill_(padding, -1)

    @torch.no_grad()
    def copy_from(self, whole: Tensor) -> None:
        """Copy these elements out of a tensor of the whole shape, of any dtype and on any device; padding becomes zero."""
        if self.part.is_padded:
            self.local.zero_()
        for box in self.part.boxes:
            self.local[box.in_local].copy_(whole[box.in_whole])

    @torch.no_grad()
    def load(self, read: Callable[[Tensor, int], None]) -> None:
        """Fill these elements by `read(out, start)`, which fills `out` with whole rows from `start` on; padding with zeros."""
        if not self.local.numel():
            return
        if self.part.is_consecutive:
            read(self.local, self.part.indices[0].ranges[0].start if self.shape else 0)
            return
        if self.part.is_padded:
            self.local.zero_()
        for first, run in self.part.indices[0].runs():
            piece = self.local[first : first + len(run)]
            if self.part.has_whole_rows:
                read(piece, run.start)
                continue
            rows = piece.new_empty(len(run), *self.shape[1:])
            read(rows, run.start)
            part = self.part.cut((first, *(0,) * (piece.dim() - 1)), piece.shape)
            for box in part.boxes:
                piece[box.in_local].copy_(rows[(slice(None), *box.in_whole[1:])])

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Fill padding with zeros."""
        for dim, indices in enumerate(self.part.indices):
            if indices.padding:
                self.local.narrow(dim, len(indices) - indices.padding, indices.padding).zero_()


def _is_shard(placement: Placement) -> bool:
    """True if the ranks of this dimension of a mesh hold different parts."""
    return type(placement) in (Shard, _StridedShard)


@torch.no_grad()
def local_shard(tensor: Tensor) -> LocalShard:
    """This rank's part of a tensor of `named_tensors`, or of any without a block."""
    local, part = local_of(tensor).detach(), part_of(tensor)
    if not local.numel():  # FSDP2 shards a tensor without elements as one without rows
        local = local.new_empty(part.local_shape)
    assert tuple(local.shape) == part.local_shape, (local.shape, part.local_shape)
    return LocalShard(local, part)


def spread_rows(whole: Tensor, ranks: DeviceMesh) -> DTensor:
    """Equal numbers of rows of `whole` [N, …] on each rank of a mesh of one dimension, [N / n, …]; a copy, also on meta."""
    local = whole.chunk(ranks.size())[ranks.get_local_rank()].clone()
    return DTensor.from_local(local, ranks, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor sharded like another one, with `local` as this rank's elements."""
    held = as_held(tensor)
    if isinstance(held, DTensor):
        local = DTensor.from_local(
            local, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
        )
    return with_block(local, tensor.block if isinstance(tensor, BlockTensor) else None)


def have_same_parts(one: Tensor, other: Tensor) -> bool:
    """True if each rank holds the same elements of both."""
    if isinstance(one, BlockTensor) or isinstance(other, BlockTensor):
        blocks = isinstance(one, BlockTensor) and isinstance(other, BlockTensor) and one.block.parts == other.block.parts
        return blocks and have_same_parts(as_held(one), as_held(other))
    if not (isinstance(one, DTensor) and isinstance(other, DTensor)):
        return not has_part(one) and not has_part(other) and one.shape == other.shape
    return one.device_mesh == other.device_mesh and one.placements == other.placements and one.shape == other.shape


def groups_of(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The nested groups of ranks that hold different parts of a tensor; none if it is whole."""
    held = as_held(tensor)
    groups = _groups(held.device_mesh, held.placements) if isinstance(held, DTensor) else ()
    if not isinstance(tensor, BlockTensor) or len(tensor.block.parts) == 1:
        return groups
    return (*groups, tensor.block.joined_by())


def _groups(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[dist.ProcessGroup, ...]:
    """`groups_of` a DTensor with this mesh and these placements."""
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if _is_shard(placement))


@torch.no_grad()
def gradient_norm(parameters: Mapping[Tensor, Block | None]) -> Tensor:
    """Norm of all gradients, counting each element once: float32 [], summed in float32 (float64).

    parameters: with their blocks. Collective where they have parts.
    """
    by_placement: dict[Any, list[Tensor]] = {}
    of_blocks: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for p, block in parameters.items():
        if p.grad is None:
            continue
        if block is not None:
            gradient = with_block(p.grad, block)
            nothing = local_of(gradient).new_zeros(())  # a rank without elements takes part in the sums too
            of_blocks.setdefault(groups_of(gradient), [nothing]).extend(counted_of(gradient))
        elif isinstance(p.grad, DTensor):
            by_placement.setdefault((p.grad.device_mesh, p.grad.placements), []).append(p.grad.to_local())
        else:
            by_placement.setdefault(None, []).append(p.grad)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for placement, gradients in by_placement.items():
        by_groups.setdefault(() if placement is None else _groups(*placement), []).extend(gradients)
    for groups, gradients in of_blocks.items():
        by_groups.setdefault(groups, []).extend(gradients)
    parts = []
    wide = torch.float64 if torch.float64 in {p.dtype for p in parameters} else torch.float32
    for groups, gradients in by_groups.items():
        part = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, wide)))
        if groups:
            part = part.square()
            for group in groups:
                dist.all_reduce(part, group=group)
            part = part.sqrt()
        parts.append(part)
    if not parts:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return torch.linalg.vector_norm(torch.stack(parts)) if len(parts) > 1 else parts[0]


def replicas_of(tensor: Tensor) -> list[list[int]]:
    """The ranks of each replica of a DTensor, in the order of its shards.

    Raises:
        InputError: the tensor is part of a block, so the meshes of the other ranks are not known.
    """
    if not isinstance(tensor, DTensor):
        raise InputError(
            f"a tensor of {list(tensor.shape)} has parts on ranks of several meshes, and process_group has only some of them: "
            "save and load over all ranks (process_group=None)."
        )
    ranks, sharded = tensor.device_mesh.mesh, [_is_shard(placement) for placement in tensor.placements]
    order = sorted(range(ranks.ndim), key=lambda dim: sharded[dim])  # dimensions of replicas first
    inside = math.prod(size for size, shards in zip(ranks.shape, sharded, strict=True) if shards)
    replicas: list[list[int]] = ranks.permute(order).reshape(-1, inside).tolist()
    return replicas


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and each buffer once, under its first name, in the same order on every rank.

    Parameters of which a rank has a block are of type `BlockTensor`.
    """
    blocks = parameters_of(model)
    for name, parameter in model.named_parameters():
        yield name, with_block(parameter, blocks[parameter])
    yield from model.named_buffers()
