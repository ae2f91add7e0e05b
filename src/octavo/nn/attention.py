"""Attention layers: dot-product attention, and multi-head attention with its products.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.

Query, key and value are one matrix whose rows are grouped by key-value head: the queries that share a key-value head, then its
key, then its value. A slice of whole groups is a working attention layer, at any tensor-parallel degree.
"""

from __future__ import annotations

import abc
import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.collectives.attention import gather_ahead
from octavo.collectives.context import ContextGroup
from octavo.collectives.tensor import TensorGroup, widened
from octavo.errors import InputError, unknown
from octavo.fp8.quantizer import WeightUse
from octavo.fp8.recipe import Recipe
from octavo.kernels.attention import short
from octavo.kernels.attention.cached import saved_once
from octavo.kernels.attention.pattern import Pattern
from octavo.kernels.autograd import SavedBytes, attention_begins, has_hooks, refuse_second_derivative
from octavo.nn.arguments import (
    Draws,
    Init,
    Tracker,
    check,
    check_dropout,
    check_format,
    check_mask,
    cos_and_sin,
    window_of,
)
from octavo.nn.attend import attend, saved_by_attention
from octavo.nn.linear import LayerNormLinear, Linear, compute_dtype, saved_by_linear, saved_by_norm_linear
from octavo.nn.norm import (
    FLOATS_OF_PYTORCH,
    NORM_LAYERS,
    L2Normalization,
    ResidualLayer,
    check_input,
    forward_residual,
    saved_by_norm,
)
from octavo.nn.rotary import Angles, Handover, Rotation, rotate


