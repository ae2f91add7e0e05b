"""`model.resize`: runs from weights of a smaller vocabulary than the tokenizer's, and the messages that lead there."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import octavo
import ranks
from octavo.cli import main
from octavo.run.metrics import read_metrics

ROWS = 260
STILL = ["optimizer.lr=1e-30", "model.dtype=float32", "fp8.enabled=false"]
"""Weights stay, to the last bit of float32."""


def _model(folder, tied=False, rows=ROWS):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=rows, tie_word_embeddings=tied, eos_token_id=1, bos_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _tokenizer(folder, tokens=263):
    """One of `tokens` words, the last three of them special and named outside of tokenizer.json."""
    folder.mkdir(exist_ok=True)
    names = ["<s>", "</s>", "<unk>"]
    spoken = ["a", "and", "before", "each", "for", "in", "of", "scale", "the", "what"]  # of the corpus
    rest = [f"w{i}" for i in range(tokens - 6 - len(spoken))]
    words = {word: i for i, word in enumerate([*names, *spoken, *rest])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(names)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    values["additional_special_tokens"] = ["<|a|>", "<|b|>", "<|c|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def made(tiny_run, tmp_path):
    """(a run from weights of 260 words with a tokenizer of 263, the folder of both)."""

    def make(name="run", tied=False, **settings):
        run = tiny_run(name, **settings)
        source = tmp_path / f"{name} source"
        if not source.exists():
            _tokenizer(_model(source, tied))
        text = run.file.read_text()
        head = f'[model]\nsource = "{source}"\nload = true\n'
        run.file.write_text(head + text[text.index("[data]") :].replace("vocab_size = 300\n", f'tokenizer = "{source}"\n'))
        return run, source

    return make


def _said(capsys):
    captured = capsys.readouterr()
    return " ".join(captured.out.split()), " ".join(captured.err.split())


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_resumes_and_exports_a_grown_vocabulary(made, tied, tmp_path, capsys):
    run, source = made(tied=tied, steps=2)
    given = ["train", str(run.file), "model.resize=true", *STILL]
    assert main([*given, "optimizer.schedule=constant"]) == 0
    said, _ = _said(capsys)
    assert "the vocabulary grows from 260 to 263 tokens; the 3 new rows of" in said
    assert ("which is the head too" in said) == tied
    assert main([*given, "optimizer.schedule=constant", "train.steps=4"]) == 0
    assert "grows" not in _said(capsys)[0]  # the checkpoint has the rows
    assert [r["step"] for r in read_metrics(run.output / "metrics.jsonl")] == [1, 2, 3, 4]
    octavo.export(run.output, tmp_path / "out")
    found, before = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", source))
    assert found.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 263
    for part in ("get_input_embeddings", "get_output_embeddings"):
        new, old = (getattr(model, part)().weight.detach() for model in (found, before))
        torch.testing.assert_close(new[:ROWS], old, rtol=0, atol=1e-7)
        torch.testing.assert_close(new[ROWS:], old.mean(0).expand(3, -1), rtol=0, atol=1e-7)
    assert (found.get_input_embeddings().weight is found.get_output_embeddings().weight) == tied


def test_a_dry_run_says_what_is_added(made, capsys):
    run, _ = made()
    given = ["train", str(run.file), "model.resize=true", "--dry-run"]
    assert main(given) == 0
    assert "vocabulary 263 tokens, 3 of them added by model.resize" in _said(capsys)[0]
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_added"] == 3


def train(file, overrides):
    """A run in this process, one of several ranks."""
    from rich.console import Console

    from octavo.config.run import RunConfig
    from octavo.train.trainer import Trainer

    return Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train().summary.loss


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_two_and_four_ranks_train_it_as_one_does(made, tied):
    given = ["model.resize=true", "model.dtype=float32", "fp8.enabled=false", "train.micro_batch=1"]
    (wanted,) = ranks.run(1, train, made("one", tied, steps=3)[0].file, given)
    for count in (2, 4):
        found = ranks.run(count, train, made(f"{count}", tied, steps=3)[0].file, given)
        assert found == pytest.approx([wanted] * count, rel=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_go_to_peft_by_the_way_that_the_export_says(made, tmp_path, capsys):
    peft = pytest.importorskip("peft", reason="needs peft, of the dev extra: pip install -e '.[dev]'")
    run, source = made(steps=2)
    run.file.write_text(run.file.read_text() + "\n[lora]\nrank = 4\n")
    assert main(["train", str(run.file), "model.resize=true", *STILL]) == 0
    assert 'With lora they are frozen there, and new tokens are not learnt: lora.save_whole = ["embed' in " ".join(
        _said(capsys)
    )
    assert main(["export", str(run.output), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    assert "resize_token_embeddings" not in _said(capsys)[1]
    assert main(["export", str(run.output), "--to", str(tmp_path / "adapter")]) == 0
    assert f"model.resize_token_embeddings({ROWS + 3}, pad_to_multiple_of=None)" in _said(capsys)[1]
    base = AutoModelForCausalLM.from_pretrained(source)
    base.resize_token_embeddings(ROWS + 3, pad_to_multiple_of=None)
    ids = torch.randint(ROWS + 3, (2, 16))
    with torch.no_grad():
        for layer in (base.get_input_embeddings(), base.get_output_embeddings()):
            layer.weight[ROWS:] = layer.weight[:ROWS].mean(0)
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        found = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_fp8_trains_it(made):
    run, _ = made(steps=2)
    assert main(["train", str(run.file), "model.resize=true", "fp8.head=true"]) == 0


def test_every_message_leads_to_a_way_that_works(made, tmp_path, capsys):
    run, _ = made(steps=1)
    assert main(["train", str(run.file)]) == 2
    _, err = _said(capsys)
    assert "has token ids up to 262, beyond the model's vocabulary of 260 (vocab_size). Set model.resize = true" in err
    assert "model.config" not in err
    assert not run.output.exists()
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": [1, 2, 270] * 200}) + "\n" + json.dumps({"input_ids": [1, 2] * 200}) + "\n")
    tokens = [f"data.source={ids}", "data.tokenizer=train"]
    assert main(["train", str(run.file), *tokens]) == 2
    assert (
        "ids up to 270, but the model's vocabulary ends at 259 (vocab_size = 260). Set model.resize = true" in _said(capsys)[1]
    )
    assert main(["train", str(run.file), *tokens, "model.resize=true"]) == 0
    assert "from 260 to 271 tokens" in _said(capsys)[0]
    random = ["model.load=false", f"train.output={tmp_path / 'random'}"]
    assert main(["train", str(run.file), *random]) == 2
    assert "Set model.config.vocab_size to at least 263" in _said(capsys)[1]
    assert main(["train", str(run.file), *random, "model.config.vocab_size=263"]) == 0
    assert main(["train", str(run.file), *random, "model.resize=true"]) == 2
    assert "model.resize = true has no effect with model.load = false" in _said(capsys)[1]


def test_a_trained_tokenizer_grows_it_to_the_tokens_that_it_has(made, tmp_path, capsys):
    """Not to data.vocab_size, which is the most that a tokenizer may have."""
    run, _ = made(steps=1)
    assert main(["train", str(run.file), "data.tokenizer=train", "data.vocab_size=8192", "model.resize=true"]) == 0
    found = json.loads((run.output / "model" / "config.json").read_text())["vocab_size"]
    assert ROWS < found < 2000
    assert f"from 260 to {found:,} tokens" in _said(capsys)[0]
    assert found == len(AutoTokenizer.from_pretrained(run.output / "tokenizer"))


def test_a_vocabulary_that_is_large_enough_stays(made, capsys):
    run, source = made(steps=1)
    _model(source, rows=300)
    assert main(["train", str(run.file), "model.resize=true"]) == 0
    assert "adds nothing: the model's vocabulary of 300 tokens is large enough" in _said(capsys)[0]
