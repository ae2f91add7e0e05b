"""Labels of the data decide the loss: as Hugging Face's model in float64 has it, on any ranks and across a resume."""

import json
import math
import random

import numpy as np
import pytest
import torch
from torch.nn import functional

import octavo
import ranks
from octavo.config.run import RunConfig
from octavo.data.loader import sequences_of
from octavo.data.prepared import prepare
from octavo.plan.run import check
from octavo.run.metrics import read_metrics
from octavo.train.evaluate import validate
from octavo.train.setup import build
from octavo.train.step import train_step

EXACT = (
    *("model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.clip=0"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0"),
)
LENGTH = 24
VOCABULARY = 320


def rows(count, seed=0):
    """Documents of token ids: an unpredicted prompt, then labels, of which some are other tokens than those of the text."""
    draw, found = random.Random(seed), []
    for number in range(count):
        ids = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 60))]
        prompt = draw.randint(1, len(ids))
        labels = [draw.randrange(VOCABULARY) if draw.random() < 0.2 else token for token in ids]
        row = {"input_ids": ids, "labels": [-100] * prompt + labels[prompt:]}
        if number % 3 == 0:
            row["loss_mask"] = [draw.choice([0, 1, 1]) for _ in ids]
        if number % 5 == 0:
            row["attention_mask"] = [1] * len(ids)
        found.append(row)
    return found


def targets_of(row):
    mask = row.get("loss_mask", [1] * len(row["input_ids"]))
    return [label if kept else -100 for label, kept in zip(row["labels"], mask, strict=True)]


def pieces(documents, packing):
    """[(ids, labels)] of what attends to itself alone, from the rows as they are written."""
    if packing == "documents":
        pairs = [(row["input_ids"], targets_of(row)) for row in documents]
        return [(ids[at : at + LENGTH], labels[at : at + LENGTH]) for ids, labels in pairs for at in range(0, len(ids), LENGTH)]
    ids = [token for row in documents for token in row["input_ids"]]
    labels = [label for row in documents for label in targets_of(row)]
    return [(ids[at : at + LENGTH], labels[at : at + LENGTH]) for at in range(0, len(ids) // LENGTH * LENGTH, LENGTH)]


def reference(model, found):
    """(loss, norm of its gradient, targets) of Hugging Face's model in float64, piece by piece."""
    theirs = octavo.to_huggingface(model).double()
    theirs.zero_grad()
    count = sum(label != -100 for _, labels in found for label in labels[1:])
    total = 0.0
    for ids, labels in found:
        if all(label == -100 for label in labels[1:]):
            continue
        logits = theirs(input_ids=torch.tensor([ids])).logits[0, :-1]
        loss = functional.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters() if p.grad is not None]).item(), count


@pytest.fixture
def labelled(tmp_path, tiny_run_in):
    """A factory of runs over these rows, each step of which is an epoch; the run and its sequences."""

    def make(packing, *overrides, documents=None, name="run"):
        documents = rows(40) if documents is None else documents
        corpus = tmp_path / f"{name}.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in documents))
        run = tiny_run_in(tmp_path / name, corpus=corpus)
        given = [*EXACT, f"data.packing={packing}", f"data.sequence_length={LENGTH}", "data.validation_fraction=0", *overrides]
        data = prepare(RunConfig.from_file(run.file, given).data)
        count = len(sequences_of(data, "train", sequence_length=LENGTH, packing=packing))
        return run, [*given, f"train.global_batch={count}"], count

    return make


@pytest.mark.parametrize("packing", ["join", "documents"])
@pytest.mark.parametrize("micro", [1, None])
def test_loss_and_gradient_are_those_of_the_labels(labelled, packing, micro):
    run, given, count = labelled(packing)
    plan = check(RunConfig.from_file(run.file, [*given, f"train.micro_batch={micro or count}"]))
    stepper, _ = build(plan, prepare(plan.config.data))
    found = pieces(rows(40), packing)
    loss, norm, targets = reference(stepper.model, found)
    dense = sum(len(ids) - 1 for ids, _ in found)
    assert 0 < targets < 0.6 * dense  # so that other denominators are other losses
    result = train_step(stepper, 1)
    assert result.loss == pytest.approx(loss, rel=2e-6)
    assert result.grad_norm == pytest.approx(norm, rel=2e-5)


