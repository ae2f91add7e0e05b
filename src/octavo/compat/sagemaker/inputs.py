"""Channels of a job: links to local folders and files, and copies of remote addresses (fsspec).

To the script each channel is a folder of files, as in SageMaker's mode "File". The mode "Pipe" is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import InputError
from octavo.launch.addresses import fetch, local_path

_CHANNEL = re.compile(r"[A-Za-z0-9.\-_]{1,64}")
_PLAIN = {"distribution": "FullyReplicated", "s3_data_type": "S3Prefix", "input_mode": ("File", "FastFile")}
"""Argument of `TrainingInput` → values with the meaning "a folder of files", the only kind of channel."""
_MEANINGLESS = ("content_type", "compression", "record_wrapping", "target_attribute_name", "attribute_names", "shuffle_config")


class TrainingInput:
    """A channel: a local path, `file://`, or an address that fsspec supports.

    Args:
        s3_data: the address of a folder or a file.
        other: further arguments of SageMaker's class. Only a folder of files, the same on every rank, is supported.

    Raises:
        InputError: an unknown argument or an unsupported value.
    """

    def __init__(self, s3_data: str, **other: Any) -> None:
        for name, value in other.items():
            allowed = _PLAIN.get(name)
            if allowed is not None and value is not None and value not in ((allowed,) if isinstance(allowed, str) else allowed):
                raise InputError(
                    f"TrainingInput: {name} = {value!r} is not supported: a channel is a folder of files, {allowed!r}."
                )
            if name in _MEANINGLESS and value is not None:
                raise InputError(f"TrainingInput: {name} = {value!r} changes the files, and Octavo passes them on unchanged.")
            if name not in _PLAIN and name not in _MEANINGLESS:
                raise InputError(f"TrainingInput: unknown argument {name!r}. Known: s3_data, {', '.join(_PLAIN)}.")
        self.s3_data = s3_data


class FileSystemInput:
    """A channel on an AWS file system that is mounted here: its folder is `directory_path`.

    Args:
        file_system_id: has no effect.
        file_system_type: has no effect.
        directory_path: the folder at which this machine has mounted it.
        file_system_access_mode: "ro" or "rw"; the folder's permissions apply.
        content_type: has no effect.
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
    """The folder of a mounted AWS file system. key: its name in messages.

    Raises:
        InputError: there is no such folder.
    """
    if not Path(path).is_dir():
        raise InputError(f"{key}: {path!r} of an AWS file system is not here: mount it, and give its folder as a string.")
    return path


def addresses(inputs: Any, key: str = "inputs") -> dict[str, str]:
    """Channel → address of the `inputs` of `fit`: an address, a `TrainingInput` (SageMaker's too), or a dictionary of these.

    key: the argument, for messages.

    Raises:
        InputError: a value of another type, an invalid name of a channel, or a local path that does not exist.
    """
    if inputs is None:
        return {}
    table = inputs if isinstance(inputs, Mapping) else {"training": inputs}
    by_channel: dict[str, str] = {}
    for channel, value in table.items():
        if not isinstance(channel, str) or not _CHANNEL.fullmatch(channel) or channel.startswith("."):
            raise InputError(f"{key}: {channel!r} is not a valid channel name: letters, digits, - and _.")
        same = next((other for other in by_channel if other.upper() == channel.upper()), None)
        if same is not None:
            raise InputError(f"{key}: the channels {same!r} and {channel!r} would share SM_CHANNEL_{channel.upper()}.")
        by_channel[channel] = _address(f"{key}[{channel!r}]", value)
    return by_channel


def _address(key: str, value: Any) -> str:
    if isinstance(value, FileSystemInput):
        value = mounted(value.directory_path, key)
    if isinstance(value, TrainingInput):
        value = value.s3_data
    config = getattr(value, "config", None)  # SageMaker's classes
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
        raise InputError(f"{key} = {value!r} is not an address: give a folder, file://… or s3://….")
    local = local_path(value, key)
    if local is None:
        return value
    if not local.exists():
        raise InputError(f"{key} = {value!r} does not exist: give a folder or a file of this machine, or s3://….")
    return str(local)


def lay(channel: str, address: str, folder: Path, key: str = "inputs") -> Path:
    """Create the folder of a channel in `folder`; returns it. key: the argument, for messages.

    Raises:
        InputError: the address cannot be read, or nothing is there.
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
