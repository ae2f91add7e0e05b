"""Model families and built-in shapes: data, not code.

A family says how a Hugging Face config and its weights map onto Octavo's decoder. A model of another family keeps its own code
and gets FP8 linears in place. A built-in shape is a Hugging Face config by name, for training from random weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """A decoder family, by the names that its Hugging Face config and weights use."""

    normalization: str
    activation: str
    names: dict[str, str]
    """Octavo's parameter of a model → Hugging Face's, outside of blocks."""
    block_names: dict[str, str | tuple[str, ...]]
    """Octavo's parameter of a block → Hugging Face's; several are joined by the rule of `joined`."""
    joined: dict[str, str]
    """Octavo's parameter of a block → "qkv" (by key-value head) or "gate_up" (blocks of rows)."""
    block_prefix: str
    requires: dict[str, tuple[Any, ...]]
    """Config key → the values that the decoder computes; with others the model keeps its own code."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Rotary scalings that do not depend on the sequence at hand."""


_LLAMA = Family(
    normalization="RMSNorm",
    activation="swiglu",
    names={
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    block_prefix="model.layers",
    block_names={
        "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.layernorm_qkv.weight": (
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
        ),
        "self_attention.layernorm_qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "self_attention.proj.weight": "self_attn.o_proj.weight",
        "self_attention.proj.bias": "self_attn.o_proj.bias",
        "layernorm_mlp.layer_norm_weight": "post_attention_layernorm.weight",
        "layernorm_mlp.fc1_weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "layernorm_mlp.fc1_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
        "layernorm_mlp.fc2_bias": "mlp.down_proj.bias",
    },
    joined={
        "self_attention.layernorm_qkv.weight": "qkv",
        "self_attention.layernorm_qkv.bias": "qkv",
        "layernorm_mlp.fc1_weight": "gate_up",
        "layernorm_mlp.fc1_bias": "gate_up",
    },
    requires={"hidden_act": ("silu",)},
)

FAMILIES: dict[str, Family] = {"llama": _LLAMA}
"""By Hugging Face's `model_type`."""

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    # Llama-3.2-1B
    "llama-1b": _LLAMA3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 32.0},
    },
    # Llama-3.1-8B
    "llama-8b": _LLAMA3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "rope_parameters": _LLAMA3_ROPE,
    },
    # Llama-3.1-70B
    "llama-70b": _LLAMA3
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "rope_parameters": _LLAMA3_ROPE,
    },
    # Llama-2-7B
    "llama2-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
"""Hugging Face configs by name; `model.config` of a run file overrides single keys."""
