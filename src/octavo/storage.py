"""File helpers: checks of paths, atomic writes, fsync, checksums, folder locks.

Prepared data and checkpoints are written by jobs that may be killed at any moment, and read by other jobs that must never see
a partial file. So files appear by rename after an fsync, and locks belong to the kernel, not to the presence of a file. POSIX
only, without object stores: `local_path`, which checks every user's path, refuses their addresses; otherwise `s3://bucket/run`
would be a folder `s3:`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from filelock import FileLock, Timeout

from octavo.errors import EXIT_FAILED, EXIT_INPUT, InputError

_POLL_SECONDS = 0.1
_LFS_POINTER, _LFS_SIZE = b"version https://git-lfs", 1024
"""The first bytes of a Git LFS pointer, and its maximum size."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""

_PATHS = {
    errno.ENOENT: "Create its folder first, or give another path.",
    errno.ENOTDIR: "A part of the path is a file. Give another path.",
    errno.EISDIR: "It is a folder, where a file is expected. Give another path.",
    errno.EEXIST: "Give another path.",
    errno.ELOOP: "A symbolic link there leads to itself. Give another path.",
    errno.ENAMETOOLONG: "Give a shorter path.",
    errno.EACCES: "Change its permissions, or give another path.",
    errno.EPERM: "Change its permissions, or give another path.",
    errno.EROFS: "Give a path on a file system that can be written.",
}
"""Faults of a path that the user gave, each with its remedy."""


