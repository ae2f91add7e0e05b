"""Expert parallelism: each rank holds some of an MoE layer's experts, and copies of tokens are sent to their experts' ranks.

A copy is sent for each of a token's experts, and its result is sent back, so that every token's results are summed by the
token's rank: in the order, and to the bits, of one rank that holds all experts.

Legend: T tokens of this rank, K experts per token (top-k), C = T · K copies, D ranks, R copies that this rank receives,
H hidden_size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.collectives.work import Pending, Ranks, start_collective
from octavo.kernels.experts.dispatch import narrow, widen


class ExpertGroup(Ranks):
    """The ranks over which experts are distributed, equally many to each, in the order of the ranks.

    experts: of an MoE layer, a multiple of the ranks. fp8: tokens and the gradients of results are sent in FP8 under an
    autocast.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int, *, fp8: bool = False) -> None:
        super().__init__(group)
        self.experts, self.fp8 = experts, fp8
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.local = experts // self.size

    @property
    def local_experts(self) -> slice:
        """This rank's experts."""
        return slice(self.rank * self.local, (self.rank + 1) * self.local)

    def exchange(self, chosen: Tensor) -> Exchange:
        """Begin the exchange of copies; chosen: int64 [T, K], the experts of each token. Collective."""
        return Exchange(self, chosen)


class Exchange:
    """One forward of an MoE layer: the destinations and sources of the tokens' copies.

    Sizes come from the device: `sizes` waits for them, once. Kernels queued before it run meanwhile.

    Attributes:
        tokens: int64 [C], the token of each copy, in the order of experts.
        rows: int64 [T, K], the position of each copy in that order.
    """

    def __init__(self, group: ExpertGroup, chosen: Tensor) -> None:
        self.group = group
        top_k, flat = chosen.shape[1], chosen.flatten()
        order = flat.argsort(stable=True)
        self.tokens = order // top_k
        self.rows = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=flat.device)).view(chosen.shape)
        counts = torch.zeros(group.experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group.group)
        self._received = received.view(group.size, group.local)  # by rank of the token, then by expert
        sizes = torch.stack((counts.view(group.size, -1).sum(1), self._received.sum(1)))
        on_gpu = sizes.is_cuda
        self._sizes = torch.empty(sizes.shape, dtype=sizes.dtype, device="cpu", pin_memory=True) if on_gpu else sizes
        self._arrived: Any = None
        if on_gpu:
            self._sizes.copy_(sizes, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._out: list[int] = []
        self._in: list[int] = []

    def sizes(self) -> None:
        """Wait for the numbers of sent and received copies: the only wait of the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._out, self._in = self._sizes.tolist()

    @property
    def experts(self) -> Tensor:
        """int64 [R], the expert of each received copy, counted from this rank's first."""
        local = torch.arange(self.group.local, device=self._received.device).repeat(self.group.size)
        return local.repeat_interleave(self._received.flatten(), output_size=sum(self._in))

    def dispatch(self, copies: Tensor, *, fp8: bool = False) -> Pending[Tensor]:
        """Send rows [C, H] to the ranks of their experts, and receive [R, H]. Collective."""
        return self._send(narrow(copies) if fp8 else (copies,), self._out, self._in, copies.dtype)

    def collect(self, results: Tensor) -> Pending[Tensor]:
        """Send rows [R, H] back to the ranks of their tokens, and receive [C, H]. Collective."""
        return self._send((results,), self._in, self._out, results.dtype)

    def _send(self, parts: tuple[Tensor, ...], leaving: list[int], arriving: list[int], dtype: torch.dtype) -> Pending[Tensor]:
        sent = tuple(part.contiguous() for part in parts)
        received = tuple(part.new_empty(sum(arriving), part.shape[1]) for part in sent)
        as_bytes = [  # gloo does not know every dtype
            (into.view(torch.uint8), part.view(torch.uint8), arriving, leaving)
            for into, part in zip(received, sent, strict=True)
        ]
        rows, *scale_inv = received  # of FP8
        finish = functools.partial(widen, rows, scale_inv[0], dtype) if scale_inv else lambda: rows
        return start_collective(dist.all_to_all_single, as_bytes, self.group.group, finish)
