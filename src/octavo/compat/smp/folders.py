"""One checkpoint in several folders: in SMP's scripts, ranks of one save give PyTorch's writer different folders.

SMP's example scripts write a folder for each `ep_rank`, over `model.process_group`, each with a whole model, and one for each
`tp_rank`. In Octavo the ranks of all folders together hold the parameters. So each folder gets the metadata of the whole
checkpoint, with relative paths: `../ep2-1/__1_0.distcp`. PyTorch's reader needs nothing else, at any degrees, while the folders
stay next to each other. Entries of a single tensor rank (`octavo.compat.smp.tensor_folders`) are only in its folder's metadata.
URLs have no relative paths: several of them are refused.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

from octavo.compat.smp.tensor_folders import entries_of_folder
from octavo.errors import InputError

_METHODS = ("prepare_local_plan", "prepare_global_plan", "finish")
_ATTEMPTS = 8
"""Attempts to write a folder's metadata while another replica writes it."""


class _Folder(str):
    """A rank's folder; its plan takes it to the coordinator as `storage_data`."""

    __slots__ = ()


def patched() -> dict[str, Callable[..., Any]]:
    """Replacements for methods of `FileSystemWriter`, by name; each calls PyTorch's."""
    local, everywhere, finish = (getattr(FileSystemWriter, name) for name in _METHODS)

    def prepare_local_plan(self: Any, plan: Any) -> Any:
        prepared = local(self, plan)
        return prepared if prepared.storage_data is not None else replace(prepared, storage_data=_Folder(self.path))

    def prepare_global_plan(self: Any, plans: list[Any]) -> list[Any]:
        folders = [plan.storage_data for plan in plans]
        told = all(isinstance(folder, _Folder) for folder in folders)
        self.octavo_folders = [str(folder) for folder in folders] if told and len(set(folders)) > 1 else None
        if self.octavo_folders:
            _check(self, self.octavo_folders)
        plain = [replace(plan, storage_data=None) if isinstance(plan.storage_data, _Folder) else plan for plan in plans]
        planned: list[Any] = everywhere(self, plain)
        return planned

    def finish_one(self: Any, metadata: Any, results: list[list[Any]]) -> None:
        # Replicas that write a folder at the same time share a temporary file: each removes the metadata and renames the file,
        # which one of them then finds missing. That one rewrites it, so that the last rename leaves the metadata in place.
        for attempt in range(_ATTEMPTS):
            try:
                finish(self, metadata, results)
            except FileNotFoundError:
                if not isinstance(self.fs, FileSystem) or attempt + 1 == _ATTEMPTS:
                    raise
                time.sleep(random.uniform(0, 0.02 * 2**attempt))
            else:
                return

    def finish_all(self: Any, metadata: Any, results: list[list[Any]]) -> None:
        folders = getattr(self, "octavo_folders", None)
        if not folders:
            finish_one(self, metadata, results)
            return
        path = self.path
        try:
            # The coordinator's folder last: with it the checkpoint is complete.
            for home in sorted(set(folders), key=lambda folder: folder == str(path)):
                self.path = self.fs.init_path(home)
                seen = [_seen_from(home, *pair) for pair in zip(folders, results, strict=True)]
                here = [results[rank] for rank, folder in enumerate(folders) if folder == home]
                finish_one(self, *entries_of_folder(metadata, seen, here))
        finally:
            self.path = path

    return dict(zip(_METHODS, (prepare_local_plan, prepare_global_plan, finish_all), strict=True))


def patched_reader() -> dict[str, Callable[..., None]]:
    """A `FileSystemReader.set_up_storage_reader` with an error that names missing folders of the checkpoint."""
    original = FileSystemReader.set_up_storage_reader

    def set_up_storage_reader(self: Any, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.fs, FileSystem):
            _check_beside(str(self.path), metadata)
        original(self, metadata, is_coordinator, *args, **kwargs)

    return {"set_up_storage_reader": set_up_storage_reader}


def _check_beside(home: str, metadata: Any) -> None:
    paths = [getattr(place, "relative_path", "") for place in (metadata.storage_data or {}).values()]
    beside = {os.path.normpath(f"{home}/{os.path.dirname(path)}") for path in paths if str(path).startswith("..")}  # noqa: PTH120
    lost = sorted(folder for folder in beside if not os.path.isdir(folder))  # noqa: PTH112
    if lost:
        names = ", ".join(map(repr, lost))
        raise InputError(
            f"load: the checkpoint in {home!r} has shards in {names}, which do not exist. The folders of one checkpoint, one "
            "for each ep_rank or tp_rank, must stay next to each other: put them back, or load another checkpoint."
        )


def _check(writer: Any, folders: list[str]) -> None:
    names = ", ".join(map(repr, sorted(set(folders))))
    if type(writer.fs) is not FileSystem:
        raise InputError(f"save: ranks write one checkpoint and give the addresses {names}: give one.")
    lost = [folder for folder in sorted(set(folders)) if not os.path.isdir(folder)]  # noqa: PTH112
    if lost:
        raise InputError(
            f"save: ranks write one checkpoint to the folders {names}, and {lost[0]!r} is not on the file system of the "
            "coordinator, which writes the metadata of all: give one folder, or folders that all ranks share."
        )


def _seen_from(home: str, folder: str, results: list[Any]) -> list[Any]:
    """Results of a rank that wrote to `folder`, with paths relative to `home`."""
    way = os.path.relpath(folder, home)

    def moved(result: Any) -> Any:
        data = result.storage_data
        path = os.path.normpath(f"{way}/{data.relative_path}")
        return replace(result, storage_data=replace(data, relative_path=path))

    return [moved(result) for result in results]
