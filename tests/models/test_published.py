"""Published folders: weights as `from_pretrained` loads them, exports as `save_pretrained` writes them, for many families."""

import copy
import json

import pytest
import torch
from expectations import refused, same_bits
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BertForMaskedLM, LlamaForCausalLM, LlamaModel

import octavo
from building import built_model
from octavo.build import transform
from octavo.models import weight_files, weight_loader
from octavo.models.sources import load_config

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = COMMON | {"intermediate_size": 48}
GROUPED = WIDE | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = GROUPED | {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": None},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "phi": WIDE,
    "phi3": GROUPED | {"pad_token_id": 0},
    "stablelm": GROUPED,
    "granite": GROUPED,
    "olmo2": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 12, "sliding_window": None},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "granitemoe": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": WIDE
    | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "moe_intermediate_size": 16,
    },
    "ernie4_5_moe": GROUPED  # a router in float32 in every version of transformers; DeepSeek-V3's from 5.24 on
    | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    },
    "gpt_neox": WIDE,
    "gpt_neo": COMMON | {"intermediate_size": 48, "attention_types": [[["global", "local"], 1]]},
    "gpt2": COMMON,
    "gptj": COMMON | {"rotary_dim": 4},
    "gpt_bigcode": COMMON,
    "bloom": COMMON,
    "opt": COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "bert": WIDE | {"is_decoder": True},
    "roberta": WIDE | {"is_decoder": True},
    "mamba": COMMON | {"state_size": 4},
}  # fmt: skip
"""By `model_type` the keys of a small config."""
TOKENS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(3))


