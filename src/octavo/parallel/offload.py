"""Activation offloading: a block's saved activations wait in host memory.

Copies go to pinned memory in forward and back in backward, on the stream of the layers. It saves memory and costs time. With
recomputation only what that keeps is copied. PyTorch's `save_on_cpu` would lose strides, which compiled backwards require,
and copy weights, which FSDP2 frees and refills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from octavo.fp8.scaling import states_of
from octavo.kernels.attention.kept import moved

SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay: statistics and scales are many and need little memory."""


class _Away(NamedTuple):
    """A copy in host memory, and the device of the original."""

    copy: Tensor
    device: torch.device


def offloaded(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run(block, hidden, …)` with saved activations in host memory, pinned for a GPU."""

    def run_offloaded(block: nn.Module, hidden: Tensor, *args: Any) -> Any:
        weights: set[int] = set()

        def pack(tensor: Tensor) -> Tensor | _Away:
            if not weights:  # not earlier: sharded weights have memory only while the block runs
                weights.update(_memory_of_weights(block))
            if tensor.nbytes < SMALLEST_BYTES or 0 in tensor.stride() or _memory(tensor) in weights:
                return tensor
            copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return _Away(copy.copy_(tensor, non_blocking=tensor.is_cuda), tensor.device)

        with saved_tensors_hooks(pack, _unpack), moved(pack, _unpack):
            return run(block, hidden, *args)

    return run_offloaded


def _unpack(packed: Tensor | _Away) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    back = torch.empty_strided(packed.copy.size(), packed.copy.stride(), dtype=packed.copy.dtype, device=packed.device)
    return back.copy_(packed.copy, non_blocking=True)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory_of_weights(block: nn.Module) -> set[int]:
    tensors: list[Tensor] = [p for p in block.parameters() if not isinstance(p, DTensor)]
    for _, state in states_of(block):
        if state.gathered is not None:
            tensors += [data for data in (state.gathered.rowwise_data, state.gathered.columnwise_data) if data is not None]
    return {_memory(tensor) for tensor in tensors} | {0}
