"""Attention of sequences that are concatenated or padded, with any numbers of queries and keys.

A segment is a rectangle of queries and keys; the rest is padding, with results and gradients of 0. Segments are computed by

causal attention, a window before each query, no mask; a sink
                                kernels that give a log-sum-exp, span by span: FlashAttention-4, cuDNN's, or the reference
dropout, other windows, a mask, values of another size
                                PyTorch's `scaled_dot_product_attention`, segment by segment
a bias, ALiBi, a cap, the largest logits; dropout with a sink
                                plain PyTorch in float32 (`octavo.nn.scores`)

Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo.kernels.attention.cached import saved_once
from octavo.kernels.attention.pattern import Span
from octavo.kernels.attention.pieces import Attended, gradients
from octavo.kernels.autograd import attention_begins, refuse_second_derivative
from octavo.nn.attend import MASKED_PAIRS, scaled_dot_product
from octavo.nn.scores import NOTHING, Scores, plain_attention

LIBRARY, PLAIN = "PyTorch's scaled_dot_product_attention", "plain PyTorch, in float32"
"""Names of the implementations without Octavo's kernels."""


class Sight(NamedTuple):
    """The keys to which a query of a segment attends: from `left` before its position to `right` after it; None for all.

    Query i is aligned with key i, or with `bottom_right` at key i + keys − queries.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def distance(self, rows: slice, queries: int, keys: int, device: torch.device) -> Tensor:
        """[rows, keys], the position of the key minus the query's."""
        ahead = keys - queries if self.bottom_right else 0
        return torch.arange(keys, device=device) - torch.arange(rows.start + ahead, rows.stop + ahead, device=device)[:, None]

    def seen(self, rows: slice, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """bool [1, 1, rows, keys], True where a query sees a key; None if all are seen."""
        if self.left is None and self.right is None:
            return None
        distance = self.distance(rows, queries, keys, device)
        there = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            there &= distance >= -self.left
        if self.right is not None:
            there &= distance <= self.right
        return there[None, None]

    @property
    def window(self) -> int | None:
        """Most keys of a query in `spans`, the one at its position included; None without a limit."""
        return None if self.left is None else self.left + 1

    def spans(self, segment: Span) -> list[Span] | None:
        """The segment for kernels of causal and full attention with a window; None if they cannot compute it."""
        b0, b1, q0, q1, k0, k1 = segment[:6]
        queries, keys = q1 - q0, k1 - k0
        if not (queries and keys and b1 > b0):
            return []
        if self.left is None and self.right is None:
            return [segment]
        if self.right != 0:
            return None
        if self.bottom_right:
            return [Span(b0, b1, q0 + max(0, queries - keys), q1, k0, k1, causal=True)]
        both = min(queries, keys)
        first = Span(b0, b1, q0, q0 + both, k0, k0 + both, causal=True)
        if queries <= keys:
            return [first]
        return [first, Span(b0, b1, q0 + both, q1, k0, k1, causal=False)] if self.left is None else None


def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Span], sight: Sight, *, scale: float, scores: Scores = NOTHING,
    mask: Tensor | None = None, dropout: float = 0.0, top: bool = False, report: Callable[[str], None] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out [B, Tq, H, Dv], 0 without a key, and with `top` the largest logit of each head, float32 [H]; differentiable once.

    Args:
        q, k, v: [B, Tq, H, D], [B, Tk, G, D], [B, Tk, G, Dv].
        segments: their queries attend to their keys within `sight`. Ascending; no query or key is in two segments.
        sight: the keys of each query.
        scale: factor of the scores.
        scores: further terms of the softmax, by positions in a segment.
        mask: bool [B or 1, H or 1, Tq, Tk], True where a query attends to a key, for one segment of all queries and keys.
        dropout: dropout probability of softmax values.
        top: also return the largest logits.
        report: called with `LIBRARY` or `PLAIN` if that computes it.
    """
    plain = top or scores.beyond_sink() or (scores.sink is not None and (dropout or mask is not None))
    if not (plain or dropout or mask is not None) and v.shape[-1] == q.shape[-1]:
        spans_of_segments = [sight.spans(segment) for segment in segments]
        if all(spans is not None for spans in spans_of_segments):
            spans = [span for each in spans_of_segments if each for span in each]
            whole: Tensor = _Segments.apply(q, k, v, scores.sink, spans, sight.window, scale)
            return whole, None
    plain = plain or scores.sink is not None
    if report is not None:
        report(PLAIN if plain else LIBRARY)
    cut = _cut(q, [segment[:4] for segment in segments]), *(_cut(x, [(*s[:2], *s[4:6]) for s in segments]) for x in (k, v))
    parts_of_segments: list[Tensor] = []
    tops = [torch.full((q.shape[2],), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)]
    for segment, segment_q, segment_k, segment_v in zip(segments, *cut, strict=True):
        queries, keys = segment_q.shape[1], segment_k.shape[1]
        if not (queries and keys and len(segment_q)):
            parts_of_segments.append(segment_q.new_zeros(*segment_q.shape[:3], v.shape[-1]))
            continue
        see = _seeing(sight, mask, queries, keys, q.device)
        if plain:
            terms = scores.of(slice(segment.b0, segment.b1), queries, keys)
            distance = _distances(sight, queries, keys, q.device)
            part, largest = plain_attention(segment_q, segment_k, segment_v, see, distance, terms, scale=scale, dropout=dropout)
            tops.append(largest)
        else:
            causal = sight == (None, 0, sight.bottom_right) and queries == keys and mask is None
            part = _by_library(segment_q, segment_k, segment_v, see, causal=causal, scale=scale, dropout=dropout)
        parts_of_segments.append(part)
    out = _put_together(parts_of_segments, segments, q, v.shape[-1])
    if not out.requires_grad:  # no pair at all: gradients are 0 all the same
        out = out + sum(x[:0].sum() for x in (q, k, v))
    return out, torch.stack(tops).amax(0) if top else None


class _Segments(torch.autograd.Function):
    """q [B, Tq, H, D], k and v [B, Tk, G, D], sink [H] or None → out [B, Tq, H, D], span by span; saves its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, spans: list[Span], window: int | None, scale: float
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            attended = Attended(q, scale=scale, window=window)
            attended.add(k, v, spans)
            if sink is not None:
                logits = _logits(sink, q).expand(len(q), -1, q.shape[1])
                attended.add_key(logits, q.new_zeros(()).expand(q.shape))
            return attended.result()

        ctx.call = spans, window, scale
        return saved_once(ctx, compute, q, k, v, sink)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("these attention kernels")
        attention_begins()
        q, k, v, sink, out, lse = ctx.saved_tensors
        spans, window, scale = ctx.call
        dq, dk, dv = gradients(d_out, q, k, v, out, lse, spans, scale=scale, window=window)
        d_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            share = (_logits(sink, q) - lse).exp()  # of the softmax
            through = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
            d_sink = -(share * through).sum((0, 2)).to(sink.dtype)
        return dq, dk, dv, d_sink, None, None, None


