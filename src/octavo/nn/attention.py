"""Attention: the joint query/key/value product, rotary embedding, the attention itself, and the output product.

Query, key and value are one matrix whose rows are grouped by key-value head: the queries that share a key-value head, then its
key, then its value. A slice of whole groups is a working attention layer, whatever the tensor-parallel degree.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.errors import InputError
from octavo.kernels import reference
from octavo.nn.linear import LayerNormLinear, Linear


def merge_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """q [H·D, ...], k [G·D, ...], v [G·D, ...] as one [(H + 2G)·D, ...], grouped by key-value head."""
    parts = [part.unflatten(0, (groups, -1)) for part in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def split_qkv(qkv: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `merge_qkv`."""
    head_dim = qkv.shape[0] // (heads + 2 * groups)
    q, k, v = qkv.unflatten(0, (groups, -1)).split([heads // groups * head_dim, head_dim, head_dim], 1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


class DotProductAttention(nn.Module):
    """softmax(q · kᵀ · scale) · v through PyTorch's `scaled_dot_product_attention`, which takes cuDNN's kernel on Hopper.

    Without a mask it is causal. `attention_dropout` is applied in training only.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % groups:
            raise InputError(f"{num_attention_heads} attention heads cannot share {groups} key-value heads: use a divisor.")
        self.heads, self.groups, self.head_dim = num_attention_heads, groups, kv_channels
        self.attention_dropout, self.softmax_scale = attention_dropout, softmax_scale

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """query [B, T, H, D], key and value [B, T, G, D], mask bool [B, 1, T, T] (true: attend) → [B, T, H·D]."""
        q, k, v = (x.transpose(1, 2) for x in (query_layer, key_layer, value_layer))
        context = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=self.groups != self.heads,
        )
        return context.transpose(1, 2).flatten(2)


class MultiheadAttention(nn.Module):
    """Norm, joint query/key/value product, rotary embedding, attention and output product; without the residual."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        normalization: str = "LayerNorm",
        qkv_bias: bool = True,
        proj_bias: bool = True,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        head_dim = kv_channels or hidden_size // num_attention_heads
        self.core_attention = DotProductAttention(num_attention_heads, head_dim, num_gqa_groups, attention_dropout)
        self.heads, self.groups, self.head_dim = num_attention_heads, self.core_attention.groups, head_dim
        self.layernorm_qkv = LayerNormLinear(
            hidden_size,
            (self.heads + 2 * self.groups) * head_dim,
            eps=layernorm_epsilon,
            bias=qkv_bias,
            normalization=normalization,
            params_dtype=params_dtype,
            device=device,
        )
        self.proj = Linear(self.heads * head_dim, hidden_size, proj_bias, params_dtype=params_dtype, device=device)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """hidden_states [B, T, hidden], mask bool [B, 1, T, T], rotary (cos, sin) each float32 [B, T, D] → like the input."""
        qkv = self.layernorm_qkv(hidden_states, is_first_microbatch)
        per_group = self.heads // self.groups
        q, k, v = qkv.unflatten(-1, (self.groups, per_group + 2, self.head_dim)).split([per_group, 1, 1], -2)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        if rotary_pos_emb is not None:
            q, k = reference.rope(q, *rotary_pos_emb), reference.rope(k, *rotary_pos_emb)
        # The rotated queries and keys are tensors of their own. The values become one, or backward would keep the whole joint
        # product for their sake.
        context = self.core_attention(q, k, v.contiguous(), attention_mask)
        return self.proj(context, is_first_microbatch)
