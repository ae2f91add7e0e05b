"""The elements of a parameter that each rank of a group holds, where no DTensor placement can express them.

A joined matrix [query rows | key rows | value rows] is split by ranges of each; key and value rows may be shared by several
ranks; a vocabulary is padded. A rank's tensor is plain: its ranges of each dimension, concatenated. FSDP2 then shards that
tensor like any other, and a `Part` is split at the borders of shards.

`declare` gives a parameter its `Block`. A module stores it separately from the parameter, since parameters are replaced: by
FSDP2, `to`, `to_empty`, `copy.deepcopy`, `load_state_dict(assign=True)`. `state_dict()` has a `BlockTensor` in the parameter's
place, which PyTorch's distributed checkpoints write and read by its ranges, under the parameter's name.

Not covered: PyTorch's functions that read only a rank's tensor, such as the raw states of `optimizer.state_dict()` and
`torch.nn.utils.clip_grad_norm_`. `octavo.save` and `octavo.clip_grad_norm_` know the ranges.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from octavo.errors import InputError

_BLOCKS = "octavo_blocks_of_parameters"
"""Attribute of a module: the blocks of its parameters, by name."""


class Box(NamedTuple):
    """A box of elements: first index of each dimension in the local and in the whole tensor, and sizes."""

    local: tuple[int, ...]
    whole: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def in_local(self) -> tuple[slice, ...]:
        """The box's elements of the local tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.local, self.sizes, strict=True))

    @property
    def in_whole(self) -> tuple[slice, ...]:
        """The box's elements of the whole tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.whole, self.sizes, strict=True))


@dataclass(frozen=True)
class Indices:
    """Indices of one dimension of the whole that a part holds: ranges, concatenated in the part's order.

    Attributes:
        ranges: none is empty, no two overlap.
        padding: trailing indices of the part without elements.
    """

    ranges: tuple[range, ...]
    padding: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.ranges)) + self.padding

    def runs(self) -> Iterator[tuple[int, range]]:
        """(first index in the part, range of the whole) of each range."""
        first = 0
        for each in self.ranges:
            yield first, each
            first += len(each)

    def cut(self, start: int, stop: int) -> Indices:
        """The indices from `start` to `stop` of the part."""
        ranges = [each[max(0, start - first) : max(0, stop - first)] for first, each in self.runs()]
        held = len(self) - self.padding
        return Indices(tuple(each for each in ranges if each), max(0, stop - max(start, held)))


def indices(*ranges: tuple[int, int], padding: int = 0) -> Indices:
    """Indices of ranges (start, stop); adjacent ones are merged, empty ones dropped."""
    joined: list[range] = []
    for start, stop in ranges:
        if joined and joined[-1].stop == start < stop:
            joined[-1] = range(joined[-1].start, stop)
        elif start != stop:
            joined.append(range(start, stop))
    return Indices(tuple(joined), padding)


@dataclass(frozen=True)
class Part:
    """The elements of a tensor that a rank holds: the product of its indices of each dimension.

    Attributes:
        shape: shape of the whole.
        indices: of each dimension, in order.
        counts: elements that this rank counts and writes, if other ranks hold some of its elements too; None: all.
    """

    shape: tuple[int, ...]
    indices: tuple[Indices, ...]
    counts: tuple[Box, ...] | None = None

    @classmethod
    def of_all(cls, shape: Sequence[int]) -> Part:
        """A whole tensor."""
        return cls(tuple(shape), tuple(indices((0, size)) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's tensor, with padding."""
        return tuple(map(len, self.indices))

    @property
    def is_padded(self) -> bool:
        """True if the rank's tensor has padding."""
        return any(each.padding for each in self.indices)

    @property
    def counts_all(self) -> bool:
        """True if this rank counts every entry of its tensor."""
        return self.counts is None and not self.is_padded

    @property
    def has_whole_rows(self) -> bool:
        """True if it has whole rows: all elements at its indices of the first dimension."""
        rest = zip(self.indices[1:], self.shape[1:], strict=True)
        return all(not each.padding and each.ranges == ((range(size),) if size else ()) for each, size in rest)

    @property
    def is_consecutive(self) -> bool:
        """True if its elements are contiguous in the flattened whole."""
        return self.has_whole_rows and all(len(each.ranges) <= 1 and not each.padding for each in self.indices[:1])

    @property
    def first(self) -> int:
        """Index in the flattened whole of the first element of a part whose elements are contiguous."""
        first = self.indices[0].ranges[0].start if self.indices and self.indices[0].ranges else 0
        return first * math.prod(self.shape[1:])

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All its elements, without padding."""
        return tuple(
            Box(tuple(first for first, _ in runs), tuple(r.start for _, r in runs), tuple(len(r) for _, r in runs))
            for runs in itertools.product(*(each.runs() for each in self.indices))
        )

    @property
    def counted(self) -> tuple[Box, ...]:
        """The elements that this rank counts in a norm, and writes to a checkpoint."""
        return self.boxes if self.counts is None else self.counts

    @property
    def chunks(self) -> tuple[Box, ...]:
        """All its elements, with counted elements in separate boxes, so that no two boxes begin at one place."""
        if self.counts is None:
            return self.boxes
        return (*self.counts, *(piece for box in self.boxes for piece in _left(box, self.counts)))

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> Part:
        """The part of a slab of the rank's tensor."""
        ends = [first + size for first, size in zip(offsets, sizes, strict=True)]
        cut = tuple(each.cut(*span) for each, *span in zip(self.indices, offsets, ends, strict=True))
        counts = self.counts
        if counts is not None:
            inside = (_within(box, offsets, ends) for box in counts)
            counts = tuple(box for box in inside if box is not None)
        return Part(self.shape, cut, counts)


