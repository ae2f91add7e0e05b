"""More positions for pretrained weights by keys of `rope_parameters`: the logits of transformers, runs, and what is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import octavo
from octavo.cli import main
from octavo.errors import InputError
from octavo.models.sources import check_positions, load_config

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of 32 positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=320, max_position_embeddings=32, eos_token_id=1, bos_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(4)  # attention depends on positions, which it hardly does at first weights
    made = tmp_path_factory.mktemp("source")
    model.save_pretrained(made)
    return made


@pytest.mark.parametrize("rope", [LINEAR, YARN, LLAMA3, {"rope_theta": 5e5}], ids=lambda rope: rope.get("rope_type", "theta"))
def test_logits_of_extended_positions_are_those_of_transformers(folder, rope):
    overrides = {"max_position_embeddings": 128, "rope_parameters": rope}
    assert check_positions(str(folder), overrides) == ""
    config = load_config(str(folder), overrides)
    theirs = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64)
    with octavo.delayed_init():
        model = AutoModelForCausalLM.from_config(config)
    model = octavo.transform(model, dtype=torch.float32, load_from=folder).eval()
    ids = torch.randint(0, 320, (2, 128))
    with torch.no_grad():
        wanted, found = theirs(input_ids=ids).logits, model(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(input_ids=ids).logits
    scale = wanted.abs().max()
    assert (found - wanted).abs().max() < 1e-4 * scale
    assert (plain - wanted).abs().max() > 1e-2 * scale  # the keys change the model


@pytest.mark.long
def test_a_run_trains_longer_sequences_and_exports_the_keys(folder, tiny_run, tmp_path, capsys):
    run = tiny_run(steps=1)
    text = run.file.read_text()
    head = f'[model]\nsource = "{folder}"\nload = true\n'
    run.file.write_text(head + text[text.index("[data]") :].replace("sequence_length = 32", "sequence_length = 64"))
    assert main(["train", str(run.file)]) == 2
    assert (
        "use at most 32. Change data.sequence_length, or raise model.config.max_position_embeddings with"
        in capsys.readouterr().err
    )
    wider = ["model.config.max_position_embeddings=64"]
    assert main(["train", str(run.file), *wider, "--dry-run"]) == 0
    assert "rope_theta and rope_type stay as they were trained for 32 positions" in capsys.readouterr().err
    rope = 'model.config.rope_parameters={ rope_type = "linear", factor = 2.0 }'
    assert main(["train", str(run.file), *wider, rope]) == 0
    assert "stay as they were" not in capsys.readouterr().err
    octavo.export(run.output, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert main(["train", str(run.file), *wider, rope.replace("2.0", "3.0"), "train.steps=2"]) == 2
    assert "model.config.rope_parameters" in capsys.readouterr().err
    assert main(["train", str(run.file), "model.config.hidden_size=128"]) == 2
    assert "model.config.hidden_size changes random weights" in capsys.readouterr().err


def refusals():
    """Positions, keys of `rope_parameters`, words of the message."""
    return [
        (128, {"rope_type": "dynamic", "factor": 4.0}, '"dynamic" is not one of linear, yarn, llama3'),
        (128, {**YARN, "beta_fst": 8.0}, "beta_fst.*beta_fast"),
        (128, {"rope_type": "yarn", "factor": 4.0}, "set original_max_position_embeddings = 32"),
        (128, {**YARN, "original_max_position_embeddings": 128}, "was trained with 32 positions"),
        (128, {**LLAMA3, "low_freq_factor": 4.0}, "below high_freq_factor"),
        (256, LINEAR, r"reaches 128 = 32 x 4 positions\. Set factor = 8"),
        (None, LINEAR, "max_position_embeddings is still 32"),
        (64, {"rope_type": "linear", "factor": 0.5}, "an extension needs 1 or more"),
        (16, {"rope_theta": 1e6}, "is less than the 32 positions"),
        (128, {"type": "linear", "factor": 4.0}, 'no effect with rope_type = "default"'),
    ]


@pytest.mark.parametrize(("positions", "rope", "words"), refusals())
def test_keys_that_would_give_other_angles_than_they_say_are_refused(folder, positions, rope, words):
    overrides = {"rope_parameters": rope} | ({} if positions is None else {"max_position_embeddings": positions})
    with pytest.raises(InputError, match=words):
        check_positions(str(folder), overrides)


def test_learned_positions_are_not_extended(tmp_path):
    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1).save_pretrained(
        tmp_path
    )
    with pytest.raises(InputError, match="a gpt2 has no single table of rotary positions"):
        check_positions(str(tmp_path), {"max_position_embeddings": 64})