def fresh(kind, seed=0, **changes):
    """A causal language model in which every parameter is random."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FAMILIES[kind] | changes))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model.eval()


def build(config, folder, dtype=torch.float32, **options):
    make = {"dtype": dtype, "params_dtype": dtype, "device": "cpu", "seed": 0}
    return built_model(config, load_from=folder, **make | options).eval()


def check_loads_as_transformers(folder, dtype=torch.float32):
    """The bits of `from_pretrained`; in float32 also its logits, with Octavo's decoder where there is one."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = build(theirs.config, folder, dtype, blocks="own")
    same_bits(dict(model.state_dict()), dict(theirs.state_dict()))
    if dtype != torch.float32:
        return
    with octavo.delayed_init():
        empty = type(theirs)(theirs.config)
    for made in (build(theirs.config, folder), transform(empty, dtype=torch.float32, load_from=folder).eval()):
        logits = made(TOKENS)
        torch.testing.assert_close(getattr(logits, "logits", logits), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_published_folder_is_loaded_as_transformers_does(tmp_path, kind):
    fresh(kind).save_pretrained(tmp_path, max_shard_size=30_000)  # under published names, in shards
    check_loads_as_transformers(tmp_path)
    check_loads_as_transformers(tmp_path, torch.bfloat16)


@pytest.mark.parametrize(("kind", "shard_bytes"), [*((kind, 20_000) for kind in FAMILIES), ("llama", None), ("mixtral", None)])
def test_an_export_has_the_published_names_and_bits(tmp_path, monkeypatch, kind, shard_bytes):
    if shard_bytes:
        monkeypatch.setattr(weight_files, "_SHARD_BYTES", shard_bytes)
    source = fresh(kind, seed=1)
    source.save_pretrained(tmp_path / "theirs")
    octavo.export(transform(copy.deepcopy(source), dtype=torch.float32), tmp_path / "ours")
    written = {name: tensor for file in (tmp_path / "ours").glob("*.safetensors") for name, tensor in load_file(file).items()}
    same_bits(written, load_file(tmp_path / "theirs" / "model.safetensors"))
    read, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(read(TOKENS).logits, source(TOKENS).logits)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [type(source).__name__]


def test_buffers_that_stay_in_float32_do_not_widen_an_export(tmp_path):
    source = fresh("deepseek_v3")
    source.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    source.save_pretrained(tmp_path / "in")
    model = build(source.config, tmp_path / "in", torch.bfloat16)
    octavo.export(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    same_bits(dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind", ["deepseek_v3", "ernie4_5_moe"])
def test_a_router_in_float32_stays_so_and_computes_as_in_transformers(tmp_path, kind):
    source = fresh(kind)
    source.save_pretrained(tmp_path / "in")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    wide = {name for name, parameter in theirs.named_parameters() if parameter.dtype == torch.float32}
    assert kind == "deepseek_v3" or "model.layers.1.mlp.gate.weight" in wide
    made = (
        transform(copy.deepcopy(theirs)),
        transform(copy.deepcopy(source), params_dtype=torch.bfloat16),
        transform(copy.deepcopy(source), params_dtype=torch.bfloat16, load_from=tmp_path / "in"),
        build(theirs.config, tmp_path / "in", torch.bfloat16),
    )
    for number, model in enumerate(made):
        assert {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32} == wide
        assert torch.equal(model.eval()(TOKENS).logits, theirs(TOKENS).logits)  # without autocast
        octavo.export(model, tmp_path / f"out{number}")
        assert json.loads((tmp_path / f"out{number}" / "config.json").read_text())["dtype"] == "bfloat16"
        same_bits(dict(AutoModelForCausalLM.from_pretrained(tmp_path / f"out{number}").state_dict()), dict(model.state_dict()))
    whole = transform(copy.deepcopy(theirs), params_dtype=torch.float32)
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}


def test_a_router_in_float32_trains_beside_bf16(tmp_path):
    """Parameters after a step are those of transformers' model; the router's have values between those of bf16."""
    source = fresh("ernie4_5_moe").bfloat16()
    source.model.layers[1].mlp.gate.float()
    model = transform(copy.deepcopy(source)).train()
    for one in (source.train(), model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-5)
        one(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    same_bits(dict(model.state_dict()), dict(source.state_dict()))
    router = model.model.layers[1].mlp.gate.weight
    assert (router != router.bfloat16().float()).any()


@pytest.fixture
def edited(tmp_path):
    """Save a small model with its tensors changed by a function; returns its config and the folder."""

    def make(change, kind="llama", **changes):
        model = fresh(kind, **changes)
        model.save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        save_file(change(tensors), file, metadata={"format": "pt"})
        return model.config, tmp_path

    return make


def renamed(change):
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


RENAMED = {
    "bert": lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
    "gpt2": lambda name: name.removeprefix("transformer."),
    "bloom": lambda name: name.removeprefix("transformer."),
    "opt": lambda name: name.removeprefix("model."),
    "llama": lambda name: name.removeprefix("model."),
    "mixtral": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_names_of_earlier_versions_and_of_the_base_model_are_found(edited, kind):
    _, folder = edited(renamed(RENAMED[kind]), kind)
    check_loads_as_transformers(folder)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_are_joined_in_the_files_are_loaded(tmp_path, kind):
    fresh(kind).save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    check_loads_as_transformers(tmp_path)


def test_a_missing_expert_is_refused(edited):
    config, folder = edited(
        lambda tensors: {n: t for n, t in tensors.items() if ".1.block_sparse_moe.experts.5.w3" not in n}, "mixtral"
    )
    refused(("layers.1.block_sparse_moe.experts.5.w3.weight missing (1)", "12 experts", "gate_up_proj"), build, config, folder)
    config, folder = edited(
        lambda tensors: {n: t for n, t in tensors.items() if ".1.block_sparse_moe.experts.5." not in n}, "mixtral"
    )
    refused(("experts.5.w1.weight, ", "experts.5.w3.weight missing (2)", "12 experts"), build, config, folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: {f"experts.{i}.w3": None for i in range(12)},
            ("experts.0.w3.weight, ", "experts.9.w3.weight and 2 more missing (12)"),
        ),
        (lambda w: {"experts.12.w1": w["experts.0.w1"].clone()}, ("experts.12.w1.weight surplus (1)", "12 experts")),
        (lambda w: {"experts.3.w2": w["experts.3.w2"].t().contiguous()}, ("experts.3.w2.weight (", "the other experts is (")),
        (lambda w: {"experts.3.w1": w["experts.3.w1"][:-1]}, ("experts.3.w1.weight (", "the other experts is (")),
    ],
)
def test_experts_without_a_matrix_surplus_ones_and_other_shapes_are_named(edited, change, words):
    prefix = "model.layers.1.block_sparse_moe."

    def edit(tensors):
        own = {n.removeprefix(prefix).removesuffix(".weight"): t for n, t in tensors.items() if n.startswith(prefix)}
        changed = tensors | {f"{prefix}{name}.weight": tensor for name, tensor in change(own).items()}
        return {name: tensor for name, tensor in changed.items() if tensor is not None}

    config, folder = edited(edit, "mixtral")
    refused(words, build, config, folder)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight", "both"])
@pytest.mark.parametrize("blocks", ["auto", "own"])
def test_tied_weights_are_there_under_either_name_or_both(edited, stored, blocks):
    names = {"model.embed_tokens.weight", "lm_head.weight"}

    def change(tensors):
        embedding = tensors.pop("model.embed_tokens.weight")
        return tensors | {name: embedding.clone() for name in (names if stored == "both" else {stored})}

    config, folder = edited(change, tie_word_embeddings=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = build(config, folder, blocks=blocks)
    logits = model(TOKENS)
    torch.testing.assert_close(getattr(logits, "logits", logits), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", ["auto", "own"])
def test_tied_weights_that_differ_are_refused(edited, blocks):
    def change(tensors):
        other = tensors["model.embed_tokens.weight"].clone()
        other[-1, -1] += 1
        return tensors | {"lm_head.weight": other}

    config, folder = edited(change, tie_word_embeddings=True)
    refused(("lm_head.weight", "differ", "tie_word_embeddings = false"), build, config, folder, blocks=blocks)
    config.tie_word_embeddings = False
    model = build(config, folder, blocks="own")
    assert torch.equal(model.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


def test_a_head_that_is_not_stored_is_refused_unless_it_is_tied(edited):
    def change(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}

    config, folder = edited(change)
    refused(("no weight 'lm_head.weight'", "set tie_word_embeddings = true"), build, config, folder)
    config, folder = edited(change, tie_word_embeddings=True)
    assert torch.equal(build(config, folder).head.weight, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (32,)),  # of another config
        ("model.layers.2.mlp.up_proj.weight", (48, 32)),  # a further layer
        ("model.layers.1.self_attn.q_norm.weight", (8,)),
        ("model.extra_weight", (3,)),
    ],
)
def test_tensors_that_the_model_would_lose_are_refused(edited, name, shape):
    config, folder = edited(lambda tensors: tensors | {name: torch.ones(shape)})
    for blocks in ("auto", "own"):
        refused((name, "not part of the model"), build, config, folder, blocks=blocks)


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("llama", "score.weight", (1, 32)),
        ("llama", "v_head.summary.weight", (1, 32)),
        ("bert", "bert.pooler.dense.weight", (32, 32)),
        ("gpt_neo", "transformer.h.0.attn.attention.masked_bias", ()),
    ],
)
def test_heads_of_other_tasks_are_named_and_left_out(edited, capsys, kind, name, shape):
    weight_loader._warn_once.cache_clear()
    _, folder = edited(lambda tensors: tensors | {name: torch.ones(shape)}, kind)
    check_loads_as_transformers(folder)
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("octavo: ")]
    assert len(err) == 1
    assert name in err[0]
    assert "not loaded" in err[0]


