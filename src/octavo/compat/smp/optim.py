"""Optimizer states of a sharded model by parameter name, in the form of FSDP1's functions (`FSDP.optim_state_dict`).

`{"state": {parameter: {"exp_avg": …}}, "param_groups": [{…, "params": [parameter, …]}]}`. Tensors are whole or DTensors,
by the type of the surrounding `state_dict_type` context. The local type has DTensors too, like `optimizer.state_dict()`: with
plain rows, ranks that share a folder would overwrite each other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType

from octavo.collectives.blocks import Block, as_held, has_part, parameters_of, with_block
from octavo.collectives.whole import whole_tensor
from octavo.compat.smp.state_dicts import Settings, clean, stored_names_of
from octavo.errors import InputError
from octavo.parallel.shards import have_same_parts, like, local_shard


def names_of(model: nn.Module) -> dict[int, str]:
    """`id` of each parameter → its stored name."""
    stored = stored_names_of(model)
    names = {id(parameter): clean(name) for name, parameter in model.named_parameters()}
    return {number: stored.get(name, name) for number, name in names.items()}


@torch.no_grad()
def optim_state(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> dict[str, Any]:
    """The state of an optimizer by the type of `settings`. Collective for the full type."""
    names, blocks = names_of(model), parameters_of(model)
    config, full = settings.optim_state_dict_config, settings.state_dict_type is StateDictType.FULL_STATE_DICT
    to_cpu = bool(getattr(config, "offload_to_cpu", False))
    returned = not (full and getattr(config, "rank0_only", False)) or not dist.is_initialized() or dist.get_rank() == 0

    def convert(value: Any, block: Block | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = with_block(value, block) if value.dim() else value
        if full:
            value = whole_tensor(value) if has_part(value) else value.clone()
        return value.cpu() if to_cpu else value

    state: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        parameters = [_name(names, parameter) for parameter in group["params"]]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": parameters})
        for name, parameter in zip(parameters, group["params"], strict=True):
            if parameter in optimizer.state:
                converted = {key: convert(value, blocks[parameter]) for key, value in optimizer.state[parameter].items()}
                if returned:
                    state[name] = converted
    return {"state": state, "param_groups": groups} if returned else {}


def _name(names: Mapping[int, str], parameter: Tensor) -> str:
    if id(parameter) not in names:
        raise InputError(
            "the optimizer has a parameter that does not belong to the model: create it from model.parameters() after FSDP."
        )
    return names[id(parameter)]


@torch.no_grad()
def optim_state_to_load(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a state of `optim_state`, of any type, for `optimizer.load_state_dict`.

    Raises:
        InputError: the state lacks a parameter of the optimizer, or has one of another shape.
    """
    names, blocks = names_of(model), parameters_of(model)
    numbers: dict[str, int] = {}
    parameters: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name(names, parameter)
            numbers[name], parameters[name] = len(numbers), with_block(parameter, blocks[parameter])
    stored = stored_names_of(model)
    saved = {stored.get(name, name): entries for name, entries in _nested(state.get("state", {})).items()}
    if strangers := sorted(saved.keys() - numbers.keys()):
        raise InputError(
            f"the optimizer's state has parameters that are not the model's, such as {strangers[0]!r}: load it into the model "
            "that saved it, with FullyShardedDataParallel around."
        )
    if saved and (lost := [name for name in numbers if name not in saved and parameters[name].requires_grad]):
        raise InputError(f"the optimizer's state lacks {lost[0]!r}: it belongs to another model or is incomplete.")
    states = {
        numbers[name]: {key: _as_part(f"{name}.{key}", value, parameters[name]) for key, value in entries.items()}
        for name, entries in saved.items()
    }
    return {"state": states, "param_groups": _groups(state.get("param_groups"), optimizer, names, numbers)}


def _nested(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {clean(name): dict(entries) for name, entries in state.items()}


def _groups(
    saved_groups: Any, optimizer: torch.optim.Optimizer, names: Mapping[int, str], numbers: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The optimizer's groups, with the values of the saved group that has the same first parameter."""
    groups = []
    by_first = {clean(group["params"][0]): group for group in saved_groups or [] if group.get("params")}
    for group in optimizer.param_groups:
        parameters = [names[id(parameter)] for parameter in group["params"]]
        saved = by_first.get(parameters[0], {}) if parameters else {}
        values = {key: saved.get(key, value) for key, value in group.items() if key != "params"}
        groups.append({**values, "params": [numbers[name] for name in parameters]})
    return groups


def _as_part(name: str, value: Any, parameter: Tensor) -> Any:
    """A state in the optimizer's form: sharded like its parameter if it has the parameter's shape."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    part = local_shard(parameter)
    if has_part(value):
        if have_same_parts(value, parameter):
            return as_held(value).to(parameter.device)
        value = whole_tensor(value)
    if tuple(value.shape) == part.shape:
        if not has_part(parameter):
            return value.to(parameter.device)
        new = torch.empty_like(part.local, dtype=value.dtype)
        replace(part, local=new).copy_from(value)
    elif tuple(value.shape) == tuple(part.local.shape):
        new = value.to(parameter.device)
    else:
        raise InputError(f"the optimizer's state {name} has shape {list(value.shape)}, and the parameter {list(part.shape)}.")
    return as_held(like(parameter, new))