def _logits(sink: Tensor, q: Tensor) -> Tensor:
    """[1, H, 1], float32, float64 for float64 inputs."""
    return sink.to(torch.promote_types(q.dtype, torch.float32)).view(1, -1, 1)


def _seeing(
    sight: Sight, mask: Tensor | None, queries: int, keys: int, device: torch.device
) -> Callable[[slice], Tensor | None]:
    def see(rows: slice) -> Tensor | None:
        seen = sight.seen(rows, queries, keys, device)
        if mask is None:
            return seen
        return mask[:, :, rows] if seen is None else mask[:, :, rows] & seen

    return see


def _distances(sight: Sight, queries: int, keys: int, device: torch.device) -> Callable[[slice], Tensor]:
    return lambda rows: sight.distance(rows, queries, keys, device)


def _by_library(
    q: Tensor, k: Tensor, v: Tensor, see: Callable[[slice], Tensor | None], *, causal: bool, scale: float, dropout: float
) -> Tensor:
    """Attention by PyTorch's function, a band of queries at a time where it needs a mask."""
    if causal:
        return scaled_dot_product(q, k, v, None, causal=True, scale=scale, dropout=dropout)

    def of_band(q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
        return scaled_dot_product(q, k, v, see(rows), causal=False, scale=scale, dropout=dropout)

    at_once = max(128, MASKED_PAIRS // k.shape[1])
    parts = []
    for first in range(0, q.shape[1], at_once):
        rows = slice(first, min(first + at_once, q.shape[1]))
        is_all = rows.stop - rows.start == q.shape[1]
        arguments = q[:, rows], k, v, rows
        parts.append(of_band(*arguments) if is_all else checkpoint(of_band, *arguments, use_reentrant=False))
    return torch.cat(parts, 1)


Range = tuple[int, int, int, int]
"""Samples and tokens: first and end of each."""


def _cut(x: Tensor, ranges: Sequence[Range]) -> list[Tensor]:
    """x [B, T, …] cut at ascending ranges, by `split`: its gradient is assembled once; a slice's has the size of x."""
    parts: list[Tensor] = []
    for (b0, b1), group in _by_samples(ranges):
        rows = x if (b0, b1) == (0, len(x)) else x.split([b0, b1 - b0, len(x) - b1])[1]
        sizes, at = [], 0
        for _, _, first, end in group:
            sizes += [first - at, end - first]
            at = end
        parts += rows.split([*sizes, x.shape[1] - at], 1)[1:-1:2] if sizes else []
    return parts


def _by_samples(ranges: Sequence[Range]) -> Iterator[tuple[tuple[int, int], list[Range]]]:
    for samples, group in itertools.groupby(ranges, key=lambda one: (one[0], one[1])):
        yield samples, list(group)


def _put_together(of_segments: list[Tensor], segments: Sequence[Span], q: Tensor, size: int) -> Tensor:
    """[B, Tq, H, size], 0 where there is no segment."""

    def nothing(samples: int, tokens: int) -> Tensor:
        return q.new_zeros(samples, tokens, q.shape[2], size)

    rows, at, following = [], 0, iter(of_segments)
    for (b0, b1), group in _by_samples([segment[:4] for segment in segments]):
        parts, token = [], 0
        for _, _, first, end in group:
            parts += [nothing(b1 - b0, first - token), next(following)]
            token = end
        parts.append(nothing(b1 - b0, q.shape[1] - token))
        rows += [nothing(b0 - at, q.shape[1]), torch.cat([part for part in parts if part.shape[1]] or parts[:1], 1)]
        at = b1
    rows.append(nothing(len(q) - at, q.shape[1]))
    rows = [part for part in rows if len(part)]
    return torch.cat(rows) if rows else nothing(len(q), q.shape[1])