@pytest.mark.parametrize(
    ("kind", "name", "tensor"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
        ("gpt2", "transformer.h.0.attn.bias", torch.ones(1, 1, 64, 64)),
        ("gpt2", "h.1.attn.bias", torch.ones(1, 1, 64, 64)),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias", torch.tensor(-1e9)),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias", torch.ones(1, 1, 64, 64, dtype=torch.bool)),
        ("gpt_neox", "gpt_neox.layers.1.attention.rotary_emb.inv_freq", torch.ones(1)),
        ("gpt_neo", "transformer.h.0.attn.attention.bias", torch.ones(1, 1, 64, 64, dtype=torch.bool)),
        ("bert", "bert.embeddings.position_ids", torch.arange(64)[None]),
    ],
)
def test_buffers_of_earlier_versions_are_left_out(edited, capsys, kind, name, tensor):
    weight_loader._warn_once.cache_clear()
    _, folder = edited(lambda tensors: tensors | {name: tensor}, kind)
    check_loads_as_transformers(folder)
    assert "octavo:" not in capsys.readouterr().err


def test_two_tensors_for_one_weight_are_refused(edited):
    config, folder = edited(lambda tensors: tensors | {"embed_tokens.weight": tensors["model.embed_tokens.weight"] + 1})
    refused(("embed_tokens.weight", "both the weight"), build, config, folder)


