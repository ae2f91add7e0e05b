"""A transformer layer: attention and feed-forward, each with a norm before and a residual after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from octavo.errors import InputError
from octavo.kernels.attention.pattern import Pattern
from octavo.nn.arguments import Creation, Init, Tracker, check, check_dropout, check_format
from octavo.nn.attention import Attending, ContextParallel, MultiheadAttention
from octavo.nn.mlp import LayerNormMLP
from octavo.nn.moe import Experts, LayerNormMoE
from octavo.nn.norm import NORM_LAYERS, ResidualLayer, forward_residual
from octavo.nn.rotary import Angles

RunBlock = Callable[..., tuple[Any, ...]]
"""Runs a layer in a stack: (layer, residual, delta, …) → (residual, delta), with experts also `routing`, as
`TransformerLayer.forward_residual` does."""


class TransformerLayer(ContextParallel, ResidualLayer):
    """h = x + attention(norm(x)), then h + mlp(norm(h)). x, result: [B, T, hidden]; the residual stream has the input's dtype.

    With `parallel_attention_mlp`: x + attention(norm(x)) + mlp(norm'(x)).

    Args:
        hidden_dropout: dropout of the results of attention and MLP; with `parallel_attention_mlp`, of their sum.
        attn_input_format: "bshd" for hidden states [B, T, hidden], or "sbhd" for [T, B, hidden].
        bias: all products have biases; `qkv_bias` and `mlp_bias` override it.
        init_method, output_layer_init_method: fill the weights of the first and second product of attention and MLP.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope: as in `MultiheadAttention`.
        experts: the MLP is a `LayerNormMoE` without biases; `ffn_hidden_size` is then the size of one expert.
        apply_residual_connection_post_layernorm: the residual is the norm's output, not its input.
        output_layernorm: a norm after the MLP (`layernorm`) instead of the norm before attention.
        drop_path_rate: in training, the share of samples (with "sbhd" of positions) whose results of attention and MLP are
            zero; results of the others are divided by the remaining share.
    """

    separate_dropout = False
    """With `parallel_attention_mlp` and `hidden_dropout`: dropout of attention and of the MLP separately, not of their sum."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        bias: bool = True,
        qkv_bias: bool | None = None,
        mlp_bias: bool | None = None,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        attn_input_format: str = "bshd",
        parallel_attention_mlp: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        drop_path_rate: float = 0.0,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        experts: Experts | None = None,
        get_rng_state_tracker: Tracker | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check("TransformerLayer", others, TransformerLayer.__init__)
        check_dropout("hidden_dropout", hidden_dropout)
        check_dropout("drop_path_rate", drop_path_rate)
        check_format("attn_input_format", attn_input_format)
        self.hidden_dropout, self.parallel, self.layer_number = hidden_dropout, parallel_attention_mlp, layer_number
        norm: dict[str, Any] = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        create: Creation = {
            "init_method": init_method, "output_layer_init_method": output_layer_init_method,
            "get_rng_state_tracker": get_rng_state_tracker, "params_dtype": params_dtype, "device": device,
        }  # fmt: skip
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            num_gqa_groups=num_gqa_groups,
            layer_number=layer_number,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bias=bias,
            input_layernorm=not output_layernorm,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            qkv_bias=qkv_bias,
            qkv_format=attn_input_format,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            **norm,
            **create,
        )
        self.experts, self.drop_path_rate = experts, drop_path_rate
        if apply_residual_connection_post_layernorm and (parallel_attention_mlp or experts is not None):
            other = "parallel_attention_mlp=True" if parallel_attention_mlp else "experts"
            raise InputError(
                f"TransformerLayer(apply_residual_connection_post_layernorm=True) with {other} is not supported. Leave one out."
            )
        sizes = hidden_size, ffn_hidden_size, layernorm_epsilon
        form = norm | {"activation": activation, "activation_params": activation_params}
        if experts is not None:
            if parallel_attention_mlp or mlp_bias:
                asked = "parallel_attention_mlp" if parallel_attention_mlp else "mlp_bias"
                raise InputError(f"TransformerLayer({asked}=True) with experts is not supported. Set {asked}=False.")
            self.layernorm_moe = LayerNormMoE(*sizes, experts, **form, **create)
        else:
            mlp_bias = bias if mlp_bias is None else mlp_bias
            self.layernorm_mlp = LayerNormMLP(*sizes, bias=mlp_bias, **form, **create)
            self.layernorm_mlp.streams_norm = apply_residual_connection_post_layernorm
        self.layernorm: nn.Module | None = None
        self.inter_attention: nn.Module | None = None
        """Cross-attention of a decoder, between attention and MLP; its pattern is a call's `inter`."""
        if output_layernorm:
            how: dict[str, Any] = {"zero_centered_gamma": zero_centered_gamma, "params_dtype": params_dtype, "device": device}
            self.layernorm = NORM_LAYERS[normalization](hidden_size, layernorm_epsilon, **how)

    def _share_sequences(self, group: dist.ProcessGroup | None, strategy: str) -> None:
        self.self_attention.set_context_parallel_group(group, cp_comm_type=strategy)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Pattern | Attending | None = None,
        rotary_pos_emb: Angles | Tensor | None = None,
        is_first_microbatch: bool | None = None,
        *,
        self_attn_mask_type: str | None = None,
        delta: Tensor | None = None,
        return_residual: bool = False,
        counted: Tensor | None = None,
        inter: Attending | None = None,
        **others: Any,
    ) -> Any:
        """hidden_states [B, T, hidden] → the same shape; the other arguments as in `MultiheadAttention`.

        The mask is True where a query attends to a key: the opposite of Transformer Engine's. delta and return_residual are for
        `forward_residual`, whose delta is None with `parallel_attention_mlp`. With `experts` the last result is their
        `routing`, of the tokens in `counted`.
        """
        if others:
            check("TransformerLayer.forward", others, TransformerLayer.forward)
        h, attended = forward_residual(
            self.self_attention,
            hidden_states,
            delta,
            attention_mask,
            rotary_pos_emb,
            is_first_microbatch,
            attn_mask_type=self_attn_mask_type,
        )
        if self.inter_attention is not None:
            delta = self._dropped(attended)
            h, attended = forward_residual(self.inter_attention, h, delta, inter, None, is_first_microbatch)
        if self.parallel:
            h, out = forward_residual(self.layernorm_mlp, h, None, is_first_microbatch)
            separate = self.separate_dropout
            out = self._dropped(attended) + self._dropped(out) if separate else self._dropped(attended + out)
            # Added here, not by the next norm: both parts return the stream unchanged, and FSDP2 warns of a view.
            h = h + out if self.layernorm is None else self.layernorm(h, out)
            return (h, None) if return_residual else h
        if self.experts is not None:
            h, out, routing = self.layernorm_moe(h, is_first_microbatch, delta=self._dropped(attended), counted=counted)
            h, out = self._normed(h, self._dropped(out))
            return (h, out, routing) if return_residual else (h if out is None else h + out, routing)
        delta = self._dropped(attended, paths=self.inter_attention is None)
        h, out = forward_residual(self.layernorm_mlp, h, delta, is_first_microbatch)
        h, out = self._normed(h, self._dropped(out))
        if return_residual:
            return h, out
        return h if out is None else h + out

    def _normed(self, h: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stream and delta; with `output_layernorm` their norm, and no delta."""
        return (h, out) if self.layernorm is None else (self.layernorm(h, out), None)

    def set_skip_output(self, skip_output: bool) -> None:
        """Skip products whose results are only added to the stream; for a recomputation of this layer."""
        last = self.layernorm_mlp if self.experts is None else self.layernorm_moe.experts
        last.skip_output = skip_output and self.layernorm is None
        if self.parallel:
            self.self_attention.proj.skip_output = last.skip_output

    def _dropped(self, x: Tensor, *, paths: bool = True) -> Tensor:
        tensor = self.self_attention.tensor
        if tensor is None:
            x = functional.dropout(x, self.hidden_dropout, self.training)
        elif self.training:
            x = tensor.dropped(x, self.hidden_dropout)
        if not (paths and self.drop_path_rate and self.training):
            return x
        keep = 1 - self.drop_path_rate
        return x / keep * x.new_empty(x.shape[:1] + (1,) * (x.dim() - 1)).bernoulli_(keep)
