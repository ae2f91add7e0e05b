"""Optimizer state by parameter name, to and from a checkpoint.

`torch.distributed.checkpoint.state_dict` does not fit (torch 2.13): to name the states of an optimizer that has not stepped it
steps it, which leaves a step count of 1 and changes the bits of the training; it fails on a parameter that has had no gradient
yet, and on None among an optimizer's own states.
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

Scalars = dict[str, dict[str, Any]]
"""Numbers and None of an optimizer's states, by parameter and state."""

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "param_names"}
"""Settings that PyTorch's schedulers, or names given to an optimizer, add to its groups."""


def _held_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The model's parameters in the optimizer, by name."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in model.named_parameters() if p in held}


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's states by the names of the parameters that it has stepped.

    Raises:
        InputError: a state belongs to a tensor that is not a parameter of the model.
    """
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    unknown = sum(owner not in names for owner in optimizer.state)
    if unknown:
        raise InputError(
            f"the optimizer keeps state for {unknown} tensors that are no parameters of the model: save it with the model "
            "that it trains."
        )
    return {names[parameter]: states for parameter, states in optimizer.state.items()}


def state_scalars(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Scalars:
    """The states that are numbers or None, infinities and NaN as text; refuses others that are no tensors."""
    scalars: Scalars = {}
    for name, states in named_states(model, optimizer).items() if optimizer is not None else ():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                continue
            if value is not None and not isinstance(value, bool | int | float):
                raise InputError(
                    f"the optimizer's state {key!r} of {name} is of type {type(value).__name__}: a checkpoint keeps tensors, "
                    "numbers and None. Keep it as one of these, or save without the optimizer."
                )
            not_json = isinstance(value, float) and not math.isfinite(value)
            scalars.setdefault(name, {})[key] = str(value) if not_json else value
    return scalars


def group_scalars(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """The settings of each parameter group: rates, betas, decay."""
    plain = (bool, int, float, str, tuple, list, type(None))
    groups = optimizer.param_groups if optimizer is not None else []
    return [{k: v for k, v in group.items() if k != "params" and isinstance(v, plain)} for group in groups]


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[list[str]]:
    """The names of the parameters in each group."""
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    groups = optimizer.param_groups if optimizer is not None else []
    return [[names[p] for p in group["params"] if p in names] for group in groups]


def check_groups(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[list[str]]) -> None:
    """Refuse a checkpoint with a parameter in another group: it would train with the settings of that one.

    `saved` are the `group_names` of the checkpoint; empty in one of an older version.

    Raises:
        InputError: names a parameter and both groups.
    """
    own = {name: number for number, names in enumerate(group_names(model, optimizer)) for name in names}
    for number, names in enumerate(saved):
        for name in names:
            if own.get(name, number) != number:
                raise InputError(
                    f"checkpoint {path} has {name} in the optimizer's parameter group {number}, and here it is in group "
                    f"{own[name]}: give the optimizer its groups in the order of the saved one."
                )


def check_class(path: Path, optimizer: torch.optim.Optimizer, saved: str | None, groups: list[dict[str, Any]]) -> None:
    """Refuse the states of an optimizer of another class.

    `saved` is the name of the class; None in a checkpoint of an older version: then no setting of its `groups` may be unknown.

    Raises:
        InputError: the optimizer is of another class.
    """
    own = type(optimizer).__name__
    known = {key for group in optimizer.param_groups for key in group} | _OF_SCHEDULERS
    strangers = sorted({key for group in groups for key in group} - known)
    if own != saved if saved is not None else strangers:
        raise InputError(
            f"checkpoint {path} has the state of another optimizer: {saved or 'one with ' + ', '.join(strangers)}, and this is "
            f"{own}. Build the optimizer that was saved, or load without the optimizer."
        )


def allocate_states(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stored: Layout,
    groups: list[dict[str, Any]],
    scalars: Scalars,
) -> dict[str, torch.Tensor]:
    """Empty tensors for the optimizer states of a checkpoint, sharded like their parameters.

    `stored` is the layout of the checkpoint's `<state>.<parameter>`; `groups` and `scalars` are those that it has saved.

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
    held = _held_parameters(model, optimizer)
    for owner in [*(name.partition(".")[2] for name in stored), *scalars]:
        if owner not in held:
            raise InputError(
                f"checkpoint {path} has optimizer states of {owner}, a parameter that the optimizer does not hold."
            )
    tensors = {}
    for name, (shape, dtype) in stored.items():
        parameter = held[name.partition(".")[2]]
        like_parameter = tuple(parameter.shape) == shape
        tensors[name] = torch.empty_like(parameter, dtype=dtype) if like_parameter else torch.empty(shape, dtype=dtype)
    return tensors


def install_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    groups: list[dict[str, Any]],
    scalars: Scalars,
) -> None:
    """Replace the states by the filled tensors of `allocate_states` and the scalars, and the settings of the groups."""
    optimizer.state.clear()
    held = _held_parameters(model, optimizer)
    # A fused or capturable kernel reads the step count on the parameter's device.
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, tensor in tensors.items():
        key, _, owner = name.partition(".")
        parameter = held[owner]
        optimizer.state[parameter][key] = tensor.to(parameter.device) if parameter in on_device else tensor
    for owner, values in scalars.items():
        optimizer.state[held[owner]] |= {k: float(v) if isinstance(v, str) else v for k, v in values.items()}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in saved.items()})
