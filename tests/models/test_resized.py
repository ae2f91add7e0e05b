"""A larger vocabulary: old rows to the bit, new ones their mean, as transformers computes it; on one rank and on several."""

import json

import pytest
import torch
from expectations import refused
from transformers import AutoConfig, AutoModelForCausalLM

import octavo
import ranks
from building import built_model
from octavo.models import resized
from octavo.models.sources import load_config
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import init, state

TOKENS, MORE = 97, 103
SIZES = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
MODELS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "gpt2": {"model_type": "gpt2"},  # tied
    "phi": {"model_type": "phi"},  # a head with a bias
    "gptj": {"model_type": "gptj", "rotary_dim": 8},
}


def _saved(folder, kind, dtype=torch.float32):
    torch.manual_seed(1)
    config = AutoConfig.for_model(**SIZES | MODELS[kind])
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder)
    return folder


def _resized(folder, blocks="auto", **settings):
    config = resized.grown(load_config(str(folder)), MORE)
    settings = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "cpu", "seed": 0} | settings
    return built_model(config, load_from=folder, resize=True, blocks=blocks, **settings)


def _expected(folder):
    """Each tensor of the folder's model with its new rows, by the definition."""
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return {
        name: torch.cat([tensor, tensor.double().mean(0, keepdim=True).float().expand(MORE - TOKENS, *tensor.shape[1:])])
        if tensor.shape[:1] == (TOKENS,)
        else tensor
        for name, tensor in old.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", ["auto", "own"])
@pytest.mark.parametrize("kind", MODELS)
def test_old_rows_stay_and_new_rows_are_their_mean(kind, blocks, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(resized, "_ROWS", 40)  # several parts
    folder = _saved(tmp_path / "source", kind, dtype)
    octavo.export(_resized(folder, blocks), tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.config.vocab_size == MORE
    expected = _expected(folder)
    assert sum(tensor.shape[:1] == (MORE,) for tensor in expected.values()) >= 2  # embedding and head
    for name, tensor in back.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0 if tensor.shape[:1] != (MORE,) else 1e-6)
        assert torch.equal(tensor[:TOKENS], expected[name][:TOKENS]), name


def test_the_rows_are_those_of_transformers(tmp_path):
    folder = _saved(tmp_path / "source", "phi")
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    theirs.resize_token_embeddings(MORE, mean_resizing=True)
    for name, tensor in _resized(folder, "own").state_dict().items():
        # transformers adds normal noise of 1e-9 of the covariance.
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=0, atol=1e-3)


def shares(folder, degrees, blocks):
    """What one rank holds, gathered."""
    from octavo.collectives.whole import whole_tensor

    init(degrees)
    model = _resized(folder, blocks, sharding=sharding_of(state, None, dtype=torch.float32, params_dtype=torch.float32))
    return {name: whole_tensor(tensor).detach() for name, tensor in model.state_dict().items()}


@pytest.mark.long(lambda kind, blocks: (kind == "llama") == (blocks == "auto"))
@pytest.mark.parametrize("blocks", ["auto", "own"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_the_shards_of_all_ranks_are_the_whole(kind, blocks, tmp_path):
    folder = _saved(tmp_path / "source", kind)
    whole = _resized(folder, blocks).state_dict()
    for count, degrees in ((2, {}), (4, {}), (4, {"hybrid_shard_degree": 2})):
        for found in ranks.run(count, shares, folder, degrees, blocks):
            assert found.keys() == whole.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, whole[name]), name


def test_weights_of_another_vocabulary_than_their_config_are_refused(tmp_path):
    folder = _saved(tmp_path / "source", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 95}))
    refused(("has 97 rows", "vocab_size = 95", "Set vocab_size = 97 there"), _resized, folder)


def test_a_vocabulary_never_shrinks(tmp_path):
    config = load_config(str(_saved(tmp_path / "source", "llama")))
    assert resized.grown(config, TOKENS - 10) is config
    assert resized.grown(config, TOKENS + 1).vocab_size == TOKENS + 1
    assert config.vocab_size == TOKENS