def test_a_base_model_is_filled_from_a_folder_with_a_head(edited, capsys):
    weight_loader._warn_once.cache_clear()
    config, folder = edited(dict)
    with octavo.delayed_init():
        base = LlamaModel(config)
    same_bits(
        dict(transform(base, dtype=torch.float32, load_from=folder).state_dict()),
        dict(LlamaModel.from_pretrained(folder).state_dict()),
    )
    assert "lm_head.weight" in capsys.readouterr().err


def test_a_masked_language_model_is_filled_and_exported(tmp_path):
    model = BertForMaskedLM(AutoConfig.for_model("bert", **FAMILIES["bert"] | {"is_decoder": False})).eval()
    model.save_pretrained(tmp_path / "in")
    with octavo.delayed_init():
        empty = BertForMaskedLM(model.config)
    filled = transform(empty, dtype=torch.float32, load_from=tmp_path / "in").eval()
    same_bits(dict(filled.state_dict()), dict(model.state_dict()))
    octavo.export(filled, tmp_path / "out")
    assert torch.equal(BertForMaskedLM.from_pretrained(tmp_path / "out")(TOKENS).logits, model(TOKENS).logits)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


CODED = {
    "F8_E4M3": lambda weight: weight.to(torch.float8_e4m3fn),
    "F8_E5M2": lambda weight: weight.to(torch.float8_e5m2),
    "integer": lambda weight: (weight * 100).to(torch.int8),
    "complex": lambda weight: weight.to(torch.complex64),
}


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("blocks", ["auto", "own"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_weights_of_another_kind_are_refused(edited, kind, blocks, name):
    config, folder = edited(lambda tensors: tensors | {name: CODED[kind](tensors[name])})
    refused((name, f"of kind {kind}"), build, config, folder, blocks=blocks)


def test_an_expert_in_fp8_is_refused(edited):
    name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    config, folder = edited(lambda tensors: tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, "mixtral")
    refused(("mlp.experts.gate_up_proj", "of kind F8_E4M3", "Dequantise"), build, config, folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floating_dtypes_are_converted_as_transformers_does(edited, dtype):
    _, folder = edited(lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    check_loads_as_transformers(folder)
    check_loads_as_transformers(folder, torch.bfloat16)


@pytest.mark.parametrize("blocks", ["auto", "own"])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_value_beyond_the_range_of_the_dtype_is_refused(edited, name, blocks):
    def change(tensors):
        tensors[name].view(-1)[-1] = -70000.0
        return tensors

    config, folder = edited(change)
    narrow = {"dtype": torch.float16, "blocks": blocks}
    refused(("7e+04", "fp16", "6.55e+04", "params_dtype"), build, config, folder, **narrow)
    build(config, folder, torch.bfloat16, blocks=blocks)


def test_infinite_values_are_kept(edited):
    def change(tensors):
        tensors["model.norm.weight"][:2] = torch.tensor([torch.inf, torch.nan])
        return tensors

    config, folder = edited(change)
    weight = build(config, folder, torch.float16, blocks="own").model.norm.weight
    assert weight[0].isinf()
    assert weight[1].isnan()


@pytest.mark.parametrize(
    "beside",
    ["weight_scale", "weight_scale_inv", "weight.absmax", "weight.quant_state.bitsandbytes__nf4", "qzeros", "SCB", "scales"],
)
def test_scales_beside_a_weight_are_refused(edited, beside):
    name = f"model.layers.0.mlp.up_proj.{beside}"
    config, folder = edited(lambda tensors: tensors | {name: torch.ones(1)})
    for blocks in ("auto", "own"):
        refused((name, "quantised", "Dequantise"), build, config, folder, blocks=blocks)


def test_a_model_that_is_quantised_in_memory_is_refused():
    model = fresh("llama")
    model.hf_quantizer = object()  # as from_pretrained leaves it
    refused(("LlamaForCausalLM", "quantised", "Dequantise"), transform, model)


def test_a_refused_folder_leaves_the_model_as_it_was(edited):
    _, folder = edited(lambda tensors: tensors | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}, "qwen2")
    model = fresh("qwen2", seed=5)
    kept = copy.deepcopy(model)
    refused("quantised", transform, model, load_from=folder)
    assert [type(m) for m in model.modules()] == [type(m) for m in kept.modules()]
    same_bits(dict(model.state_dict()), dict(kept.state_dict()))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_config_that_says_quantised_is_refused_for_weights_alone(edited, key):
    _, folder = edited(dict)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: {"quant_method": "gptq", "bits": 4}}))
    config = load_config(str(folder))
    refused(("'gptq'", "bits 4", "Dequantise"), build, config, folder)
    model = built_model(config, dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=1)  # its shapes, untrained
    octavo.export(model, folder / "out")
    assert "quant" not in (folder / "out" / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(folder / "out")


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_file_that_says_quantised_is_refused(edited, name):
    config, folder = edited(dict)
    (folder / name).write_text("{}")
    refused((name, "quantised"), build, config, folder)


def test_a_config_of_another_class_is_not_kept_in_an_export(tmp_path):
    config = AutoConfig.for_model("llama", **FAMILIES["llama"], architectures=["LlamaForSequenceClassification"])
    octavo.export(transform(LlamaForCausalLM(config)), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_config_with_other_heads_than_the_folders_is_refused(edited):
    config, folder = edited(dict, num_key_value_heads=4)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 8, 4  # the same shapes
    refused(("num_attention_heads = 4", "8"), build, config, folder)
    for model in (LlamaForCausalLM(config), LlamaModel(config)):
        refused(("num_attention_heads = 4", "8"), transform, model, load_from=folder)


def test_other_differences_between_configs_are_named(edited, capsys):
    weight_loader._warn_once.cache_clear()
    config, folder = edited(dict)
    transform(LlamaForCausalLM(config), load_from=folder)
    assert "octavo:" not in capsys.readouterr().err
    config.rms_norm_eps = 0.5
    config.attention_dropout = 0.5
    transform(LlamaForCausalLM(config), load_from=folder)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("octavo:")]
    assert len(said) == 1
    assert "rms_norm_eps = 1e-06 (the model's config: 0.5)" in said[0]
    assert "dropout" not in said[0]


def test_tensors_of_a_module_without_config_are_held_against_it_as_well(tmp_path, capsys):
    weight_loader._warn_once.cache_clear()

    def stack():
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))

    model = stack()
    save_file(model.state_dict() | {"head.weight": torch.ones(2, 16)}, tmp_path / "model.safetensors")
    same_bits(dict(transform(stack(), dtype=torch.float32, load_from=tmp_path).state_dict()), dict(model.state_dict()))
    assert "head.weight: not part of Sequential" in capsys.readouterr().err
    for name in ("2.weight", "1.scale"):
        save_file(model.state_dict() | {name: torch.ones(16, 16)}, tmp_path / "model.safetensors")
        refused((name, "not part of the model"), transform, stack(), load_from=tmp_path)
