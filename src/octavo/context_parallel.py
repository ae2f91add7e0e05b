"""Context parallelism for any model: `attention`, `split` and `gather` over ranks that share each sequence.

A sequence of T tokens is 2n chunks; of n ranks, rank r holds the chunks r and 2n−1−r. Everything except attention is computed
on these tokens alone. Octavo's decoder does all of this automatically. A single rank has whole sequences of any length, without
communication.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from octavo.collectives.attention import check_shapes, context_attention
from octavo.collectives.context import STRATEGIES, ContextGroup
from octavo.errors import InputError
from octavo.kernels.attention.pattern import pattern_of
from octavo.nn.attend import attend
from octavo.parallel.world import state

__all__ = ["attention", "gather", "split"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    cp_comm_type: str = "all_gather",
) -> Tensor:
    """Causal attention of this rank's queries over whole sequences, differentiable once. Collective.

    Args:
        q: [B, T / n, H, D], this rank's tokens from `split`, rotated by their positions in the whole sequence.
        k, v: [B, T / n, G, D], G key-value heads, a divisor of H.
        group: the ranks; None: those of `octavo.init`'s context_parallel_degree, by default each rank alone.
        position_ids: [B or 1, T], of whole sequences, the same on every rank; a position that is not the previous one plus 1
            begins a document, and attention stays within documents. On the host it causes no GPU synchronisation.
        attention_mask: [B, T], 0 for padding at either end of a sequence, to which no token attends.
        window: keys to which a query attends, its position included; None for all.
        scale: of the logits; None for D^-½.
        cp_comm_type: "all_gather", "p2p", "a2a", or "auto": "all_gather" or "a2a", whichever moves fewer bytes; ignored on one
            rank.

    Returns:
        [B, T / n, H, D], this rank's tokens.

    Raises:
        InputError: there is no group, shapes or dtypes do not fit, or the exchange cannot split these heads or compute this
            mask.
    """
    check_shapes(q, k, v)
    context = _context(group, cp_comm_type).resolved(q.shape[2], k.shape[2])
    tokens = q.shape[1] if context.size == 1 else context.split_of(q.shape[1] * context.size).tokens
    for name, whole in (("position_ids", position_ids), ("attention_mask", attention_mask)):
        if whole is not None and (whole.dim() != 2 or whole.shape[1] != tokens or whole.shape[0] not in (1, q.shape[0])):
            raise InputError(
                f"{name} has the shape {list(whole.shape)}: give the shape of whole sequences, [{q.shape[0]}, {tokens}]."
            )
    if position_ids is not None and position_ids.is_floating_point():
        raise InputError(f"position_ids is {position_ids.dtype}: positions are whole numbers, torch.int64.")
    pattern = pattern_of(position_ids, attention_mask, q.shape[0], tokens).with_window(window)
    if context.size == 1 and context.strategy in STRATEGIES:
        return attend(q, k, v, pattern, scale=scale)
    return context_attention(q, k, v, context, pattern, scale)


def split(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """This rank's tokens of `x` [..., T, ...], with T along `dim` a multiple of 2n: [..., T / n, ...]; on one rank `x` itself.

    Differentiable. Shift labels before: a chunk's last label is the next chunk's first token.

    Raises:
        InputError: there is no group, no dimension `dim`, or another number of tokens.
    """
    return _context(group).split(x, dim)


def gather(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """The inverse of `split`, on every rank: [..., T / n, ...] → [..., T, ...] along `dim`. Collective. On one rank `x` itself.

    In backward each rank takes its part of the gradient, since all compute the same from the whole.

    Raises:
        InputError: there is no group, no dimension `dim`, or, on several ranks, an odd number of tokens along it.
    """
    return _context(group).gather(x, dim)


def _context(group: dist.ProcessGroup | None, strategy: str = "all_gather") -> ContextGroup:
    """The ranks of `group` or of `octavo.init`; one rank has no process group."""
    if group is None:
        group = state.cp_process_group
    if group is None and not state.initialised:  # each rank of a launcher would treat its sequence as whole
        raise InputError(
            "there is no context group: group = None means the ranks of octavo.init, which was not called. Call "
            'octavo.init({"context_parallel_degree": n}) on each rank, octavo.init() for a single rank, or pass a process '
            "group, such as torch.distributed.group.WORLD after torch.distributed.init_process_group."
        )
    return ContextGroup(group, strategy)