def merge_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """q [H·D, ...], k [G·D, ...], v [G·D, ...] as one [(H + 2G)·D, ...], grouped by key-value head."""
    parts = [part.unflatten(0, (groups, -1)) for part in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def split_qkv(qkv: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `merge_qkv`: qkv [(H + 2G)·D, ...] → q [H·D, ...], k and v [G·D, ...]."""
    head_dim = qkv.shape[0] // (heads + 2 * groups)
    q, k, v = qkv.unflatten(0, (groups, -1)).split([heads // groups * head_dim, head_dim, head_dim], 1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


class _ShortAttentionFunction(torch.autograd.Function):
    """`short_attention`: qkv [B, T, (H + 2G)·D] → [B, T, H·D]. Saves qkv, the result and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, groups: int, scale: float) -> Tensor:
        ctx.call = heads, groups, scale
        return saved_once(ctx, lambda: short.forward(qkv, heads, groups, scale), qkv)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("these attention kernels")
        attention_begins()
        qkv, out, lse = ctx.saved_tensors
        return short.backward(d_out, qkv, out, lse, *ctx.call), None, None, None


def short_attention(qkv: Tensor, heads: int, groups: int, scale: float | None = None) -> Tensor:
    """softmax(q · kᵀ · scale) · v without a mask, from the joint product; differentiable once.

    qkv [B, T, (H + 2G)·D] → [B, T, H·D]. On a GPU `octavo.kernels.attention.short.takes` must accept the shape; nothing may
    write to qkv before backward. scale: above 0; None for D^-½.

    Raises:
        InputError: scale is 0 or below.
    """
    scale = (qkv.shape[-1] // (heads + 2 * groups)) ** -0.5 if scale is None else scale
    if scale <= 0:
        raise InputError(f"softmax_scale = {scale}: give a number above 0, or None for 1/√head_dim.")
    return _ShortAttentionFunction.apply(qkv, heads, groups, scale)


class Attending(abc.ABC):
    """A custom attention computation, passed in place of `attention_mask`."""

    @abc.abstractmethod
    def core(self, layer: DotProductAttention, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """q [B, Tq, H, D], k and v [B, Tk, G, D] → [B, Tq, H·D], or a tuple that begins with it."""

    @abc.abstractmethod
    def context(
        self, layer: MultiheadAttention, x: Tensor, delta: Tensor | None, rotary: Any, first: bool | None
    ) -> tuple[Tensor, Tensor]:
        """x and delta [B, T, hidden] → the residual stream, and the input of the output product [B, T, H·D]."""


class ContextParallel(nn.Module):
    """Base of attention layers, and of layers that contain one."""

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "all_gather",
    ) -> None:
        """Share each sequence among the ranks of a group: inputs and rotary angles are then those of this rank's tokens, as
        `octavo.context_parallel.split` returns them. None turns this off. `cp_global_ranks` and `cp_stream` are accepted for
        Transformer Engine's callers, and unused.
        """
        self._share_sequences(cp_group, cp_comm_type)

    def _share_sequences(self, group: dist.ProcessGroup | None, strategy: str) -> None:
        raise NotImplementedError


class DotProductAttention(ContextParallel):
    """softmax(q · kᵀ · scale) · v. q: [B, T, H, D]; k, v: [B, T, G, D] → [B, T, H·D].

    `octavo.nn.attend` lists the kernels.

    `attn_mask_type`, for calls without a mask: "causal" or "no_mask". `attention_dropout` is applied in training only.
    qkv_format: "bshd" for [B, T, H, D], or "sbhd" for [T, B, H, D]. window_size (w, 0) under causal attention: a query attends
    to w keys before its position.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "bshd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        softmax_scale: float | None = None,
        get_rng_state_tracker: Tracker | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check("DotProductAttention", others, DotProductAttention.__init__)
        check_dropout("attention_dropout", attention_dropout)
        self.causal = check_mask("attn_mask_type", attn_mask_type)
        self.window = window_of(window_size, causal=self.causal)
        self.sequence_first = check_format("qkv_format", qkv_format)
        self.draws = Draws(get_rng_state_tracker)
        groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % groups:
            raise InputError(f"{num_attention_heads} attention heads cannot share {groups} key-value heads: use a divisor.")
        self.heads, self.groups, self.head_dim = num_attention_heads, groups, kv_channels
        self.attention_dropout, self.softmax_scale = attention_dropout, softmax_scale
        self.context: ContextGroup | None = None
        """The ranks that share each sequence."""
        self.tensor: TensorGroup | None = None
        """The ranks with the other heads; each draws its dropout separately."""

    def _share_sequences(self, group: dist.ProcessGroup | None, strategy: str) -> None:
        self.context = None if group is None else ContextGroup(group, strategy)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | Pattern | Attending | None = None,
        *,
        attn_mask_type: str | None = None,
        handover: Handover | None = None,
        **others: Any,
    ) -> Tensor:
        """query [B, T, H, D], key and value [B, T, G, D] → [B, T, H·D].

        With "sbhd" T is the first dimension. attention_mask: bool [B, 1, T, T], True where a query attends to a key, which
        replaces the window; or a `Pattern` of whole sequences. attn_mask_type: overrides the constructor's. handover: as in
        `attend`.
        """
        if others:
            check("DotProductAttention.forward", others, DotProductAttention.forward)
        check_input(self, query_layer, key_layer, value_layer, dtypes=FLOATS_OF_PYTORCH)
        taken = isinstance(attention_mask, Attending)  # samples first
        _check_shapes(query_layer, key_layer, value_layer, first=self.sequence_first and not taken)
        if isinstance(attention_mask, Attending):
            out: Tensor = attention_mask.core(self, query_layer, key_layer, value_layer)
            return out
        causal = self.causal if attn_mask_type is None else check_mask("attn_mask_type", attn_mask_type)
        if query_layer.numel() == 0:  # not every kernel of PyTorch accepts empty inputs
            return query_layer.flatten(2)
        dropout = self.attention_dropout if self.training else 0.0
        q, k, v = query_layer, key_layer, value_layer
        if self.sequence_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        pattern = attention_mask
        if pattern is None:
            pattern = Pattern(k.shape[1] * (1 if self.context is None else self.context.size), causal)
        if isinstance(pattern, Pattern):
            pattern = pattern.with_window(self.window)
        with contextlib.ExitStack() as draws:
            if dropout:
                draws.enter_context(self.draws() if self.tensor is None else self.tensor.forked_rng(q.device))
            out = attend(q, k, v, pattern, scale=self.softmax_scale, dropout=dropout, context=self.context, handover=handover)
        return (out.transpose(0, 1) if self.sequence_first else out).flatten(2)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, *, first: bool) -> None:
    """Raise an InputError unless samples, tokens and heads agree: not every kernel checks them."""
    sample = 1 if first else 0
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    fits = fits and q.shape[sample] == k.shape[sample] and k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0
    if not fits:
        order = "T, B" if first else "B, T"
        raise InputError(
            f"query, key and value are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}: give query [{order}, H, D], key "
            f"and value [{order}, G, D], with the same B, the same T of key and value, and H a multiple of G."
        )


def saved_by_attention_layer(
    tokens: int, hidden_size: int, heads: int, groups: int, head_dim: int, recipes: tuple[Recipe | None, Recipe | None],
    use: WeightUse, *, normalization: str, qk_norm: bool, joined: bool, runs: int = 1,
) -> SavedBytes:  # fmt: skip
    """Bytes that `MultiheadAttention` saves for backward of `tokens` tokens.

    recipes: of the first product and of `proj`. qk_norm: queries and keys have an RMSNorm. joined: the result is concatenated
    from results of documents. runs: as in `saved_input_bytes`, of `proj`.
    """
    width, element = heads * head_dim, use.compute_bytes
    qkv = saved_by_norm_linear(tokens, (width + 2 * groups * head_dim, hidden_size), recipes[0], use, normalization)
    proj = saved_by_linear(tokens, (hidden_size, width), recipes[1], use, runs=runs)
    activations = qkv.activations + saved_by_attention(tokens, heads, groups, head_dim, element)
    if qk_norm:
        activations += saved_by_norm(tokens * (heads + groups), head_dim, element, "RMSNorm")
    if joined or recipes[1] is not None:  # else `proj` reads, and saves, the result of attention itself
        activations += proj.activations
    return SavedBytes(activations, qkv.weight_copies + proj.weight_copies)


def _norm_of_heads(
    kind: str | None, head_dim: int, eps: float, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Module | None:
    """A norm of queries or keys, head by head."""
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(eps)
    if kind not in NORM_LAYERS:
        raise unknown("qk_norm_type", kind, (*NORM_LAYERS, "L2Normalization"))
    return NORM_LAYERS[kind](head_dim, eps, params_dtype=dtype, device=device)


class MultiheadAttention(ContextParallel, ResidualLayer):
    """Norm, joint query/key/value product, rotary embedding, attention and output product, without the residual.

    [B, T, hidden] → [B, T, hidden].

    Without `input_layernorm` there is no norm, and the first product is `qkv`. With `return_layernorm_output` the norm's output
    is the last result, and `forward_residual` returns it as the stream.

    `bias` is the default of `qkv_bias` and `proj_bias`. With `return_bias` the output product's bias is returned after the
    result instead of being added. qkv_format: "bshd", or "sbhd" for hidden states [T, B, hidden].
    `qk_norm_type` "RMSNorm", "LayerNorm" or "L2Normalization" normalises queries and keys head by head (`q_norm`, `k_norm`),
    after the rotation or with `qk_norm_before_rope` before it.
    """

    tensor: TensorGroup | None = None
    """The ranks with the other heads; inputs and results have this rank's tokens."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        num_gqa_groups: int | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        proj_bias: bool | None = None,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        input_layernorm: bool = True,
        return_layernorm_output: bool = False,
        qkv_format: str = "bshd",
        return_bias: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        get_rng_state_tracker: Tracker | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check("MultiheadAttention", others, MultiheadAttention.__init__)
        self.sequence_first, self.layer_number = check_format("qkv_format", qkv_format), layer_number
        draw: dict[str, Any] = {"get_rng_state_tracker": get_rng_state_tracker}
        make: dict[str, Any] = {"params_dtype": params_dtype, "device": device} | draw
        head_dim = kv_channels or hidden_size // num_attention_heads
        self.core_attention = DotProductAttention(
            num_attention_heads,
            head_dim,
            num_gqa_groups,
            attention_dropout,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            **draw,
        )
        self.heads, self.groups, self.head_dim = num_attention_heads, self.core_attention.groups, head_dim
        sizes = hidden_size, (self.heads + 2 * self.groups) * head_dim
        first = make | {"bias": bias if qkv_bias is None else qkv_bias, "init_method": init_method}
        self.input_layernorm, self.return_layernorm_output = input_layernorm, input_layernorm and return_layernorm_output
        if input_layernorm:
            first |= {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
            self.layernorm_qkv = LayerNormLinear(*sizes, layernorm_epsilon, **first)
            self.layernorm_qkv.streams_norm = return_layernorm_output
        else:
            self.qkv = Linear(*sizes, **first)
        self.q_norm, self.k_norm = (_norm_of_heads(qk_norm_type, head_dim, qk_norm_eps, params_dtype, device) for _ in range(2))
        self.norm_first = qk_norm_before_rope and qk_norm_type is not None
        self.proj = Linear(
            self.heads * head_dim,
            hidden_size,
            bias if proj_bias is None else proj_bias,
            return_bias=return_bias,
            init_method=output_layer_init_method,
            **make,
        )

    def _share_sequences(self, group: dist.ProcessGroup | None, strategy: str) -> None:
        self.core_attention.set_context_parallel_group(group, cp_comm_type=strategy)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Pattern | Attending | None = None,
        rotary_pos_emb: Angles | Tensor | None = None,
        is_first_microbatch: bool | None = None,
        *,
        attn_mask_type: str | None = None,
        delta: Tensor | None = None,
        return_residual: bool = False,
        **others: Any,
    ) -> Any:
        """hidden_states [B, T, hidden], mask bool [B, 1, T, T], rotary (cos, sin) each float32 [B, T, Dr] → like the input.

        The mask is True where a query attends to a key, as in PyTorch, and replaces mask type and window; or it is a
        `Pattern`. The first Dr columns of each head rotate. rotary_pos_emb may also be Transformer Engine's angles, [T, 1, 1,
        Dr]. attn_mask_type: overrides the constructor's. delta and return_residual are for `forward_residual`.
        """
        if others:
            check("MultiheadAttention.forward", others, MultiheadAttention.forward)
        x = hidden_states
        if self.sequence_first:
            x, delta = x.transpose(0, 1), None if delta is None else delta.transpose(0, 1)
        taken = isinstance(attention_mask, Attending)
        # Attention covers the tokens of all ranks.
        tokens = x.shape[:2] if self.tensor is None else widened(x.shape[:2], self.tensor.size)
        angles = None if taken else cos_and_sin(rotary_pos_emb, tokens, self.head_dim)
        if isinstance(attention_mask, Attending):
            h, context = attention_mask.context(self, x, delta, rotary_pos_emb, is_first_microbatch)
        elif angles is None and attention_mask is None and self._is_short(x, attn_mask_type):
            h, qkv = self._qkv(x, delta, is_first_microbatch)
            context = short_attention(qkv, self.heads, self.groups, self.core_attention.softmax_scale)
        else:
            rotation = Rotation(self.heads, self.groups, *((not self.norm_first and angles) or (None, None)))
            rotation = rotation._replace(handover=self._handover())
            h, *parts = self._qkv(x, delta, is_first_microbatch, rotation)
            q, k, v = parts
            if self.q_norm is not None and self.k_norm is not None:
                after = angles if self.norm_first else None
                q, k = rotate(self.q_norm(q), after), rotate(self.k_norm(k), after)
            handed = {} if rotation.handover is None else {"handover": rotation.handover}
            context = self.core_attention(q, k, v, attention_mask, attn_mask_type=attn_mask_type, **handed)
        if self.sequence_first:
            h, context = h.transpose(0, 1), context.transpose(0, 1)
        attended = self.proj(context, is_first_microbatch)
        if self.core_attention.context is not None:
            gather_ahead(attended[0] if isinstance(attended, tuple) else attended, context)
        if return_residual:
            return h, attended
        if self.return_layernorm_output:
            return *(attended if isinstance(attended, tuple) else (attended,)), h
        return attended

    def _qkv(self, x: Tensor, delta: Tensor | None, first: bool | None, rotation: Rotation | None = None) -> tuple[Tensor, ...]:
        """The residual stream, and the joint product, or with a rotation its queries, keys and values."""
        if self.input_layernorm:
            outputs: tuple[Tensor, ...] = forward_residual(self.layernorm_qkv, x, delta, first, rotation=rotation)
            return outputs
        h = x if delta is None else x + delta
        y = self.qkv(h, first)
        return h, *((y,) if rotation is None else rotation.composed(y))

    def _handover(self) -> Handover | None:
        """None if norms, hooks or a user's attention read the gradients of queries, keys and values."""
        core = self.core_attention
        built_in = type(core) is DotProductAttention and "forward" not in vars(core) and self.q_norm is None
        if torch.compiler.is_compiling() or not (built_in and self.input_layernorm) or has_hooks(core):
            return None
        qkv = self.layernorm_qkv
        return None if qkv.streams_norm or has_hooks(qkv) else Handover()

    def _is_short(self, x: Tensor, attn_mask_type: str | None) -> bool:
        """True if the kernel of short sequences takes the joint product of x [B, T, hidden]."""
        core = self.core_attention
        causal = core.causal if attn_mask_type is None else check_mask("attn_mask_type", attn_mask_type)
        if (
            causal
            or core.context is not None
            or (core.attention_dropout and self.training)
            or torch.compiler.is_compiling()
            or x.numel() == 0
        ):
            return False
        if self.q_norm is not None:
            return False
        return short.takes(compute_dtype(x), x.shape[1], self.head_dim)
