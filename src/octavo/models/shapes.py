"""Built-in shapes: the Hugging Face configs of released models by name, so that a run from random weights needs no download.

The benchmark's workloads are built from them too. `model.config` of a run file overrides single keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.errors import InputError, nearest, unknown
from octavo.storage import names_a_path, path_of, taken_for_a_path

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _sizes(hidden_size: int, intermediate_size: int, layers: int, heads: int, key_value_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


_LLAMA3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_parameters": _LLAMA3_ROPE,
}
_MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_TIED = {"tie_word_embeddings": True}


def _neox(hidden_size: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


SHAPES: dict[str, dict[str, Any]] = {
    # hidden size, intermediate size, layers, heads, key-value heads
    "llama-tiny": _sizes(256, 704, 4, 4, 2) | _TIED | {"vocab_size": 4096, "max_position_embeddings": 2048},
    # Llama-3.2-1B
    "llama-1b": _sizes(2048, 8192, 16, 32, 8) | _LLAMA3 | _TIED | {"rope_parameters": _LLAMA3_ROPE | {"factor": 32.0}},
    # Llama-3.1-8B
    "llama-8b": _sizes(4096, 14336, 32, 32, 8) | _LLAMA3,
    # Llama-3.1-70B
    "llama-70b": _sizes(8192, 28672, 80, 64, 8) | _LLAMA3,
    # Llama-2-7B
    "llama2-7b": _sizes(4096, 11008, 32, 32, 32) | {"vocab_size": 32000, "max_position_embeddings": 4096},
    # Mistral-7B-v0.1
    "mistral-7b": _sizes(4096, 14336, 32, 32, 8)
    | {"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096},
    # Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1
    "mixtral-8x7b": _sizes(4096, 14336, 32, 32, 8) | _MIXTRAL | {"vocab_size": 32000, "max_position_embeddings": 32768},
    "mixtral-8x22b": _sizes(6144, 16384, 56, 48, 8) | _MIXTRAL | {"vocab_size": 32768, "max_position_embeddings": 65536},
    # Qwen3-30B-A3B; intermediate_size is of dense MLPs, which it has none of
    "qwen3-30b-a3b": _sizes(2048, 6144, 48, 32, 4) | _QWEN3_MOE,
    # hidden size, layers, heads, words
    "pythia-160m": _neox(768, 12, 12, 50304),
    "pythia-410m": _neox(1024, 24, 16, 50304),
    "gpt-neox-20b": _neox(6144, 44, 64, 50432) | {"hidden_act": "gelu_fast"},
}
"""Hugging Face configs by name."""


def check_source(source: str) -> None:
    """Check, without transformers, that `model.source` is a built-in shape, a folder with a config, or looks like an id.

    Raises:
        InputError: it is none of them.
    """
    if source in SHAPES:
        return
    with path_of("model.source", source):
        folder = Path(source).expanduser()
        is_folder, is_path = folder.is_dir(), names_a_path(source)
    if is_folder:
        if not (folder / "config.json").is_file():
            raise InputError(f"model.source = {source!r} is a folder without config.json: give a Hugging Face model folder.")
    elif is_path:
        raise _no_folder(source)
    elif "/" not in source:
        raise unknown("model", source, SHAPES, key="model.source (a folder or id of Hugging Face works too)")


def _no_folder(source: str) -> InputError:
    folder = Path(source).expanduser()
    fault = "is a file" if folder.is_file() else f"does not exist{taken_for_a_path(source)}"
    siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    near = nearest(folder.name, siblings)
    guess = folder.parent if folder.is_file() else folder.parent / near if near else None
    hint = f" Did you mean {str(guess)!r}?" if guess else ""
    return InputError(
        f"model.source = {source!r} {fault}.{hint} Give a model's folder, or a built-in shape: {', '.join(SHAPES)}."
    )
