"""What of an optimizer goes into a checkpoint, and back: its states by the names of their parameters.

Tensors (moments, AdamW's step) are laid out as their parameters are and go among the tensors; numbers and the settings of the
parameter groups are JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.checkpoint.shard_io import Layout
from octavo.errors import InputError


def allocate_moments(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, found: Layout, groups: list[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """Empty tensors for the optimizer states of the checkpoint, sharded and laid out as their parameters are.

    Args:
        path: of the checkpoint, for messages.
        found: `<state>.<parameter>` and what the checkpoint has under it.
        groups: what `group_scalars` gave.

    Raises:
        InputError: the checkpoint has no optimizer, or another one.
    """
    if not groups:
        raise InputError(f"checkpoint {path} has no optimizer state: load it without the optimizer, or save it with one.")
    if len(groups) != len(optimizer.param_groups):
        raise InputError(
            f"checkpoint {path} has an optimizer of {len(groups)} parameter groups, this one has "
            f"{len(optimizer.param_groups)}: build it as the saved one was."
        )
    parameters = dict(model.named_parameters())
    held = {p for group in optimizer.param_groups for p in group["params"]}
    moments: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in found.items():
        parameter = parameters.get(name.partition(".")[2])
        if parameter is None or parameter not in held:
            raise InputError(
                f"checkpoint {path} has an optimizer state {name} for a parameter that the optimizer does not hold."
            )
        like = tuple(parameter.shape) == shape
        moments[name] = torch.empty_like(parameter, dtype=dtype) if like else torch.empty(shape, dtype=dtype)
    return moments


def install_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, torch.Tensor], groups: list[dict[str, Any]]
) -> None:
    """Hand the optimizer its filled states and the settings of its groups."""
    parameters = dict(model.named_parameters())
    # A fused or capturable kernel reads its step count on the device of the parameter.
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, tensor in moments.items():
        key, _, owner = name.partition(".")
        parameter = parameters[owner]
        value = tensor.to(parameter.device) if parameter in on_device else tensor
        optimizer.state[parameter][key] = value
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in saved.items()})


def states_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps for each parameter that it has stepped.

    Raises:
        InputError: it holds tensors that are no parameters of the model.
    """
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    strangers = sum(owner not in names for owner in optimizer.state)
    if strangers:
        raise InputError(
            f"the optimizer keeps state for {strangers} tensors that are no parameters of the model: save it with the model "
            "that it trains."
        )
    return {names[parameter]: states for parameter, states in optimizer.state.items()}


def state_scalars(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """What an optimizer keeps for a parameter besides tensors: numbers and None; JSON has no infinities, so these are text.

    Raises:
        InputError: it keeps something else.
    """
    scalars: dict[str, dict[str, Any]] = {}
    for name, states in states_by_name(model, optimizer).items() if optimizer is not None else ():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                continue
            if value is not None and not isinstance(value, bool | int | float):
                raise InputError(
                    f"the optimizer's state {key!r} of {name} is of type {type(value).__name__}: a checkpoint keeps tensors, "
                    "numbers and None. Keep it as one of these, or save without the optimizer."
                )
            odd = isinstance(value, float) and not math.isfinite(value)
            scalars.setdefault(name, {})[key] = str(value) if odd else value
    return scalars


def check_scalars(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scalars: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse numbers for parameters that the optimizer does not hold (InputError)."""
    parameters = dict(model.named_parameters())
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name in scalars:
        if parameters.get(name) not in held:
            raise InputError(f"checkpoint {path} has optimizer states of {name}, a parameter that the optimizer does not hold.")


def install_scalars(model: nn.Module, optimizer: torch.optim.Optimizer, scalars: Mapping[str, Mapping[str, Any]]) -> None:
    """Hand the optimizer the numbers of `state_scalars`; after `install_moments`."""
    parameters = dict(model.named_parameters())
    for name, values in scalars.items():
        optimizer.state[parameters[name]] |= {k: float(v) if isinstance(v, str) else v for k, v in values.items()}


def group_scalars(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """What a parameter group says besides its parameters: rates, betas, decay."""
    plain = (bool, int, float, str, tuple, list, type(None))
    groups = optimizer.param_groups if optimizer is not None else []
    return [{k: v for k, v in group.items() if k != "params" and isinstance(v, plain)} for group in groups]
