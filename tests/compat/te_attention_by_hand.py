"""Transformer Engine's attention in float64, sequence by sequence and head by head, with every term written out."""

from __future__ import annotations

import torch


def sees(i, j, queries, keys, *, kind, window, right_aligned):
    """True if query i of `queries` attends to key j of `keys`."""
    causal = "causal" in kind
    if kind in ("causal", "padding_causal"):
        right_aligned = False
    elif kind.endswith("bottom_right") or right_aligned is None:
        right_aligned = True
    at = i + (keys - queries if right_aligned else 0)
    left, right = window or (-1, -1)
    right = 0 if causal else right
    return (left < 0 or j >= at - left) and (right < 0 or j <= at + right)


def one_sequence(q, k, v, *, kind, window=None, right_aligned=None, scale, bias=None, before=False, slopes=None, cap=0.0,
                 sink=None, allowed=None):  # fmt: skip
    """q [Tq, H, D], k [Tk, G, D], v [Tk, G, Dv] → [Tq, H, Dv], and the largest logit of each head. bias [H or 1, Tq, Tk]."""
    queries, heads = q.shape[:2]
    keys, per_group = len(k), heads // k.shape[1]
    out, top = [], []
    aligned = kind not in ("causal", "padding_causal") and (kind.endswith("bottom_right") or right_aligned is not False)
    for h in range(heads):
        rows, largest = [], q.new_full((), -torch.inf)
        for i in range(queries):
            seen = [j for j in range(keys) if sees(i, j, queries, keys, kind=kind, window=window, right_aligned=right_aligned)]
            if allowed is not None:
                seen = [j for j in seen if allowed[h % len(allowed), i, j]]
            if not seen:
                rows.append(v.new_zeros(v.shape[-1]) + 0 * q[i, h].sum())
                continue
            logits = k[seen, h // per_group] @ q[i, h]
            own = None if bias is None else bias[h % len(bias), i % bias.shape[1]][seen]
            logits = (logits + own if own is not None and before else logits) * scale
            logits = cap * torch.tanh(logits / cap) if cap else logits
            logits = logits + own if own is not None and not before else logits
            if slopes is not None:
                place = i + (keys - queries if aligned else 0)
                logits = logits - slopes[h] * (torch.tensor(seen, dtype=q.dtype) - place).abs()
            weights = logits.exp()
            total = weights.sum() + (0 if sink is None else sink[h].exp())
            rows.append((weights / total) @ v[seen, h // per_group])
            largest = torch.maximum(largest, logits.max())
        out.append(torch.stack(rows) if rows else q.new_zeros(0, v.shape[-1]))
        top.append(largest)
    return torch.stack(out, 1), torch.stack(top)


def attention(q, k, v, sequences, **how):
    """q [B, Tq, H, D], k and v [B, Tk, G, …]; sequences: (sample, first query, end, first key, end). Padding: 0.

    `bias` [B or 1, H or 1, Tq or 1, Tk], `slopes` [H] or [B, H].
    """
    out, tops = q.new_zeros(*q.shape[:3], v.shape[-1]), []
    bias, slopes = how.pop("bias", None), how.pop("slopes", None)
    scale = how.pop("scale", None) or q.shape[-1] ** -0.5
    for sample, q0, q1, k0, k1 in sequences:
        own = None if bias is None else bias[sample % len(bias), :, : q1 - q0, : k1 - k0]
        of_sample = slopes if slopes is None or slopes.dim() == 1 else slopes[sample]
        found, top = one_sequence(
            q[sample, q0:q1], k[sample, k0:k1], v[sample, k0:k1], bias=own, slopes=of_sample, scale=scale, **how
        )
        out = out.index_put((torch.tensor(sample), torch.arange(q0, q1)), found)
        tops.append(top)
    return out.flatten(2), torch.stack(tops).amax(0)
