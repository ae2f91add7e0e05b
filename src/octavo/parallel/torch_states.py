"""PyTorch's state dicts and loss scaling, for models that are split over tensor ranks.

A model's whole state dict is joined from the ranks' parts. An optimizer's states are DTensors over the sharding ranks: all
ranks of a tensor group would silently write and read theirs under one key, which is refused. A loss scaler joins what it has
found over all ranks: it would skip the step, and lower its scale, only on ranks whose part has an infinity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from octavo.collectives.blocks import BlockTensor
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError
from octavo.parallel.calls import noted
from octavo.parallel.torch_clipping import is_of_tensor_rank
from octavo.parallel.world import state as ranks

_MARK = "octavo_knows_tensor_ranks"


def check_torch_states() -> None:
    """Patch PyTorch to join whole state dicts and infinities of gradients, and to refuse operations that would use parts."""
    changes: dict[str, Callable[[Any], Any]] = {
        "_get_optim_state_dict": _refusing,
        "_load_optim_state_dict": _refusing,
        "_maybe_full_or_cpu_state_dict": _joining,
    }
    for name, changed in changes.items():
        _change(state_dict, name, changed)
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        _change(scaler, "_unscale_grads_", _agreeing)


def _change(owner: Any, name: str, changed: Callable[[Any], Any]) -> None:
    """Replace a function of PyTorch's, once."""
    known = vars(owner)[name]
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
    return whole.cpu() if dist.get_rank() == 0 else torch.empty(0, device="cpu")


def _agreeing(known: Any) -> Any:
    @functools.wraps(known)
    def agreed(self: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        if "octavo_matrices" in vars(optimizer):
            raise InputError(
                "torch.amp.GradScaler with an optimizer of octavo.matrices: its gradients are copied in its step, after the "
                "scaler has divided others. Give loss scaling to octavo.muon(model) or an optimizer of model.parameters(), or "
                "train in bfloat16."
            )
        found: dict[torch.device, Tensor] = known(self, optimizer, *arguments, **keywords)
        if any(is_of_tensor_rank(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            with noted("torch.amp.GradScaler"):
                _join(found)
        return found

    return agreed


def _join(found: dict[torch.device, Tensor]) -> None:
    """Replace the flags, 1.0 for an infinity or NaN among a device's gradients, by the largest of all ranks. Collective."""
    largest = torch.zeros((), dtype=torch.float32, device=ranks.device)
    for flag in found.values():
        largest = torch.maximum(largest, flag.amax().to(largest.device))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for flag in found.values():
        flag.fill_(largest.to(flag.device))