def test_a_validation_is_over_the_labels_of_its_own_source(labelled, tmp_path):
    held_out = rows(12, seed=1)
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in held_out))
    run, given, _ = labelled("documents")
    given = [each for each in given if not each.startswith("data.validation_fraction")]
    plan = check(
        RunConfig.from_file(
            run.file, [*given, f"data.validation_source={path}", "train.micro_batch=1", "train.validate_batches=99"]
        )
    )
    stepper, batches = build(plan, prepare(plan.config.data))
    loss, _, _ = reference(stepper.model, pieces(held_out, "documents"))
    assert validate(stepper, batches).loss == pytest.approx(loss, rel=2e-6)


def train(file, overrides):
    """`octavo train` in this process, which is one rank of those that the pool has joined."""
    from rich.console import Console

    from octavo.train.trainer import Trainer

    Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train()


@pytest.mark.long
@pytest.mark.parametrize("packing", ["join", "documents"])
def test_ranks_and_a_resume_train_on_the_same_targets(labelled, packing):
    """Rows are uneven: some ranks and micro-batches have many times as many targets as others."""
    documents = rows(60)
    more = (
        "train.global_batch=8",
        "train.micro_batch=1",
        "train.validate_batches=99",
        "data.validation_fraction=0.2",
    )
    found = {}
    for name, parts in (
        ("one", [(1, 4, ())]),
        ("four", [(4, 4, ("train.micro_batch=2",))]),
        ("moved", [(2, 2, ("parallel.context_parallel_degree=2",)), (2, 3, ()), (1, 4, ("data.workers=2",))]),
    ):
        run, given, _ = labelled(packing, documents=documents, name=name)
        for count, steps, changes in parts:
            ranks.run(count, train, run.file, [*given, *more, f"train.steps={steps}", *changes])
        found[name] = read_metrics(run.output / "metrics.jsonl")
    for name, records in found.items():
        assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in found["one"]], rel=1e-5), name
        assert [r["grad_norm"] for r in records] == pytest.approx([r["grad_norm"] for r in found["one"]], rel=1e-4), name
        assert records[-1]["validation_loss"] == pytest.approx(found["one"][-1]["validation_loss"], rel=1e-5)


def test_every_step_has_a_target_however_few_there_are(labelled):
    """Of 60 documents two have targets: the others are left out, so that no step is empty and none is not a number."""
    documents = [
        {**row, "labels": row["labels"] if n in (7, 31) else [-100] * len(row["labels"])} for n, row in enumerate(rows(60))
    ]
    run, given, count = labelled("documents", documents=documents)
    assert 1 <= count <= 6
    train(run.file, [*given, "train.global_batch=1", "train.micro_batch=1", "train.steps=8"])
    losses = [record["loss"] for record in read_metrics(run.output / "metrics.jsonl")]
    assert all(math.isfinite(loss) and loss > 1 for loss in losses)
    assert np.ptp(losses) > 0


def test_a_run_without_a_target_ends_with_exit_code_2_before_a_model_is_built(labelled, monkeypatch, capsys):
    from octavo.cli import main

    documents = [
        {
            **row,
            "labels": [row["input_ids"][0], *[-100] * (len(row["input_ids"]) - 1)],
            "loss_mask": [1] * len(row["input_ids"]),
        }
        for row in rows(20)
    ]
    run, given, _ = labelled("join", documents=documents)  # where documents are joined their first tokens are predicted
    monkeypatch.setattr("octavo.train.setup.build_model", None)
    assert main(["train", str(run.file), *given, "data.packing=documents"]) == 2
    assert "the train split has" in (said := capsys.readouterr().err)
    assert "but no sequence with a target" in said
