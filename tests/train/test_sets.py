"""Validation sets by name: their losses over ranks and across resume, the best checkpoint by one of them, and bad sets."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import octavo
import ranks
from octavo.cli import main
from octavo.run.metrics import read_metrics
from octavo.train.evaluate import Validation

EXACT = ["model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.schedule=constant"]


WORDS = [
    "a",
    "scale",
    "for",
    "each",
    "tensor",
    "keeps",
    "small",
    "values",
    "in",
    "reach",
    "of",
    "the",
    "format",
    "while",
    "large",
    "ones",
    "saturate",
]


def write_corpus(path, documents, seed):
    draw = random.Random(seed)
    rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(3, 60)))} for _ in range(documents)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Overrides with two sets, of 12 and of 4 documents that no training has."""
    folder = tmp_path_factory.mktemp("sets")
    first, second = (write_corpus(folder / f"{n}.jsonl", count, n) for n, count in ((7, 12), (8, 4)))
    return [f'data.validation={{ first = "{first}", second = {{ source = ["{second}"] }} }}']


def train(file, overrides):
    from rich.console import Console

    from octavo.config.run import RunConfig

    found = octavo.Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train().summary
    return found.validation_losses, found.loss


def by_hand(run, source, length=32):
    """The mean loss of transformers' model of a run over the joined tokens of a file, in sequences of `length`."""
    octavo.export(run.output, run.folder / "out")
    model = AutoModelForCausalLM.from_pretrained(run.folder / "out", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "out")
    ids = []
    for line in source.read_text().splitlines():
        ids += [*tokenizer.encode(json.loads(line)["text"], add_special_tokens=False), tokenizer.eos_token_id]
    total = count = 0
    for at in range(0, len(ids) - length + 1, length):  # a remainder is left out
        row = torch.tensor([ids[at : at + length]])
        with torch.no_grad():
            total += model(input_ids=row, labels=row).loss.item()
        count += 1
    return total / count


@pytest.mark.long
def test_each_set_has_its_loss_over_ranks_and_across_resume_and_training_is_unchanged(tiny_run, sets, tmp_path, capsys):
    given = [*EXACT, "train.micro_batch=1", "train.validate_every=2", "train.validate_batches=1000"]
    whole, plain, parts = (tiny_run(name, steps=4, every=2) for name in ("whole", "plain", "parts"))
    losses, _ = train(whole.file, [*given, *sets])
    assert list(losses) == ["first", "second"]
    assert losses["first"] == pytest.approx(by_hand(whole, Path(sets[0].split('"')[1])), rel=1e-5)
    train(plain.file, given)
    metrics = read_metrics(whole.output / "metrics.jsonl")
    assert [r["loss"] for r in metrics] == [r["loss"] for r in read_metrics(plain.output / "metrics.jsonl")]
    found = [
        (r["validation_loss/first"], r["validation_loss/second"], r["validation_loss"]) for r in metrics if r["step"] in (2, 4)
    ]
    assert len({*found[0], *found[1]}) == 6
    train(parts.file, [*given, *sets, "train.steps=2"])
    ranks.run(2, train, parts.file, [*given, *sets])
    other = read_metrics(parts.output / "metrics.jsonl")
    for step, wanted in ((2, found[0]), (4, found[1])):
        record = other[step - 1]
        assert [record[f"validation_loss/{name}"] for name in ("first", "second")] == pytest.approx(list(wanted[:2]), rel=1e-5)
    capsys.readouterr()
    assert main(["compare", str(whole.output), str(parts.output)]) == 0
    assert "validation of second: whole/run" in " ".join(capsys.readouterr().out.split())


def test_the_best_checkpoint_is_by_the_set_that_is_named(tiny_run, sets, monkeypatch, capsys):
    tiny = tiny_run(steps=5)
    given = ["train", str(tiny.file), *sets, "train.validate_every=1", "checkpoint.keep=1", "checkpoint.best=second"]
    rows = iter([9, 9, 3.0, 9, 9, 1.0, 9, 9, 2.0, 9, 9, 4.0, 9, 9, 5.0])
    monkeypatch.setattr("octavo.train.loop.validate", lambda context, batches: Validation(next(rows), 1.0))
    assert main([*given, "train.early_stopping=2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ended at step 4 of 5: train.early_stopping = 2: the lowest validation loss of second was 1.0000 at step 2" in said
    assert "At step 2 the lowest validation loss of second was 1.0000: octavo export and octavo sample take" in said
    assert sorted(path.name for path in (tiny.output / "checkpoints").iterdir()) == ["step-2", "step-4"]


def test_bad_sets_are_refused(tiny_run, sets, tmp_path, capsys):
    tiny = tiny_run(steps=2)

    def refused(*overrides):
        assert main(["train", str(tiny.file), *overrides]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "data.validation.own: all of its documents" in refused(f'data.validation.own="{tiny.corpus}"')
    missing = refused('data.validation.far="nowhere.jsonl"')
    assert "data.validation.far = 'nowhere.jsonl': there is no such file" in missing
    assert "Change data.validation.far" in missing
    assert "checkpoint.best = 'sceond' is not a set" in refused(*sets, "checkpoint.best=sceond", "train.validate_every=1")
    assert "Did you mean 'second'" in refused(*sets, "checkpoint.best=sceond", "train.validate_every=1")
    only = refused(*sets, "checkpoint.best=true", "train.validate_every=1", "data.validation_fraction=0.0")
    assert "there are only named sets: set checkpoint.best to the name of one of first, second" in only
    assert "only letters and digits" in refused('data.validation={ "a/b" = "x.jsonl" }')
    assert "a set is a source, or" in refused('data.validation={ a = { sourc = "x.jsonl" } }')
    assert main(["train", str(tiny.file), *sets, "train.steps=1", "optimizer.schedule=constant"]) == 0
    source = Path(sets[0].split('"')[1])
    text = source.read_text()
    source.write_text(text.replace("scale", "scales", 1))
    said = refused(*sets, "optimizer.schedule=constant")
    source.write_text(text)
    assert "data.validation.first is another text than at" in said
    assert main(["train", str(tiny.file), "optimizer.schedule=constant"]) == 0  # a set may go
