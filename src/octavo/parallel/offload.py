"""Activation offloading: what a block saves for backward waits in host memory.

The copies are PyTorch's own (`save_on_cpu`): to pinned memory in forward and back in backward, on the stream of the layers.
It buys memory and pays with time; together with recomputation only each block's input makes the journey.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu


def offloaded(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run(block, hidden, …)` with the tensors that it saves for backward kept in host memory (pinned for a GPU)."""

    def run_offloaded(block: nn.Module, hidden: Tensor, *args: Any) -> Tensor:
        with save_on_cpu(pin_memory=hidden.is_cuda):
            return run(block, hidden, *args)

    return run_offloaded
