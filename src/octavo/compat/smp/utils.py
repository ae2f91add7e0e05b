"""SMP's small helpers: a timer, ranks of a group, a logger, clipping, and empty parameters for delayed initialisation."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from octavo.collectives.blocks import parameters_of
from octavo.errors import InputError


def get_logger(name: str = "smp") -> logging.Logger:
    """SMP's logger: messages from level INFO on go to stderr."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


@contextlib.contextmanager
def timeit(condition: bool = True, msg: str = "", rank: int | None = 0) -> Iterator[None]:
    """Log the seconds of the block, on rank 0 and if `condition` is True."""
    start = time.perf_counter()
    yield
    if condition and not rank:
        get_logger().info("%s: %.2f s", msg, time.perf_counter() - start)


def get_global_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """The ranks of a process group; None: all."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def empty_module_params(module: nn.Module, device: torch.device | int | str | None = None, recurse: bool = False) -> nn.Module:
    """Give a module's parameters uninitialised memory on `device`; with `recurse` those of its children too."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        new = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        module.register_parameter(name, new)
    if recurse:
        for child in module.children():
            empty_module_params(child, device, recurse=True)
    return module


def move_buffers_to_device(module: nn.Module, device: torch.device | int | str, recurse: bool = False) -> nn.Module:
    """Move a module's buffers to `device`; with `recurse` those of its children too."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        module._buffers[name] = buffer.to(device)
    if recurse:
        for child in module.children():
            move_buffers_to_device(child, device, recurse=True)
    return module


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0, **others: Any) -> Tensor:
    """Scale the gradients of a model, sharded or not, to a norm of at most `max_norm`.

    Returns the norm before scaling.
    """
    sharded = next((module for module in model.modules() if isinstance(module, FullyShardedDataParallel)), None)
    if sharded is not None:
        return sharded.clip_grad_norm_(max_norm, norm_type)
    return clip_by_pytorch(model, max_norm, norm_type)


def clip_by_pytorch(model: nn.Module, max_norm: float, norm_type: float) -> Any:
    """PyTorch's `clip_grad_norm_`; refused where ranks hold ranges of parameters, of which it would see this rank's only."""
    if any(block is not None for block in parameters_of(model).values()):
        raise InputError(
            f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): ranks hold ranges of this model's parameters, some "
            "of them the same: octavo.clip_grad_norm_(model, max_norm) counts each element once, in a norm of type 2."
        )
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
