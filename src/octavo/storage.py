"""Small file helpers: what is on disk is whole, or it is not there.

Prepared data and checkpoints are written by jobs that are killed at any moment, and read by other jobs that must never take
half a file for a whole one. So files appear by rename after an fsync, folders are locked by the kernel rather than by the
presence of a file, and sums are streamed. The price is an fsync a file: milliseconds, paid for a few files a checkpoint.
POSIX only (`fcntl`); object stores are not handled here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.errors import InputError

_POLL_SECONDS = 0.1


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file so that `path` holds the old content or all of the new one, also after a power cut.

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


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable: a file's own fsync does not cover the entry that names it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make a folder durable with every file and folder below it; children first, so that no durable name points at nothing."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            descriptor = os.open(Path(folder) / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_folder(Path(folder))


def sha256_file(path: Path) -> str:
    """The hexadecimal SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Bytes that this user can still write where `path` is, or would be created."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


class FolderLock:
    """Only one process at a time works in a folder: `with FolderLock(folder): ...`.

    An advisory `flock` on `<path>/.lock`; the folder is created if need be. The kernel releases it when the process ends in
    whatever way, `kill -9` included, so a lock is never stale. The file's content, JSON with pid, host and start, serves the
    message alone.

    A flock belongs to the open file, which a child shares. O_CLOEXEC keeps it from programs that a child executes, and a hook
    closes it in a child that only forks (a worker of a data loader, say), or such a child would hold the lock after its parent
    had died.

    The holder may delete the file, or the whole folder: whoever obtains the lock checks that the file it locked is still the
    one with that name.

    Args:
        path: the folder.
        wait_seconds: how long to wait for another holder before giving up.

    Raises:
        InputError: on entry, when someone else still holds it.
    """

    def __init__(self, path: Path, *, wait_seconds: float = 0.0) -> None:
        self.path = Path(path)
        self._wait_seconds = wait_seconds
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        if self._descriptor is not None:
            raise RuntimeError(f"{self.path} is already locked by this object")
        deadline = time.monotonic() + self._wait_seconds
        while not self._try():
            if time.monotonic() >= deadline:
                raise InputError(self._taken())
            time.sleep(_POLL_SECONDS)
        _held.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is not None:  # None in a forked child, which never held it
            os.ftruncate(descriptor, 0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # not close alone: a child forked in another way may share the open file
            os.close(descriptor)

    def _try(self) -> bool:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the last holder has just removed the folder
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), (self.path / ".lock").stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        started = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode(), 0)
        self._descriptor = descriptor
        return True

    def _taken(self) -> str:
        holder: dict[str, Any] = {}
        for _ in range(10):  # the holder writes its name just after it obtains the lock
            with contextlib.suppress(OSError, ValueError):
                holder = json.loads((self.path / ".lock").read_bytes())
                break
            time.sleep(0.01)
        who = f"pid {holder.get('pid', '?')} on host {holder.get('host', '?')}, since {holder.get('started', '?')}"
        return f"folder {str(self.path)!r} is in use by {who}. Wait until it has finished or stop it, or use another folder."

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_held):
        lock._forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