def _within(box: Box, begins: Sequence[int], ends: Sequence[int]) -> Box | None:
    """The elements of a box in a slab of the local tensor, with offsets in the slab; None without any."""
    starts = tuple(max(first, begin) for first, begin in zip(box.local, begins, strict=True))
    stops = [min(first + size, end) for first, size, end in zip(box.local, box.sizes, ends, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return Box(
        tuple(start - begin for start, begin in zip(starts, begins, strict=True)),
        tuple(whole + start - first for whole, start, first in zip(box.whole, starts, box.local, strict=True)),
        tuple(stop - start for start, stop in zip(starts, stops, strict=True)),
    )


def _without(box: Box, other: Box) -> list[Box]:
    """The elements of a box outside another box."""
    left: list[Box] = []
    starts = [max(a, b) for a, b in zip(box.whole, other.whole, strict=True)]
    ends = zip(box.whole, box.sizes, other.whole, other.sizes, strict=True)
    stops = [min(a + n, b + m) for a, n, b, m in ends]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return [box]
    for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        end = box.whole[dim] + box.sizes[dim]
        left += [_span(box, dim, *span) for span in ((box.whole[dim], start), (stop, end)) if span[0] < span[1]]
        box = _span(box, dim, start, stop)
    return left


def _left(box: Box, others: Iterable[Box]) -> list[Box]:
    """The elements of a box outside all other boxes."""
    left = [box]
    for other in others:
        left = [piece for one in left for piece in _without(one, other)]
    return left


def _meet(one: Part, other: Part) -> bool:
    """True if two parts of a whole overlap."""
    for first, second in zip(one.indices, other.indices, strict=True):
        both = sorted([(each.start, each.stop) for each in (*first.ranges, *second.ranges)])
        if all(stop <= start for (_, stop), (start, _) in itertools.pairwise(both)):  # none overlaps within a part
            return False
    return True


def _span(box: Box, dim: int, start: int, stop: int) -> Box:
    """The elements of a box from `start` to `stop`, indices of the whole, in one dimension."""
    moved = start - box.whole[dim]
    local, whole, sizes = list(box.local), list(box.whole), list(box.sizes)
    local[dim], whole[dim], sizes[dim] = local[dim] + moved, start, stop - start
    return Box(tuple(local), tuple(whole), tuple(sizes))


@dataclass(frozen=True)
class Block:
    """The parts of a parameter that the ranks of a group hold; created by `share_out`.

    Attributes:
        parts: one per rank. An element in several parts is counted by the first.
        rank: this rank's number in the group.
        group: None without communication, as in a plan.
    """

    parts: tuple[Part, ...]
    rank: int
    group: dist.ProcessGroup | None = None

    @property
    def local(self) -> Part:
        """This rank's part."""
        return self.parts[self.rank]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.local.shape

    @property
    def is_whole(self) -> bool:
        """True if every rank holds all elements, as of a norm."""
        return all(part.indices == Part.of_all(part.shape).indices for part in self.parts)

    def joined_by(self) -> dist.ProcessGroup:
        """The group; an InputError without one."""
        if self.group is None:
            raise InputError(f"a tensor of {list(self.shape)} has parts on {len(self.parts)} ranks without a process group.")
        return self.group

    def __deepcopy__(self, memo: Any) -> Block:
        return self  # a process group has no copy


def share_out(
    shape: Sequence[int], held: Sequence[Sequence[Indices]], group: dist.ProcessGroup | None = None, rank: int | None = None
) -> Block:
    """A block from the ranges that each rank of a group holds. Every rank passes all ranges, so that no rank is queried.

    Args:
        shape: of the whole.
        held: for each rank, its indices of each dimension.
        group: the ranks; None needs `rank`.
        rank: this rank's number in the group; by default the group's.

    Raises:
        InputError: ranges that overlap within a rank or leave the shape, or elements that no rank holds.
    """
    shape = tuple(shape)
    rank = dist.get_rank(group) if rank is None else rank
    if group is not None and dist.get_world_size(group) != len(held):
        raise InputError(f"a block of {len(held)} ranks in a group of {dist.get_world_size(group)}: give each rank's ranges.")
    parts: list[Part] = []
    before: list[Box] = []  # counted by the ranks before, none twice
    for number, each in enumerate(held):
        part = Part(shape, tuple(each))
        if fault := _fault(part):
            raise InputError(f"rank {number} of {len(held)}: {fault}")
        counted, all_boxes = list(part.boxes), list(part.boxes)
        for earlier in parts:
            if _meet(part, earlier):  # seldom, and boxes may be many
                counted = [piece for box in counted for piece in _left(box, earlier.boxes)]
        parts.append(part if counted == all_boxes else replace(part, counts=tuple(counted)))
        before += counted
    if (there := sum(math.prod(box.sizes) for box in before)) < math.prod(shape):
        left = _left(Box(shape, (0,) * len(shape), shape), before)
        text = ", ".join(f"{first}:{first + size}" for first, size in zip(left[0].whole, left[0].sizes, strict=True))
        raise InputError(f"no rank holds [{text}] of {list(shape)}: of {math.prod(shape)} elements {there} are held.")
    return Block(tuple(parts), rank, group)


def _fault(part: Part) -> str | None:
    """The first fault of a part's ranges; None if they are valid."""
    if len(part.indices) != len(part.shape):
        return f"indices of {len(part.indices)} dimensions for the shape {list(part.shape)}."
    for dim, (each, size) in enumerate(zip(part.indices, part.shape, strict=True)):
        if each.padding < 0:
            return f"padding {each.padding} in dimension {dim} is below 0."
        for one in each.ranges:
            if one.step != 1 or not 0 <= one.start < one.stop <= size:
                return f"{one} in dimension {dim} is not a range of the {size} indices of shape {list(part.shape)}."
        for one, other in itertools.pairwise(sorted(each.ranges, key=lambda run: run.start)):
            if one.stop > other.start:
                return f"{one} and {other} in dimension {dim} overlap."
    return None


def declare(module: nn.Module, name: str, block: Block) -> None:
    """Declare a parameter of a module, plain or sharded by FSDP2, as this rank's part of a block.

    Raises:
        InputError: the parameter has another shape.
    """
    parameter = module.get_parameter(name)
    if tuple(parameter.shape) != block.local.local_shape:
        raise InputError(_other_shape(f"{type(module).__name__}.{name}", tuple(parameter.shape), block))
    if _BLOCKS not in vars(module):
        vars(module)[_BLOCKS] = {}
        module.register_state_dict_post_hook(_give)
        module.register_load_state_dict_pre_hook(_take)
    vars(module)[_BLOCKS][name] = block


def declared(module: nn.Module) -> Mapping[str, Block]:
    """The blocks of a module's direct parameters, by name."""
    blocks: dict[str, Block] = vars(module).get(_BLOCKS, {})
    return blocks


def parameters_of(model: nn.Module) -> dict[Tensor, Block | None]:
    """The parameters of a model in the order of `model.parameters()`, each with its block.

    Raises:
        InputError: a parameter of two modules has two blocks.
    """
    block_of: dict[Tensor, Block | None] = {}
    for module in model.modules():
        blocks = vars(module).get(_BLOCKS)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            known = block_of.setdefault(parameter, None)
            block = None if blocks is None else blocks.get(name)
            if block is None or block is known:
                continue
            if known is not None:
                raise InputError(f"{name} of {type(module).__name__} is tied, with two blocks: declare one for both modules.")
            block_of[parameter] = block
    return block_of


def shape_of(tensor: Tensor, blocks: Mapping[Tensor, Block | None]) -> tuple[int, ...]:
    """The shape of the whole of a parameter or buffer of the model with these blocks."""
    block = blocks.get(tensor)
    return tuple(tensor.shape) if block is None else block.shape


@contextlib.contextmanager
def undeclared(places: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
    """Inside, these parameters of modules have no declared block."""
    there = [(vars(module)[_BLOCKS], name) for module, name in places if name in declared(module)]
    removed = [(blocks, name, blocks.pop(name)) for blocks, name in there]
    try:
        yield
    finally:
        for blocks, name, block in removed:
            blocks[name] = block


def with_block(tensor: Tensor, block: Block | None) -> Tensor:
    """A parameter, its gradient or an optimizer state as a `BlockTensor`; unchanged without a block."""
    return tensor if block is None else BlockTensor(tensor.detach(), block)


def as_held(tensor: Tensor) -> Tensor:
    """The local tensor, plain or a DTensor: the inverse of `with_block`."""
    return tensor.held if isinstance(tensor, BlockTensor) else tensor


def has_part(tensor: object) -> TypeGuard[Tensor]:
    """True for a tensor of which each rank holds a part."""
    return isinstance(tensor, DTensor | BlockTensor)


def part_of(tensor: Tensor) -> Part:
    """The elements that this rank holds of a tensor: plain, a DTensor, or one of a block."""
    held = as_held(tensor)
    part = tensor.block.local if isinstance(tensor, BlockTensor) else Part.of_all(tensor.shape)
    if not isinstance(held, DTensor):
        return part
    (chunk,) = held.__create_chunk_list__()
    return part.cut(chunk.offsets, chunk.sizes)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's local tensor; shares memory with `tensor`."""
    held = as_held(tensor)
    return held.to_local() if isinstance(held, DTensor) else held


def counted_of(tensor: Tensor) -> list[Tensor]:
    """The local elements that this rank counts, so that the ranks of a block count each element once."""
    local, part = local_of(tensor), part_of(tensor)
    return [local] if part.counts_all else [local[box.in_local] for box in part.counted]


def _other_shape(name: str, shape: tuple[int, ...], block: Block) -> str:
    return f"{name} is {list(shape)}, but this rank's ranges of {list(block.shape)} are {list(block.local.local_shape)}."


class BlockTensor(Tensor):
    """A tensor with the shape of the whole, of which this rank holds a block's part; supports what a checkpoint needs.

    Copies, `empty_like`, `zeros_like` and conversions of dtype and device have the same block; `copy_` accepts a tensor of the
    same block or the whole. Any other operation raises an InputError.

    Attributes:
        held: the rank's tensor, plain or FSDP2's DTensor.
        block: its place in the whole.
    """

    held: Tensor
    block: Block

    @staticmethod
    def __new__(cls: type[BlockTensor], held: Tensor, block: Block) -> BlockTensor:
        """A tensor of the whole's shape. Raises InputError if `held` has another shape than the rank's part."""
        if tuple(held.shape) != block.local.local_shape:
            raise InputError(_other_shape("a tensor", tuple(held.shape), block))
        new: BlockTensor = Tensor._make_wrapper_subclass(cls, block.shape, dtype=held.dtype, device=held.device)
        new.held, new.block = held, block
        return new

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BlockTensor(shape={list(self.shape)}, held={list(self.held.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Elementwise operations, on the rank's tensor."""
        first = args[0]
        if func is torch.ops.aten.copy_.default and isinstance(first, BlockTensor):
            first._fill(args[1])
            return first
        if func not in _OF_ELEMENTS or not isinstance(first, BlockTensor):
            raise InputError(
                f"{func} of a tensor with a part on each rank: octavo.export writes whole weights, octavo.save checkpoints."
            )
        return BlockTensor(func(first.held, *args[1:], **(kwargs or {})), first.block)

    def _fill(self, source: Tensor) -> None:
        if isinstance(source, BlockTensor):
            if source.block is not self.block and source.block.local != self.block.local:
                raise InputError("copy_ of a tensor of another block: gather it first, by octavo.export or octavo.save.")
            self.held.copy_(source.held)
        else:
            fill(self, source)

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise InputError(
            f"a tensor of {list(self.shape)} in a file would be only this rank's part: octavo.save(path, model) writes a "
            "checkpoint, octavo.export(model, folder) whole weights, each called on every rank."
        )

    storage = __reduce_ex__  # called by safetensors

    def full_tensor(self) -> NoReturn:
        """Refused: these parts have no mesh from which a DTensor could gather the whole."""
        raise InputError(
            f"full_tensor() of a tensor of {list(self.shape)} whose ranges are on several ranks: octavo.to_huggingface(model) "
            "has whole weights, and octavo.export(model, folder) writes them, each called on every rank."
        )

    # The protocol of PyTorch's planners for tensors of several chunks.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """The chunks that this rank writes: the elements that it counts."""
        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The chunks that this rank reads."""
        return [ChunkStorageMetadata(torch.Size(box.whole), torch.Size(box.sizes)) for box in part_of(self).chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The elements of a chunk, to write or to read."""
        (box,) = (box for box in part_of(self).chunks if index.offset is not None and tuple(index.offset) == box.whole)
        return local_of(self)[box.in_local]


_OF_ELEMENTS = frozenset(
    {
        torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default,
        torch.ops.aten.empty_like.default, torch.ops.aten.zeros_like.default, torch.ops.aten.ones_like.default,
        torch.ops.aten._to_copy.default, torch.ops.aten.zero_.default,
    }
)  # fmt: skip


def write_items(name: str, tensor: Tensor) -> list[WriteItem]:
    """DCP's items that this rank writes of a tensor with parts."""
    properties = TensorProperties.create_from_tensor(local_of(tensor))
    items = []
    for box in part_of(tensor).counted:
        chunk = ChunkStorageMetadata(torch.Size(box.whole), torch.Size(box.sizes))
        data = TensorWriteData(chunk, properties, torch.Size(tensor.shape))
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


@torch.no_grad()
def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part from the whole, which may have any dtype and device; padding becomes zero."""
    local, part = local_of(tensor).detach(), part_of(tensor)
    if tuple(whole.shape) != part.shape:
        raise InputError(f"a tensor of {list(whole.shape)} is not the whole of a tensor of {list(part.shape)}.")
    if part.is_padded:
        local.zero_()
    for box in part.boxes:
        local[box.in_local].copy_(whole[box.in_whole])


def _give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Hook: `state_dict()` returns tensors of type `BlockTensor`; with `keep_vars` they stay the parameters."""
    for name, block in declared(module).items():
        value = state.get(f"{prefix}{name}")
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter | BlockTensor):
            state[f"{prefix}{name}"] = BlockTensor(value, block)


def _take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook: `load_state_dict` accepts tensors of the same block, and whole ones."""
    for name, block in declared(module).items():
        key, parameter = f"{prefix}{name}", module._parameters.get(name)
        value = state.get(key)
        if not isinstance(value, Tensor) or parameter is None:
            continue
        if isinstance(value, BlockTensor) and value.block.local == block.local:
            state[key] = value.held
            continue
        if isinstance(value, DTensor) and tuple(value.shape) == block.shape:
            value = value.full_tensor()  # from `set_model_state_dict(full_state_dict=True)`
        if has_part(value) or tuple(value.shape) != block.shape:
            raise InputError(
                f"load_state_dict: {key} is {list(value.shape)}, and this rank needs its ranges of {list(block.shape)}: "
                "give state_dict() of a model with the same ranges, or whole tensors; octavo.load "
                "reads checkpoints of other layouts."
            )
        part = BlockTensor(
            torch.empty_like(parameter, dtype=value.dtype, device=value.device if parameter.is_meta else None), block
        )
        fill(part, value)
        state[key] = part.held
