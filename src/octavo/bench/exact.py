"""Exact layers: plain PyTorch in float64, the reference of the layers suite.

A layer is a function of its parameters, by their names in Octavo and Transformer Engine. Rows of the joint query/key/value
matrix are grouped by key-value head; in gate and up all rows of gate come first, as in Transformer Engine.
Shapes: B batch, T tokens, K features, H query heads, G key-value heads, P query heads of a group, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Parameters = Mapping[str, Tensor]
EPS = 1e-5
"""The default of both libraries."""


class Heads(NamedTuple):
    """Attention: query heads, key-value heads, rotary angles [T, D] of causal attention (None: no mask, no rotation)."""

    queries: int
    groups: int
    angles: Tensor | None


def rotary_angles(tokens: int, head_dim: int, base: float, device: torch.device) -> Tensor:
    """Angles [T, K] of the positions, float32; the second half of a row repeats the first."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(tokens, device=device, dtype=torch.float32)
    return torch.outer(positions, base**-exponents).repeat(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (k, k + K/2) of [..., K] by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def below(parameters: Parameters, prefix: str) -> Parameters:
    """The parameters with this prefix, with the prefix removed."""
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def norm(p: Parameters, x: Tensor, kind: str) -> Tensor:
    """RMSNorm or LayerNorm of [..., K]."""
    if kind == "LayerNorm":
        return functional.layer_norm(x, x.shape[-1:], p["layer_norm_weight"], p["layer_norm_bias"], EPS)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * p["layer_norm_weight"]


def linear(p: Parameters, x: Tensor) -> Tensor:
    """x · weightᵀ + bias."""
    return functional.linear(x, p["weight"], p.get("bias"))


def mlp(p: Parameters, x: Tensor, kind: str, activation: str) -> Tensor:
    """Norm, product, activation ("gelu" with the tanh, or "swiglu"), product."""
    hidden = functional.linear(norm(p, x, kind), p["fc1_weight"], p.get("fc1_bias"))
    if activation == "swiglu":
        gate, up = hidden.chunk(2, -1)
        hidden = functional.silu(gate) * up
    else:
        hidden = functional.gelu(hidden, approximate="tanh")
    return functional.linear(hidden, p["fc2_weight"], p.get("fc2_bias"))


def attention(p: Parameters, x: Tensor, kind: str, heads: Heads) -> Tensor:
    """Norm, queries/keys/values [B, T, (H + 2G)·D], rotation, softmax(q · kᵀ / √D) · v, product."""
    per_group = heads.queries // heads.groups
    p_qkv = below(p, "layernorm_qkv.")
    qkv_BTGPD = linear(p_qkv, norm(p_qkv, x, kind)).unflatten(-1, (heads.groups, per_group + 2, -1))
    q_BTGPD, k_BTGPD, v_BTGPD = qkv_BTGPD.split([per_group, 1, 1], -2)
    if heads.angles is not None:
        cos, sin = heads.angles.cos()[:, None, None], heads.angles.sin()[:, None, None]
        q_BTGPD, k_BTGPD = rotate(q_BTGPD, cos, sin), rotate(k_BTGPD, cos, sin)
    scores = torch.einsum("btgpd,bsgd->bgpts", q_BTGPD, k_BTGPD.squeeze(-2)) / math.sqrt(q_BTGPD.shape[-1])
    if heads.angles is not None:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(unseen, -math.inf)
    context = torch.einsum("bgpts,bsgd->btgpd", scores.softmax(-1), v_BTGPD.squeeze(-2))
    return linear(below(p, "proj."), context.flatten(2))


def block(p: Parameters, x: Tensor, kind: str, activation: str, heads: Heads) -> Tensor:
    """A transformer layer: attention and MLP, each added to the residual."""
    h = x + attention(below(p, "self_attention."), x, kind, heads)
    return h + mlp(below(p, "layernorm_mlp."), h, kind, activation)
