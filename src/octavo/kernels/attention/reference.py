"""Attention in plain PyTorch with its log-sum-exp and its backward: the definition of correct, which runs on any device.

Sums and softmax are float32 (float64 for float64 inputs). Queries are taken in blocks, so that no matrix of Tq × Tk exists.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.attention.pattern import Packing

BLOCK = 512
"""Queries computed at once."""


def takes(q: Tensor, k: Tensor, *, causal: bool, window: int | None) -> bool:
    """True: the reference computes every call."""
    return True


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int | None = None, packed: Packing | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q · kᵀ · scale) · v, and the logarithm of the softmax's sum.

    Args:
        q: [B, Tq, H, D].
        k, v: [B, Tk, G, D].
        causal: query i attends to keys up to i + Tk − Tq.
        scale: of the logits.
        window: only the last `window` of these keys; None for all.
        packed: sequences, none across two samples, with as many queries as keys. A query attends only to keys of its sequence.

    Returns:
        out [B, Tq, H, D], 0 for a query that sees no key, and lse [B, H, Tq], −∞ for it; float32, float64 for float64 inputs.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
    for rows, keys, seen in _blocks(q, k, causal, window, packed):
        logits = _logits(q[:, rows], k[:, keys], seen, scale)
        top = logits.logsumexp(-1)
        lse[:, :, rows] = top.flatten(1, 2)
        probabilities = (logits - _finite(top)[..., None]).exp()
        out[:, rows] = _einsum("bgpqk,bkgd->bqgpd", probabilities, v[:, keys].to(wide)).flatten(2, 3)
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
    window: int | None = None, packed: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [B, Tq, H, D], k and v [B, Tk, G, D], float32 (float64 for float64 inputs).

    d_out, out [B, Tq, H, D], lse [B, H, Tq]: the latter two may be those of a softmax over more keys; the results are then the
    given keys' parts of the gradients.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    groups = k.shape[2]
    delta = (d_out.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).unflatten(1, (groups, -1))
    for rows, keys, seen in _blocks(q, k, causal, window, packed):
        query, grad = (x[:, rows].to(wide).unflatten(2, (groups, -1)) for x in (q, d_out))
        logits = _logits(q[:, rows], k[:, keys], seen, scale)
        of_rows = lse[:, :, rows].to(wide).unflatten(1, (groups, -1))
        probabilities = (logits - _finite(of_rows)[..., None]).exp()
        dv[:, keys] += _einsum("bgpqk,bqgpd->bkgd", probabilities, grad)
        slopes = _einsum("bqgpd,bkgd->bgpqk", grad, v[:, keys].to(wide)) - delta[..., rows, None]
        slopes = probabilities * slopes * scale
        dq[:, rows] += _einsum("bgpqk,bkgd->bqgpd", slopes, k[:, keys].to(wide)).flatten(2, 3)
        dk[:, keys] += _einsum("bgpqk,bqgpd->bkgd", slopes, query)
    return dq, dk, dv


def _blocks(
    q: Tensor, k: Tensor, causal: bool, window: int | None, packed: Packing | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the keys that some of them see, and a mask [B, G, H/G, queries, keys] (broadcast) or None."""
    queries, keys = q.shape[1], k.shape[1]
    ahead = keys - queries
    number = None
    if packed is not None:  # of each token's sequence, [B, T]
        places = torch.arange(q.shape[0] * queries, device=q.device, dtype=torch.int32)
        number = torch.searchsorted(packed.q_ends, places, right=True).view(q.shape[0], queries)
    for first in range(0, queries, BLOCK):
        end = min(first + BLOCK, queries)
        low = 0 if window is None else max(0, first + ahead - window + 1)
        high = min(keys, end + ahead) if causal else keys
        if low >= high:
            continue
        seen = None
        if causal:
            at = torch.arange(first, end, device=q.device)[:, None] + ahead - torch.arange(low, high, device=q.device)
            seen = at >= 0 if window is None else (at >= 0) & (at < window)
        if number is not None:
            same = (number[:, first:end, None] == number[:, None, low:high])[:, None, None]
            seen = same if seen is None else seen & same
        yield slice(first, end), slice(low, high), seen


def _logits(q: Tensor, k: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """q [B, queries, H, D], k [B, keys, G, D] → [B, G, H/G, queries, keys]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = _einsum("bqgpd,bkgd->bgpqk", q.to(wide).unflatten(2, (k.shape[2], -1)), k.to(wide)) * scale
    return logits if seen is None else logits.masked_fill(~seen, -torch.inf)


def _einsum(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """`torch.einsum` in the dtype of both, which `torch.autocast` would round."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum(equation, x, y)


def _finite(lse: Tensor) -> Tensor:
    """0 instead of −∞ for a row without keys: its probabilities are then exp(−∞ − 0) = 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
