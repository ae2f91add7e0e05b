"""Every preset and every run file under examples/ is equal to one rank, at 2 and 4 ranks, with three seeds."""

from pathlib import Path

import pytest
from transformers import AutoConfig
from verified import comparisons

from octavo.config.effects import with_values
from octavo.config.run import RunConfig
from octavo.verify import certificate

ROOT = Path(__file__).parents[2]
FILES = sorted(str(file.relative_to(ROOT)) for folder in ("presets", "examples") for file in (ROOT / folder).rglob("*.toml"))


HUB = {
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
}
"""Configs of models of the Hub, which no test asks."""
SHORT = ("presets/llama-8b-128k.toml", 2)
"""Of one seed and without the pass in the dtypes that train, in `make test`."""


def with_hub_model(config, folder):
    """The run with a folder's config in place of the Hub's."""
    if config.model.source not in HUB:
        return config
    AutoConfig.for_model(**HUB[config.model.source]).save_pretrained(folder)
    return with_values(config, {"model.source": str(folder)})


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.long(lambda name, world: (name, world) != SHORT)
def test_a_run_file_is_equal(name, world, tmp_path):
    config = with_hub_model(RunConfig.from_file(ROOT / name), tmp_path)
    config, said = certificate._lowered(config, world, ())
    degrees = config.parallel.model_dump(include={"cp_comm_type", *(key for key in vars(config.parallel) if "degree" in key)})
    assert all("does not divide" in line for line in said)
    short = (name, world) == SHORT
    kinds = ("plain", "fp8", *[each for each in ("narrow", "narrow-fp8") if not short])
    found = comparisons(config, world, degrees, kinds=kinds, seeds=[3] if short else certificate.SEEDS)
    assert {where: each.first for where, each in found.items() if each.first is not None} == {}
    assert len(found) == (3 if config.fp8.enabled is False else 6) + (0 if short else 1 if config.fp8.enabled is False else 2)


@pytest.mark.parametrize("name", FILES)
def test_files_that_a_run_reads_need_not_be_here(name, tmp_path, monkeypatch):
    """Of every preset and example: with a tokenizer and texts elsewhere, up to the start of ranks."""
    config = with_hub_model(RunConfig.from_file(ROOT / name), tmp_path)
    data = {
        "source": "nowhere/texts.jsonl",
        "validation_source": "nowhere/others.jsonl",
        "tokenizer": str(tmp_path / "nowhere"),
    }
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    if config.lora.rank is not None:
        config = with_values(config, {"lora.load": str(tmp_path / "nowhere")})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(certificate.Pool, "run", lambda *_: pytest.skip("would start ranks"))
    with pytest.raises(pytest.skip.Exception):
        certificate.verify(config, 4)