_VARIABLE = re.compile(r"^\$([A-Za-z_]\w*|\{\w+\})(?=/|$)")
"""An environment variable at the beginning of a path."""
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*):(?=$|[/\\:])")
"""The beginning of an address: `s3://`, `file:/` (a pathlib.Path takes a slash), `host:/`, `C:\\`, `simplecache::`."""
_OF_THE_HUB = re.compile(
    r"(?:hf|https?):/+(?:(?:www\.)?(?:huggingface\.co|hf\.co)/+)?(?:datasets/|models/)?([\w.-]+/[\w.-]+)/*"
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILE_SUFFIX = re.compile(
    r"\.(txt|jsonl?|ndjson|[ct]sv|parquet|arrow|gz|zst|bz2|xz|zip|tar|toml|ya?ml|md|html|xml|safetensors|gguf|bin|ckpt|pth?)$",
    re.I,
)


def names_a_path(name: str) -> bool:
    """True if a name without a file or folder can only be a path: ids of the Hugging Face Hub are `name` or `owner/name`.

    An id counts as a path if it is a symbolic link, if a file or folder `owner` exists, or if it has a file suffix.
    """
    path = Path(name)
    return (
        name.startswith((".", "/", "~"))
        or not _HUB_ID.fullmatch(name)
        or _FILE_SUFFIX.search(name) is not None
        or path.is_symlink()
        or ("/" in name and (path.parent.exists() or path.parent.is_symlink()))
    )


def taken_for_a_path(name: str) -> str:
    """For a message about a missing path: the reason if it looks like an id or goes through a file; else empty."""
    path = Path(name)
    for part in (path, *path.parents):
        if part.is_dir():
            break
        if part.exists():
            return f" ({str(part)!r} is a file)"
        if part.is_symlink():
            return f" ({str(part)!r} is a broken symbolic link)"
    folder = path.parent
    if not _HUB_ID.fullmatch(name) or name.startswith(".") or _FILE_SUFFIX.search(name) or "/" not in name:
        return ""
    return (
        f" (there is a folder {str(folder)!r}; an id of the Hub needs a current folder without it)" if folder.is_dir() else ""
    )


def path_fault(text: str, *, hub: bool = False) -> str:
    """The reason, with a remedy, why text is not a path of this machine (blank, or an address); else empty.

    hub: ids of the Hugging Face Hub are accepted too.
    """
    if not text.strip():
        return "it is empty: give a path, or . for the current folder."
    if "\0" in text:
        return "it has a null byte, which paths cannot have: give another."
    if variable := _VARIABLE.search(text):
        value = os.path.expandvars(text)
        way = f"write {value!r}" if value != text else "it is not set here, so write the path itself"
        told = f"{variable[0]} is a variable, which a shell expands and Octavo does not"
        return f"{told}: {way}. A folder of that name is './{text}'."
    match = _ADDRESS.match(text.strip())
    if match is None:
        return ""
    scheme, name = match[1].lower(), re.split(r"[/\\]", text.strip().rstrip("/\\"))[-1]
    if scheme == "file":
        return f"it is an address: write the path itself, {_path_in(text.strip())!r}."
    if hub and (there := _OF_THE_HUB.fullmatch(text.strip())) and scheme in ("hf", "http", "https"):
        return f"it is an address: write the id itself, {there[1]!r}."
    if len(scheme) == 1:
        return f"it is a Windows path: write this system's path, such as '/mnt/{scheme}/…'."
    here = name if name and ":" not in name else "run"
    way = " (for a bucket `aws s3 sync`, `gcloud storage rsync` or `azcopy`)"
    return (
        f"it is an address ({match[1]}:), and Octavo reads and writes only local file systems. Give a path, "
        f"such as {here!r}, and copy from or to the address{way}, or mount it. A folder of that name is './{text.strip()}'."
    )


def _path_in(address: str) -> str:
    """The path in a `file:` address; file://data/x is meant as a relative one."""
    rest = unquote(address[len("file:") :])
    if rest.startswith("//") and not rest.startswith("///"):
        rest = rest[2:].removeprefix("localhost")
    return re.sub(r"^/+", "/", rest) or "."


def local_path(path: object, key: str) -> Path:
    """A user's path as a Path, with the home folder for ~. key: for the message, such as "train.output" or "--to".

    Raises:
        InputError: it is not a string or Path, is empty, is an address such as s3://…, or begins with the ~ of an unknown user.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    shown = f"{key}{_joint(key)}"
    if not isinstance(text, str):
        value = shortened(" ".join(repr(text).split()))
        raise InputError(f"{shown}{value}: {type(text).__name__} is not a path. Give a string or a Path.")
    if fault := path_fault(text):
        raise InputError(f"{shown}{shortened(text)!r}: {fault}")
    with path_of(key, text):
        return Path(text).expanduser()


def _joint(key: str) -> str:
    """The separator of key and value in a message; empty for options."""
    return " " if key.startswith("--") else " = "


def shortened(name: str) -> str:
    """A name for a message, cut if it is very long."""
    return name if len(name) <= 120 else f"{name[:80]}…"


@contextlib.contextmanager
def path_of(key: str, name: str) -> Iterator[None]:
    """Add the run file's key to errors about its path, such as a too long name.

    Raises:
        InputError: replaces an OSError, and pathlib's error for an unknown user.
    """
    shown = f"{key}{_joint(key)}{shortened(name)!r}"
    try:
        yield
    except OSError as error:
        raise InputError(f"{shown} cannot be used: {why_unusable(error)}") from None
    except RuntimeError:
        if not name.startswith("~"):
            raise
        raise InputError(f"{shown} cannot be used: there is no such user. Write the full path.") from None


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file atomically and durably: after a kill or a power cut `path` has the old or the complete new content.

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
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # from a write, which knows only its descriptor
            error.filename = str(path)
        raise
    fsync_folder(path.parent)


def use_umask(folder: Path) -> None:
    """Give the files of a folder the permissions of new files: safetensors creates them readable for this user only."""
    probe = folder / f".{secrets.token_hex(4)}.tmp"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(mode)


def fsync_folder(path: Path) -> None:
    """Sync a folder's entries: the fsync of a file does not cover its name."""
    _fsync(path)


def fsync_tree(path: Path) -> None:
    """Sync a folder with everything below it; children first, so that every durable name has its content."""
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


def is_lfs_pointer(path: Path) -> bool:
    """True if a file is a Git LFS pointer."""
    try:
        with path.open("rb") as file:
            return file.read(_LFS_SIZE + 1).startswith(_LFS_POINTER) and file.tell() < _LFS_SIZE
    except OSError:  # the reader of the file reports it
        return False


def sha256_file(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def why_unusable(error: OSError) -> str:
    """Fault and remedy of a path that the user gave."""
    return f"{error.strerror or error}. {_PATHS.get(error.errno or 0, 'Give another path.')}"


def describe_fault(error: OSError) -> tuple[str, int]:
    """A system error in one line, and its exit code: 2 for an unusable path, with the remedy."""
    if error.filename is not None and error.errno in NO_SPACE:
        free = free_bytes(Path(os.fsdecode(error.filename)))
        return f"no space for {str(error.filename)!r}: {free:,} bytes are free ({error.strerror}). Free some.", EXIT_FAILED
    if error.filename is not None and error.errno in _PATHS:
        return f"{str(error.filename)!r} cannot be used: {why_unusable(error)}", EXIT_INPUT
    if error.filename is None and error.errno in NO_SPACE:
        return f"no space for standard output, or for a file ({error.strerror}). Free some.", EXIT_FAILED
    return " ".join(str(error).split()), EXIT_FAILED


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the file system of `path`, which need not exist yet."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def folder_fault(path: Path) -> str:
    """The reason why a path is not and cannot become a folder, with the remedy; empty if it can. Creates nothing."""
    try:
        if path.is_dir():
            return ""
        if path.exists():
            return "it is a file. Give the path of a folder."
        if path.is_symlink():
            return "it is a broken symbolic link. Give another path."
        above = next(folder for folder in path.absolute().parents if folder.exists() or folder.is_symlink())
    except OSError as error:
        return why_unusable(error)
    if not above.is_dir():
        what = "a file" if above.exists() else "a broken symbolic link"
        return f"{str(above)!r} is {what}. Give another path."
    writable = os.access(above, os.W_OK | os.X_OK)
    return "" if writable else f"{str(above)!r} cannot be written. Change its permissions, or give another path."


def check_file(path: Path, option: str, suffix: str) -> None:
    """Refuse the path of a file that has another suffix, or could not be written.

    Raises:
        InputError: names the option.
    """
    if path.suffix.lower() != suffix:
        other = path.with_suffix(suffix) if path.name else f"file{suffix}"
        raise InputError(f"{option} {path}: the name does not end in {suffix}. Use {other}.")
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder: give the name of a file in it.")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {str(path.parent)!r}. Create it first, or give another path.")
    check_writable(path, option)


def check_writable(path: Path, option: str) -> None:
    """Refuse the path of a file that could not be written, in a folder that need not exist.

    Raises:
        InputError: names the option, the file and its folder.
    """
    if fault := _unwritable(path.absolute().parent, path.name):
        raise InputError(f"{option}: {path.name} cannot be written in {str(path.parent)!r}: {fault}")


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder that could not be created or written to.

    Raises:
        InputError: names the option.
    """
    if fault := _unwritable(folder.absolute(), ""):
        raise InputError(f"{option} {folder} cannot be written to: {fault}")


def _unwritable(folder: Path, name: str) -> str:
    """The reason why a file cannot be created in a folder, with the remedy; empty if it can. Leaves nothing behind."""
    if fault := folder_fault(folder):
        return fault
    above = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        # Permissions do not reflect /proc, quotas, or root on network disks, so a file is created. Its name is as long as
        # `write_atomic`'s temporary one.
        with tempfile.NamedTemporaryFile(dir=above, prefix=f".{name}.", suffix=f"-{os.getpid()}.tmp"):
            return ""
    except FileNotFoundError:
        return f"{str(above)!r} takes no new file. Give another path."
    except OSError as error:
        return why_unusable(error)


def new_folder(path: Path, key: str) -> Path:
    """The path of a new or empty folder, with the home folder for ~; creates nothing. key: for the message.

    Raises:
        InputError: it is a file or holds files, or cannot be created.
    """
    try:
        path = path.expanduser()
        fault = folder_fault(path)
        if not fault and path.is_dir() and any(path.iterdir()):
            fault = "it is not empty. Give the path of a new folder."
    except RuntimeError:
        fault = "there is no such user. Write the full path."
    except OSError as error:
        fault = why_unusable(error)
    if fault:
        raise InputError(f"{key} {str(path)!r} cannot be used: {fault}")
    return path


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
        # With a callback, filelock refuses a file system without flock instead of locking by a file's presence.
        self._lock = FileLock(self._file, thread_local=False, poll_interval=_POLL_SECONDS, on_acquired=_write_holder)

    def __enter__(self) -> FolderLock:
        deadline, removed = time.monotonic() + self._wait_seconds, False
        while True:
            try:
                self._lock.acquire(max(0.0, deadline - time.monotonic()))
            except Timeout:
                raise InputError(self._in_use()) from None
            except FileNotFoundError:  # the previous holder just removed the folder; the next acquire creates it
                self.path.mkdir(parents=True, exist_ok=True)  # raises where no folder can be created, as in /proc
                if removed and time.monotonic() > deadline:
                    raise
                removed = True
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
