"""Writes tensor files: DCP's planners over safetensors, without pickle.

Each rank writes one file with its pieces; a piece that several ranks hold is written by one of them, chosen by DCP's planner.
The files are those of DCP's Hugging Face storage. Its writer is not used, because it first builds each file in memory; here
tensors are written one by one, without a second copy of the state. `octavo.checkpoint.stored` reads them.
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
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from octavo.checkpoint.failpoints import failpoint
from octavo.collectives.blocks import BlockTensor, local_of
from octavo.errors import InputError, OctavoError
from octavo.parallel.coordination import Ranks
from octavo.parallel.shards import groups_of
from octavo.storage import free_bytes

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Global shape and dtype of each tensor, by name."""

Entries = dict[str, dict[str, Any]]
"""Manifest entries by name: size and sha256 of a file, or dtype and shape of a tensor."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_HEADER_BYTES = 512  # upper bound of a tensor's entry in a safetensors header, name and offsets included

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
"""Safetensors' names of the dtypes."""


@dataclass(frozen=True)
class TensorPiece:
    """This rank's piece of a tensor: the tensor's name, the piece's offsets and sizes in it, and the data."""

    name: str
    item: WriteItem
    data: torch.Tensor


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
    """This rank's pieces of each tensor (plain, DTensor or `BlockTensor`), not copied; empty shards are skipped.

    For a block, only the part that this rank counts: an element on several ranks is written once.

    Raises:
        InputError: safetensors does not support the dtype.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name} has the dtype {tensor.dtype}, which safetensors does not support: it cannot be saved.")
    pieces = []
    for item in create_default_local_save_plan(dict(tensors), is_coordinator=True).items:
        name = item.index.fqn
        tensor = tensors[name]
        data = local_of(tensor).detach()
        if isinstance(tensor, BlockTensor):
            groups_of(tensor)  # raises if ranks of a block are unknown: the checkpoint would lack parts
            data = tensor.__get_tensor_shard__(item.index)
        if data.numel() or not tensor.numel():
            pieces.append(TensorPiece(name, item, data))
    return pieces


def deduplicate(pieces: Sequence[TensorPiece], ranks: Ranks) -> list[TensorPiece]:
    """The pieces that this rank writes, so that the ranks together write each piece once. Collective."""
    if ranks.size == 1:
        return list(pieces)
    plans = ranks.gather(SavePlan([piece.item for piece in pieces]))
    assigned: list[Sequence[WriteItem]] = []
    with ranks.sharing_errors():
        if ranks.rank == 0:
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner({}, is_coordinator=True)
            assigned = [plan.items for plan in planner.create_global_plan(plans)[0]]
    of_rank = {item.index for item in ranks.scatter(assigned)}
    return [piece for piece in pieces if piece.item.index in of_rank]


def write_shard(folder: Path, pieces: Sequence[TensorPiece], rank: int = 0, step: int | None = None) -> Entries:
    """Write pieces as synced safetensors files; returns their manifest entries. No file without pieces.

    A file holds one piece per tensor, so further pieces of blocks go into further files.
    """
    files: list[list[TensorPiece]] = []
    of_name: dict[str, int] = {}
    for piece in pieces:
        number = of_name[piece.name] = of_name.get(piece.name, -1) + 1
        files += [[]] if number == len(files) else []
        files[number].append(piece)
    entries: Entries = {}
    for number, of_file in enumerate(files, 1):
        name = f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(files):05d}.safetensors"
        entries |= _write_file(folder, name, of_file, step if number == 1 else None)
    return entries


def _write_file(folder: Path, name: str, pieces: Sequence[TensorPiece], step: int | None) -> Entries:
    # Safetensors' own order: each tensor starts at a multiple of its element size.
    ordered = sorted(pieces, key=lambda piece: (-piece.data.element_size(), piece.name))
    offsets = {piece.name: {"saved_offsets": list(piece.item.index.offset or ())} for piece in ordered}
    header: dict[str, Any] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}}
    end = 0
    for piece in ordered:
        begin, end = end, end + piece.data.nbytes
        shape, dtype = list(piece.data.shape), DTYPES[piece.data.dtype]
        header[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, middle = hashlib.sha256(), 1 + len(ordered) // 2
    # Hashing and writing take about equally long and release the interpreter's lock, so they run in parallel.
    with (folder / name).open("xb") as file, ThreadPoolExecutor(1) as hashing:
        blocks = itertools.chain([memoryview(len(text).to_bytes(8, "little") + text)], (raw(piece.data) for piece in ordered))
        for number, block in enumerate(blocks):
            hashed = hashing.submit(digest.update, block)
            half = len(block) // 2
            file.write(block[:half])
            if number == middle:
                file.flush()
                failpoint("within-shard", step)
            file.write(block[half:])
            hashed.result()
        file.flush()
        os.fsync(file.fileno())  # on the writing host: another host's fsync does not flush this host's cache
        size = file.tell()
    return {name: {"size": size, "sha256": digest.hexdigest()}}


def tensor_entries(pieces: Sequence[TensorPiece]) -> Entries:
    """Safetensors' dtype and the global shape of each tensor, by name: entries of a manifest."""
    entries: Entries = {}
    for piece in pieces:
        assert piece.item.tensor_data is not None, piece.name
        entries[piece.name] = {"dtype": DTYPES[piece.data.dtype], "shape": list(piece.item.tensor_data.size)}
    return entries


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, on the CPU."""
    whole = tensor.detach().cpu().contiguous()  # a one-element tensor may retain a stride that forbids a view as bytes
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def bytes_needed(pieces: Sequence[TensorPiece]) -> int:
    """Upper bound of the size of `write_shard`'s file."""
    return sum(piece.data.nbytes for piece in pieces) + _HEADER_BYTES * (len(pieces) + 1)


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Names, global shapes and dtypes of tensors in memory."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def empty_tensors(layout: Layout, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Tensors of global shape, not initialised."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}


