"""Transformer Engine's attention layers: those of `octavo.nn`, with its masks, sequence first, causal and with dropout."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from octavo.compat.te.layers import Kind
from octavo.compat.te.masks import PLAIN, TYPES, mask_and_type, window_pair
from octavo.compat.te.parts import separate
from octavo.compat.te.signatures import SIGNATURES, bound, normal
from octavo.compat.te.state import Stateful, Stateless
from octavo.errors import InputError, unknown
from octavo.nn import attention as _attention
from octavo.nn import block as _block
from octavo.nn.linear import compute_dtype
from octavo.nn.te_arguments import check_format


class _Masked:
    """The mask type and the window of a layer, which a call may replace."""

    mask_type: str
    window_size: tuple[int, int] | None
    native_window: tuple[int, int] | None = None
    """A window that the layer of `octavo.nn` computes by itself, in causal calls."""

    def _take(self, values: dict[str, Any], name: str) -> dict[str, Any]:
        """Keep mask type and window of the arguments, and give `octavo.nn` the one of its own that is nearest."""
        # For a subclass that is a module: attributes are set before its constructor has run.
        kind, window = values.pop(name), values.pop("window_size")
        values.pop("bottom_right_diagonal")  # queries and keys are the same tokens
        if kind not in TYPES:
            raise unknown(name, str(kind), TYPES)
        window = window_pair(window)
        causal = "causal" in kind
        native = (window[0], 0) if window is not None and causal else None
        vars(self).update(mask_type=kind, window_size=window, native_window=native)
        return values | {name: "causal" if causal else "no_mask", "window_size": native}

    def _mask(self, x: Tensor, first: bool, mask: Any, kind: str | None, window: Any) -> tuple[Tensor | None, str]:
        """The mask for the layer of `octavo.nn`, and its type. x: [T, B, …] if the sequence is `first`, or [B, T, …]."""
        shape = (x.shape[1], x.shape[0]) if first else (x.shape[0], x.shape[1])
        kind = kind or self.mask_type
        window = window_pair(window) if window is not None else self.window_size
        if self.native_window is None or kind not in PLAIN:
            return mask_and_type(kind, mask, window, shape, x.device)
        if "causal" in kind and window is not None and window[0] == self.native_window[0]:
            return None, "causal"
        found, base = mask_and_type(kind, mask, window, shape, x.device)
        return (found if found is not None else mask_and_type(kind, mask, (shape[1], shape[1]), shape, x.device)[0]), base


def _apart(values: dict[str, Any]) -> bool:
    """True if query, key and value are three parameters; removes the arguments that `octavo.nn` lacks."""
    if values.pop("fuse_qkv_params"):
        return False
    values.pop("qkv_weight_interleaved")  # of the one joint parameter
    return True


def _order(attention: Any) -> None:
    """Put parts in Transformer Engine's order, by which an optimizer's state numbers parameters: norms of heads first."""
    modules = attention._modules
    for name in ("layernorm_qkv", "qkv", "core_attention", "proj"):
        if name in modules:
            modules[name] = modules.pop(name)


def _first(attention: Any) -> Any:
    """The first product, with the norm in front of it or without one."""
    return attention.layernorm_qkv if attention.input_layernorm else attention.qkv


def _given(values: dict[str, Any]) -> Any:
    """The script's own `init_method`, or None."""
    return None if values["init_method"] is normal else values["init_method"]


