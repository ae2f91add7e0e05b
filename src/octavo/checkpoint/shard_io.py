"""Tensors on disk: DCP's planner over safetensors, with no pickle in either direction.

Each rank writes one file with the parts that it holds; a part that several ranks hold is written by one of them, as DCP's
planner shares them out. The files are those of DCP's Hugging Face storage, whose reader puts any layout into any other. They
are written here rather than by its writer, which makes a file in memory first: a tensor at a time costs no second copy of the
state. Names, shapes and dtypes are compared before anything is loaded, so that nothing is touched unless all fit.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from octavo.checkpoint.failpoints import failpoint
from octavo.errors import InputError, OctavoError
from octavo.parallel.coordination import Ranks
from octavo.storage import free_bytes

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Global shape and dtype of each tensor, by name."""

FileEntries = dict[str, dict[str, Any]]
"""Size and sha256 of files, by name: their entries in a manifest."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_HEADER_BYTES = 512  # a tensor's entry in a safetensors header, names and offsets included, generously

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
"""What safetensors calls each dtype."""


@dataclass(frozen=True)
class Part:
    """What this rank holds of one tensor: its place in the whole, and its data."""

    item: WriteItem
    data: torch.Tensor

    @property
    def name(self) -> str:
        """Of the whole tensor."""
        return self.item.index.fqn


def parts_of(tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    """This rank's part of each tensor (plain or DTensor): not copied, and none where its shard of a DTensor is empty.

    Raises:
        InputError: a dtype that safetensors does not have.
    """
    parts = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise InputError(f"{name} is of {tensor.dtype}, which safetensors does not hold: a checkpoint cannot keep it.")
        if isinstance(tensor, DTensor):
            place: ChunkStorageMetadata = tensor.__create_chunk_list__()[0]
            data, kind = tensor.to_local().detach(), WriteItemType.SHARD
            if not data.numel() and tensor.numel():
                continue
        else:
            place = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.size())
            data, kind = tensor.detach(), WriteItemType.TENSOR
        written = TensorWriteData(chunk=place, properties=TensorProperties(dtype=tensor.dtype), size=tensor.size())
        parts.append(Part(WriteItem(MetadataIndex(name, place.offsets), kind, tensor_data=written), data))
    return parts


def share_out(parts: Sequence[Part], ranks: Ranks) -> list[Part]:
    """Those of this rank's parts that it is to write, so that together the ranks write each part once. Collective."""
    if ranks.size == 1:
        return list(parts)
    plans = ranks.gather(SavePlan([part.item for part in parts]))
    shared: list[list[WriteItem]] = []

    def plan() -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({}, is_coordinator=True)
        shared.extend(each.items for each in planner.create_global_plan(plans)[0])

    ranks.on_rank_0(plan)
    mine = {item.index for item in ranks.scatter(shared)}
    return [part for part in parts if part.item.index in mine]