def subset(layout: Layout, prefix: str) -> Layout:
    """The entries under `prefix`, without it."""
    return {name.removeprefix(prefix): entry for name, entry in layout.items() if name.startswith(prefix)}


def check_layout(folder: Path, layout: Layout, wanted: Layout) -> None:
    """Compare a checkpoint with a model before anything is loaded.

    Raises:
        InputError: names tensors that are missing or unexpected, or differ in shape or dtype.
    """
    both = [name for name in wanted if name in layout and layout[name] != wanted[name]]
    differences = [f"{n} is {_shape(layout[n])} in the checkpoint and {_shape(wanted[n])} in the model" for n in both]
    differences += [f"{name} {_shape(wanted[name])} is not in the checkpoint" for name in wanted if name not in layout]
    differences += [f"{name} {_shape(layout[name])} is not in the model" for name in layout if name not in wanted]
    if differences:
        shown = "; ".join(differences[:6]) + (f"; and {len(differences) - 6} more" if len(differences) > 6 else "")
        dtypes = {layout[name][1] for name in both}
        if len(dtypes) == 1 and len(both) == len(differences) and all(layout[name][0] == wanted[name][0] for name in both):
            dtype = str(*dtypes)
            raise InputError(
                f"checkpoint {folder} has parameters of another dtype: {shown}. Give octavo.transform params_dtype={dtype}, or "
                f'a run model.params_dtype = "{dtype.removeprefix("torch.")}".'
            )
        raise InputError(
            f"checkpoint {folder} belongs to another model: {shown}. Use the model.source and model.config of the save, or "
            "another train.output."
        )


def check_space(folder: Path, needed: int) -> None:
    """Raise ENOSPC before a save that the disk of `folder` cannot hold."""
    if free_bytes(folder) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def explaining_full_disk(folder: Path, needed: int) -> Iterator[None]:
    """Turn the error of a full disk into an OctavoError with the bytes needed and free."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        if error.errno == errno.EFBIG:
            raise OctavoError(
                f"no space for a checkpoint in {folder}: this process or file system allows no file of that size "
                f"({error.strerror}). Earlier ones are intact. Raise the limit (ulimit -f), or move the run's folder and set "
                "train.output; then run it again."
            ) from None
        raise OctavoError(
            f"no space for a checkpoint in {folder}: it needs {needed:,} bytes and {free_bytes(folder):,} are free "
            f"({error.strerror}). Earlier ones are intact. Free some space, lower checkpoint.keep, or move the run's folder "
            "and set train.output; then run it again."
        ) from None


def _shape(entry: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{list(entry[0])} {str(entry[1]).removeprefix('torch.')}"