class DotProductAttention(_Masked, Stateless, _attention.DotProductAttention, metaclass=Kind):
    """softmax(q · kᵀ · scale) · v, without parameters."""

    __module__ = "transformer_engine.pytorch.attention.dot_product_attention"  # by which clients tell it
    octavo = _attention.DotProductAttention
    __signature__ = SIGNATURES["DotProductAttention"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = self._take(bound("DotProductAttention", args, kwargs), "attn_mask_type")
        channels = values["kv_channels"]
        if isinstance(channels, tuple):
            if channels[0] != channels[1]:
                raise InputError(f"kv_channels={channels}: keys and values have one size here; give one number.")
            values["kv_channels"] = channels[0]
        group, ranks, stream, how = (values.pop(f"cp_{name}") for name in ("group", "global_ranks", "stream", "comm_type"))
        super().__init__(**values)
        self.set_context_parallel_group(group, ranks, stream, how)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        **te_arguments: Any,
    ) -> Tensor:
        """query [T, B, H, D], key and value [T, B, G, D], or with "bshd" B first → [T, B, H·D].

        attention_mask: bool, True where nothing is attended to; for mask types with "padding" and "arbitrary". qkv_format:
        "sbhd" or "bshd", of this call; None for the layer's.
        """
        if qkv_format is not None and check_format("qkv_format", qkv_format) != self.sequence_first:
            q, k, v = (x.transpose(0, 1) for x in (query_layer, key_layer, value_layer))
            options = {"attn_mask_type": attn_mask_type, "window_size": window_size, **te_arguments}
            return self.forward(q, k, v, attention_mask, **options).transpose(0, 1)
        dim = 0 if self.sequence_first else 1
        others = query_layer.shape[dim] != key_layer.shape[dim]
        if others and ((attn_mask_type or self.mask_type) != "no_mask" or window_size or self.window_size):
            raise InputError(
                f"DotProductAttention got {query_layer.shape[dim]} queries and {key_layer.shape[dim]} keys: these differ only "
                "with attn_mask_type='no_mask' here, and without a window."
            )
        mask, base = self._mask(key_layer, self.sequence_first, attention_mask, attn_mask_type, window_size)
        return super().forward(query_layer, key_layer, value_layer, mask, attn_mask_type=base, **te_arguments)


class MultiheadAttention(_Masked, Stateful, _attention.MultiheadAttention, metaclass=Kind):
    """Joint query/key/value product, rotary embedding, attention and output product; with `input_layernorm` a norm first."""

    __module__ = "transformer_engine.pytorch.attention.multi_head_attention"  # by which clients tell it
    octavo = _attention.MultiheadAttention
    __signature__ = SIGNATURES["MultiheadAttention"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = self._take(bound("MultiheadAttention", args, kwargs), "attn_mask_type")
        apart = _apart(values)
        super().__init__(**values)
        _order(self)
        if apart:
            separate(_first(self), self.heads, self.groups, _given(values))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        **te_arguments: Any,
    ) -> Any:
        """hidden_states [T, B, hidden], or with "bshd" [B, T, hidden] → the same shape."""
        others = {
            "encoder_output": encoder_output, "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params, **te_arguments,
        }  # fmt: skip
        mask, base = self._mask(hidden_states, self.sequence_first, attention_mask, attn_mask_type, window_size)
        return super().forward(hidden_states, mask, rotary_pos_emb, is_first_microbatch, attn_mask_type=base, **others)

    def set_context_parallel_group(
        self, cp_group: dist.ProcessGroup | None, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Share sequences with the ranks of a group; None ends it."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)


class TransformerLayer(_Masked, Stateful, _block.TransformerLayer, metaclass=Kind):
    """x + attention(norm(x)), then h + mlp(norm(h)); a block of timm's or Hugging Face's may be a subclass."""

    __module__ = "transformer_engine.pytorch.transformer"  # by which clients tell it
    octavo = _block.TransformerLayer
    __signature__ = SIGNATURES["TransformerLayer"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = self._take(bound("TransformerLayer", args, kwargs), "self_attn_mask_type")
        apart = _apart(values)
        super().__init__(**values)
        attention: Any = self.self_attention
        _order(attention)
        if apart:
            separate(_first(attention), attention.heads, attention.groups, _given(values))
        self.layernorm_mlp.gate_rows = self.layernorm_mlp.ffn_hidden_size  # all of them

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        **te_arguments: Any,
    ) -> Any:
        """hidden_states [T, B, hidden], or with "bshd" [B, T, hidden] → the same shape.

        attention_mask: bool, True where nothing is attended to; for mask types with "padding" and "arbitrary".
        """
        attention: Any = self.self_attention
        hidden_states = hidden_states.to(compute_dtype(hidden_states))  # the residual stream of an autocast has its dtype
        mask, base = self._mask(hidden_states, attention.sequence_first, attention_mask, self_attn_mask_type, window_size)
        return super().forward(
            hidden_states, mask, rotary_pos_emb, is_first_microbatch, self_attn_mask_type=base, encoder_output=encoder_output,
            enc_dec_attn_mask=enc_dec_attn_mask, enc_dec_attn_mask_type=enc_dec_attn_mask_type,
            enc_dec_window_size=enc_dec_window_size, checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params, **te_arguments,
        )  # fmt: skip

    def set_context_parallel_group(
        self, cp_group: dist.ProcessGroup | None, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Share sequences with the ranks of a group; None ends it."""
        attention: Any = self.self_attention
        attention.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
