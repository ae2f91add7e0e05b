"""Tensors in the files of a checkpoint: their headers, checked against each other and the manifest, and reads of slices.

The files are safetensors in the layout of DCP's Hugging Face storage, and DCP's planner finds the slices of a shard. Its reader
is not used: it opens files by path, and accepts pieces that overlap or leave a gap.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from octavo.checkpoint.manifest import Count, Manifest, OpenCheckpoint, first_fault, parse_json
from octavo.checkpoint.opened import Damaged, OpenFolder
from octavo.checkpoint.shard_io import DTYPES, Layout
from octavo.collectives.blocks import BlockTensor
from octavo.parallel.shards import local_shard
from octavo.stored_names import record_name

_LARGEST_HEADER = 100_000_000  # bytes: the limit of safetensors
_LEAST_GAP = 4096
"""A gap of at most this many bytes between two reads is read too: a page, which the system would read anyway."""
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    dtype: str
    shape: list[Count]
    data_offsets: Annotated[list[Count], Field(min_length=2, max_length=2)]


_ENTRIES = TypeAdapter(dict[str, _Entry])
_METADATA = TypeAdapter(dict[str, str])
_OFFSETS = TypeAdapter(dict[str, dict[str, list[Count]]])


class Piece(NamedTuple):
    """A part of a tensor in a file: dtype, shape, offsets in the tensor, and its first byte in the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int


Pieces = dict[str, list[Piece]]
"""The pieces of each tensor."""


