"""SMP's attention modules, and the class names of its blocks for wrapping policies.

Shapes: B batch, T tokens, H heads, D head dimension.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from octavo.errors import InputError, unknown
from octavo.kernels.attention.pattern import Pattern
from octavo.models.decoder import Decoder
from octavo.nn.attend import attend
from octavo.nn.block import TransformerLayer
from octavo.process import process

TETransformerLayer = TransformerLayer
TransformerLMHead = Decoder
LAYOUTS = ("b h s d", "b s h d")
_CACHE = next(name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaAttention.forward).parameters)
"""The name of the cache among transformers' arguments: `past_key_values` up to transformers 5.23."""

__all__ = [
    "FlashGroupedQueryAttention", "FlashSelfAttention", "LlamaFlashAttention", "TETransformerLayer", "TransformerLMHead",
    "TransformerLayer",
]  # fmt: skip


class FlashGroupedQueryAttention(nn.Module):
    """softmax(q · kᵀ · scale) · v, with fewer key-value heads than query heads."""

    def __init__(self, attention_dropout_prob: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.attention_dropout_prob, self.scale = attention_dropout_prob, scale

    def forward(
        self, q: Tensor, kv: Any, causal: bool = False, cast_dtype: torch.dtype | None = None, layout: str = "b s h d"
    ) -> Tensor:
        """q [B, H, T, D] or [B, T, H, D] by `layout`; kv: (k, v), or one tensor of k's heads, then v's → like q."""
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
        heads = LAYOUTS[0] == layout
        k, v = kv if isinstance(kv, tuple | list) else kv.chunk(2, 1 if heads else 2)
        q, k, v = (x.transpose(1, 2) if heads else x for x in (q, k, v))
        if cast_dtype is not None:
            q, k, v = (x.to(cast_dtype) for x in (q, k, v))
        dropout = self.attention_dropout_prob if self.training else 0.0
        out = attend(q, k, v, Pattern(k.shape[1], causal), scale=self.scale, dropout=dropout)
        return out.transpose(1, 2) if heads else out


class FlashSelfAttention(FlashGroupedQueryAttention):
    """softmax(q · kᵀ · scale) · v, with as many key-value heads as query heads."""

    def __init__(
        self,
        attention_dropout_prob: float = 0.0,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__(attention_dropout_prob, scale)
        if use_alibi:
            raise InputError("FlashSelfAttention(use_alibi=True): linear biases (ALiBi) are not supported. Leave it out.")

    def forward(
        self,
        qkv: Any,
        attn_mask: Tensor | None = None,
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b h s d",
    ) -> Tensor:
        """qkv: (q, k, v), or one tensor with their heads in this order; [B, H, T, D] or [B, T, H, D] by `layout` → like q."""
        if attn_mask is not None:
            raise InputError("FlashSelfAttention(attn_mask=…) is for ALiBi, which is not supported. Leave it out.")
        q, k, v = qkv if isinstance(qkv, tuple | list) else qkv.chunk(3, 1 if layout == LAYOUTS[0] else 2)
        return super().forward(q, (k, v), causal, cast_dtype, layout)


class LlamaFlashAttention(LlamaAttention):
    """transformers' Llama attention through scaled_dot_product_attention.

    Scripts replace the attention of every layer by `LlamaFlashAttention(config)`. Without `layer_idx` a layer uses the first
    empty layer of the cache.
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx or 0)
        self._numbered = layer_idx is not None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        cache: Any = None,
        **others: Any,
    ) -> Any:
        """transformers' forward; a layer without `layer_idx` first finds its layer of the cache.

        hidden_states: [B, T, hidden]. past_key_values, cache: two names of one argument in different versions of
        transformers; both are accepted with any version.
        """
        if past_key_values is not None and cache is not None and past_key_values is not cache:
            raise InputError(
                "LlamaFlashAttention got two caches, past_key_values and cache, which are two names of one argument: give one."
            )
        cache = past_key_values if cache is None else cache
        if cache is not None and not self._numbered:
            parts = process.layers_of_caches.setdefault(cache, weakref.WeakKeyDictionary())
            empty = (index for index in itertools.count() if not cache.get_seq_length(index))
            self.layer_idx = parts[self] if self in parts else parts.setdefault(self, next(empty))
        return super().forward(hidden_states, position_embeddings, attention_mask, **{_CACHE: cache}, **others)
