"""Special tokens of a run: of its tokenizer, its model's config and its generation config; what is said and exported."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    TokenizersBackend,
)

import octavo
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.data.prepared import prepare

NAMES = ["<unk>", "<s>", "<|endoftext|>", "<|im_end|>", "<pad>"]
WORDS = ["a", "and", "before", "each", "for", "in", "of", "scale", "the", "what"]


@pytest.fixture
def made(tiny_run, tmp_path):
    """(a run from weights and the tokenizer beside them, their folder); keys of its three files."""

    def make(*, config=None, generation=None, special=None, load=True, tokenizer=True, **named):
        run, source = tiny_run(steps=1), tmp_path / "source"
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 4}
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=320, **sizes, **ids | (config or {}))).save_pretrained(source)
        (source / "generation_config.json").unlink()
        if generation is not None:
            (source / "generation_config.json").write_text(json.dumps(generation, indent=3))
        if tokenizer:
            words = {word: i for i, word in enumerate([*NAMES, *WORDS])}
            backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
            backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            backend.add_special_tokens(NAMES)
            backend.save(str(source / "tokenizer.json"))
            values = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<pad>", "unk_token": "<unk>", **named}
            values = {"tokenizer_class": "PreTrainedTokenizerFast", **values}
            (source / "tokenizer_config.json").write_text(json.dumps(values))
            if special is not None:
                (source / "special_tokens_map.json").write_text(json.dumps(special))
        text = run.file.read_text()
        head = f'[model]\nsource = "{source}"\nload = {str(load).lower()}\n'
        data = text[text.index("[data]") :]
        named = data.replace("vocab_size = 300\n", f'tokenizer = "{source}"\n')
        run.file.write_text(head + (named if tokenizer else data))
        return run, source

    return make


def _said(capsys):
    captured = capsys.readouterr()
    return " ".join(captured.out.split()), " ".join(captured.err.split())


def test_documents_the_config_and_generation_end_in_one_token(made, tmp_path, capsys):
    """The eos of special_tokens_map.json, as transformers reads it; tokenizer_config.json has another."""
    run, source = made(generation={"eos_token_id": 2, "temperature": 0.5}, special={"eos_token": "<|im_end|>"})
    theirs = AutoTokenizer.from_pretrained(source)
    assert theirs.eos_token_id == 3
    assert main(["train", str(run.file)]) == 0
    said, _ = _said(capsys)
    assert f"eos_token_id of {source}: config.json has 2 ('<|endoftext|>'); generation_config.json has 2" in said
    assert "the tokenizer has 3 ('<|im_end|>'). The run and its exports use [2, 3]" in said
    assert "trained with other tokens" not in said
    data = prepare(RunConfig.from_file(run.file).data)
    offsets, tokens = data.offsets("train"), data.tokens("train")
    assert {int(tokens[end - 1]) for end in offsets[1:].tolist()} == {3}
    octavo.export(run.output, tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert config.eos_token_id == generation.eos_token_id == [2, 3]
    assert generation.temperature == 0.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    made_ids = model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, sequence_bias={(3,): 1e4})
    assert made_ids[0].tolist() == [5, 6, 3]


@pytest.mark.parametrize(
    ("keys", "role", "words"),
    [
        ({"config": {"eos_token_id": 9}}, "eos_token_id", ["config.json has 9 (not one of its special tokens)", "use 2,"]),
        ({"config": {"eos_token_id": None}}, "eos_token_id", ["config.json has none", "use 2,"]),
        ({"config": {"bos_token_id": 3}}, "bos_token_id", ["config.json has 3 ('<|im_end|>')", "has 1 ('<s>')", "use 1,"]),
        ({"config": {"pad_token_id": 0}}, "pad_token_id", ["config.json has 0 ('<unk>')", "has 4 ('<pad>')"]),
        ({"generation": {"eos_token_id": [3]}}, "eos_token_id", ["generation_config.json has 3 ('<|im_end|>')", "use 2,"]),
    ],
)
def test_files_that_disagree_are_named_with_what_the_run_takes(made, keys, role, words, capsys):
    run, source = made(**keys)
    assert main(["train", str(run.file)]) == 0
    said, _ = _said(capsys)
    for word in (f"{role} of {source}:", *words, f"or {role} in the others"):
        assert word in said
    assert "trained with other tokens" not in said  # data.tokenizer has theirs already
    assert said.count(" of the others") + said.count("in the others") == 1


@pytest.mark.parametrize("generation", [None, {"eos_token_id": [3, 2], "pad_token_id": 4}, {"do_sample": True}])
def test_files_that_agree_say_nothing(made, generation, capsys):
    run, _ = made(generation=generation, config={"eos_token_id": [2, 3]})
    assert main(["train", str(run.file)]) == 0
    said, _ = _said(capsys)
    assert "in the others" not in said
    assert "trained with other tokens" not in said


def test_random_weights_know_no_tokens(made, capsys):
    run, _ = made(config={"eos_token_id": 9}, load=False)
    assert main(["train", str(run.file)]) == 0
    assert "in the others" not in _said(capsys)[0]


def test_weights_without_a_tokenizer_beside_them_lead_to_none(made, capsys):
    run, source = made(tokenizer=False)
    assert main(["train", str(run.file)]) == 0
    said, _ = _said(capsys)
    assert (
        f"The weights of {source} were trained with other tokens than this tokenizer's. Set data.tokenizer to theirs." in said
    )


SAMPLING = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 4}


def test_an_export_has_the_generation_config_of_its_source_to_the_byte(made, tmp_path):
    run, source = made(generation=SAMPLING)
    assert main(["train", str(run.file)]) == 0
    assert main(["export", str(run.output), "--to", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()


def test_what_transformers_refuses_is_said_and_the_rest_is_exported(made, tmp_path, capsys):
    run, source = made(generation=SAMPLING | {"max_new_tokens": 0})
    with pytest.raises(ValueError, match="max_new_tokens"):
        AutoModelForCausalLM.from_pretrained(source)
    assert main(["train", str(run.file)]) == 0
    capsys.readouterr()
    assert main(["export", str(run.output), "--to", str(tmp_path / "out")]) == 0
    reason = "since transformers refuses it: ValueError: `max_new_tokens` must be greater than 0"
    assert f"generation_config.json: max_new_tokens = 0 is dropped, {reason}" in _said(capsys)[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.generation_config.temperature, model.generation_config.top_p) == (0.6, 0.9)
    assert main(["sample", str(run.output), "--prompt", "the scale", "--tokens", "2"]) == 0
    assert main(["sample", str(source), "--prompt", "the scale", "--tokens", "2"]) == 0


def test_a_damaged_generation_config_is_refused_before_training(made, capsys):
    run, source = made(generation={})
    (source / "generation_config.json").write_text("{")
    assert main(["train", str(run.file)]) == 2
    assert "generation_config.json is damaged" in _said(capsys)[1]
    assert not run.output.exists()


@pytest.mark.parametrize("end", [300, 0, None])
def test_ids_of_another_tokenizer_are_left_out_of_generation_and_said(made, end, tmp_path, capsys):
    run, _ = made(generation={**SAMPLING, "eos_token_id": end, "suppress_tokens": [7], "forced_bos_token_id": 9})
    assert main(["train", str(run.file), "data.tokenizer=train", "data.vocab_size=300"]) == 0
    capsys.readouterr()
    assert main(["export", str(run.output), "--to", str(tmp_path / "out")]) == 0
    assert "suppress_tokens, forced_bos_token_id: dropped, since their ids belong to a tokenizer other" in _said(capsys)[1]
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (found["temperature"], found["top_p"], found["eos_token_id"]) == (0.6, 0.9, 0)
    assert not {"suppress_tokens", "forced_bos_token_id", "pad_token_id"} & found.keys()


@pytest.mark.parametrize(("family", "other"), [("qwen2", True), ("qwen3", False), ("llama", False)])
def test_a_tokenizer_that_an_export_would_have_read_otherwise_is_said(tiny_run, family, other, tmp_path, capsys):
    """transformers has its own class for Qwen2's tokenizers, which splits words in its own way."""
    run, source = tiny_run(steps=1), tmp_path / "source"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoConfig.for_model(family, vocab_size=320, num_key_value_heads=1, **sizes).save_pretrained(source)
    text = run.file.read_text()
    run.file.write_text(f'[model]\nsource = "{source}"\n' + text[text.index("[data]") :])
    assert main(["train", str(run.file)]) == 0
    said = _said(capsys)[0]
    assert main(["export", str(run.output), "--to", str(tmp_path / "out")]) == 0
    for words in (said, _said(capsys)[1]):
        assert ("as Qwen2Tokenizer, which may give other ids than the run's" in words) == other
        assert ("transformers.TokenizersBackend.from_pretrained(FOLDER)" in words) == other
    text = "cafe\u0301"  # which Qwen2's normalizes
    ids = AutoTokenizer.from_pretrained(run.output / "tokenizer")(text)["input_ids"]
    assert (AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] != ids) == other
    assert TokenizersBackend.from_pretrained(tmp_path / "out")(text)["input_ids"] == ids
