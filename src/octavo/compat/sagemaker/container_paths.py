"""Replaces SageMaker's paths below /opt/ml, in hyperparameters and variables, by the folders of a job on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.compat.sagemaker.keys import ESTIMATOR
from octavo.errors import InputError

_ROOT = "/opt/ml"
_PATH = re.compile(r"(?:(?<![\w./-])|(?<=\bfile://))/opt/ml(?P<inside>/[^\s,;:'\"]*|(?![\w-]))")
_FOLDERS = ("checkpoints", "code", "input", "model", "output")
"""Folders below /opt/ml, each of which a job's folder has too."""


def mapped(value: Any, folder: Path, channels: Iterable[str], key: str, call: str = ESTIMATOR.call) -> Any:
    """`value` with paths below /opt/ml replaced by those in the job's `folder`, also in lists and dictionaries.

    channels: names of the job's channels. key, call: name of the value and a call with channels, for messages.

    Raises:
        InputError: a folder of /opt/ml that jobs do not have, or a channel that this job does not have.
    """
    if isinstance(value, Mapping):
        return {name: mapped(inside, folder, channels, key, call) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(inside, folder, channels, key, call) for inside in value]
    if not isinstance(value, str) or _ROOT not in value:
        return value

    def replaced(match: re.Match[str]) -> str:
        parts = [part for part in match["inside"].split("/") if part]
        if parts and (parts[0] not in _FOLDERS or ".." in parts):
            raise InputError(f"{key} = {value!r}: a job has the folders {', '.join(f'{_ROOT}/{name}' for name in _FOLDERS)}.")
        if parts[:3] == ["input", "data", "code"] and "code" not in channels:  # its place in the SDK's version 3
            parts = parts[2:]
        if parts[:2] == ["input", "data"] and len(parts) > 2 and parts[2] not in (known := sorted(channels)):
            there = f"Channels of {call}: {', '.join(known)}." if known else f"Give it in {call}."
            raise InputError(f"{key} = {value!r}: this job has no channel {parts[2]!r}. {there}")
        return str(folder.joinpath(*parts))

    return _PATH.sub(replaced, value)
