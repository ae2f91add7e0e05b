"""`octavo train` with tensor parallelism is the run of one rank: samples, losses, norms, validation, checkpoints, exports."""

import json
import math

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import ranks
from octavo import errors
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.run.metrics import read_metrics
from octavo.train.trainer import Trainer

pytestmark = ranks.alone

EXACT = ["model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.schedule=constant"]
FP8 = ["fp8.enabled=true", "model.config.attention_dropout=0.0", "optimizer.schedule=constant"]


def degree(tensor):
    return f"parallel.tensor_parallel_degree={tensor}"


def run(file, overrides):
    """`octavo train` in this process, which is one rank of those that the pool has joined."""
    result = Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train()
    return result.summary.loss, result.summary.validation_loss


def records(output):
    return read_metrics(output / "metrics.jsonl")


def losses(output):
    return [record["loss"] for record in records(output)]


@pytest.mark.parametrize("packing", ["join", "documents"])
def test_tensor_parallel_ranks_train_as_one_does(tiny_run, packing):
    """Sequences of 31 tokens, which two ranks do not divide."""
    given = [*EXACT, f"data.packing={packing}", "data.sequence_length=31", "train.validate_every=3", "train.micro_batch=1"]
    one = tiny_run("one", steps=6, every=3)
    ranks.run(1, run, one.file, given)
    wanted = records(one.output)
    for count, more in ((2, ["train.recompute=mlp"]), (4, []), (4, ["parallel.context_parallel_degree=2"])):
        several = tiny_run(f"{count}-{len(more)}", steps=6, every=3)
        said = ranks.run(count, run, several.file, [*given, degree(2), *more])
        assert len(set(said)) == 1  # every rank says the same
        found = records(several.output)
        assert [r["tokens"] for r in found] == [r["tokens"] for r in wanted]
        for a, b in zip(found, wanted, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
            assert a.get("validation_loss", 0) == pytest.approx(b.get("validation_loss", 0), rel=1e-5)
