"""Projections of cross-attention: queries from the layer's input, keys and values from an encoder's output.

Parameters have Transformer Engine's names: `layernorm_query` (with a norm) or `query_layer`, and `key_value`, with key_weight
and value_weight, or with `fuse_qkv_params` one weight.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.compat.te.parts import separate_rows
from octavo.errors import InputError
from octavo.nn.linear import LayerNormLinear, Linear
from octavo.nn.norm import forward_residual


def make_cross(attention: Any, *, fused: bool) -> None:
    """Replace the query/key/value product of an `octavo.nn.MultiheadAttention` by two, in place. fused: key_value is one."""
    first: Any = attention.layernorm_qkv if attention.input_layernorm else attention.qkv
    weight = first.weight
    make = {"params_dtype": weight.dtype, "device": weight.device, "get_rng_state_tracker": first.draws.tracker}
    options: dict[str, Any] = {"bias": first.bias is not None, "init_method": first.init_method, **make}
    hidden, rows = first.in_features, attention.heads * attention.head_dim
    if attention.input_layernorm:
        of_norm = {"normalization": first.normalization, "zero_centered_gamma": first.zero_centered_gamma}
        attention.layernorm_query = LayerNormLinear(hidden, rows, first.eps, **options, **of_norm)
        attention.layernorm_query.streams_norm = first.streams_norm
        del attention.layernorm_qkv
    else:
        attention.query_layer = Linear(hidden, rows, **options)
        del attention.qkv
    attention.key_value = Linear(hidden, 2 * attention.groups * attention.head_dim, **options)
    if not fused:
        attention.grouped = False  # key above value
        separate_rows(attention.key_value, ("key", "value"))
        if attention.input_layernorm:
            separate_rows(attention.layernorm_query, ("query",))


def crossed(
    layer: Any, x: Tensor, delta: Tensor | None, encoded: Tensor | None, first: bool | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, delta [B, T, hidden], encoded [B, Tk, hidden] → residual stream [B, T, hidden], q [B, T, H, D], k and v [B, Tk, G, D].

    B batch, T tokens, Tk tokens of the encoder, H query heads, G key-value heads, D head dimension.
    """
    if encoded is None:
        raise InputError("cross-attention needs encoder_output: give the encoder's hidden states.")
    if layer.input_layernorm:
        h, q = forward_residual(layer.layernorm_query, x, delta, first)
    else:
        h = x if delta is None else x + delta
        q = layer.query_layer(h, first)
    joint = layer.key_value(encoded, first)
    if layer.grouped:
        k, v = joint.unflatten(-1, (layer.groups, 2 * layer.head_dim)).chunk(2, -1)
    else:
        k, v = joint.unflatten(-1, (2 * layer.groups, layer.head_dim)).chunk(2, -2)
    return h, q.unflatten(-1, (layer.heads, layer.head_dim)), k, v
