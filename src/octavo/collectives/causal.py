"""Plain causal attention by gathered keys and values: no window, no documents, so that every rank reads nearly all chunks.

Of a rank's two chunks the early one attends to itself while keys and values are gathered, then to the chunks before it. The
late one attends to everything up to its end: in one call if a kernel takes more keys than queries, else in two. In backward a
rank sends each other rank two shares of gradients, as its kernels wrote them; shares are summed in float32. A layer may start
the gather before attention's backward (`octavo.collectives.attention.gather_ahead`); then the early chunk's pairs with itself
hide the exchange of gradients.

Shapes: B batch, T tokens, n ranks, L = T / n tokens of this rank, C = L / 2 of a chunk, H query heads, G key-value heads,
D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.collectives.context import ContextGroup, chunks_in_order
from octavo.collectives.schedule import Split
from octavo.collectives.work import Pending, start_collective, start_gather
from octavo.kernels.attention import pieces
from octavo.kernels.attention.join import add_, add_up, join_


def forward(q: Tensor, k: Tensor, v: Tensor, context: ContextGroup, split: Split, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, L, H, D] in the dtype of q, lse [B, H, L] float32 (float64 for float64 inputs)."""
    gathering = start_gather(joint(k, v), context.group)
    early, late = slice(None, split.chunk), slice(split.chunk, None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    pieces.attend(q[:, early], k[:, early], v[:, early], (out[:, early], lse[..., early]), causal=True, scale=scale)
    keys, values = in_sequence(gathering.wait(), split)
    before = split.chunks()[0] * split.chunk
    if before:
        other = pieces.attend(q[:, early], keys[:, :before], values[:, :before], None, causal=False, scale=scale)
        join_(out[:, early], lse[..., early], *other)
    result = out[:, late], lse[..., late]
    if pieces.takes_more_keys(keys):
        pieces.attend(q[:, late], keys, values, result, causal=True, scale=scale)
        return out, lse
    earlier = slice(None, keys.shape[1] - split.chunk)
    pieces.attend(q[:, late], k[:, late], v[:, late], result, causal=True, scale=scale)
    join_(*result, *pieces.attend(q[:, late], keys[:, earlier], values[:, earlier], None, causal=False, scale=scale))
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, context: ContextGroup, split: Split, scale: float,
    started: list[Pending[Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [B, L, H, D], k and v [B, L, G, D], in their dtype; d_out and out [B, L, H, D], lse [B, H, L].

    started: the pending gather of k and v, if started; emptied.
    """
    ahead = bool(started)
    gathering = started.pop() if ahead else start_gather(joint(k, v), context.group)
    chunk, (rank, last) = split.chunk, split.chunks()
    halves = slice(None, chunk), slice(chunk, None)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    written = [False, False]

    def add(half: int, keys: Tensor, values: Tensor, shares: Tensor, *, causal: bool) -> None:
        """Add a chunk's gradients from attention to some keys; gradients of the keys are written to `shares`."""
        rows = halves[half]
        into = torch.empty_like(dq[:, rows]) if written[half] else dq[:, rows]
        arguments = d_out[:, rows], q[:, rows], keys, values, out[:, rows], lse[..., rows]
        pieces.differentiate(*arguments, (into, *shares), causal=causal, scale=scale)
        if written[half]:
            add_(dq[:, rows], into)
        written[half] = True

    def empty(chunks: int) -> Tensor:
        return k.new_empty(2, k.shape[0], chunks * chunk, *k.shape[2:])

    def share(of: Tensor, number: int) -> Tensor:
        return of[:, :, number * chunk : (number + 1) * chunk]

    # The early chunk's pairs with itself hide the gather, or if that was started earlier, the exchange of gradients.
    itself = empty(1)
    if not ahead:
        add(0, k[:, halves[0]], v[:, halves[0]], itself, causal=True)
    keys, values = in_sequence(gathering.wait(), split)
    of_early, of_late = empty(rank), empty(last + 1)
    if rank:
        add(0, keys[:, : rank * chunk], values[:, : rank * chunk], of_early, causal=False)
    if pieces.takes_more_keys(keys):
        add(1, keys, values, of_late, causal=True)
    else:
        add(1, k[:, halves[1]], v[:, halves[1]], share(of_late, last), causal=True)
        add(1, keys[:, : last * chunk], values[:, : last * chunk], of_late[:, :, : last * chunk], causal=False)
    del keys, values  # the last references to their memory

    others = [other for other in range(split.size) if other != rank]
    # Two shares for each other rank: the late chunk's share of the rank's early chunk; then the early chunk's share of it, if
    # it comes before, else the late chunk's share of the rank's late chunk.
    sent = k.new_empty(len(others), 2, *itself.shape)
    for place, other in enumerate(others):
        add_up(sent[place, 0], [share(of_late, other)])
        add_up(sent[place, 1], [share(of_early, other) if other < rank else share(of_late, 2 * split.size - 1 - other)])
    exchange = _start_exchange(sent, others, context)
    if ahead:
        add(0, k[:, halves[0]], v[:, halves[0]], itself, causal=True)
    received = exchange.wait()
    summed = empty(2)
    # Both chunks of later ranks attend only to this rank's early chunk; late chunks of earlier ranks attend to both.
    behind = [received[place, 1] for place, other in enumerate(others) if other > rank]
    before = [received[place, 1] for place, other in enumerate(others) if other < rank]
    add_up(summed[:, :, halves[0]], [itself, share(of_late, rank), *received[:, 0].unbind(), *behind])
    add_up(summed[:, :, halves[1]], [share(of_late, last), *before])
    dk, dv = summed
    return dq, dk, dv


def joint(k: Tensor, v: Tensor) -> Tensor:
    """k and v as one tensor [2, *k.shape], without a copy if they are adjacent in memory."""
    behind = k.storage_offset() + k.numel()
    if (
        k.is_contiguous()
        and v.is_contiguous()
        and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and v.storage_offset() == behind
    ):
        return k.as_strided((2, *k.shape), (k.numel(), *k.stride()))
    return torch.stack((k, v))


def in_sequence(gathered: Tensor, split: Split) -> Any:
    """[n, 2, B, L, G, D] of all ranks → keys and values [B, tokens, G, D] up to the end of this rank's late chunk."""
    return torch.cat(chunks_in_order(gathered, 2)[: split.chunks()[1] + 1], 2)


def _start_exchange(sent: Tensor, others: list[int], context: ContextGroup) -> Pending[Tensor]:
    """Start to send sent[i] to others[i], and to receive from them in the same order."""
    received = torch.empty_like(sent)
    if not others:
        return Pending([], lambda: received)
    sizes = [sent[0].numel() if rank in others else 0 for rank in range(context.size)]
    exchanged = received.view(-1), sent.view(-1), sizes, sizes
    return start_collective(dist.all_to_all_single, [exchanged], context.group, lambda: received)
