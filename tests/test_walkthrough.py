"""The walk-through with short chunks: its channels, its own call on 8 ranks of a CPU in FP8, and its run files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.compat.migrate.script import read
from octavo.config.run import RunConfig

FOLDER = Path(__file__).parent.parent / "examples" / "walkthrough"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "a sequence is divided into parts and every rank keeps one of them "
    (tmp_path / "articles.jsonl").write_text("".join(json.dumps({"text": words * (2 + n % 7)}) + "\n" for n in range(90)))
    return tmp_path


@pytest.mark.long
def test_the_published_call_runs_on_eight_ranks_of_a_cpu_in_fp8(place):
    text = ["data.source=articles.jsonl", "data.max_documents=60", "data.sequence_length=128", "data.vocab_size=320"]
    assert main(["prepare", str(FOLDER / "prepare.toml"), *text, "--channels", "channels"]) == 0
    command = [sys.executable, str(FOLDER / "estimator.py"), "--fp8", "--length", "128", "--steps", "2", "--name", "job"]
    done = subprocess.run(
        [*command, "--vocabulary", "320"],
        cwd=place,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path.endswith("/src"))),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "octavo: ml.p5.48xlarge has 8 x H100 SXM; this machine has no GPU: 8 ranks on its CPU." in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "8 ranks: context 8, hybrid_shard 8; FP8"
    first, second = (float(line.split("loss ")[1].split(",")[0]) for line in lines[1:3])
    assert 5 < second < first < 6.5  # from log(320) downwards
    result = json.loads((place / "jobs" / "job" / "model" / "result.json").read_text())
    assert result["steps"] == 2
    assert 5 < result["validation_loss"] < 6.5


def test_the_call_is_refused_where_it_contradicts_itself(place):
    for options, part in {
        ("--context", "3"): "context 3 does not divide hybrid_shard 8",
        ("--fp8", "--instance", "ml.p4d.24xlarge"): "A100 40GB, have no FP8 products",
    }.items():
        done = subprocess.run(
            [sys.executable, str(FOLDER / "estimator.py"), *options], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert part in done.stderr
    assert not (place / "jobs").exists()


def test_the_run_files_are_those_of_the_call():
    tiny = json.loads((FOLDER / "tiny" / "config.json").read_text())
    config = RunConfig.from_file(FOLDER / "train.toml")
    assert all(tiny[key] == value for key, value in config.model.config.items())
    assert (config.parallel.context_parallel_degree, config.parallel.hybrid_shard_degree) == (8, 8)
    prepared = RunConfig.from_file(FOLDER / "prepare.toml")
    assert (prepared.data.max_documents, prepared.data.seed, prepared.data.validation_fraction) == (1000, 42, 0.2)
    assert prepared.data.sequence_length == config.data.sequence_length == 16384
    large = RunConfig.from_file(FOLDER / "train-8b.toml")
    assert (large.parallel.context_parallel_degree, large.data.sequence_length) == (2, 32768)


def test_the_script_uses_only_names_that_are_there():
    script = read(FOLDER / "train.py")
    assert len(script.uses) > 20
    assert {use.name for use in script.uses if use.row is None or use.row.status == "absent"} == set()
