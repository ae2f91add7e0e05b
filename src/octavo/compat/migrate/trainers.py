"""Checks calls of `ModelTrainer` and of its configuration classes in a script, each by itself.

Combinations of settings (degrees with ranks, the script with its folder, channels) are left to `train(dry_run=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.compat.migrate.known import REST, is_known
from octavo.compat.sagemaker import configs
from octavo.compat.sagemaker.environment import DRIVERS, check_hyperparameters, check_variables
from octavo.compat.sagemaker.sdk_arguments import (
    TRAINER_CONFIGS_REFUSED,
    TRAINER_MEANINGLESS,
    TRAINER_REFUSED,
    check_sdk,
)
from octavo.compat.sagemaker.trainer import ARGUMENTS
from octavo.errors import InputError

UNSEEN = "combinations of its configurations, and this machine, are not checked here: train(dry_run=True) checks them"


def is_trainer(dotted: str) -> bool:
    """True for the trainer, by any of its names in the SDK."""
    return dotted.startswith("sagemaker.") and dotted.endswith(".ModelTrainer")


def refused_by_trainer(dotted: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(argument, value, reason) for each refused argument of the trainer or of a configuration class, taken by itself."""
    if is_trainer(dotted):
        for name, value in arguments.items():
            if name != REST and (fault := _fault(name, value if is_known(value) else ...)):
                yield name, value, fault
    elif is_trainer(dotted.removesuffix(".from_recipe")) or is_trainer(dotted.removesuffix(".from_jumpstart_config")):
        yield "…", next(iter(arguments.values()), None), TRAINER_REFUSED["training_recipe"]
    elif dotted.startswith("sagemaker."):
        yield from _of_configuration(dotted.rpartition(".")[2], arguments)


def _fault(name: str, value: Any) -> str | None:
    """The reason why an argument of the trainer is refused, or None. value: `...` if it is known only at run time."""
    try:
        if name not in ARGUMENTS:
            check_sdk({name: value}, "ModelTrainer", (*ARGUMENTS, *TRAINER_MEANINGLESS), TRAINER_REFUSED)
        elif name == "hyperparameters" and isinstance(value, dict):
            check_hyperparameters(value, DRIVERS.arguments)
        elif name == "environment" and isinstance(value, dict):
            check_variables(value)
    except InputError as error:
        return str(error)
    return None


def _of_configuration(kind: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Refused arguments of a configuration class: each by itself, or else all known ones together."""
    made = getattr(configs, kind, None)
    if not (isinstance(made, type) and issubclass(made, configs.Config)):
        return
    known = {name: value if is_known(value) else None for name, value in arguments.items() if name != REST}
    any_refused = False
    for name, value in known.items():
        way = TRAINER_CONFIGS_REFUSED.get(kind, {}).get(name)
        if way is not None and value not in (None, False, []):
            any_refused = True
            yield name, value, way
            continue
        try:
            made(**{name: value})
        except InputError as error:
            any_refused = True
            yield name, arguments[name], str(error)
    if not any_refused and known:
        try:
            made(**known)
        except InputError as error:
            name = next((each for each in reversed(known) if f"{each} = " in str(error)), next(iter(known)))
            yield name, known[name], str(error)
