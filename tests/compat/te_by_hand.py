"""Transformer Engine's layers in float64 by hand, with its parameters: gate above up; query, key and value; T before B."""

import plain
import torch

EPS = 1e-3

CURVES = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "qgelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu": lambda x: x.clamp(min=0),
    "srelu": lambda x: x.clamp(min=0).square(),
    "silu": plain.silu,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}
GATES = {"geglu": "gelu", "glu": "sigmoid", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
"""Gated activation → the curve of the first half of the rows, which multiplies the second."""
CLAMP = {"limit": 1.5, "alpha": 1.25, "glu_linear_offset": 0.5}


def activated(hidden, name, params=None):
    if name in CURVES:
        return CURVES[name](hidden)
    first, second = hidden.chunk(2, -1)
    if name == "clamped_swiglu":
        of = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0} | (params or {})
        first = first.clamp(max=of["limit"])
        second = second.clamp(-of["limit"], of["limit"]) + of["glu_linear_offset"]
        return first / (1 + (-of["alpha"] * first).exp()) * second
    return CURVES[GATES[name]](first) * second


def normed(p, x, at="", *, kind="LayerNorm", zero=False):
    """The norm of the parameters `at`weight and `at`bias."""
    return plain.norm(kind, x, p[f"{at}weight"] + zero, p.get(f"{at}bias"), EPS)


def linear(p, x, at=""):
    return plain.linear(x, p[f"{at}weight"], p.get(f"{at}bias"))


def mlp(p, x, at="", *, kind="LayerNorm", zero=False, activation="gelu", params=None):
    """The norm's output and the result."""
    y = normed(p, x, f"{at}layer_norm_", kind=kind, zero=zero)
    return y, linear(p, activated(linear(p, y, f"{at}fc1_"), activation, params), f"{at}fc2_")


def attention(p, x, at="", *, heads, norm=True, kind="LayerNorm", zero=False):
    """The norm's output (without one x) and the result, causal. x [T, B, hidden]."""
    first = f"{at}layernorm_qkv." if norm else f"{at}qkv."
    y = normed(p, x, f"{first}layer_norm_", kind=kind, zero=zero) if norm else x
    q, k, v = (linear(p, y, f"{first}{part}_").transpose(0, 1).unflatten(-1, (heads, -1)) for part in ("query", "key", "value"))
    if f"{at}q_norm.weight" in p:  # around 1 in any case
        q, k = (plain.norm("RMSNorm", one, p[f"{at}{name}.weight"], None, EPS) for one, name in ((q, "q_norm"), (k, "k_norm")))
    return y, linear(p, plain.attention(q, k, v, plain.causal(x.shape[0])).transpose(0, 1), f"{at}proj.")


def layer(p, x, *, heads, kind="LayerNorm", zero=False, activation="gelu", post=False, output=False, parallel=False):
    """A transformer layer. post: residuals are the norms' outputs. output: the first norm stands behind the layer."""
    how = {"kind": kind, "zero": zero}
    y, attended = attention(p, x, "self_attention.", heads=heads, norm=not output, **how)
    if parallel:
        h = x + attended + mlp(p, x, "layernorm_mlp.", activation=activation, **how)[1]
    else:
        h = (y if post else x) + attended
        z, out = mlp(p, h, "layernorm_mlp.", activation=activation, **how)
        h = (z if post else h) + out
    return normed(p, h, "layernorm.", **how) if output else h