def write_shard(folder: Path, parts: Sequence[Part], rank: int = 0, step: int | None = None) -> FileEntries:
    """Write this rank's parts as one safetensors file, synced; nothing where there are none. Returns its manifest entry."""
    if not parts:
        return {}
    # As safetensors itself lays them out: each begins at a multiple of its element's size.
    ordered = sorted(parts, key=lambda part: (-part.data.element_size(), part.name))
    offsets = {part.name: {"saved_offsets": list(part.item.index.offset or ())} for part in ordered}
    header: dict[str, Any] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}}
    end = 0
    for part in ordered:
        begin, end = end, end + part.data.nbytes
        entry = {"dtype": _DTYPES[part.data.dtype], "shape": list(part.data.shape), "data_offsets": [begin, end]}
        header[part.name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    digest, middle = hashlib.sha256(), 1 + len(ordered) // 2
    # Summing and writing take about as long as each other and both leave Python alone, so they run side by side.
    with (folder / name).open("xb") as file, ThreadPoolExecutor(1) as summing:
        pieces = itertools.chain([memoryview(len(text).to_bytes(8, "little") + text)], (raw(part.data) for part in ordered))
        for number, piece in enumerate(pieces):
            summed = summing.submit(digest.update, piece)
            half = len(piece) // 2
            file.write(piece[:half])
            if number == middle:
                file.flush()
                failpoint("within-shard", step)
            file.write(piece[half:])
            summed.result()
        file.flush()
        os.fsync(file.fileno())  # by the host that wrote it: another one's fsync does not reach this one's cache
        size = file.tell()
    return {name: {"size": size, "sha256": digest.hexdigest()}}


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row after row, on the CPU."""
    whole = tensor.detach().cpu().contiguous()  # also a single number whose stride is not 1, which is no view of bytes
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def bytes_needed(parts: Sequence[Part]) -> int:
    """What `write_shard` will take on disk, never less."""
    return sum(part.data.nbytes for part in parts) + _HEADER_BYTES * (len(parts) + 1)


@dataclass(frozen=True)
class Stored:
    """The tensors in the shards of a folder; `open_shards` makes it."""

    folder: Path
    metadata: Metadata

    @property
    def layout(self) -> Layout:
        """Names, global shapes and dtypes."""
        entries = cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)
        return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill the tensors of `into` in place, each with the one of its name: of a DTensor this rank's slices alone are read.

        Call `check_layout` first. No rank waits for another here.
        """
        if not into:
            return
        wanted = {name: self.metadata.state_dict_metadata[name] for name in into}
        metadata = Metadata(state_dict_metadata=wanted, storage_data=self.metadata.storage_data)
        reader = HuggingFaceStorageReader(str(self.folder))
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), metadata, is_coordinator=False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()


def open_shards(folder: Path) -> Stored:
    """Everything in the shards of `folder`, found from their headers alone.

    Raises:
        OctavoError: a file is not safetensors.
    """
    try:
        return Stored(folder, HuggingFaceStorageReader(str(folder)).read_metadata())
    except SafetensorError as error:
        raise OctavoError(f"the tensor files of {folder} cannot be read: {error}") from None


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Names, global shapes and dtypes of tensors in memory."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def part_of(found: Layout, prefix: str) -> Layout:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): entry for name, entry in found.items() if name.startswith(prefix)}


def check_layout(folder: Path, found: Layout, wanted: Layout, *, key: str = "model.source and model.config") -> None:
    """Refuse a checkpoint of another model before anything is loaded.

    Raises:
        InputError: naming the tensors that are missing, left over, or of another shape or dtype.
    """
    faults = [
        f"{name} is {_shape(found[name])} in the checkpoint and {_shape(wanted[name])} in the model"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]
    faults += [f"{name} {_shape(wanted[name])} is not in the checkpoint" for name in wanted if name not in found]
    faults += [f"{name} {_shape(found[name])} is not in the model" for name in found if name not in wanted]
    if faults:
        shown = "; ".join(faults[:6]) + (f"; and {len(faults) - 6} more" if len(faults) > 6 else "")
        raise InputError(
            f"checkpoint {folder} holds another model: {shown}. Use the {key} it was trained with, or another train.output."
        )


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what cannot fit below `folder`.

    Raises:
        OctavoError: with the bytes needed and free.
    """
    if (free := free_bytes(folder)) < needed:
        raise OctavoError(_no_space(folder, needed, free))


@contextmanager
def space_named(folder: Path, needed: int) -> Iterator[None]:
    """Name the bytes if the disk below `folder` fills up all the same.

    Raises:
        OctavoError: with the bytes needed and free.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise OctavoError(f"{_no_space(folder, needed, free_bytes(folder))} ({error.strerror})") from None


def _no_space(folder: Path, needed: int, free: int) -> str:
    return (
        f"no space for a checkpoint in {folder}: it needs {needed:,} bytes and {free:,} are free. Earlier ones are intact. "
        "Free some space, lower checkpoint.keep, or move the run's folder and set train.output; then run it again."
    )


def _shape(entry: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{list(entry[0])} {str(entry[1]).removeprefix('torch.')}"
