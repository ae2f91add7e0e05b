"""Checks a script's calls of SageMaker's estimators: ranks on this machine, and arguments ignored, refused or unchecked.

Values known without a run go through the checks of `octavo.launch`. Omitted: whether a remote address can be reached.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.compat.migrate.known import REST, UNKNOWN, is_known
from octavo.compat.sagemaker import environment, inputs
from octavo.compat.sagemaker.distribution import layout_of
from octavo.compat.sagemaker.estimator import PyTorch
from octavo.compat.sagemaker.sdk_arguments import ARGUMENTS, MEANINGLESS, REFUSED
from octavo.errors import InputError

_FIT = tuple(inspect.signature(PyTorch.fit).parameters)[1:]
_CALL = (*ARGUMENTS, *inspect.signature(PyTorch.__init__).parameters, *_FIT)
_CHECKS = {
    "environment": lambda value: isinstance(value or {}, Mapping) and environment.check_variables(value or {}),
    "hyperparameters": environment.check_hyperparameters,
}
"""Argument → its check of `octavo.launch`."""


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_WRONG = {
    "environment": lambda value: value is not None and not isinstance(value, dict),
    "dependencies": lambda value: value is not None and not _are_texts(value),
    "max_run": lambda value: value is not None and (type(value) not in (int, float) or not value > 0),
    "input_mode": lambda value: value not in (None, "File", "FastFile"),
    "entry_point": lambda value: not str(value).endswith(".py"),
}
"""Argument → True for a value of the wrong type."""
_KINDS = {
    "environment": "a dictionary",
    "dependencies": "a list of paths",
    "max_run": "a number of seconds above 0",
    "input_mode": '"File"',
    "entry_point": "a .py file",
}


def told(arguments: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The report on a call of an estimator: its ranks, and arguments without effect, refused, or unchecked.

    folder: the working directory of the call.
    """
    refused = [f"{name}: {REFUSED[name]}" for name, value in arguments.items() if name in REFUSED and value is not None]
    refused += [f"{name}: no argument of the SDK" for name in arguments if name not in (*_CALL, *REFUSED, "fit", REST)]
    refused += [f"{name}: an argument of fit" for name in arguments if name in _FIT and name not in MEANINGLESS]
    refused += _faults(arguments)
    kind, count = arguments.get("instance_type"), arguments.get("instance_count", 1)
    if kind is None and REST not in arguments:
        refused.append("instance_type is missing")
    hyperparameters, distribution = arguments.get("hyperparameters"), arguments.get("distribution")
    values = {"instance_type": kind, "instance_count": count, "distribution": distribution}
    unsure = [name for name, value in values.items() if not is_known(value)]
    ranks = f"its {' and '.join(unsure) or 'instance_type'} cannot be told without running the script"
    if not unsure and isinstance(kind, str) and not (REST in arguments and "distribution" not in arguments):
        try:
            layout = layout_of(kind, count, distribution, hyperparameters if isinstance(hyperparameters, dict) else {})
            ranks = f"{kind}: {layout.ranks} ranks on this machine" if layout.ranks else f"{kind}: one process"
        except InputError as error:
            ranks = kind
            refused.append(str(error))
    meaningless = [name for name, value in arguments.items() if name in MEANINGLESS and value is not None]
    return {"ranks": ranks, "meaningless": meaningless, "refused": refused, "unchecked": list(_unchecked(arguments, folder))}


def _faults(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Values of the wrong type, and invalid names of channels."""
    for name, value in arguments.items():
        if not is_known(value):
            continue
        if name in _WRONG and _WRONG[name](value):
            yield f"{name} = {value!r}: give {_KINDS[name]}"
        elif name in _CHECKS:
            try:
                _CHECKS[name](value)
            except InputError as error:
                yield str(error)
    channels = (arguments.get("fit") or {}).get("inputs")
    if isinstance(channels, dict):
        try:
            inputs.addresses({name: "s3://bucket" for name in channels if name != REST})
        except InputError as error:
            yield str(error)


def _unchecked(arguments: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Files that do not exist here, and remote addresses."""
    entry, source = arguments.get("entry_point"), arguments.get("source_dir")
    if isinstance(entry, str) and (source is None or isinstance(source, str)):
        there = folder / Path(source or "").expanduser()
        if not (there / entry).is_file():
            yield f"entry_point = {entry!r} is not in {str(there)!r}"
    channels = (arguments.get("fit") or {}).get("inputs")
    named = channels if isinstance(channels, dict) else {"inputs": channels}
    for name, value in {"output_path": arguments.get("output_path"), **{str(key): each for key, each in named.items()}}.items():
        if isinstance(value, str) and "://" in value:
            yield f"{name} = {value!r} is an address that is not tried"
        elif name != "output_path" and isinstance(value, str) and not (folder / Path(value).expanduser()).exists():
            yield f"the channel {name} = {value!r} is not there"
    dependencies = arguments.get("dependencies")
    for each in dependencies if isinstance(dependencies, list) else ():
        if isinstance(each, str) and not (folder / Path(each).expanduser()).exists():
            yield f"dependencies: {each!r} is not there"
    if UNKNOWN in (entry, source) and entry is not source:
        yield "the file of its script is known only at run time"
