"""Channels of a job: local folders and files as links, other addresses as copies through fsspec; and results sent to one.

The script sees each channel as a folder of files, as SageMaker's mode "File" lays it. The mode "Pipe" is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from octavo import storage
from octavo.errors import InputError, first_line, install_extra

_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_CHANNEL = re.compile(r"[A-Za-z0-9.\-_]{1,64}")
_PLAIN = {"distribution": "FullyReplicated", "s3_data_type": "S3Prefix", "input_mode": ("File", "FastFile")}
"""Arguments of `TrainingInput` that describe a folder of files, which every channel is."""
_MEANINGLESS = ("content_type", "compression", "record_wrapping", "target_attribute_name", "attribute_names", "shuffle_config")


class TrainingInput:
    """A channel: a local path, `file://`, or an address that fsspec knows.

    Args:
        s3_data: the address of a folder or a file.
        other: arguments of SageMaker's class of this name. A folder of files, the same on every rank, is what there is.

    Raises:
        InputError: an unknown argument, or one that asks for something else.
    """

    def __init__(self, s3_data: str, **other: Any) -> None:
        for name, value in other.items():
            allowed = _PLAIN.get(name)
            if allowed is not None and value is not None and value not in ((allowed,) if isinstance(allowed, str) else allowed):
                raise InputError(
                    f"TrainingInput: {name} = {value!r} is not there: a channel is a folder of files, {allowed!r}."
                )
            if name in _MEANINGLESS and value is not None:
                raise InputError(
                    f"TrainingInput: {name} = {value!r} changes the files, and Octavo hands them over as they are."
                )
            if name not in _PLAIN and name not in _MEANINGLESS:
                raise InputError(f"TrainingInput: unknown argument {name!r}. Known: s3_data, {', '.join(_PLAIN)}.")
        self.s3_data = s3_data


class FileSystemInput:
    """A channel on a file system of AWS that is mounted here: its folder is `directory_path`.

    Args:
        file_system_id: means nothing here.
        file_system_type: means nothing here.
        directory_path: the folder, as this machine has it mounted.
        file_system_access_mode: "ro" or "rw"; the folder's own permissions count.
        content_type: means nothing here.
    """

    def __init__(
        self,
        file_system_id: str,
        file_system_type: str,
        directory_path: str,
        file_system_access_mode: str = "ro",
        content_type: str | None = None,
    ) -> None:
        self.directory_path = directory_path


def mounted(path: str, key: str) -> str:
    """The folder of a file system of AWS. key: for the message.

    Raises:
        InputError: this machine does not have it.
    """
    if not Path(path).is_dir():
        raise InputError(f"{key}: {path!r} of a file system of AWS is not here: mount it, and give its folder as text.")
    return path


def addresses(inputs: Any, key: str = "inputs") -> dict[str, str]:
    """Channel → address of the `inputs` of `fit`: an address, a `TrainingInput` (SageMaker's too), or a dictionary of these.

    key: the argument, for messages.

    Raises:
        InputError: another form, a name that no channel may have, or a local path that does not exist.
    """
    if inputs is None:
        return {}
    table = inputs if isinstance(inputs, Mapping) else {"training": inputs}
    found: dict[str, str] = {}
    for channel, value in table.items():
        if not isinstance(channel, str) or not _CHANNEL.fullmatch(channel) or channel.startswith("."):
            raise InputError(f"{key}: {channel!r} is no name of a channel: letters, digits, - and _.")
        same = next((other for other in found if other.upper() == channel.upper()), None)
        if same is not None:
            raise InputError(f"{key}: the channels {same!r} and {channel!r} would share SM_CHANNEL_{channel.upper()}.")
        found[channel] = _address(f"{key}[{channel!r}]", value)
    return found


def _address(key: str, value: Any) -> str:
    if isinstance(value, FileSystemInput):
        value = mounted(value.directory_path, key)
    if isinstance(value, TrainingInput):
        value = value.s3_data
    config = getattr(value, "config", None)  # SageMaker's own classes
    if isinstance(config, Mapping):
        source = config.get("DataSource", {})
        value = source.get("S3DataSource", {}).get("S3Uri")
        if value is None:
            value = mounted(str(source.get("FileSystemDataSource", {}).get("DirectoryPath")), key)
        if config.get("InputMode") == "Pipe":
            raise InputError(f'{key} has the mode "Pipe": a channel is a folder of files here. Use "File".')
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise InputError(f"{key} = {value!r} is no address: give a folder, file://… or s3://….")
    local = local_path(value, key)
    if local is None:
        return value
    if not local.exists():
        raise InputError(f"{key} = {value!r} does not exist: give a folder or a file of this machine, or s3://….")
    return str(local)


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
        InputError: there is no such user, or it is the rest of an address, of which a pathlib.Path has taken a slash.
    """
    if shortened := re.match(r"([a-z][a-z0-9+.-]+):/(?!/)", path, re.IGNORECASE):
        whole = f"{shortened[1]}://{path[shortened.end() :]}"
        raise InputError(f"{key} = {path!r} lacks a slash, which a pathlib.Path takes from an address: give {whole!r} as text.")
    return storage.local_path(path, key)


def lay(channel: str, address: str, folder: Path, key: str = "inputs") -> Path:
    """Make the folder of a channel in `folder`; returns it. key: the argument, for messages.

    Raises:
        InputError: the address cannot be read, or names nothing.
    """
    target = folder / channel
    source = local_path(address, f"{key}[{channel!r}]")
    if source is None:
        target.mkdir(parents=True)
        fetch(address, target, f"{key}[{channel!r}] = {address!r}")
    elif source.is_dir():
        target.symlink_to(source.resolve(), target_is_directory=True)
    else:
        target.mkdir(parents=True)
        (target / source.name).symlink_to(source.resolve())
    return target


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
    except Exception as error:  # each of fsspec's file systems has its own
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
    except Exception as error:  # each of fsspec's file systems has its own
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
