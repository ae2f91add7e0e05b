"""Optimizer state by parameter name, to and from a checkpoint.

`torch.distributed.checkpoint.state_dict` is not used (torch 2.13): to name the states of an optimizer that has not stepped, it
steps the optimizer, which leaves a step count of 1 and changes the bits of training; it fails on a parameter without a
gradient, and on None among an optimizer's states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.checkpoint.joined import class_name
from octavo.checkpoint.opened import Damaged
from octavo.checkpoint.shard_io import Layout
from octavo.collectives.blocks import Block, as_held, parameters_of, with_block
from octavo.errors import InputError, some

Scalars = dict[str, dict[str, Any]]
"""Numbers and None of an optimizer's states, by parameter and state."""

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "param_names"}
"""Entries of parameter groups that are not settings: added by PyTorch's schedulers and named parameters."""
_NOT_SETTINGS = ("params", "param_names")
_LARGEST = 64
"""Most elements of a tensor among the settings: they are stored as text."""


def _names(model: nn.Module) -> dict[Any, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _held_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The model's parameters in the optimizer, by name."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in model.named_parameters() if p in held}


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's states by the names of the parameters that it has stepped.

    Raises:
        InputError: a state belongs to a tensor that is not a parameter of the model.
    """
    refuse_matrices(optimizer)
    names = _names(model)
    unknown = sum(owner not in names for owner in optimizer.state)
    if unknown:
        raise InputError(
            f"the optimizer holds state for {unknown} tensors that are not parameters of the model: save it with the model "
            "that it trains."
        )
    blocks = parameters_of(model)
    return {names[p]: _of_whole(names[p], states, blocks[p]) for p, states in optimizer.state.items()}


def _of_whole(name: str, states: dict[str, Any], block: Block | None) -> dict[str, Any]:
    """States, with a block's elementwise ones as its parts; refuses states of other shapes, which differ between ranks."""
    if block is None:
        return states
    with_blocks = dict(states)
    for key, value in states.items():
        if isinstance(value, torch.Tensor) and value.dim():
            if tuple(value.shape) != block.local.local_shape:
                raise InputError(
                    f"the optimizer's state {key!r} of {name} is {list(value.shape)}: for a parameter of {list(block.shape)} "
                    "with parts on ranks, a checkpoint stores numbers and states of its elements "
                    f"({list(block.local.local_shape)} on this rank). Save without the optimizer."
                )
            with_blocks[key] = with_block(value, block)
    return with_blocks


def refuse_matrices(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of `octavo.matrices`: its states belong to matrices, not to the model's parameters."""
    if "octavo_matrices" in vars(optimizer):
        raise InputError(
            f"the states of {type(optimizer).__name__} belong to octavo.matrices, but octavo.save and octavo.load store states "
            "of a model's parameters: call them without this optimizer, and store its state_dict() on each rank by torch.save "
            "and torch.load."
        )


def state_scalars(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Scalars:
    """The states that are numbers or None, with infinities and NaN as text; refuses others that are not tensors."""
    scalars: Scalars = {}
    for name, states in named_states(model, optimizer).items() if optimizer is not None else ():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                continue
            if value is not None and not isinstance(value, bool | int | float):
                raise InputError(
                    f"the optimizer's state {key!r} of {name} is of type {type(value).__name__}: a checkpoint stores tensors, "
                    "numbers and None. Store it as one of these, or save without the optimizer."
                )
            not_json = isinstance(value, float) and not math.isfinite(value)
            scalars.setdefault(name, {})[key] = str(value) if not_json else value
    return scalars


def group_scalars(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """The settings of each parameter group (rates, betas, decay) as JSON.

    Raises:
        InputError: a setting has a type that a checkpoint does not support.
    """
    return [
        {k: _to_json(v, f"{k!r} of parameter group {number}") for k, v in group.items() if k not in _NOT_SETTINGS}
        for number, group in enumerate(optimizer.param_groups if optimizer is not None else [])
    ]


def settings_of(path: Path, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The inverse of `group_scalars` for the groups of this optimizer.

    Raises:
        Damaged: a setting is not a result of `group_scalars`.
    """
    try:
        pairs = zip(optimizer.param_groups, groups, strict=False)
        return [{key: _from_json(stored, current.get(key)) for key, stored in saved.items()} for current, saved in pairs]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise Damaged(f"the settings of the optimizer in {path} are invalid ({error})") from None


def _to_json(value: Any, key: str) -> Any:
    """A setting as JSON: exact, with tensors, infinities and NaN marked by their type."""
    if isinstance(value, torch.Tensor) and value.numel() <= _LARGEST and not value.is_complex():
        stored = [_to_json(number, key) for number in value.detach().flatten().tolist()]
        return {"tensor": stored, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_to_json(item, key) for item in value]
    raise InputError(
        f"the optimizer's setting {key} is of type {type(value).__name__}: a checkpoint stores numbers, text, None, small real"
        " tensors, and tuples and lists of them. Store it as one of these, or save without the optimizer."
    )


def _from_json(stored: Any, current: Any) -> Any:
    """The inverse of `_to_json`, with the type (tuple or list) and device of the optimizer's setting `current`."""
    if isinstance(stored, dict) and "tensor" in stored:
        device = current.device if isinstance(current, torch.Tensor) else None
        values = [_from_json(number, None) for number in stored["tensor"]]
        tensor = torch.tensor(values, dtype=getattr(torch, stored["dtype"]), device=device)
        return tensor.reshape(stored["shape"])
    if isinstance(stored, dict):
        return float(stored["float"])
    if isinstance(stored, list):
        alike = isinstance(current, tuple | list) and len(current) == len(stored)
        existing = current if alike else [None] * len(stored)
        items = list(map(_from_json, stored, existing))
        return tuple(items) if isinstance(current, tuple) else items
    return stored


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[list[str]]:
    """The names of the parameters in each group."""
    names = _names(model)
    groups = optimizer.param_groups if optimizer is not None else []
    return [[names[p] for p in group["params"] if p in names] for group in groups]


def check_groups(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[list[str]]) -> None:
    """Refuse a checkpoint with a parameter in another group: it would be trained with that group's settings.

    saved: the `group_names` of the checkpoint; empty in one of an older version.

    Raises:
        InputError: names a parameter and both groups.
    """
    groups = {name: number for number, names in enumerate(group_names(model, optimizer)) for name in names}
    if new := sorted(groups.keys() - {name for names in saved for name in names}) if saved else []:
        raise InputError(
            f"checkpoint {path} has no optimizer state of {some(new)}: its optimizer had fewer parameters. Build the "
            "optimizer that was saved, or load without it."
        )
    for number, names in enumerate(saved):
        for name in names:
            if groups.get(name, number) != number:
                raise InputError(
                    f"checkpoint {path} has {name} in the optimizer's parameter group {number}, but this optimizer has it in "
                    f"group {groups[name]}: give the optimizer its groups in the saved order."
                )


def check_class(path: Path, optimizer: torch.optim.Optimizer, saved: str | None, groups: list[dict[str, Any]]) -> None:
    """Refuse the states of an optimizer of another class.

    saved: the name of the class; None in older checkpoints, whose `groups` must then have no unknown setting.

    Raises:
        InputError: the optimizer is of another class.
    """
    current = class_name(optimizer)
    known = {key for group in optimizer.param_groups for key in group} | _OF_SCHEDULERS
    strangers = sorted({key for group in groups for key in group} - known)
    if current != saved if saved is not None else strangers:
        raise InputError(
            f"checkpoint {path} has the state of another optimizer: {saved or 'one with ' + ', '.join(strangers)}, and this is "
            f"{current}. Build the optimizer that was saved, or load without the optimizer."
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

    stored: the layout of the checkpoint's `<state>.<parameter>`; groups, scalars: the checkpoint's.

    Raises:
        InputError: the checkpoint has no optimizer, or another one.
    """
    refuse_matrices(optimizer)
    if not groups:
        raise InputError(f"checkpoint {path} has no optimizer state: load it without the optimizer, or save it with one.")
    if len(groups) != len(optimizer.param_groups):
        raise InputError(
            f"checkpoint {path} has an optimizer with {len(groups)} parameter groups, this one has "
            f"{len(optimizer.param_groups)}: build it like the saved one."
        )
    held, blocks = _held_parameters(model, optimizer), parameters_of(model)
    for owner in [*(name.partition(".")[2] for name in stored), *scalars]:
        if owner not in held:
            raise InputError(
                f"checkpoint {path} has optimizer states of {owner}, a parameter that the optimizer does not hold."
            )
    tensors = {}
    for name, (shape, dtype) in stored.items():
        parameter = held[name.partition(".")[2]]
        whole = with_block(parameter, blocks[parameter])
        if tuple(whole.shape) == shape:
            tensors[name] = torch.empty_like(whole, dtype=dtype)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
    return tensors


def install_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    groups: list[dict[str, Any]],
    scalars: Scalars,
) -> None:
    """Replace the states by the filled tensors of `allocate_states` and the scalars, and the settings by `groups`."""
    optimizer.state.clear()
    held = _held_parameters(model, optimizer)
    # Fused and capturable kernels need the step count on the parameter's device.
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, tensor in tensors.items():
        key, _, owner = name.partition(".")
        parameter, tensor = held[owner], as_held(tensor)
        optimizer.state[parameter][key] = tensor.to(parameter.device) if parameter in on_device else tensor
    for owner, values in scalars.items():
        optimizer.state[held[owner]] |= {k: float(v) if isinstance(v, str) else v for k, v in values.items()}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            current: Any = group.get(key)
            if _same_kind(current, value):
                with torch.no_grad():
                    current.copy_(value)  # a scheduler or a compiled step may reference it
            else:
                group[key] = value


def _same_kind(one: Any, other: Any) -> bool:
    """True for tensors of one shape and dtype."""
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.shape == other.shape and one.dtype == other.dtype
