"""Checks the values of `ModelTrainer`'s arguments: configuration objects, texts, channels, hyperparameters from a file.

Accepted in place of Octavo's configurations: the SDK's objects, recognized by class name, and dictionaries of values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.compat.sagemaker import configs, inputs
from octavo.compat.sagemaker.configs import value_of
from octavo.errors import InputError, first_line
from octavo.launch.addresses import expanded

_PLAIN_SOURCE = {"s3_data_type": (None, "S3Prefix"), "s3_data_distribution_type": (None, "FullyReplicated")}
_PLAIN_CHANNEL = {
    "input_mode": (None, "File", "FastFile"), "compression_type": (None, "None"), "record_wrapper_type": (None, "None"),
    "shuffle_config": (None,),
}  # fmt: skip
"""Values with the meaning "a folder of files", the only kind of channel."""


def is_a(value: Any, *kinds: str) -> bool:
    """True for an object of a class of one of these names, or of a subclass."""
    return any(one.__name__ in kinds for one in type(value).__mro__)


def config_of(value: Any, kind: str, key: str) -> Any:
    """`value` as a configuration of class `kind`; a dictionary is converted, as in the SDK. key: its name in messages.

    Raises:
        InputError: a value of another kind.
    """
    if value is None or is_a(value, kind):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return getattr(configs, kind)(**value)
    raise InputError(f"{key} = {value!r}: give {kind}(…).")


def text_of(value: Any, key: str) -> str | None:
    """A string, or a path as a string. key: its name in messages.

    Raises:
        InputError: a value of another type.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise InputError(f"{key} = {value!r} is not a string.")


def channels_of(channels: Any, key: str) -> dict[str, Any]:
    """Channel → address, from a list of `InputData` or `Channel`. key: its name in messages.

    Raises:
        InputError: a value of another type, a channel that is not a folder of files, or two channels of one name.
    """
    if channels is None:
        return {}
    if not isinstance(channels, list | tuple):
        raise InputError(f"{key} = {channels!r}: give a list, [InputData(channel_name=…, data_source=…)].")
    addresses: dict[str, Any] = {}
    for one in channels:
        channel = config_of(one, "InputData", key) if isinstance(one, Mapping) else one
        name = value_of(channel, "channel_name")
        if not is_a(channel, "InputData", "Channel") or not name or not isinstance(name, str):
            raise InputError(f"{key}: {one!r}: give InputData(channel_name=…, data_source=…).")
        if name in addresses:
            raise InputError(f"{key}: two channels are called {name!r}: rename one, or give one folder with both.")
        addresses[name] = _address(channel, f"{key}[{name!r}]")
    return addresses


def _address(channel: Any, key: str) -> str:
    """The address of an `InputData` or a `Channel`."""
    source = value_of(channel, "data_source")
    for name, plain in _PLAIN_CHANNEL.items():
        if value_of(channel, name) not in plain:
            raise InputError(f"{key}: {name} = {value_of(channel, name)!r} is not supported: a channel is a folder of files.")
    if is_a(source, "DataSource"):
        inner = [value_of(source, name) for name in ("s3_data_source", "file_system_data_source", "dataset_source")]
        source = next((one for one in inner if one is not None), None)
    if is_a(source, "FileSystemDataSource"):
        return inputs.mounted(str(value_of(source, "directory_path")), key)
    if is_a(source, "S3DataSource"):
        for name, plain in _PLAIN_SOURCE.items():
            if value_of(source, name) not in plain:
                raise InputError(
                    f"{key}: {name} = {value_of(source, name)!r} is not supported: a channel is a folder, {plain[1]!r}."
                )
        source = value_of(source, "s3_uri")
    if not isinstance(source, str | Path) or not str(source):
        raise InputError(f"{key} = {source!r} is not an address: give a folder, file://… or s3://….")
    return str(source)


def hyperparameters_of(value: Any) -> Any:
    """Hyperparameters of the call, or those in a JSON or YAML file.

    Raises:
        InputError: there is no such file, or it is not a dictionary.
    """
    if not isinstance(value, str | Path):
        return {} if value is None else value
    name, path = str(value), expanded(str(value), "hyperparameters")
    if not path.is_file():
        raise InputError(f"hyperparameters = {name!r}: there is no such file. Give a dictionary, or a JSON or YAML file.")
    try:
        content = _parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"hyperparameters = {name!r} is neither JSON nor YAML: {first_line(error)}.") from None
    if not isinstance(content, dict):
        raise InputError(f"hyperparameters = {name!r} holds no names and values.")
    return content


def _parsed(text: str) -> Any:
    """The content of a JSON or YAML file.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        import yaml  # type: ignore[import-untyped]

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            raise ValueError(f"{getattr(error, 'problem', error)}{f', line {mark.line + 1}' if mark else ''}") from None
