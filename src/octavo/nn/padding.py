"""Causal attention with padding between tokens, by compaction: no mask of T × T.

Real tokens are moved to the front in their order, where attention is plainly causal. A padded query attends to the real tokens
before it and to itself: a rectangle, whose result is merged with that of its one key. Consecutive padding shares a rectangle.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.attention.cached import saved_once
from octavo.kernels.attention.pattern import Pattern
from octavo.kernels.attention.pieces import Attended, Gradients
from octavo.kernels.autograd import refuse_second_derivative


def padded_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> Tensor:
    """q [B, T, H, D], k and v [B, T, G, D] → [B, T, H, D].

    pattern: causal, with padding between real tokens, without a window.
    """
    out: Tensor = _PaddedAttention.apply(q, k, v, pattern, scale)
    return out


class _PaddedAttention(torch.autograd.Function):
    """`padded_attention`: q [B, T, H, D], k and v [B, T, G, D] → [B, T, H, D]. Saves them in the order of `real_first`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> Tensor:
        order, padded, spans = pattern.real_first
        order, padded = (x.to(q.device, non_blocking=True) for x in (order, padded))
        q, k, v = (_taken(x, order) for x in (q, k, v))

        def compute() -> tuple[Tensor, Tensor]:
            attended = Attended(q, scale=scale)
            attended.add(k, v, spans)
            attended.add_key(_diagonal_logits(q, k, padded, scale), _for_queries(v, q))
            return attended.result()

        ctx.call = pattern, scale
        return _put_back(saved_once(ctx, compute, q, k, v, order, padded), order)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("these attention kernels")
        q, k, v, order, padded, out, lse = ctx.saved_tensors
        pattern, scale = ctx.call
        d_out = _taken(d_out, order)
        grads = Gradients(d_out, q, out, lse, scale=scale)
        dk, dv = (torch.zeros(x.shape, dtype=grads.dq.dtype, device=x.device) for x in (k, v))
        grads.add(k, v, pattern.real_first.spans, dk, dv)
        diagonal = (_diagonal_logits(q, k, padded, scale) - lse).exp().transpose(1, 2)[..., None]  # 0 for real tokens
        wide, groups = d_out.to(dv.dtype), k.shape[2]
        slope = diagonal * scale * (wide * (_for_queries(v, q).to(wide.dtype) - out)).sum(-1, keepdim=True)
        grads.dq += slope * _for_queries(k, q)
        dk += (slope * q).unflatten(2, (groups, -1)).sum(3)
        dv += (diagonal * wide).unflatten(2, (groups, -1)).sum(3)
        dq, dk, dv = (_put_back(grad.to(q.dtype), order) for grad in (grads.dq, dk, dv))
        return dq, dk, dv, None, None


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """x [B, T, heads, D] in another order of its tokens, int64 [B, T]."""
    return x.gather(1, order[..., None, None].expand(x.shape))


def _put_back(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of `_taken`."""
    return torch.empty_like(x).scatter_(1, order[..., None, None].expand(x.shape), x)


def _diagonal_logits(q: Tensor, k: Tensor, padded: Tensor, scale: float) -> Tensor:
    """Logits of each query with the key at its position, [B, H, T], float32 or wider; −∞ for real tokens, whose spans have
    them."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) * _for_queries(k, q)).sum(-1).transpose(1, 2) * scale
    return logits.masked_fill(~padded[:, None], -torch.inf)


def _for_queries(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, T, G, D] for each of H query heads: a view."""
    return x[:, :, :, None].expand(-1, -1, -1, q.shape[2] // x.shape[2], -1).flatten(2, 3)
