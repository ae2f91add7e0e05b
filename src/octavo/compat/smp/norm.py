"""SMP's `clip_grad_norm_`: for a sharded model, PyTorch's FSDP, or any other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0, **others: Any) -> Tensor:
    """Scale the gradients of `model` to a norm of at most `max_norm`; returns the norm before."""
    found = next((module for module in model.modules() if isinstance(module, FullyShardedDataParallel)), None)
    if found is not None:
        return found.clip_grad_norm_(max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
