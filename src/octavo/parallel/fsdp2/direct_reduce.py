"""Zero-copy reduction of large gradients: those of an embedding, of a head and of an MLP's first product.

FSDP2 copies the gradients of a group into one buffer, between the kernels of the backward, so that the rows of each rank are
contiguous. One matrix whose rows the ranks divide has that order already: the copy of an embedding of 8B takes 0.6 ms, with
nothing to hide it. Smaller matrices of a block use FSDP2's reduction: separately each needs a collective, which waits for
multiprocessors and for the other ranks.

Gradients are reduced as they are if their sums have the same dtype; bf16 gradients of ranks on one host are exchanged and
summed in float32, as in `bf16_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from octavo.collectives.work import reduce_scatter
from octavo.kernels.attention.join import add_up
from octavo.parallel.fsdp2.adapter import Group, Parameter, groups_of
from octavo.parallel.fsdp2.sizes import one_is_large
from octavo.parallel.storages import SOLE_OWNER, reference_count

LARGE_BYTES = 256 * 2**20
"""Size of a gradient in a group from which its copy takes longer than a separate collective."""


class _Running:
    """The latest reduction of any group: it references its gradients until it ends."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.event: Any = None

    def wait(self, device: Any) -> None:
        """Have the current stream wait for it, and release the gradients."""
        if self.event is not None:
            device.current_stream().wait_event(self.event)
        self.gradients, self.event = [], None


def use(modules: Sequence[FSDPModule], dtype: torch.dtype | None, *, one_host: bool) -> None:
    """Reduce gradients of these modules in place, if they are summed. dtype: of the sums; None: the gradients' dtype."""
    running = _Running()
    for group in groups_of(modules):
        if group.is_sharded and not group.replicated:
            _Reduction(group, running, dtype, one_host).install()


class _Reduction:
    """The reductions of one group of parameters without replicas."""

    def __init__(self, group: Group, running: _Running, dtype: torch.dtype | None, one_host: bool) -> None:
        self.group, self.running, self.dtype, self.one_host = group, running, dtype, one_host
        self.ranks = group.ranks
        self.accumulated = False

    def install(self) -> None:
        """Run before FSDP2's reduction of the group, and before its wait at the end of a backward."""
        self.group.before_reduction("direct", self.reduce)
        self.group.before_end_of_backward(lambda: self.running.wait(self.group.device))

    @torch.no_grad()
    def reduce(self) -> None:
        """Begin to reduce the large gradients of the group."""
        group, accumulated = self.group, self.accumulated
        self.accumulated = not group.reduces
        summed = group.forces_sums and group.divides_by == 1.0
        if not summed or not group.reduces or group.has_hook:
            return
        found = {parameter: parameter.gradient() for parameter in group.parameters}
        gradients = {parameter: gradient for parameter, gradient in found.items() if gradient is not None}
        widened = self.dtype if accumulated else None  # whatever this rank has accumulated, since that may be nothing
        if not one_is_large([gradient.numel() for gradient in gradients.values()]):
            gradients = {parameter: gradient for parameter, gradient in gradients.items() if _is_large(gradient, widened)}
        if widened is not None:
            gradients = {parameter: gradient.to(widened) for parameter, gradient in gradients.items()}
        dtype = self._dtype_of_sums(gradients)
        if dtype is None:
            return
        for parameter in gradients:
            parameter.drop_gradient()  # also if the reduction fails
        device, stream = group.device, group.reduction_stream
        self.running.wait(device)
        # Autograd can pass a view of memory that the rest of the backward writes.
        own = [gradient if reference_count(gradient) <= SOLE_OWNER else gradient.clone() for gradient in gradients.values()]
        stream.wait_stream(device.current_stream())
        with device.stream(stream):
            for parameter, gradient in zip(gradients, own, strict=True):
                parameter.add_to_shard(self._sum(gradient, dtype))
            self.running.gradients, self.running.event = own, stream.record_event()

    def _dtype_of_sums(self, gradients: dict[Parameter, Tensor]) -> torch.dtype | None:
        """The dtype of the sums, the same on all ranks; None: FSDP2 reduces these gradients."""
        given = {gradient.dtype for gradient in gradients.values()}
        if len(given) != 1 or not all(self._in_order(*pair) for pair in gradients.items()):
            return None
        own = given.pop()
        wanted = self.dtype or own
        widened = own == torch.bfloat16 and wanted == torch.float32 and self.one_host
        return wanted if own == wanted or widened else None

    def _in_order(self, parameter: Parameter, gradient: Tensor) -> bool:
        """True if each rank's rows are contiguous in memory, with equal numbers per rank."""
        divides = gradient.dim() > 0 and gradient.shape[0] % self.ranks.size() == 0
        return parameter.is_by_rows and divides and gradient.is_contiguous()

    def _sum(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's rows of the sum."""
        ranks = self.ranks.size()
        rows = gradient.new_empty(gradient.shape[0] // ranks, *gradient.shape[1:], dtype=dtype)
        if gradient.dtype == dtype:
            reduce_scatter(rows, gradient, group=self.ranks)
        else:
            parts = torch.empty_like(gradient)
            dist.all_to_all_single(parts, gradient, group=self.ranks)
            add_up(rows.view(1, 1, -1), parts.view(ranks, 1, 1, -1).unbind())
        return rows


def _is_large(gradient: Tensor, dtype: torch.dtype | None) -> bool:
    """True if a gradient, in `dtype` or its own, is large enough for a separate reduction."""
    return gradient.numel() * (dtype or gradient.dtype).itemsize >= LARGE_BYTES
