"""Operations a token, against numbers worked out by hand and against the parameters of real models."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from octavo.errors import InputError
from octavo.hardware import lookup
from octavo.models.families import spec_of
from octavo.models.sources import load_config
from octavo.plan.flops import MatmulParameters, matmul_parameters, mean_keys, mfu, model_flops

LLAMA_1B, LLAMA_8B = (spec_of(load_config(name)) for name in ("llama-1b", "llama-8b"))
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 128}
MODELS = [
    LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=32),
    MistralConfig(**SMALL, num_key_value_heads=2, head_dim=16),
    MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32),
    Phi3Config(**SMALL, num_key_value_heads=2, pad_token_id=None),
    GPTNeoXConfig(**SMALL),
    GPTNeoConfig(hidden_size=64, num_layers=4, num_heads=4, vocab_size=128, attention_types=[[["global", "local"], 2]]),
]


def test_llama_1b_by_hand():
    counted = matmul_parameters(LLAMA_1B)
    # 16 × (q and o: 2 × 2048², k and v: 2 × 2048 × 512, gate, up and down: 3 × 2048 × 8192), and 128256 × 2048.
    assert counted == MatmulParameters(layers=973_078_528, router=0, head=262_668_288, inactive=0)
    norms = 33 * 2048
    assert counted.stored + norms == 1_235_814_400  # what the released model has, embedding and head being one
    flops = model_flops(LLAMA_1B, 4096)
    assert flops.attention == 6 * 16 * 2048 * 4096
    assert flops.total == 6 * 1_235_746_816 + 805_306_368


def test_llama_8b_by_hand():
    counted = matmul_parameters(LLAMA_8B)
    assert counted == MatmulParameters(layers=6_979_321_856, router=0, head=525_336_576, inactive=0)
    norms = 65 * 4096
    assert counted.stored + counted.head + norms == 8_030_261_248  # the embedding is a matrix of its own here
    # 11,779 tokens/s at 16k are 682 TFLOP/s; 2,754 at 128k are 408.
    assert round(11_779 * model_flops(LLAMA_8B, 16_384).total / 1e12) == 682
    assert round(2_754 * model_flops(LLAMA_8B, 131_072).total / 1e12) == 408


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model_type)
def test_counts_equal_the_matrices_of_the_real_model(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = {"wte", "wpe", "embed_tokens", "embed_in"}
    inside = {name: p for name, p in model.named_parameters() if p.ndim > 1 and not embeddings & set(name.split("."))}
    head = model.get_output_embeddings().weight
    routers = sum(p.numel() for name, p in inside.items() if name.endswith("mlp.gate.weight"))
    matrices = sum(p.numel() for p in inside.values() if p is not head)
    counted = matmul_parameters(spec_of(config))
    assert counted.head == head.numel()
    assert counted.router == routers
    assert counted.layers + counted.inactive == matrices - routers


def test_experts_that_are_not_visited_cost_nothing():
    spec = spec_of(MixtralConfig())
    counted = matmul_parameters(spec)
    attention = 4096 * 128 * (2 * 32 + 2 * 8)
    expert = 3 * 4096 * 14336
    assert counted.layers == 32 * (attention + 2 * expert)
    assert counted.inactive == 32 * 6 * expert
    assert counted.router == 32 * 4096 * 8
    assert model_flops(spec, 2048).total == 6 * (counted.stored - counted.inactive) + 6 * 32 * 4096 * 2048


def test_keys_seen_equal_a_count_over_the_mask():
    length = 64
    query, key = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    for window in (1, 7, 32, 64, 200):
        seen = ((key <= query) & (key > query - window)).sum().item() / length
        # The formula counts the diagonal half: it is T/2 rather than (T+1)/2, as everyone's is.
        assert abs(mean_keys(length, window) - seen) <= 0.5
    assert mean_keys(length) == 32
    assert mean_keys(length, 64) == mean_keys(length, 1000) == 32


def test_windows_of_each_layer():
    assert spec_of(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4096)).windows == (4096,) * 3
    assert LLAMA_1B.windows == (None,) * 16
    assert spec_of(MODELS[-1]).windows == (None, 256, None, 256)
    mixed = Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention", *["full_attention"] * 2]
    )
    assert spec_of(mixed).windows == (8, None, None)


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"unknown model family 'lama'\. Did you mean 'llama'\?"):
        spec_of(SimpleNamespace(model_type="lama"))


def test_windows_of_layers_that_mix_are_counted_each():
    window = spec_of(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=32))
    full = spec_of(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None))
    assert model_flops(full, 128).attention == 6 * 3 * 64 * 128
    assert model_flops(window, 128).attention == 12 * 3 * 64 * (32 - 32 * 32 / 256)


def test_mfu_is_ideal_time_over_measured_time():
    h200, a100 = lookup("H200"), lookup("A100 40GB")
    assert mfu({"bf16": 494.5e12}, h200) == 0.5
    assert mfu({"bf16": 494.5e12, "fp8": 494.75e12}, h200) == 0.75
    assert mfu({"bf16": 156e12}, a100) == 0.5
    assert mfu({"fp8": 1e12}, a100) is None
    assert mfu({"bf16": 1e12}, None) is None
    flops = model_flops(LLAMA_1B, 4096)
    split = flops.by_precision(layers="fp8")
    assert sum(split.values()) == flops.total
    assert split == {"fp8": flops.layers, "bf16": flops.head + flops.attention}
    assert flops.by_precision() == {"bf16": flops.total}
    split = flops.by_precision(layers="fp8", head="fp8", head_forward="bf16")
    assert split["fp8"] == pytest.approx(flops.layers + flops.head * 2 / 3)
    assert sum(split.values()) == pytest.approx(flops.total)
    # A step in which every product runs at its own peak has utilisation 1.
    seconds = split["fp8"] / 1979e12 + split["bf16"] / 989e12
    assert mfu({precision: work / seconds for precision, work in split.items()}, h200) == pytest.approx(1.0)


def test_neither_torch_nor_transformers_is_needed():
    code = "import sys, octavo.plan.flops; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
