"""File helpers: atomic writes, fsync, checksums, folder locks.

Prepared data and checkpoints are written by jobs that may be killed at any moment, and read by other jobs that must never see
half a file. So files appear by rename after an fsync, and locks belong to the kernel rather than to the presence of a file.
POSIX only; no object stores.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from octavo.errors import InputError

_POLL_SECONDS = 0.1


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file atomically and durably: after a kill or a power cut `path` has the old content or all of the new.

    Text is written as UTF-8. The folder must exist.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def use_umask(folder: Path) -> None:
    """Give the files of a folder the permissions of new files: safetensors writes its own for this user alone."""
    probe = folder / f".{secrets.token_hex(4)}.tmp"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(mode)


def fsync_folder(path: Path) -> None:
    """Make a folder's entries durable: the fsync of a file does not cover its name."""
    _fsync(path)


def fsync_tree(path: Path) -> None:
    """Make a folder durable with everything below it; children first, so that every durable name has its content."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            _fsync(Path(folder, name))
        _fsync(Path(folder))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the file system of `path`, which need not exist yet."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


class FolderLock:
    """An exclusive lock on a folder: `with FolderLock(folder): ...`.

    A kernel lock on `<path>/.lock`: it ends with its process, `kill -9` included, so it is never stale. The folder is created
    if it does not exist; the holder may delete it. Forked children do not inherit the lock.

    Raises:
        InputError: on entry, if another holder has it after `wait_seconds`; the message names that process.
    """

    def __init__(self, path: Path, *, wait_seconds: float = 0.0) -> None:
        self.path = Path(path)
        self._file = self.path / ".lock"
        self._wait_seconds = wait_seconds
        # With a callback filelock refuses a file system without flock, rather than to lock by the presence of a file.
        self._lock = FileLock(self._file, thread_local=False, poll_interval=_POLL_SECONDS, on_acquired=_write_holder)

    def __enter__(self) -> FolderLock:
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                self._lock.acquire(max(0.0, deadline - time.monotonic()))
            except Timeout:
                raise InputError(self._in_use()) from None
            except FileNotFoundError:  # the last holder has just removed the folder; the next acquire creates it
                if time.monotonic() > deadline:
                    raise
            else:
                return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    def _in_use(self) -> str:
        holder: dict[str, Any] = {}
        for _ in range(10):  # a new holder writes its name just after it gets the lock
            with contextlib.suppress(OSError, ValueError):
                holder = json.loads(self._file.read_bytes())
                break
            time.sleep(0.01)
        name = f"pid {holder.get('pid', '?')} on host {holder.get('host', '?')}, since {holder.get('started', '?')}"
        return f"folder {str(self.path)!r} is in use by {name}. Wait until it has finished or stop it, or use another folder."


def _write_holder(descriptor: int) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode(), 0)
