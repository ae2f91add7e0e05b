"""A transformer layer: attention and feed-forward, each with its norm in front and its residual behind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.nn.attention import MultiheadAttention
from octavo.nn.mlp import LayerNormMLP


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then h + mlp(norm(h)). The residual stream keeps the input's dtype."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        attention_dropout: float = 0.0,
        kv_channels: int | None = None,
        normalization: str = "LayerNorm",
        bias: bool = True,
        activation: str = "gelu",
        *,
        qkv_bias: bool | None = None,
        mlp_bias: bool | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            num_gqa_groups,
            attention_dropout,
            layernorm_epsilon,
            normalization,
            qkv_bias=bias if qkv_bias is None else qkv_bias,
            proj_bias=bias,
            params_dtype=params_dtype,
            device=device,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            bias if mlp_bias is None else mlp_bias,
            normalization,
            activation,
            params_dtype=params_dtype,
            device=device,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """hidden_states [B, T, hidden] → the same shape and dtype; the other arguments as in `MultiheadAttention`."""
        attended = self.self_attention(hidden_states, attention_mask, rotary_pos_emb, is_first_microbatch)
        hidden_states = hidden_states + attended
        return hidden_states + self.layernorm_mlp(hidden_states, is_first_microbatch)
