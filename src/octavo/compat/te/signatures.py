"""Argument names of Transformer Engine's layers in their order, with their defaults: data, from version 2.20.

`bound` maps a call to names, drops arguments that have no effect with one tensor-parallel rank, and leaves the rest to
`octavo.nn.arguments`, which refuses unsupported arguments by name.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octavo.compat.te.device import default_device
from octavo.errors import InputError

REQUIRED = inspect.Parameter.empty
_PARALLEL = "sequence_parallel=False fuse_wgrad_accumulation=False tp_group=None tp_size=1"
_UB = "ub_overlap_ag=False ub_overlap_rs=False ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False"
_SCORES = "bottom_right_diagonal=None softcap=0.0"
_DEVICE = "device='default'"

_TEXTS = {
    "Linear": f"in_features out_features {_PARALLEL} get_rng_state_tracker=None rng_tracker_name=None init_method=None "
    f"bias=True return_bias=False params_dtype=None parallel_mode=None parameters_split=None {_DEVICE} {_UB} ub_name=None "
    "delay_wgrad_compute=False symmetric_ar_type=None save_original_input=False name=None",
    "LayerNormLinear": f"in_features out_features eps=1e-5 {_PARALLEL} get_rng_state_tracker=None init_method=None bias=True "
    "normalization='LayerNorm' return_bias=False params_dtype=None parallel_mode=None return_layernorm_output=False "
    f"return_layernorm_output_gathered=False parameters_split=None zero_centered_gamma=False {_DEVICE} ub_overlap_ag=False "
    "ub_overlap_rs=False ub_overlap_rs_dgrad=False ub_bulk_wgrad=False ub_bulk_dgrad=False ub_name=None "
    "delay_wgrad_compute=False symmetric_ar_type=None name=None",
    "LayerNormMLP": "hidden_size ffn_hidden_size eps=1e-5 sequence_parallel=False return_bias=False "
    "get_rng_state_tracker=None tp_group=None tp_size=1 init_method=None bias=True normalization='LayerNorm' "
    "activation='gelu' activation_params=None output_layer_init_method=None fuse_wgrad_accumulation=False params_dtype=None "
    "return_layernorm_output=False return_layernorm_output_gathered=False seq_length=None micro_batch_size=None "
    f"set_parallel_mode=False zero_centered_gamma=False {_DEVICE} ub_overlap_ag=False name=None ub_overlap_rs=False "
    "ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False delay_wgrad_compute=False symmetric_ar_type=None "
    "checkpoint=False",
    "GroupedLinear": f"num_gemms in_features out_features {_PARALLEL} get_rng_state_tracker=None rng_tracker_name=None "
    f"init_method=None bias=True return_bias=False params_dtype=None parallel_mode=None {_DEVICE} ub_overlap_rs=False "
    "ub_overlap_ag=False ub_name=None delay_wgrad_compute=False save_original_input=False single_grouped_weight=False "
    "single_grouped_bias=False name=None use_grouped_tensor=None",
    "LayerNorm": f"normalized_shape=None eps=1e-5 sequence_parallel=None params_dtype=None zero_centered_gamma=False "
    f"hidden_size=None dtype=None {_DEVICE}",
    "DotProductAttention": "num_attention_heads kv_channels num_gqa_groups=None attention_dropout=0.0 qkv_format='sbhd' "
    f"attn_mask_type='causal' window_size=None {_SCORES} "
    "sequence_parallel=False tp_size=1 get_rng_state_tracker=None tp_group=None "
    "layer_number=None attention_type='self' cp_group=None cp_global_ranks=None cp_stream=None cp_comm_type='p2p' "
    "softmax_scale=None softmax_type='vanilla' return_max_logit=False name=None",
    "MultiheadAttention": "hidden_size num_attention_heads kv_channels=None attention_dropout=0.1 layernorm_epsilon=1e-5 "
    f"init_method=None output_layer_init_method=None layer_number=None attn_mask_type='causal' "
    f"window_size=None {_SCORES} "
    "tp_group=None tp_size=1 num_gqa_groups=None fuse_wgrad_accumulation=False get_rng_state_tracker=None "
    "sequence_parallel=False params_dtype=None return_bias=False return_layernorm_output=False "
    "input_layernorm=False attention_type='self' "
    "set_parallel_mode=False fuse_qkv_params=False zero_centered_gamma=False qkv_weight_interleaved=True "
    f"rotary_pos_interleaved=False {_UB} bias=True normalization='LayerNorm' {_DEVICE} qkv_format='sbhd' name=None "
    "qk_norm_type=None qk_norm_eps=1e-6 qk_norm_before_rope=False seq_length=None micro_batch_size=None softmax_type='vanilla'",
    "TransformerLayer": "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups=None layernorm_epsilon=1e-5 "
    "hidden_dropout=0.1 attention_dropout=0.1 init_method=None output_layer_init_method=None layer_number=None "
    f"kv_channels=None self_attn_mask_type='causal' window_size=None {_SCORES} enc_dec_attn_mask_type='no_mask' "
    "enc_dec_bottom_right_diagonal=None enc_dec_window_size=None tp_group=None tp_size=1 params_dtype=None "
    "get_rng_state_tracker=None fuse_wgrad_accumulation=False seq_length=None micro_batch_size=None "
    "sequence_parallel=False apply_residual_connection_post_layernorm=False output_layernorm=False "
    "parallel_attention_mlp=False layer_type='encoder' drop_path_rate=0.0 set_parallel_mode=False fuse_qkv_params=False "
    "rotary_pos_interleaved=False zero_centered_gamma=False qkv_weight_interleaved=True ub_tp_comm_overlap=False "
    "ub_overlap_ag=True ub_overlap_rs=True ub_overlap_rs_dgrad=False ub_bulk_dgrad=True ub_bulk_wgrad=True bias=True "
    f"activation='gelu' activation_params=None normalization='LayerNorm' {_DEVICE} attn_input_format='sbhd' name=None "
    "qk_norm_type=None qk_norm_eps=1e-6 qk_norm_before_rope=False softmax_type='vanilla'",
}


def _signature(text: str) -> inspect.Signature:
    parameters = []
    for part in text.split():
        name, _, default = part.partition("=")
        value = ast.literal_eval(default) if default else REQUIRED
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    return inspect.Signature(parameters)


SIGNATURES = {layer: _signature(text) for layer, text in _TEXTS.items()}
SIGNATURES["RMSNorm"] = SIGNATURES["LayerNorm"]

_OF_ONE_RANK = ("sequence_parallel", "tp_group", "tp_size", "parallel_mode", "set_parallel_mode")
_INIT = ("init_method", "output_layer_init_method")


def bound(layer: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a layer by name, for the layer of `octavo.nn`; unknown ones are left for it to refuse.

    Defaults: weights normal with σ 0.023, and the GPU as device on a machine that has one.
    """
    signature = SIGNATURES[layer]
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    call = signature.bind_partial(*args, **known)
    missing = [n for n, p in signature.parameters.items() if p.default is REQUIRED and n not in call.arguments]
    if missing:
        raise TypeError(f"{layer}() missing required arguments: {', '.join(map(repr, missing))}")
    call.apply_defaults()
    values = {**call.arguments, **{name: value for name, value in kwargs.items() if name not in known}}
    if _ranks(values) == 1:
        values = {name: value for name, value in values.items() if name not in _OF_ONE_RANK}
    if values.get("device") == "default":
        values["device"] = default_device()
    for name in _INIT:
        if name in values and values[name] is None:
            values[name] = normal
    return values


def _ranks(values: Mapping[str, Any]) -> int:
    group = values.get("tp_group")
    return dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else int(values.get("tp_size") or 1)


def normal(weight: torch.Tensor) -> None:
    """Transformer Engine's default `init_method`: normal values with mean 0 and σ 0.023, in place."""
    nn.init.normal_(weight, mean=0.0, std=0.023)


def refuse_fp8(**results: bool) -> None:
    """Raise an InputError for a result or a gradient in FP8."""
    for name, wanted in results.items():
        if wanted:
            raise InputError(f"{name}=True is not supported: results and gradients are in the compute dtype. Leave it out.")
