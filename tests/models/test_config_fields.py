"""Every field of a family's config that could change numbers: Hugging Face's numbers, or a refusal with field and value.

A model is transformed, and built from its saved folder as a run builds it, where no module of Hugging Face's is compared.
"""

import copy

import pytest
import torch
from expectations import refused
from llamas import LLAMA3_ROPE, assert_same_gradients, llama, llama_config, tokens

from building import built_model
from octavo.build import describe, transform
from octavo.models.decoder import Decoder
from octavo.models.sources import load_config


def rope(kind, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0} | keys}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
FIVE_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16}
"""Heads that do not divide the hidden size of 48."""
DECODERS = [
    ("llama", {"rms_norm_eps": 0.1}),
    ("llama", {"head_dim": 6, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"pretraining_tp": 2, "clip_qkv": 0.1, "logit_scale": 0.1, "attention_chunk_size": 4}),  # which Llama ignores
    ("llama", {"pad_token_id": -1}),
    ("llama", {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", rope("default", attention_factor=0.5, factor=3.0)),
    ("llama", YARN),
    ("llama", rope("yarn", factor=4.0) | {"original_max_position_embeddings": 32}),
    ("llama", rope("yarn", factor=None, original_max_position_embeddings=32, attention_factor=0.6)),
    (
        "llama",
        rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0, mscale=0.7,
            mscale_all_dim=1.3, truncate=False,
        ),
    ),
    ("llama", {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}),
    ("mistral", {"sliding_window": 4, "use_sliding_window": False, "attention_bias": True}),
    ("mistral", FIVE_HEADS | YARN),
    ("qwen2", {"attention_bias": False, "head_dim": 20}),
    ("qwen2", {"sliding_window": 4}),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen2", rope("default", mrope_section=[2, 2, 2])),
    ("qwen3", {"rms_norm_eps": 0.5, "qk_norm": False}),
    ("qwen3", FIVE_HEADS | {"rope_parameters": LLAMA3_ROPE}),
    ("phi3", {"embd_pdrop": 0.5, "attention_bias": True, "original_max_position_embeddings": 8}),  # which Phi-3 ignores
    ("phi3", {"partial_rotary_factor": 0.4, "head_dim": 20}),
    (
        "mixtral",  # which ignores the last two
        {
            "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.3, "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    ("mixtral", FIVE_HEADS | {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 4}),
    (
        "mixtral",
        {
            "num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "attention_bias": True}),
    (
        "qwen3_moe",
        {
            "num_experts": 5, "num_experts_per_tok": 4, "norm_topk_prob": True, "use_sliding_window": True,
            "sliding_window": 4, "moe_intermediate_size": 20, "output_router_logits": True, "router_jitter_noise": 0.5,
        },
    ),
    ("qwen3_moe", {"mlp_only_layers": [0, 1], "num_experts": 4, "sliding_window": 4}),
    ("gpt_neox", {"rotary_pct": 0.4, "rotary_emb_base": 50, "layer_norm_eps": 0.3}),
    ("gpt_neox", {"attention_bias": False, "use_parallel_residual": False, "num_key_value_heads": 2, "rms_norm_eps": 0.3}),
    ("gpt_neox", rope("yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5)),
    ("gpt_neox", {"classifier_dropout": 0.5, "sliding_window": 4, "hidden_act": "gelu_python"}),
]  # fmt: skip
OWN_CODE = [
    ("llama", {"hidden_act": "swish"}, "hidden_act = 'swish'"),
    ("llama", {"is_causal": False}, "is_causal = False"),
    ("mistral", {"is_causal": False, "sliding_window": 4}, "is_causal = False"),
    ("qwen3", {"is_causal": False}, "is_causal = False"),
    ("gpt_neox", {"is_causal": False}, "is_causal = False"),
    ("llama", rope("dynamic", factor=2.0) | {"max_position_embeddings": 8}, "rope_type = 'dynamic'"),
    ("llama", rope("proportional", factor=2.0, partial_rotary_factor=0.5), "rope_type = 'proportional'"),
    (
        "phi3",
        rope("longrope", short_factor=[1.5] * 6, long_factor=[3.0] * 6) | {"original_max_position_embeddings": 8},
        "rope_type = 'longrope'",
    ),
    ("gpt_neox", {"head_dim": 20}, "head_dim = 20"),
    ("gpt_neox", {"head_dim": 6}, "head_dim = 6"),
    ("gpt_neox", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
]
MASK = torch.ones(2, 13, dtype=torch.int64)
MASK[0, 9:] = 0


def assert_same_numbers(model, reference):
    """Logits, the loss, and all gradients, of whole and of padded sequences."""
    ids = tokens(2, 13)
    for mask in (None, MASK):
        labels = ids if mask is None else ids.where(mask.bool(), -100)
        real = slice(None) if mask is None else mask.bool()
        for m in (model, reference):
            m.zero_grad()
        found, wanted = (m(input_ids=ids, attention_mask=mask).logits[real] for m in (model, reference))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        found, wanted = (m(input_ids=ids, attention_mask=mask, labels=labels).loss for m in (model, reference))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        found.backward()
        wanted.backward()
        if isinstance(model, Decoder):
            assert_same_gradients(model, reference, relative=2e-4)
        else:
            for (name, one), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


def both_ways(reference, folder):
    """The model transformed, and built from its folder."""
    reference.save_pretrained(folder)
    yield transform(copy.deepcopy(reference), dtype=torch.float32)
    make = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "cpu", "seed": 0}
    yield built_model(load_config(str(folder)), **make, load_from=folder)


@pytest.mark.parametrize(("kind", "changes"), DECODERS, ids=str)
def test_the_decoder_reads_a_field_as_hugging_face_does(kind, changes, tmp_path):
    reference = llama(3, model_type=kind, **changes)
    for model in both_ways(reference, tmp_path):
        assert isinstance(model, Decoder)
        assert_same_numbers(model, reference)


@pytest.mark.parametrize(("kind", "changes", "reason"), OWN_CODE, ids=str)
def test_a_field_beyond_the_decoder_keeps_the_models_own_code(kind, changes, reason, tmp_path):
    reference = llama(3, model_type=kind, **changes)
    for model in both_ways(reference, tmp_path):
        assert describe(model).own_code.startswith(reason)
        assert_same_numbers(model, reference)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama", {"attention_dropout": None}, "attention_dropout = None: use 0.0"),
        ("phi3", {"resid_pdrop": 1.0}, "resid_pdrop = 1.0: a dropout rate"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads = 3: 4 attention heads"),
        ("llama", {"num_key_value_heads": 8}, "Use a divisor, such as 4."),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "5 experts per token of 4"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 0}, "0 experts per token of 4"),
        ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 1.5}, "router_jitter_noise = 1.5"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types[1] = 'sliding_attention' without a"),
        ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types[0] = 'chunked_attention'"),
    ],
    ids=str,
)
def test_a_field_that_no_code_can_honour_is_refused(kind, changes, words):
    refused(words, transform, llama(model_type=kind, **changes))


def test_no_layer_with_experts_by_a_step_of_0_is_refused_before_transformers_fails():
    config = llama_config(model_type="qwen3_moe", decoder_sparse_step=0)
    make = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "meta", "seed": 0}
    refused("decoder_sparse_step = 0", built_model, config, **make)


def test_one_rotation_for_each_kind_of_layer_is_refused_before_transformers_fails():
    kinds = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    layers = {"layer_types": list(kinds), "sliding_window": 4, "use_sliding_window": True}
    config = llama_config(model_type="qwen2", rope_parameters=kinds, **layers)
    make = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "meta", "seed": 0}
    refused(("rope_parameters of qwen2", "full_attention, sliding_attention"), built_model, config, **make)


@pytest.mark.parametrize(("kind", "pad"), [("llama", 97), ("llama", -98), ("phi3", 32000), ("gpt_neox", 32000)])
def test_a_pad_token_outside_the_vocabulary_is_refused_where_it_is_read(kind, pad, tmp_path):
    llama_config(model_type=kind, pad_token_id=pad).save_pretrained(tmp_path)
    if kind == "gpt_neox":
        assert load_config(str(tmp_path)).pad_token_id == pad
    else:
        refused((f"model.config.pad_token_id = {pad}", "the vocabulary has 97 tokens"), load_config, str(tmp_path))
        assert load_config(str(tmp_path), {"pad_token_id": 5}).pad_token_id == 5


def test_outputs_that_a_config_asks_for_are_returned():
    ids = tokens(2, 13)
    reference = llama(3, output_hidden_states=True)
    model = transform(copy.deepcopy(reference), dtype=torch.float32)
    assert isinstance(model, Decoder)
    found, wanted = (m(input_ids=ids).hidden_states for m in (model, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert model(input_ids=ids, output_hidden_states=False).hidden_states is None
    reference = llama(3)
    reference.config._attn_implementation = "eager"
    reference.config.output_attentions = True
    model = transform(copy.deepcopy(reference), dtype=torch.float32)
    assert describe(model).own_code.startswith("output_attentions = True")
    torch.testing.assert_close(model(input_ids=ids).attentions, reference(input_ids=ids).attentions)
