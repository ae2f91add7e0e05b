"""The buffers of an exchange that reduces a group's gradients in place of FSDP2's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from octavo.parallel.fsdp2.adapter import group_of, use_reduce_scatter


class Reduction:
    """Base of a `ReduceScatter` for FSDP2, which asks it for two buffers: of all gradients, then of this rank's sums.

    A reduction may fail between the two, so each starts anew.
    """

    def __init__(self) -> None:
        self._allocated = 0

    def begin(self) -> None:
        """The next buffer is the first."""
        self._allocated = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's request, of the dtype of the gradients."""
        self._allocated += 1
        make = self.gradients if self._allocated == 1 else self.sums
        return make(math.prod(int(side) for side in size), dtype, device)

    def gradients(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of all gradients."""
        return torch.empty(numel, dtype=dtype, device=device)

    def sums(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of this rank's sums, which outlives the reduction."""
        return torch.empty(numel, dtype=dtype, device=device)


def use_reduction(module: FSDPModule, reduction: Reduction) -> None:
    """Reduce the gradients of a module by this `Reduction`, which has FSDP2's `__call__`."""
    use_reduce_scatter(module, reduction)
    if (group := group_of(module)) is not None:
        group.before_reduction("buffers", reduction.begin)
