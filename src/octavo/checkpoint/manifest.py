"""The manifest of a checkpoint: every file with its size and sha256, written last.

DCP leaves no mark of completion: a folder with a missing shard loads without an error, and files of an older save mix in. So
every checkpoint has a fresh folder, and nothing is loaded before every file was verified, which costs about a second a GiB. The
manifest contains its own sha256, so that a flipped bit there is found as well.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octavo._version import __version__
from octavo.errors import InputError, OctavoError
from octavo.storage import sha256_file, write_atomic

MANIFEST = "manifest.json"
FORMAT = "octavo-checkpoint"
FORMAT_VERSION = 1
_READERS = 8  # files hashed in parallel: each takes a core
_STEP_FOLDER = re.compile(r"step-(\d+)")


class Damaged(OctavoError):
    """A checkpoint differs from its manifest; the message names the file and the difference."""


def write_manifest(folder: Path, step: int | None, known: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Write the manifest of `folder`, which completes the checkpoint.

    `known` has the entries of files that each rank hashed while it wrote them.
    """
    files = dict(known or {})
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files:
            files[name] = {"size": path.stat().st_size, "sha256": sha256_file(path)}
    files = dict(sorted(files.items()))
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "octavo": __version__, "step": step, "files": files}
    write_atomic(folder / MANIFEST, json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n")


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file was compared with it.

    Raises:
        Damaged: a file is missing, unexpected, of another size, or its bytes differ.
        InputError: this version does not read the checkpoint's format.
    """
    manifest = _read_manifest(folder)
    files: dict[str, dict[str, Any]] = manifest["files"]
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        size = path.stat().st_size
        if size != entry["size"]:
            raise Damaged(f"{path} has {size:,} bytes instead of {entry['size']:,}")
    with ThreadPoolExecutor(_READERS) as readers:
        sums = readers.map(lambda name: sha256_file(folder / name), files)
        for (name, entry), found in zip(files.items(), sums, strict=True):
            if found != entry["sha256"]:
                readers.shutdown(wait=False, cancel_futures=True)
                raise Damaged(f"{folder / name} has other content than was written (its sha256 differs)")
    # An unexpected tensor file would be loaded with the others.
    for path in folder.glob("*.safetensors"):
        if path.name not in files:
            raise Damaged(f"{path} does not belong to the checkpoint")
    return manifest


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, newest first, damaged or not."""
    if not checkpoints.is_dir():
        return []
    found = [(int(m[1]), p) for p in checkpoints.iterdir() if p.is_dir() and (m := _STEP_FOLDER.fullmatch(p.name))]
    return sorted(found, reverse=True)


def newest_whole(checkpoints: Path, report: Callable[[str], None]) -> tuple[Path | None, list[Path]]:
    """The newest whole checkpoint, and the damaged ones that are newer; (None, []) if there are no checkpoints.

    Each damaged one is reported with the file and the difference.

    Raises:
        OctavoError: there are checkpoints, but none is whole; starting from zero would hide the loss.
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
            f"no checkpoint in {checkpoints} is whole ({names}), and the run is not started from zero over them. "
            "Restore one from a copy, or move the folder away, or set another train.output, to begin again."
        )
    return None, []


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise Damaged(f"{path} is missing")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        content = {key: manifest[key] for key in manifest if key != "sha256"}
        whole = manifest["sha256"] == _digest(content)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is not a manifest ({error})") from None
    if not whole:
        raise Damaged(f"{path} has other content than was written (its sha256 differs)")
    if content["format"] != FORMAT or content["format_version"] > FORMAT_VERSION:
        raise InputError(
            f"{folder} is of format {content['format']} {content['format_version']}, written by Octavo {content['octavo']}; "
            f"this is Octavo {__version__}, which reads {FORMAT} up to {FORMAT_VERSION}. Install that version or newer."
        )
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match and content["step"] is not None and content["step"] != int(match[1]):
        raise Damaged(f"{path} says step {content['step']}: the folder was renamed")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
