"""Transformer Engine's attention layers on those of `octavo.nn`: its masks and defaults (sequence first, causal, dropout).

`octavo.compat.te.core` computes cross-attention and all calls that the layers of `octavo.nn` do not support.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from octavo.compat.te.call import Settings
from octavo.compat.te.core import Call, set_softmax
from octavo.compat.te.cross import make_cross
from octavo.compat.te.device import default_device
from octavo.compat.te.inner import make_readable
from octavo.compat.te.layers import Kind
from octavo.compat.te.limits import ATTENTION_TYPES, FORMATS, LAYER_TYPES, check_kind, check_layer
from octavo.compat.te.parts import separate
from octavo.compat.te.signatures import SIGNATURES, bound, normal
from octavo.compat.te.state import OneRank, Stateful, Stateless
from octavo.errors import InputError, check_flags
from octavo.nn import attention as _attention
from octavo.nn import block as _block
from octavo.nn.arguments import check
from octavo.nn.linear import compute_dtype


def _format(argument: str, name: Any) -> str:
    return check_kind(argument, name, FORMATS)


def _packed(argument: str, values: dict[str, Any]) -> bool:
    """True for packed sequences, which are passed to the layer of `octavo.nn` as one sample."""
    packed = _format(argument, values[argument]) == "thd"
    if packed:
        values[argument] = "bshd"
    return packed


def _prepare(attention: Any, taken: dict[str, Any], values: dict[str, Any], *, cross: bool = False) -> None:
    """Give the submodules of an `octavo.nn.MultiheadAttention` Transformer Engine's names, order and classes."""
    attention.interleaved, attention.grouped = taken["rotary_pos_interleaved"], taken["qkv_weight_interleaved"]
    attention.attention_type, attention.rows_grouped = "cross" if cross else "self", attention.grouped
    make = {"dtype": values.get("params_dtype"), "device": values.get("device")}
    set_softmax(attention.core_attention, taken["softmax_type"], attention.heads, make)
    if cross:
        make_cross(attention, fused=taken["fuse_qkv_params"])
    elif not taken["fuse_qkv_params"]:
        init = None if values["init_method"] is normal else values["init_method"]
        separate(_first(attention), attention.heads, attention.groups, init)
        attention.grouped = True  # `Parts` concatenates them by key-value head
    _order(attention)


def _order(attention: Any) -> None:
    """Register submodules in Transformer Engine's order (q/k norms first), since optimizer states number parameters by it."""
    modules = attention._modules
    for name in ("layernorm_qkv", "qkv", "layernorm_query", "query_layer", "key_value", "core_attention", "proj"):
        if name in modules:
            modules[name] = modules.pop(name)


def _first(attention: Any) -> Any:
    """The query/key/value product, with or without its fused norm."""
    return attention.layernorm_qkv if attention.input_layernorm else attention.qkv


def _special(attention: Any) -> bool:
    """True if every call of this layer needs `octavo.compat.te.core`."""
    return attention.attention_type == "cross" or attention.interleaved or not attention.grouped


