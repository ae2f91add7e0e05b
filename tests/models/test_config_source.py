"""`load_config`: folders, built-in shapes and overrides, and what is said of those that are wrong."""

import json

import pytest
import torch
from expectations import refused
from llamas import llama_config
from transformers import GPT2Config, GPTNeoConfig, LlamaForCausalLM, MixtralConfig, Qwen3MoeConfig

from building import built_model
from octavo.models.families import decoder_spec
from octavo.models.shapes import SHAPES
from octavo.models.sources import load_config

PUBLISHED = {
    "llama-1b": 1.2358,
    "llama-8b": 8.0303,
    "llama2-7b": 6.7384,
    "pythia-160m": 0.162322944,
    "pythia-410m": 0.405334016,
    "gpt-neox-20b": 20.55456768,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_built_in_shapes_have_the_published_number_of_parameters(name, billions):
    model = built_model(load_config(name), dtype=torch.bfloat16, params_dtype=torch.float32, device="meta", seed=0)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_built_in_shapes_have_octavos_decoder(name):
    assert decoder_spec(load_config(name))[0] is not None


def test_a_folder_gives_its_config(tmp_path):
    config = llama_config(head_dim=20, rope_parameters={"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0})
    config.save_pretrained(tmp_path)
    found = load_config(str(tmp_path)).to_dict()
    for key, value in config.to_dict().items():
        if key not in ("_name_or_path", "transformers_version"):
            assert found[key] == value, key


def test_rotary_keys_of_older_configs_are_read(tmp_path):
    """As Pythia's have them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 31}
    old = {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500, "use_parallel_residual": False, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(old))
    spec, _ = decoder_spec(load_config(str(tmp_path)))
    assert (spec.rotary_fraction, spec.rotary["rope_theta"], spec.parallel) == (0.5, 500, False)


def test_overrides_change_single_keys():
    config = load_config(
        "llama-tiny", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 101}
    )
    assert (config.hidden_size, config.num_attention_heads, config.vocab_size, config.head_dim) == (96, 6, 101, 16)
    assert config.num_hidden_layers == SHAPES["llama-tiny"]["num_hidden_layers"]
    LlamaForCausalLM(config)
    assert load_config("llama-tiny", {"head_dim": 32}).head_dim == 32
    assert load_config("llama-tiny", {"attention_dropout": 0.25}).attention_dropout == 0.25
    rope = {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0}
    assert load_config("llama-tiny", {"rope_parameters": rope}).rope_parameters == rope
    assert load_config("llama-tiny").vocab_size == SHAPES["llama-tiny"]["vocab_size"]


@pytest.mark.parametrize(("said", "meant"), [("lama-1b", "llama-1b"), ("llama-tinny", "llama-tiny"), ("llama_8b", "llama-8b")])
def test_an_unknown_shape_is_answered_with_the_nearest(said, meant):
    refused((repr(said), f"Did you mean {meant!r}", "model.source", *SHAPES), load_config, said)


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "runs/a/b", "~/model"])
def test_a_path_that_does_not_exist_is_no_shape(path):
    refused((path, "does not exist", "llama-tiny"), load_config, path)


def test_a_path_is_refused_before_the_hub_is_asked_and_a_hub_out_of_reach_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "model.json").write_text("{}")

    def ask(source, **options):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    monkeypatch.setattr("octavo.models.sources.AutoConfig.from_pretrained", ask)
    refused(("'models/tinny' does not exist", "there is a folder 'models'", "'models/tiny'?"), load_config, "models/tinny")
    refused(("'model.json' is a file", "model's folder"), load_config, "model.json")
    refused(("model.source = 'model.json/x' does not exist ('model.json' is a file)",), load_config, "model.json/x")
    refused(("model.source = 'xxx", "cannot be used: File name too long"), load_config, "x" * 300 + "/y")
    refused(("'owner/weights.safetensors' does not exist",), load_config, "owner/weights.safetensors")
    refused(("'owner/model'", "Hub cannot be reached", "`hf download owner/model`", "llama-tiny"), load_config, "owner/model")


def test_an_unknown_override_is_answered_with_the_nearest():
    refused(("'hiden_size'", "Did you mean 'hidden_size'", "model.config"), load_config, "llama-tiny", {"hiden_size": 32})


def test_an_override_of_one_rotary_key_keeps_the_others():
    before = dict(load_config("llama-1b").rope_parameters)
    for key, value in (("factor", 8.0), ("rope_theta", 1234.5), ("low_freq_factor", 2.0)):
        asked = {"rope_parameters": {key: value}}
        assert load_config("llama-1b", asked).rope_parameters == before | {key: value}
        assert asked == {"rope_parameters": {key: value}}
    linear = {"rope_type": "linear", "factor": 4.0}
    kept = {"rope_theta": before["rope_theta"]}
    assert load_config("llama-1b", {"rope_parameters": linear}).rope_parameters == kept | linear
    assert load_config("llama-1b", {"rope_parameters": {"rope_type": "default"}}).rope_parameters == kept | {
        "rope_type": "default"
    }


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_parameters": {"factor": 2.0}}, ("rope_parameters.factor = 2.0", "no effect", 'rope_type = "default"')),
        ({"rope_parameters": {"rope_theta": -1.0}}, ("rope_theta = -1.0", "above 0")),
        ({"rope_parameters": {"rope_theta": None}}, ("rope_theta = None", "above 0")),
        ({"rope_parameters": {"rope_theta": 0}}, ("rope_theta = 0", "above 0")),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, ("rope_parameters.factor = '2'", "above 0")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers = 0", "at least 1")),
        ({"num_key_value_heads": -1}, ("num_key_value_heads = -1",)),
        ({"hidden_size": 0}, ("hidden_size = 0",)),
        ({"vocab_size": 0}, ("vocab_size = 0",)),
        ({"head_dim": -16}, ("head_dim = -16",)),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "bool")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'")),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ("partial_rotary_factor = 1.5", "from 0 to 1")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps = nan", "finite")),
        ({"rms_norm_eps": -1e-5}, ("rms_norm_eps = -1e-05", "at least 0")),
        ({"attention_dropout": float("inf")}, ("attention_dropout",)),
        ({"dtype": "float16"}, ("model.config.dtype = 'float16'", "model.dtype")),
        ({"model_type": "gpt2"}, ("model.config.model_type", "model.source")),
        ({"rope_scaling": {"factor": 2.0}}, ("model.config.rope_scaling", "rope_parameters")),
        ({"output_attentions": True}, ("model.config.output_attentions", "no effect")),
        ({"to_dict": 3}, ("'to_dict'",)),
    ],
)
def test_an_override_without_effect_or_without_sense_is_refused(overrides, words):
    refused(words, load_config, "llama-tiny", overrides)


def test_a_key_has_one_effect_by_each_of_its_names(tmp_path):
    Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, mlp_only_layers=[]).save_pretrained(tmp_path / "qwen")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    MixtralConfig(num_local_experts=4).save_pretrained(tmp_path / "mixtral")
    for kind in ("qwen", "mixtral"):
        for key in ("num_experts", "num_local_experts"):
            config = load_config(str(tmp_path / kind), {key: 6})
            assert (config.num_experts, config.num_local_experts, decoder_spec(config)[0].experts) == (6, 6, 6), (kind, key)
        refused(
            ("num_experts = 6", "num_local_experts = 3", "two names of one key"),
            load_config, str(tmp_path / kind), {"num_experts": 6, "num_local_experts": 3},
        )  # fmt: skip
    for key in ("n_embd", "hidden_size"):
        assert load_config(str(tmp_path / "gpt2"), {key: 96}).n_embd == 96
    refused("moe_intermediate_size = 0", load_config, str(tmp_path / "qwen"), {"moe_intermediate_size": 0})


def test_sizes_of_other_names_are_checked_too(tmp_path):
    GPT2Config(n_layer=0).save_pretrained(tmp_path)
    refused(("n_layer = 0", "at least 1"), load_config, str(tmp_path))
    assert load_config(str(tmp_path), {"num_hidden_layers": 3}).n_layer == 3
    Qwen3MoeConfig(decoder_sparse_step=0).save_pretrained(tmp_path)
    refused(("decoder_sparse_step = 0", "use 1 for experts in every layer"), load_config, str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [({"num_attention_heads": 5}, ("attention heads", "256", "5")), ({"hidden_size": "large"}, ("hidden_size", "'large'"))],
)
def test_an_override_that_makes_no_model_is_refused(overrides, words):
    refused(("model.config", *words), load_config, "llama-tiny", overrides)


def test_python_files_that_a_config_names_are_forgotten(tmp_path):
    llama_config(auto_map={"AutoModelForCausalLM": "own.Own"}).save_pretrained(tmp_path)
    assert "auto_map" in (tmp_path / "config.json").read_text()
    assert not hasattr(load_config(str(tmp_path)), "auto_map")


def test_a_folder_without_config_is_named(tmp_path):
    refused((str(tmp_path), "config.json"), load_config, str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1, 2]", "null", "\x00\x01", ""])
def test_a_config_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    refused((str(tmp_path / "config.json"),), load_config, str(tmp_path))


@pytest.mark.parametrize("kind", ["lama", "not-a-model", None, 3])
def test_an_unknown_model_type_is_named(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    words = [str(tmp_path / "config.json"), *(["model family", repr(kind)] if isinstance(kind, str) else ['no "model_type"'])]
    refused([*words, "Did you mean 'llama'"] if kind == "lama" else words, load_config, str(tmp_path))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]]), "gpt_neo"),
        (llama_config(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (llama_config(model_type="mistral", sliding_window=0), "sliding_window = 0"),
        (llama_config(model_type="mistral", sliding_window=-3), "sliding_window = -3"),
        (
            llama_config(
                rope_parameters={
                    "rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 128,
                }
            ),
            "rope_type = 'dynamic'",
        ),
    ],
)  # fmt: skip
def test_what_the_decoder_does_not_compute_keeps_its_code_and_the_reason_is_given(config, reason):
    spec, why = decoder_spec(config)
    assert spec is None
    assert reason in why
