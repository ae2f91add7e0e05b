"""Tensors on disk: DCP's planner over safetensors, with no pickle in either direction.

DCP plans which rank writes which part and reads any layout into any other; its Hugging Face storage keeps the parts as
plain safetensors files. Two of its traps are closed here: it takes tensors only (anything else would be an unreadable file
without an error), and a name or shape that does not fit is found out halfway through the loading, so names, shapes and
dtypes are compared first and nothing is touched unless all fit.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from octavo.errors import InputError, OctavoError
from octavo.storage import free_bytes
from octavo.train.failpoints import failpoint

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Global shape and dtype of each tensor, by name."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_HEADER_BYTES = 512  # a tensor's entry in a safetensors header, names and offsets included, generously


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], step: int | None = None) -> None:
    """Write tensors (plain or DTensor) as safetensors shards into a fresh folder, synced."""
    packed = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}  # safetensors refuses strides
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.fs = _Shards(step)
    with _single_process(), _root_cause():
        dcp_save(packed, storage_writer=writer, no_dist=not dist.is_initialized())


def read_tensors(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors of `into` in place, each with the one of its name; call `check_layout` first."""
    if not into:
        return
    with _single_process(), _root_cause():
        dcp_load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())


def read_layout(folder: Path) -> Layout:
    """Names, global shapes and dtypes of everything in the shards of `folder`, from their headers alone."""
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except SafetensorError as error:
        raise OctavoError(f"the tensor files of {folder} cannot be read: {error}") from None
    entries = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Names, global shapes and dtypes of tensors in memory."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


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


def bytes_needed(tensors: Mapping[str, torch.Tensor]) -> int:
    """What `write_tensors` will take on this rank's disk, never less."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors.values()]
    return sum(tensor.nbytes for tensor in local) + _HEADER_BYTES * (len(local) + 1)


@contextmanager
def space_checked(folder: Path, needed: int) -> Iterator[None]:
    """Refuse to begin what cannot fit below `folder`, and name the bytes if the disk fills up all the same.

    Raises:
        OctavoError: with the bytes needed and free.
    """
    if (free := free_bytes(folder)) < needed:
        raise OctavoError(_no_space(folder, needed, free))
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


class _Shards(FileSystem):
    """DCP's file system, with a place to die halfway through a file."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file for DCP."""
        with super().create_stream(path, mode) as stream:
            yield _Halves(stream, self.step)


class _Halves:
    """A binary stream that writes in two halves, with a failpoint between them."""

    def __init__(self, stream: Any, step: int | None) -> None:
        self._stream, self._step = stream, step

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        written: int = self._stream.write(view[: len(view) // 2])
        self._stream.flush()
        failpoint("within-shard", self._step)
        return written + int(self._stream.write(view[len(view) // 2 :]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _single_process() -> Iterator[None]:
    """Silence DCP's remark that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def _root_cause() -> Iterator[None]:
    """Raise what went wrong on this rank instead of DCP's collection of it; a full disk is then an OSError again."""
    try:
        yield
    except CheckpointException as wrapped:
        causes = [failure[0] for failure in wrapped.failures.values()]
        if not causes:
            raise
        raise causes[0] from None
