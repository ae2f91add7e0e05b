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


def turned(x, at, *, interleaved, columns, base=10000.0):
    """x [T, H, D] with the first columns of each head turned: pairs of neighbours, or of the two halves. at: positions [T]."""
    half = columns // 2
    angle = at.double()[:, None] * base ** (-torch.arange(half, dtype=torch.float64) * 2 / columns)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    first, second = (x[..., 0:columns:2], x[..., 1:columns:2]) if interleaved else (x[..., :half], x[..., half:columns])
    made = torch.complex(first, second) * turn
    both = (made.real, made.imag)
    head = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat((head, x[..., columns:]), -1)


def rows(p, at, kind, parts, heads, groups, grouped):
    """Weights or biases of queries, keys and values (or of keys and values) of parameters in Transformer Engine's orders."""
    if f"{at}{parts[0]}_{kind}" in p:
        return [p[f"{at}{part}_{kind}"] for part in parts]
    joint = p.get(f"{at}{kind}")
    if joint is None:
        return [None] * len(parts)
    counts = [heads // groups if part == "query" else 1 for part in parts]
    if grouped:  # by key-value head
        return [
            x.flatten(0, 1)
            for x in joint.unflatten(0, (groups, -1)).split([n * joint.shape[0] // groups // sum(counts) for n in counts], 1)
        ]
    return list(joint.split([n * groups * joint.shape[0] // (sum(counts) * groups) for n in counts]))


def mha(p, x, at, sequences, *, heads, groups, norm, grouped=True, encoded=None, rotate=None, kind="causal", **how):
    """Attention of hidden states x [B, Tq, hidden] with the norm and products of the parameters `at`…

    rotate(x [B, T, H, D], sequences as (sample, first, end)).
    """
    import plain

    sides = [(n, a, b) for n, a, b, *_ in sequences], [(n, a, b) for n, _, _, a, b in sequences]
    if encoded is None:
        first = f"{at}layernorm_qkv." if norm else f"{at}qkv."
        parts = "query", "key", "value"
        weights, biases = (rows(p, first, name, parts, heads, groups, grouped) for name in ("weight", "bias"))
    else:
        first = f"{at}layernorm_query." if norm else f"{at}query_layer."
        found = [
            rows(p, first, name, ["query"], heads, heads, False)
            + rows(p, f"{at}key_value.", name, ["key", "value"], groups, groups, grouped)
            for name in ("weight", "bias")
        ]
        weights, biases = found
    y = plain.norm("LayerNorm", x, p[f"{first}layer_norm_weight"], p[f"{first}layer_norm_bias"], 1e-5) if norm else x
    sources = y, *((y, y) if encoded is None else (encoded, encoded))
    dim = weights[1].shape[0] // groups
    q, k, v = (plain.linear(s, w, b).unflatten(-1, (-1, dim)) for s, w, b in zip(sources, weights, biases, strict=True))
    if rotate is not None:
        q, k = rotate(q, sides[0]), rotate(k, sides[1])
    made, _ = attention(q, k, v, sequences, kind=kind, sink=p.get(f"{at}core_attention.softmax_offset"), **how)
    return plain.linear(made, p[f"{at}proj.weight"], p.get(f"{at}proj.bias"))
