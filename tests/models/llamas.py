"""Small models of the decoder's families with weights that matter, and how their gradients are compared with Octavo's."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.models.convert import conversion

VOCABULARY = 97

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _partial(fraction, **keys):
    """`rope_parameters` by which this part of each head rotates."""
    return {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": fraction} | keys


SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "pad-token": {"pad_token_id": 5},
    "pad-token-tied": {"pad_token_id": 96, "tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "one-group": {"num_key_value_heads": 1},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "all-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    "wide-heads": {"head_dim": 20},
    "narrow-heads": {"head_dim": 6, "num_attention_heads": 6, "num_key_value_heads": 3},
    "intermediate-176": {"intermediate_size": 176},
    "intermediate-odd": {"intermediate_size": 45},
    "mistral": {"model_type": "mistral"},
    "llama-that-ignores-a-window": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral-that-ignores-its-list": {
        "model_type": "mistral",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 8},
    "mistral-window-of-1": {"model_type": "mistral", "sliding_window": 1},
    "mistral-tied": {"model_type": "mistral", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "mistral-llama3-rope": {"model_type": "mistral", "rope_parameters": LLAMA3_ROPE},
    "mistral-narrow-heads": {"model_type": "mistral", "head_dim": 6, "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-biases": {"model_type": "qwen3", "attention_bias": True, "head_dim": 10, "rope_parameters": LLAMA3_ROPE},
    "phi3": {"model_type": "phi3"},
    "phi3-partial": {"model_type": "phi3", "rope_parameters": _partial(0.75), "num_key_value_heads": 1, "pad_token_id": 5},
    "qwen2-mixed-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "phi3-window": {"model_type": "phi3", "sliding_window": 5},
    "neox": {"model_type": "gpt_neox"},
    "neox-serial": {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False},
    "neox-tanh-tied": {"model_type": "gpt_neox", "hidden_act": "gelu_fast", "tie_word_embeddings": True, "pad_token_id": 5},
    "neox-whole-heads": {"model_type": "gpt_neox", "rope_parameters": _partial(1.0), "hidden_act": "relu2"},
    "neox-no-rotation": {"model_type": "gpt_neox", "rope_parameters": _partial(0.0)},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 48},
    "mixtral-balanced": {
        "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8,
        "output_router_logits": True, "router_aux_loss_coef": 0.5, "tie_word_embeddings": True,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "output_router_logits": True, "router_aux_loss_coef": 0.1,
    },
    "qwen3-moe-mixed": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [1], "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5,
    },
    "neox-linear-rope": {"model_type": "gpt_neox", "rope_parameters": _partial(0.5, rope_type="linear", factor=4.0)},
}  # fmt: skip
"""By name what a config has in place of the keys of `llama_config`."""
DEFAULTS = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16},
    "phi3": {"pad_token_id": None},
}
"""Keys of a family whose own default is not that of a small Llama."""


def llama_config(**changes):
    """A Llama of two layers, 97 words, 4 query heads on 2 key-value heads, and a feed-forward size of 44.

    With `model_type` another family of that size, Mistral without a window unless `sliding_window` says so; one without grouped
    queries ignores their number.
    """
    values = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    values |= changes
    kind = values.pop("model_type")
    return AutoConfig.for_model(kind, **DEFAULTS.get(kind, {}) | values)


def llama(seed=0, dtype=torch.float32, **changes):
    """A Hugging Face model of `llama_config` with SDPA attention; every parameter, biases and norms included, is random."""
    config = llama_config(**changes)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw) * 0.2
            value = noise + 1 if name.endswith("norm.weight") else noise
            parameter.data = value.to(dtype)  # not `model.to`, which would round the rotary buffers as well
    model.tie_weights()
    return model.train()


def tokens(batch, length, seed=1):
    """Random token ids [batch, length]."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def hugging_face(tensors, spec):
    """The decoder's tensors under Hugging Face's names, joined matrices taken apart."""
    way = conversion(spec)
    return {theirs: part for name, tensor in tensors.items() for theirs, part in way.split(name, tensor).items()}


def gradients(decoder):
    """Gradients of Octavo's decoder by the names of Hugging Face."""
    found = {name: p.grad for name, p in decoder.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"no gradient for {missing}"
    return hugging_face(found, decoder.spec)


def assert_same_gradients(decoder, reference, *, relative=1e-4):
    """Every gradient of the decoder is that of the Hugging Face model, relative to the largest entry of each tensor.

    Gradients that are zero but for rounding (of queries and keys where there is one key) are held against the largest of all.
    """
    ours = gradients(decoder)
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    assert ours.keys() == theirs.keys()
    floor = 1e-6 * max(grad.abs().max() for grad in theirs.values())
    for name, wanted in theirs.items():
        error = (ours[name] - wanted).abs().max()
        assert error <= relative * wanted.abs().max() + floor, f"{name}: off by {error}, largest {wanted.abs().max()}"
