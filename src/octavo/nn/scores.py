"""Attention in plain PyTorch, in float32: biases, ALiBi, caps, and dropout with a sink, which no kernel here supports.

A band of queries is computed at a time, and recomputed in backward, so that no matrix of T × T is saved.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PAIRS = 1 << 26
"""Most query-key pairs, of all samples and heads, in memory at once."""


class Scores(NamedTuple):
    """Terms of a softmax beside softmax(q · kᵀ · scale).

    Attributes:
        bias: [B or 1, H or 1, Tq or 1, Tk], added to the scaled scores, or with `before_scale` to the scores.
        slopes: ALiBi's, [H] or [B, H]: a score falls by the slope per position between a key and the query.
        cap: scores are cap · tanh(score / cap); 0 for none.
        sink: [H], a further logit of each head, whose value is 0.
    """

    bias: Tensor | None = None
    before_scale: bool = False
    slopes: Tensor | None = None
    cap: float = 0.0
    sink: Tensor | None = None

    def beyond_sink(self) -> bool:
        """True if there is more than a sink."""
        return self.bias is not None or self.slopes is not None or bool(self.cap)

    def of(self, samples: slice, queries: int, keys: int) -> Scores:
        """The terms of some samples, for their first queries and keys."""
        bias, slopes = self.bias, self.slopes
        if bias is not None:
            bias = bias[samples if bias.shape[0] > 1 else slice(None), :, :queries, :keys]
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[samples]
        return self._replace(bias=bias, slopes=slopes)


NOTHING = Scores()
"""A plain softmax."""


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi's slopes, float32 [H]: 2^(−8/n), … of the largest power of two n ≤ H, then every second of those of 2n.

    Source: Press et al., "Train Short, Test Long" (2022), and its published code for other numbers of heads.
    """
    largest = 1 << (heads.bit_length() - 1)
    exponents = [8 / largest * (at + 1) for at in range(largest)]
    exponents += [4 / largest * (2 * at + 1) for at in range(heads - largest)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32, device=device)


Seen = Callable[[slice], Tensor | None]
"""Rows of the queries → bool [B or 1, H or 1, rows, Tk], True where a query attends to a key; None: to all."""
Distance = Callable[[slice], Tensor]
"""Rows of the queries → [rows, Tk], the position of the key minus the query's."""


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, distance: Distance, scores: Scores, *, scale: float, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """out [B, Tq, H, Dv] in the dtype of v, and the largest logit of each head [H], float32 (float64), without gradient.

    q [B, Tq, H, D], k [B, Tk, G, D], v [B, Tk, G, Dv]. A query without a key: 0. Sums and softmax are float32, float64 for
    float64 inputs.
    """

    def band(q: Tensor, k: Tensor, v: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return _band(q, k, v, rows, seen, distance, scores, scale, dropout)

    at_once = max(16, PAIRS // max(1, q.shape[0] * q.shape[2] * k.shape[1]))
    outs, tops = [], []
    with torch.autocast(q.device.type, enabled=False):  # it would round logits and sums
        for first in range(0, q.shape[1], at_once):
            rows = slice(first, min(first + at_once, q.shape[1]))
            is_all = rows.stop - rows.start == q.shape[1]
            arguments = q[:, rows], k, v, rows
            out, top = band(*arguments) if is_all else checkpoint(band, *arguments, use_reentrant=False)
            outs.append(out)
            tops.append(top)
    return torch.cat(outs, 1), torch.stack(tops).amax(0)


def _band(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, seen: Seen, distance: Distance, scores: Scores, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    wide, groups = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    logits = torch.einsum("bqgpd,bkgd->bgpqk", q.to(wide).unflatten(2, (groups, -1)), k.to(wide)).flatten(1, 2)
    bias = None if scores.bias is None else scores.bias.to(wide)
    if bias is not None and bias.shape[2] > 1:
        bias = bias[:, :, rows]
    if bias is not None and scores.before_scale:
        logits = logits + bias
    logits = logits * scale
    if scores.cap:
        logits = scores.cap * torch.tanh(logits / scores.cap)
    if bias is not None and not scores.before_scale:
        logits = logits + bias
    if scores.slopes is not None:
        slopes = scores.slopes.to(wide).reshape(-1, q.shape[2], 1, 1)
        logits = logits - slopes * distance(rows).abs()
    there = seen(rows)
    if there is not None:
        logits = logits.masked_fill(~there, -math.inf)
        empty = ~there.any(-1, keepdim=True)
        logits = logits.masked_fill(empty, 0.0)  # the gradient of an empty softmax is NaN
    lse = logits.logsumexp(-1, keepdim=True)
    if scores.sink is not None:
        lse = torch.logaddexp(lse, scores.sink.to(wide).view(1, -1, 1, 1))
    probabilities = (logits - lse).exp()
    top = logits.detach()
    if there is not None:
        probabilities = probabilities.masked_fill(empty, 0.0)
        top = top.masked_fill(empty, -math.inf)
    if dropout:
        probabilities = functional.dropout(probabilities, dropout)
    out = torch.einsum("bgpqk,bkgd->bqgpd", probabilities.unflatten(1, (groups, -1)), v.to(wide)).flatten(2, 3)
    return out.to(v.dtype), top.amax((0, 2, 3))
