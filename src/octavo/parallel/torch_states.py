"""PyTorch's state dicts and loss scaling, for models that are split over tensor ranks.

A model's whole state dict is joined from the ranks' parts. An optimizer's states are DTensors over the sharding ranks: all
ranks of a tensor group would silently write and read theirs under one key, which is refused. So is a loss scaler: it would skip
the step only on ranks whose part has an infinity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict

from octavo.collectives.blocks import BlockTensor
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError
from octavo.parallel.torch_clipping import is_of_tensor_rank

_MARK = "octavo_knows_tensor_ranks"


def check_torch_states() -> None:
    """Patch PyTorch to join whole state dicts, and to refuse operations that would use parts."""
    changes: dict[str, Callable[[Any], Any]] = {
        "_get_optim_state_dict": _refusing,
        "_load_optim_state_dict": _refusing,
        "_maybe_full_or_cpu_state_dict": _joining,
    }
    for name, changed in changes.items():
        _change(state_dict, name, changed)
    _change(torch.amp.GradScaler, "_unscale_grads_", _refusing_scale)


def _change(owner: Any, name: str, changed: Callable[[Any], Any]) -> None:
    """Replace a function of PyTorch's, once."""
    known = getattr(owner, name)
    if not hasattr(known, _MARK):
        wrapped = changed(known)
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


def _refusing(known: Any) -> Any:
    @functools.wraps(known)
    def checked(model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if any(map(is_of_tensor_rank, model.parameters())):
            raise InputError(
                "torch.distributed.checkpoint knows no tensor ranks, and would save one rank's optimizer states for all: "
                "octavo.save(path, model, optimizer) writes them, and octavo.load reads them at any tensor_parallel_degree."
            )
        return known(model, *arguments, **keywords)

    return checked


def _joining(known: Any) -> Any:
    @functools.wraps(known)
    def joined(state: dict[str, Any], info: Any) -> Any:
        if info.full_state_dict:
            state = {name: _whole(value, info.cpu_offload) for name, value in state.items()}
        return known(state, info)

    return joined


def _whole(value: Any, offloaded: bool) -> Any:
    """The whole tensor; `offloaded`: in host memory and on rank 0 alone, as in PyTorch."""
    if not isinstance(value, BlockTensor):
        return value
    whole = whole_tensor(value)
    if not offloaded:
        return whole
    return whole.cpu() if dist.get_rank() == 0 else torch.empty(0)


def _refusing_scale(known: Any) -> Any:
    @functools.wraps(known)
    def checked(self: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        if any(is_of_tensor_rank(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise InputError(
                "torch.amp.GradScaler with a tensor_parallel_degree above 1: it would skip the step only on ranks whose "
                "part has an infinity. Train in bfloat16, which needs no loss scaling, or set tensor_parallel_degree = 1."
            )
        return known(self, optimizer, *arguments, **keywords)

    return checked