@dataclass(frozen=True)
class StoredTensors:
    """The tensors in the shards of an open folder; pieces: from `read_headers`."""

    opened: OpenFolder
    pieces: Pieces

    @property
    def folder(self) -> Path:
        """The folder's path."""
        return self.opened.path

    @property
    def layout(self) -> Layout:
        """Names, global shapes and dtypes."""
        return {name: (_global_shape(pieces), pieces[0].dtype) for name, pieces in self.pieces.items()}

    def renamed(self, names: Mapping[str, str]) -> StoredTensors:
        """The same tensors under a model's names; names: of parameters and modules in the file → in the model."""

        def of(name: str) -> str:
            section, _, rest = name.partition(".")
            if section == "fp8":
                return f"fp8.{record_name(rest, names)}"
            key, _, owner = rest.partition(".") if section == "optimizer" else ("", "", rest)
            return ".".join(part for part in (section, key, names.get(owner, owner)) if part)

        return StoredTensors(self.opened, {of(name): pieces for name, pieces in self.pieces.items()}) if names else self

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill the tensors of `into` in place, by name; for a DTensor only this rank's slices. Not collective."""
        metadata = Metadata({name: self._metadata(name) for name in into})
        places = {(name, piece.offsets): piece for name in into for piece in self.pieces[name]}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), metadata, is_coordinator=False)
        for tensor in into.values():
            if isinstance(tensor, BlockTensor):
                local_shard(tensor).clear_padding()
        for item in planner.create_local_plan().items:
            index: MetadataIndex = item.storage_index
            part = self._slice(places[index.fqn, tuple(index.offset or ())], item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)

    def _metadata(self, name: str) -> TensorStorageMetadata:
        pieces = self.pieces[name]
        chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in pieces]
        return TensorStorageMetadata(TensorProperties(dtype=pieces[0].dtype), torch.Size(_global_shape(pieces)), chunks)

    def _slice(self, piece: Piece, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """A slice of a piece. Columns are read as runs, including small gaps between them."""
        shape, size = list(piece.shape), piece.dtype.itemsize
        strides = [size * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # in bytes
        # A run covers the trailing dimensions that are read whole.
        first = max((dim for dim, length in enumerate(lengths) if length != shape[dim]), default=0)
        while first and (shape[first] - lengths[first]) * strides[first] < _LEAST_GAP:
            first -= 1
        read = [(offset, offset + length) for offset, length in zip(offsets[: first + 1], lengths[: first + 1], strict=True)]
        read += [(0, length) for length in shape[first + 1 :]]
        sizes = [stop - start for start, stop in read]
        run = math.prod(sizes[first:]) * size
        begin = piece.start + (read[first][0] * strides[first] if shape else 0)
        spans = zip(read[:first], strides[:first], strict=True)
        outer = itertools.product(*(range(start * step, stop * step, step) for (start, stop), step in spans))
        block = torch.empty(math.prod(sizes) * size, dtype=torch.uint8, device="cpu")
        self.opened.read_runs(piece.file, block.numpy().data, run, (begin + sum(places) for places in outer))
        part = block.view(piece.dtype).view(sizes)
        inside = zip(read, offsets, lengths, strict=True)
        return part[tuple(slice(offset - start, offset - start + length) for (start, _), offset, length in inside)]


def open_tensors(checkpoint: OpenCheckpoint) -> StoredTensors:
    """The tensors of an open checkpoint; reads only the headers.

    Raises:
        Damaged: a header contradicts itself, another one, or the manifest.
    """
    pieces = read_headers(checkpoint.folder, checkpoint.manifest.shards)
    stored = StoredTensors(checkpoint.folder, pieces)
    if fault := _difference(stored.layout, checkpoint.manifest) or _disorder(pieces, checkpoint.manifest):
        raise Damaged(f"the tensors of {checkpoint.path} differ from its manifest: {fault}")
    return stored


def read_headers(folder: OpenFolder, files: Sequence[str]) -> Pieces:
    """The pieces of all tensors in `files`.

    Raises:
        Damaged: a header contradicts itself or another one, or the pieces of a tensor overlap or leave a gap.
    """
    by_name: Pieces = {}
    for file in files:
        for name, piece in _read_header(folder, file).items():
            by_name.setdefault(name, []).append(piece)
    for name, pieces in by_name.items():
        if len({(piece.dtype, len(piece.shape)) for piece in pieces}) > 1:
            raise Damaged(f"the pieces of {name} in {folder.path} differ in dtype or in number of dimensions")
        boxes = [tuple(zip(piece.offsets, piece.shape, strict=True)) for piece in pieces]
        if not _fills(boxes, _global_shape(pieces)):
            raise Damaged(f"the pieces of {name} in {folder.path} overlap or leave a gap")
    return by_name


def _read_header(folder: OpenFolder, file: str) -> dict[str, Piece]:
    path, size = folder.path / file, folder.stamp(file).size
    start = memoryview(bytearray(8))
    folder.read_into(file, start, 0)
    length = int.from_bytes(start, "little")
    if length > min(size - 8, _LARGEST_HEADER):
        raise Damaged(f"{path} has a header of {length:,} bytes in a file of {size:,}")
    text = memoryview(bytearray(length))
    folder.read_into(file, text, 8)
    try:
        raw = parse_json(bytes(text))
        metadata = _METADATA.validate_python(raw.pop("__metadata__", {}))
        entries = _ENTRIES.validate_python(raw)
        sharding = metadata.get("DCP_SHARDING_INFO")
        zeros = {name: {"saved_offsets": [0] * len(entry.shape)} for name, entry in entries.items()}
        saved = zeros if sharding is None else _OFFSETS.validate_python(parse_json(sharding.encode()))
        offsets = {name: tuple(saved[name]["saved_offsets"]) for name in entries}
    except ValidationError as error:
        raise Damaged(f"{path} has a wrong header: {first_fault(error)}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{path} has a wrong header ({error})") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if fault := _fault(entry, offsets[name], end):
            raise Damaged(f"{path} has a wrong header: {name}: {fault}")
        end = entry.data_offsets[1]
    if end != size - 8 - length or saved.keys() != entries.keys():
        raise Damaged(f"{path} has a wrong header: it lists {end:,} bytes of tensors, but {size - 8 - length:,} are there")
    return {
        name: Piece(file, _BY_NAME[entry.dtype], tuple(entry.shape), offsets[name], 8 + length + entry.data_offsets[0])
        for name, entry in entries.items()
    }


def _fault(entry: _Entry, offsets: tuple[int, ...], end: int) -> str | None:
    """A contradiction in a tensor's entry, whose bytes should begin at `end`; None without one."""
    if entry.dtype not in _BY_NAME:
        return f"unknown dtype {entry.dtype!r}"
    if len(offsets) != len(entry.shape):
        return f"offsets {list(offsets)} of shape {entry.shape}"
    if any(offset + size >= 2**63 for offset, size in zip(offsets, entry.shape, strict=True)):
        return f"offsets {list(offsets)} are beyond any tensor"
    begin, stop = entry.data_offsets
    if begin != end:
        return f"its bytes begin at {begin:,}, but those before it end at {end:,}"
    needed = math.prod(entry.shape) * _BY_NAME[entry.dtype].itemsize
    if stop - begin != needed:
        return f"{entry.dtype} {entry.shape} needs {needed:,} bytes, but its byte range has {stop - begin:,}"
    return None


def _global_shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    ends = [[offset + size for offset, size in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def _fills(boxes: Sequence[tuple[tuple[int, int], ...]], shape: tuple[int, ...]) -> bool:
    """True if boxes, with (offset, size) per dimension, fill `shape` without gap or overlap."""
    if not shape or not boxes:
        return len(boxes) == 1
    slabs: dict[tuple[int, int], list[tuple[tuple[int, int], ...]]] = {}
    for first, *rest in boxes:
        slabs.setdefault(first, []).append(tuple(rest))
    spans = [(begin, begin + size) for begin, size in sorted(slabs)]
    if spans[0][0] != 0 or max(stop for _, stop in spans) != shape[0]:
        return False
    if any(stop != following for (_, stop), (following, _) in pairwise(spans)):  # boxes of blocks may begin and end anywhere
        if any(begin == stop for begin, stop in spans):
            return False
        spans = list(pairwise(sorted({edge for span in spans for edge in span})))
        within = [
            [rest for (begin, size), slab in slabs.items() if begin <= start < stop <= begin + size for rest in slab]
            for start, stop in spans
        ]
    else:
        within = list(slabs.values())
    return all(map(_fills, within, [shape[1:]] * len(within)))


def _difference(layout: Layout, manifest: Manifest) -> str | None:
    """The first difference between tensors and manifest; None if they agree."""
    ranks = {int(rank) for name in layout if name.startswith("random.") and (rank := name.split(".")[1]).isdecimal()}
    if ranks != manifest.random_ranks | {0}:
        return f"random states of ranks {sorted(ranks)}, but of {sorted(manifest.random_ranks | {0})} in its other files"
    if manifest.tensors is None:
        return None
    there = {name: (DTYPES[dtype], list(shape)) for name, (shape, dtype) in layout.items()}
    named: dict[str, Any] = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    for name in sorted(there.keys() | named.keys()):
        if there.get(name) != named.get(name):
            return f"{name} is {_text(there.get(name))}, not {_text(named.get(name))}"
    return None


def _disorder(pieces: Pieces, manifest: Manifest) -> str | None:
    """The first tensor out of the order of `shard_io.write_shard`; None without one, or if an older version wrote them."""
    if manifest.tensors is None:
        return None
    placed = [(piece.file, -piece.dtype.itemsize, name, piece.start) for name, parts in pieces.items() for piece in parts]
    for before, after in pairwise(sorted(placed)):
        if before[0] == after[0] and before[-1] > after[-1]:
            return f"the bytes of {before[2]} and {after[2]} in {after[0]} have changed places"
    return None


def _text(entry: Any) -> str:
    return "absent" if entry is None else json.dumps(entry)