def _taken(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments that `octavo.nn` lacks, removed from `values`."""
    names = ("fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved", "softmax_type")
    check_flags("attention", **{name: values[name] for name in names[:3]})
    return {name: values.pop(name) for name in names}


def _attention_mask(call: Call, attention: Any, x: Tensor, rotary: Any) -> tuple[Any, str | None]:
    """`attention_mask` for the layer of `octavo.nn`, and its mask type. x: hidden states [T, B, hidden] or [B, T, hidden]."""
    batch, tokens = (x.shape[1], x.shape[0]) if attention.sequence_first else (x.shape[0], x.shape[1])
    separate = isinstance(rotary, tuple) and len(rotary) == 2 and rotary[0] is not rotary[1]
    separate = separate and all(isinstance(angles, Tensor) and angles.dim() == 4 for angles in rotary)  # keys have other angles
    if separate or _special(attention) or not call.is_plain(attention.core_attention, tokens, tokens):
        return call, None
    return call.native(batch, attention.heads, tokens, tokens, x.device)


class DotProductAttention(OneRank, Stateless, _attention.DotProductAttention, metaclass=Kind):
    """softmax(q · kᵀ · scale) · v, without parameters but for a learnable `softmax_offset`."""

    __module__ = "transformer_engine.pytorch.attention.dot_product_attention"  # libraries recognise the class by it
    octavo = _attention.DotProductAttention
    __signature__ = SIGNATURES["DotProductAttention"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = bound("DotProductAttention", args, kwargs)
        check_layer("DotProductAttention", values)
        settings = Settings.take(values, "attn_mask_type")
        channels = values["kv_channels"]
        values["kv_channels"] = channels[0] if isinstance(channels, tuple | list) else channels
        group, ranks, stream, how = (values.pop(f"cp_{name}") for name in ("group", "global_ranks", "stream", "comm_type"))
        kind, top, softmax = (values.pop(name) for name in ("attention_type", "return_max_logit", "softmax_type"))
        check_flags("DotProductAttention", return_max_logit=top)
        check_kind("attention_type", kind, ATTENTION_TYPES)
        packed = _packed("qkv_format", values)
        super().__init__(**values | settings.native_arguments("attn_mask_type"))
        self.settings, self.return_max_logit, self.packed = settings, bool(top), packed
        set_softmax(self, softmax, self.heads, {"device": default_device()})
        self.set_context_parallel_group(group, ranks, stream, how)

    @property
    def mask_type(self) -> str:
        """Transformer Engine's mask type, the default of calls."""
        return self.settings.kind

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        *,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        **others: Any,
    ) -> Any:
        """query [T, B, H, D], key and value [T, B, G, D], with "bshd" B first, with "thd" without B → [T, B, H·D] likewise.

        attention_mask: bool, True for masked positions; for mask types with "padding" and "arbitrary". qkv_format: of
        this call; None for the layer's. cu_seqlens_q, cu_seqlens_kv: cumulative lengths, for mask types with "padding";
        cu_seqlens_q_padded, cu_seqlens_kv_padded: where packed sequences begin. With `return_max_logit` the result is a pair,
        the second the largest logit of each head. qkv_layer, kv_layer: all three, or key and value, stacked along
        `qkv_interleave_dim`.

        Raises:
            InputError: a mask, lengths or a bias that do not fit, or an argument that Octavo does not support.
        """
        arguments = dict(
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, softcap=softcap,
            checkpoint_core_attention=checkpoint_core_attention, core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes, **others,
        )  # fmt: skip
        order = ("thd" if self.packed else "sbhd" if self.sequence_first else "bshd") if qkv_format is None else qkv_format
        packed = _format("qkv_format", order) == "thd"
        call, rest = Call.of(
            self.settings, attn_mask_type, window_size, bottom_right_diagonal, attention_mask, arguments, packed=packed
        )
        check("DotProductAttention.forward", rest, DotProductAttention.forward)
        parts = _unstacked(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        for part in parts:
            if part.dim() != (3 if packed else 4):
                raise InputError(
                    f"qkv_format={order!r} with a tensor {list(part.shape)}: it has {3 if packed else 4} dimensions."
                )
        if not parts[0].dtype == parts[1].dtype == parts[2].dtype:
            dtypes = ", ".join(str(part.dtype) for part in parts)
            raise InputError(f"query_layer, key_layer and value_layer are {dtypes}: give one dtype.")
        if parts[0].shape[-2] != self.heads or parts[1].shape[-2] != self.groups:
            raise InputError(
                f"query_layer and key_layer of {parts[0].shape[-2]} and {parts[1].shape[-2]} heads: the layer has "
                f"num_attention_heads={self.heads} and num_gqa_groups={self.groups}."
            )
        q, k, v = (x[None] if packed else x.transpose(0, 1) if order == "sbhd" else x for x in parts)
        result: Any = super().forward(q, k, v, call)
        out, top = result if isinstance(result, tuple) else (result, None)
        out = out[0] if packed else out.transpose(0, 1) if order == "sbhd" else out
        return (out, top) if self.return_max_logit else out


def _unstacked(
    q: Tensor | None, k: Tensor | None, v: Tensor | None, qkv: Tensor | None, kv: Tensor | None, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    stacked = qkv if qkv is not None else kv
    if not (stacked is None or isinstance(stacked, Tensor)):
        raise InputError(
            f"qkv_layer or kv_layer is {type(stacked).__name__}: give a tensor, or query_layer, key_layer, value_layer."
        )
    if stacked is not None:
        count, taken = (3, (q, k, v)) if qkv is not None else (2, (k, v))
        if (
            dim not in (-3, -2)
            or stacked.shape[dim] != count
            or any(x is not None for x in taken)
            or (qkv is not None and kv is not None)
        ):
            raise InputError(
                f"a stacked tensor {list(stacked.shape)} along qkv_interleave_dim={dim}: give one of qkv_layer and kv_layer, "
                f"with {count} at dimension -3 or -2, and without the tensors that it holds."
            )
        parts = stacked.unbind(dim)
        q, k, v = parts if qkv is not None else (q, *parts)
    if q is None or k is None or v is None:
        raise InputError(
            "DotProductAttention takes query_layer, key_layer and value_layer, or a stacked qkv_layer or kv_layer."
        )
    return q, k, v


class MultiheadAttention(OneRank, Stateful, _attention.MultiheadAttention, metaclass=Kind):
    """Fused query/key/value product, rotary embedding, attention and output product; with `input_layernorm` a norm first.


    attention_type "cross": keys and values come from `encoder_output`.
    """

    __module__ = "transformer_engine.pytorch.attention.multi_head_attention"  # libraries recognise the class by it
    octavo = _attention.MultiheadAttention
    __signature__ = SIGNATURES["MultiheadAttention"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = bound("MultiheadAttention", args, kwargs)
        check_layer("MultiheadAttention", values)
        settings = Settings.take(values, "attn_mask_type")
        taken, kind, packed = _taken(values), values.pop("attention_type"), _packed("qkv_format", values)
        check_kind("attention_type", kind, ATTENTION_TYPES)
        super().__init__(**values | settings.native_arguments("attn_mask_type"))
        self.settings, self.packed = settings, packed
        _prepare(self, taken, values, cross=kind == "cross")
        make_readable(self)

    @property
    def mask_type(self) -> str:
        """Transformer Engine's mask type, the default of calls."""
        return self.settings.kind

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
        **others: Any,
    ) -> Any:
        """hidden_states [T, B, hidden], with "bshd" [B, T, hidden], with "thd" [T, hidden] → the same shape.

        encoder_output: of cross-attention, of the same order. Masks, lengths and biases are those of `DotProductAttention`.
        """
        arguments = {"checkpoint_core_attention": checkpoint_core_attention, **others}
        first = self.sequence_first
        encoded = _batched(encoder_output, first, self.packed) if self.attention_type == "cross" else None
        call, rest = Call.of(
            self.settings, attn_mask_type, window_size, bottom_right_diagonal, attention_mask, arguments, packed=self.packed,
            encoded=encoded, self_attention=self.attention_type == "self",
        )  # fmt: skip
        if encoder_output is not None and encoded is None:
            raise InputError(
                "MultiheadAttention: encoder_output with attention_type='self', whose keys come from hidden_states. Pass "
                "attention_type='cross' to the constructor, or leave encoder_output out."
            )
        rest["inference_params"] = inference_params
        x = hidden_states[None] if self.packed else hidden_states
        mask, base = _attention_mask(call, self, x, rotary_pos_emb)
        result = super().forward(x, mask, rotary_pos_emb, is_first_microbatch, attn_mask_type=base, **rest)
        return _unpacked(result) if self.packed else result

    def set_context_parallel_group(
        self, cp_group: dist.ProcessGroup | None, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Share each sequence among the ranks of a group; None turns this off."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)


def _batched(x: Tensor | None, first: bool, packed: bool) -> Tensor | None:
    """Hidden states as [B, T, hidden]."""
    if x is None:
        return None
    return x[None] if packed else x.transpose(0, 1) if first else x


def _unpacked(result: Any) -> Any:
    """Results without the batch dimension of packed sequences; biases unchanged."""
    if isinstance(result, tuple):
        return tuple(x[0] if isinstance(x, Tensor) and x.dim() == 3 else x for x in result)
    return result[0]


class TransformerLayer(OneRank, Stateful, _block.TransformerLayer, metaclass=Kind):
    """x + attention(norm(x)), then h + mlp(norm(h)); a block of timm's or Hugging Face's may be a subclass.

    layer_type "decoder": with cross-attention to `encoder_output` in between (`inter_attention`).
    """

    __module__ = "transformer_engine.pytorch.transformer"  # libraries recognise the class by it
    octavo = _block.TransformerLayer
    __signature__ = SIGNATURES["TransformerLayer"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = bound("TransformerLayer", args, kwargs)
        settings, inter = (
            Settings.take(values, "self_attn_mask_type"),
            Settings.take(values, "enc_dec_attn_mask_type", "enc_dec_"),
        )
        inter.softcap = settings.softcap
        check_layer("TransformerLayer", values)
        kind, taken = check_kind("layer_type", values.pop("layer_type"), LAYER_TYPES), _taken(values)
        packed = _packed("attn_input_format", values)
        super().__init__(**values | settings.native_arguments("self_attn_mask_type"))
        self.settings, self.inter_settings, self.packed = settings, inter, packed
        _prepare(self.self_attention, taken, values)
        if kind == "decoder":
            self.inter_attention = _inter(values, inter)
            _prepare(self.inter_attention, taken, values, cross=True)
            for name in ("layernorm_mlp", "layernorm"):  # after it, as in Transformer Engine
                if name in self._modules:
                    self._modules[name] = self._modules.pop(name)
        self.layernorm_mlp.gate_rows = self.layernorm_mlp.ffn_hidden_size  # all of gate before all of up
        make_readable(self)

    @property
    def mask_type(self) -> str:
        """Transformer Engine's mask type of self-attention, the default of calls."""
        return self.settings.kind

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
        **others: Any,
    ) -> Any:
        """hidden_states [T, B, hidden], with "bshd" [B, T, hidden], with "thd" [T, hidden] → the same shape.

        attention_mask: bool, True for masked positions; for mask types with "padding" and "arbitrary". In a decoder layer
        cu_seqlens_q describes queries and keys of self-attention, cu_seqlens_kv `encoder_output`; a bias applies to both
        attentions.
        """
        attention: Any = self.self_attention
        first, decodes = attention.sequence_first, self.inter_attention is not None
        hidden_states = hidden_states.to(compute_dtype(hidden_states))  # the residual stream of an autocast has its dtype
        arguments = {"checkpoint_core_attention": checkpoint_core_attention, **others}
        for_self, inter = dict(arguments), None
        if decodes:
            encoded = _batched(encoder_output, first, self.packed)
            encoded = None if encoded is None else encoded.to(hidden_states.dtype)
            inter, _ = Call.of(
                self.inter_settings, enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal,
                enc_dec_attn_mask, arguments, packed=self.packed, encoded=encoded,
            )  # fmt: skip
            for_self |= {
                "cu_seqlens_kv": arguments.get("cu_seqlens_q"),
                "cu_seqlens_kv_padded": arguments.get("cu_seqlens_q_padded"),
                "max_seqlen_kv": arguments.get("max_seqlen_q"),
            }
        call, rest = Call.of(
            self.settings, self_attn_mask_type, window_size, bottom_right_diagonal, attention_mask, for_self,
            packed=self.packed, self_attention=True,
        )  # fmt: skip
        rest["inference_params"] = inference_params
        others = {"encoder_output": encoder_output, "enc_dec_attn_mask": enc_dec_attn_mask}
        for name in [name for name, value in others.items() if value is not None and not decodes]:
            raise InputError(
                f"TransformerLayer: {name} with layer_type='encoder', which has no cross-attention. Pass "
                f"layer_type='decoder' to the constructor, or leave {name} out."
            )
        x = hidden_states[None] if self.packed else hidden_states
        mask, base = _attention_mask(call, attention, x, rotary_pos_emb)
        result = super().forward(x, mask, rotary_pos_emb, is_first_microbatch, self_attn_mask_type=base, inter=inter, **rest)
        return _unpacked(result) if self.packed else result

    def set_context_parallel_group(
        self, cp_group: dist.ProcessGroup | None, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Share each sequence among the ranks of a group; None turns this off."""
        if self.inter_attention is not None and cp_group is not None:
            raise InputError("set_context_parallel_group of a decoder layer: context parallelism supports self-attention only.")
        attention: Any = self.self_attention
        attention.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)


def _inter(values: dict[str, Any], settings: Settings) -> _attention.MultiheadAttention:
    """A decoder layer's cross-attention, with the layer's arguments."""
    names = (
        "hidden_size", "num_attention_heads", "kv_channels", "attention_dropout", "layernorm_epsilon", "init_method",
        "output_layer_init_method", "layer_number", "num_gqa_groups", "bias", "normalization", "zero_centered_gamma",
        "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope", "get_rng_state_tracker", "params_dtype", "device",
    )  # fmt: skip
    return _attention.MultiheadAttention(
        **{name: values[name] for name in names},
        **settings.native_arguments("attn_mask_type"),
        qkv_format=values["attn_input_format"],
        return_layernorm_output=values["apply_residual_connection_post_layernorm"],
    )
