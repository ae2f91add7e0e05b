"""Addresses of a job's files: local ones as paths, others by fsspec, read into a folder or written from one."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from octavo import storage
from octavo.errors import InputError, first_line, install_extra

_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def local_path(address: str, key: str) -> Path | None:
    """The absolute path of a local address; None for another machine's. key: for the message."""
    if not _REMOTE.match(address):
        return expanded(address, key).absolute()
    if not address.lower().startswith("file://"):
        return None
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost"):  # file://data/train: meant as a relative path
        raise InputError(f"{key} = {address!r} names the host {parts.netloc!r}: write file:// and an absolute path.")
    return Path(unquote(parts.path))


def expanded(path: str, key: str) -> Path:
    """A path with ~ as the home folder. key: for the message.

    Raises:
        InputError: there is no such user, or `path` is an address that pathlib.Path has changed (s3:/…).
    """
    if shortened := re.match(r"([a-z][a-z0-9+.-]+):/(?!/)", path, re.IGNORECASE):
        whole = f"{shortened[1]}://{path[shortened.end() :]}"
        raise InputError(
            f"{key} = {path!r} lacks a slash, which pathlib.Path removes from an address: give {whole!r} as a string."
        )
    return storage.local_path(path, key)


def fetch(address: str, target: Path, key: str, *, may_be_empty: bool = False) -> None:
    """Copy the files of a remote address into a folder. key: argument and address, for messages.

    Raises:
        InputError: the address cannot be read, or holds no file, unless it `may_be_empty`.
    """
    system, root = _file_system(address, key)
    try:
        names = system.find(root)
    except FileNotFoundError:
        names = []
    except Exception as error:  # fsspec's file systems raise different exceptions
        raise InputError(f"{key} cannot be read: {first_line(error)}. Check the address and your credentials.") from error
    if not names and not may_be_empty:
        raise InputError(f"{key} holds no file. Check the address.")
    for name in names:
        inside = PurePosixPath(name).relative_to(root) if name != root else PurePosixPath(PurePosixPath(name).name)
        if ".." in inside.parts or inside.is_absolute():
            raise InputError(f"{key} has a file {name!r}, which would lie outside of its channel.")
        path = target.joinpath(*inside.parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            system.get_file(name, str(path))
        except Exception as error:
            raise InputError(f"{key}: {name!r} cannot be read: {first_line(error)}.") from error


def send(folder: Path, address: str, key: str = "output_path") -> None:
    """Copy the files of a folder to a remote address. key: the argument, for messages.

    Raises:
        InputError: the address cannot be written.
    """
    key = f"{key} = {address!r}"
    system, root = _file_system(address, key)
    try:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = f"{root.rstrip('/')}/{path.relative_to(folder).as_posix()}"
                system.makedirs(name.rpartition("/")[0], exist_ok=True)
                system.put_file(str(path), name)
    except Exception as error:  # fsspec's file systems raise different exceptions
        raise InputError(f"{key} cannot be written: {first_line(error)}. Check the address and your credentials.") from error


def check_address(address: str, key: str) -> None:
    """Check that fsspec knows the kind of an address.

    Raises:
        InputError: it does not, or needs another package.
    """
    _file_system(address, key)


def _file_system(address: str, key: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    from fsspec.core import url_to_fs

    kind, separator, rest = address.partition(":")
    try:
        system, root = url_to_fs(f"{kind.lower()}{separator}{rest}")
    except ImportError as error:
        way = f" It is in an extra: {install_extra('s3')}." if address.startswith("s3://") else ""
        raise InputError(f"{key} needs another package: {first_line(error)}.{way}") from None
    except ValueError as error:
        raise InputError(f"{key}: {first_line(error)}. Give a folder, file://… or s3://….") from None
    return system, str(root).rstrip("/") or "/"
