"""Activation offloading: what a block saves for backward waits in host memory.

Copies go to pinned memory in forward and back in backward, on the stream of the layers. It buys memory and pays with time;
together with recomputation only each block's input makes the journey. PyTorch's `save_on_cpu` does not do here: it forgets
strides, which compiled backwards insist on, and it takes weights along, which FSDP2 frees and refills behind its back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from octavo.fp8.scaling import states_of

SMALLEST_BYTES = 1 << 20
"""What is smaller stays: statistics and scales are many and weigh nothing."""


class _Away(NamedTuple):
    """A tensor in host memory, and where it came from."""

    copy: Tensor
    device: torch.device


def offloaded(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run(block, hidden, …)` with the activations that it saves for backward kept in host memory (pinned, of a GPU's)."""

    def run_offloaded(block: nn.Module, hidden: Tensor, *args: Any) -> Any:
        weights: set[int] = set()

        def pack(tensor: Tensor) -> Tensor | _Away:
            if not weights:  # when the block runs, since that is when sharded weights are there
                weights.update(_memory_of_weights(block))
            if tensor.nbytes < SMALLEST_BYTES or 0 in tensor.stride() or _memory(tensor) in weights:
                return tensor
            copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return _Away(copy.copy_(tensor, non_blocking=tensor.is_cuda), tensor.device)

        with saved_tensors_hooks(pack, _unpack):
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
