"""The manifest of a checkpoint: every file with its size and sha256, and every tensor with its dtype and shape; written last.

DCP leaves no mark of completion: a folder with a missing shard loads without an error, and files of older saves mix in. So
every checkpoint has a fresh folder, and every file is verified before a load, at about one second per GiB. The manifest
contains its own sha256 against bit flips. Manifests of older versions have no `ranks` and no `tensors`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo._version import __version__
from octavo.checkpoint.opened import Damaged, OpenFolder, allow_open_files
from octavo.errors import InputError, OctavoError
from octavo.storage import sha256_file, write_atomic

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = "octavo-checkpoint"
FORMAT_VERSION = 1
TENSORS = ".safetensors"
_READERS = 8  # files hashed in parallel: each takes a core
_STEP_FOLDER = re.compile(r"step-(\d+)")
_RANDOM = re.compile(r"random-(\d+)\.json")

Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class FileEntry(_Record):
    """Size in bytes and sha256 of a file."""

    size: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TensorEntry(_Record):
    """A tensor's dtype, by safetensors' name, and its global shape."""

    dtype: str
    shape: list[Count]


class Manifest(_Record):
    """A manifest, after a check of its types.

    Attributes:
        octavo: the version that wrote it.
        step: the run's step; None for a checkpoint of `octavo.save`.
        files: by name, except the manifest itself.
        ranks: number of ranks that saved; None in a manifest of an older version, as `tensors`.
        tensors: all tensors in the files.
        sha256: hash of the content, which identifies the save.
    """

    octavo: str
    step: Count | None
    files: dict[str, FileEntry]
    ranks: Annotated[int, Field(ge=1)] | None = None
    tensors: dict[str, TensorEntry] | None = None
    sha256: str

    @property
    def shards(self) -> list[str]:
        """Names of the tensor files."""
        return [name for name in self.files if name.endswith(TENSORS)]

    @property
    def random_ranks(self) -> set[int]:
        """Ranks above 0 with a file of random states."""
        return {int(match[1]) for name in self.files if (match := _RANDOM.fullmatch(name))}


class OpenCheckpoint:
    """A checkpoint with its folder open and its manifest read; a context that closes it.

    Raises:
        Damaged: there is no manifest, or it contradicts itself.
        InputError: this version does not read the checkpoint's format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = OpenFolder(path)
        self.manifest = _parse(self.folder.read(MANIFEST), path)
        allow_open_files(len(self.manifest.files))

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.__exit__()

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            Damaged: a file is missing or unexpected, or its size or bytes differ.
        """
        for name in self.folder.names():
            # An unexpected file of these kinds belongs to another save.
            if (name.endswith(TENSORS) or _RANDOM.fullmatch(name)) and name not in self.manifest.files:
                raise Damaged(f"{self.path / name} does not belong to the checkpoint")
        self._compare(list(self.manifest.files))

    def verify_opened(self) -> None:
        """Compare every file that was read with the manifest; a file that has not changed is not reread."""
        self._compare([name for name in self.folder.opened if name != MANIFEST])

    def _compare(self, names: list[str]) -> None:
        files = self.manifest.files
        for name in names:
            size = self.folder.stamp(name).size
            if size != files[name].size:
                raise Damaged(f"{self.path / name} has {size:,} bytes instead of {files[name].size:,}")
        with ThreadPoolExecutor(_READERS) as readers:
            for name, digest in zip(names, readers.map(self.folder.sha256, names), strict=True):
                if digest != files[name].sha256:
                    readers.shutdown(wait=False, cancel_futures=True)
                    raise Damaged(f"{self.path / name} has other content than was written (its sha256 differs)")

    def json(self, name: str) -> Any:
        """The content of a JSON file of the manifest."""
        if name not in self.manifest.files:
            raise Damaged(f"{self.path / name} is not in the manifest")
        try:
            return parse_json(self.folder.read(name))
        except ValueError as error:
            raise Damaged(f"{self.path / name} is not JSON ({error})") from None


def write_manifest(
    folder: Path,
    step: int | None,
    known: Mapping[str, dict[str, Any]] | None = None,
    *,
    ranks: int | None = None,
    tensors: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Write the manifest of `folder`, which completes the checkpoint.

    known: entries of the files that the ranks hashed during their writes. tensors: entries of all tensors.
    """
    files = dict(known or {})
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files:
            files[name] = {"size": path.stat().st_size, "sha256": sha256_file(path)}
    content: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, "octavo": __version__, "step": step}
    content |= {"ranks": ranks, "files": dict(sorted(files.items()))}
    content |= {"tensors": None if tensors is None else dict(sorted(tensors.items()))}
    write_atomic(folder / MANIFEST, json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n")


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        Damaged: a file is missing or unexpected, or its size or bytes differ.
        InputError: this version does not read the checkpoint's format.
    """
    with OpenCheckpoint(folder) as checkpoint:
        checkpoint.verify()


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, newest first, damaged or not."""
    if not checkpoints.is_dir():
        return []
    folders = [(int(m[1]), p) for p in checkpoints.iterdir() if p.is_dir() and (m := _STEP_FOLDER.fullmatch(p.name))]
    return sorted(folders, reverse=True)


def newest_whole(checkpoints: Path, report: Callable[[str], None]) -> tuple[Path | None, list[Path]]:
    """The newest complete checkpoint, and newer damaged ones; (None, []) if there are no checkpoints.

    Each damaged one is reported with the file and the difference.

    Raises:
        OctavoError: there are checkpoints, but none is complete; starting from zero would hide the loss.
    """
    damaged: list[Path] = []
    for _, folder in step_folders(checkpoints):
        try:
            verify(folder)
        except Damaged as damage:
            report(f"checkpoint {folder.name} is damaged: {damage}; trying the one before.")
            damaged.append(folder)
        else:
            return folder, damaged
    if damaged:
        names = ", ".join(folder.name for folder in damaged)
        raise OctavoError(
            f"no checkpoint in {checkpoints} is complete ({names}), and the run does not silently start from zero. "
            "Restore one from a copy, or move the folder away, or set another train.output, to start over."
        )
    return None, []


def _parse(text: bytes, folder: Path) -> Manifest:
    """A manifest, after a check that it does not contradict itself."""
    path = folder / MANIFEST
    try:
        record = parse_json(text)
        content = {key: record[key] for key in record if key != "sha256"}
        whole = record["sha256"] == _digest(content)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is not a manifest ({error})") from None
    if not whole:
        raise Damaged(f"{path} has other content than was written (its sha256 differs)")
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        raise Damaged(f"{path} is not a manifest (its format_version is {version!r})")
    if content.get("format") != FORMAT or version > FORMAT_VERSION:
        raise InputError(
            f"{folder} is of format {content.get('format')} {version}, written by Octavo {content.get('octavo')}; "
            f"this is Octavo {__version__}, which reads {FORMAT} up to {FORMAT_VERSION}. Install that version or newer."
        )
    try:
        manifest = Manifest.model_validate(record)
    except ValidationError as error:
        raise Damaged(f"{path} contradicts itself: {first_fault(error)}") from None
    if fault := _fault(manifest):
        raise Damaged(f"{path} contradicts itself: {fault}")
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match and manifest.step is not None and manifest.step != int(match[1]):
        raise Damaged(f"{path} says step {manifest.step}: the folder was renamed")
    return manifest


def _fault(manifest: Manifest) -> str | None:
    """A contradiction between the entries; None if there is none."""
    for name in manifest.files:
        if "/" in name or "\0" in name or name in ("", ".", "..", MANIFEST):
            return f"{name!r} is not a file name in the folder"
    if STATE not in manifest.files:
        return f"{STATE} is not among its files"
    if (manifest.ranks is None) != (manifest.tensors is None):
        return "only one of ranks and tensors is present"
    ranks, others = manifest.ranks or len(manifest.random_ranks) + 1, manifest.random_ranks
    if others != set(range(1, ranks)):
        return f"{ranks} ranks saved, and the random states are of ranks {sorted(others | {0})}"
    return None


def parse_json(text: bytes) -> Any:
    """JSON in UTF-8 with each key once; a ValueError for anything else."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def first_fault(error: ValidationError) -> str:
    """The first fault of a validation: its place and message."""
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return entries


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
