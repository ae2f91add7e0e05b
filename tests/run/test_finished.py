"""A finished run says so from its folder alone; any doubt goes the usual way."""

import json
import shutil
import subprocess
import sys

import pytest

from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.run.finished import finished
from octavo.run.metrics import read_metrics
from octavo.train.trainer import Trainer


@pytest.fixture(scope="module")
def trained(tiny_run_in, tmp_path_factory):
    """A run with its bf16 twin, trained once; tests change copies of it."""
    run = tiny_run_in(tmp_path_factory.mktemp("finished") / "run", steps=3, every=2)
    assert main(["train", str(run.file), "train.compare_bf16=true", "--json"]) == 0
    return run


@pytest.fixture
def copy(trained, tmp_path):
    """`copy(*overrides)` → the configuration of a start in a copy of the run's folder."""
    shutil.copytree(trained.output, tmp_path / "run")
    given = [f"train.output={tmp_path / 'run'}", "train.compare_bf16=true"]
    return lambda *overrides: RunConfig.from_file(trained.file, [*given, *overrides])


def test_it_is_the_result_of_the_usual_way(copy, monkeypatch):
    from rich.console import Console

    config = copy()
    usual = Trainer(config, console=Console(quiet=True)).train()
    result, lines = finished(config)
    assert result.as_dict() == usual.as_dict()
    assert lines == [
        f"fp8: already trained, 3 of 3 steps, in {config.output}",
        f"bf16: already trained, 3 of 3 steps, in {config.output / 'bf16'}",
    ]


@pytest.mark.parametrize("override", ["log.every=7", "checkpoint.keep=1", "train.compare_bf16=false", "train.micro_batch=1"])
def test_keys_that_may_change_leave_it_finished(copy, override):
    result, lines = finished(copy(override))
    assert result.summary.steps == 3
    assert (result.bf16 is None) == (len(lines) == 1) == (override == "train.compare_bf16=false")


@pytest.mark.parametrize(
    "override", ["train.steps=4", "train.steps=2", "optimizer.lr=1e-2", "fp8.recipe=current", "data.seed=3"]
)
def test_another_value_of_a_key_that_may_not_change_is_not_finished(copy, override):
    assert finished(copy(override)) is None


def test_a_key_that_the_run_has_and_its_file_not_goes_the_usual_way_which_names_it(copy):
    config = copy()
    edit(config.output / "run.toml", lambda data: data.replace(b"[data]\n", b"[data]\nmax_tokens = 900\n"))
    assert finished(config) is None


def edit(path, change):
    path.write_bytes(change(path.read_bytes()))


DOUBTS = {
    "no run file": lambda run: (run / "run.toml").unlink(),
    "no folder": shutil.rmtree,
    "a checkpoint of an earlier step only": lambda run: shutil.rmtree(run / "checkpoints" / "step-3"),
    "no manifest": lambda run: (run / "checkpoints" / "step-3" / "manifest.json").unlink(),
    "a flipped bit": lambda run: edit(
        next((run / "checkpoints" / "step-3").glob("*.safetensors")), lambda data: data[:-1] + bytes([data[-1] ^ 1])
    ),
    "a torn last line": lambda run: edit(run / "metrics.jsonl", lambda data: data[:-9]),
    "leftovers of a removal that was killed": lambda run: shutil.copytree(
        run / "checkpoints" / "step-3", run / "checkpoints" / ".tmp-old-step-2"
    ),
    "no metrics": lambda run: (run / "metrics.jsonl").unlink(),
    "no twin": lambda run: shutil.rmtree(run / "bf16"),
    "a twin of other settings": lambda run: edit(run / "bf16" / "run.toml", lambda data: data.replace(b"0.003", b"0.01")),
    "a twin that was stopped": lambda run: shutil.rmtree(run / "bf16" / "checkpoints" / "step-3"),
    "another model in the run file": lambda run: edit(
        run / "run.toml", lambda data: data.replace(b"hidden_size = 32", b"hidden_size = 64")
    ),
    "another model than recorded": lambda run: edit(
        run / "model" / "config.json", lambda data: data.replace(b'"hidden_size": 32', b'"hidden_size": 64')
    ),
}


@pytest.mark.parametrize("kind", DOUBTS)
def test_any_doubt_goes_the_usual_way(copy, kind):
    config = copy()
    assert finished(config) is not None
    before = {path: path.read_bytes() for path in config.output.rglob("*") if path.is_file()}
    DOUBTS[kind](config.output)
    assert {path: path.read_bytes() for path in config.output.rglob("*") if path.is_file()} != before
    assert finished(config) is None


def test_the_remedy_of_a_cut_last_line_gives_the_same_run(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained.output, run)
    edit(run / "metrics.jsonl", lambda data: data[:-9])
    command = ["train", str(trained.file), f"train.output={run}"]
    assert main(command) == 1
    err = capsys.readouterr().err
    assert f"line 3 of {run / 'metrics.jsonl'} is cut" in err
    assert f"remove {run / 'checkpoints' / 'step-3'}" in err
    assert main(["compare", str(trained.output), str(run)]) == 0
    captured = capsys.readouterr()
    assert f"has done 3 steps, but line 3 of {run / 'metrics.jsonl'} is cut" in captured.err
    assert "Compared are steps up to 2." in captured.err
    shutil.rmtree(run / "checkpoints" / "step-3")
    assert main(command) == 0
    before, after = (read_metrics(folder / "metrics.jsonl") for folder in (trained.output, run))
    assert [record["loss"] for record in after] == [record["loss"] for record in before]


def test_ranks_have_to_agree_first(copy, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert finished(copy()) is None


def test_changed_sources_go_the_usual_way_and_absent_ones_do_not(tiny_run, tmp_path):
    corpus = tmp_path / "own.jsonl"
    corpus.write_text("".join(f'{{"text": "a line of text with the number {i} in it"}}\n' for i in range(200)))
    run = tiny_run(steps=2, corpus=corpus)
    assert main(["train", str(run.file)]) == 0
    config = RunConfig.from_file(run.file)
    text = corpus.read_text()
    corpus.unlink()
    assert finished(config) is not None
    corpus.write_text(text.replace("number 7 ", "number 8 "))
    assert finished(config) is None
    assert main(["prepare", str(run.file)]) == 0
    assert finished(config) is None  # by the fingerprint


@pytest.mark.parametrize("json_", [False, True])
def test_the_command_needs_no_torch_and_says_at_once_what_it_reads(copy, trained, tmp_path, json_):
    program = (
        "import sys\n"
        "from octavo.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)\n"
    )
    command = ["train", str(trained.file), f"train.output={copy().output}", *(["--json"] if json_ else [])]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, other = (done.stderr, done.stdout) if json_ else (done.stdout, done.stderr)
    first, second = said.splitlines()[:2]
    assert first.startswith("octavo ")
    assert first.endswith(f": reading {trained.file} …")
    assert second == f"fp8: already trained, 3 of 3 steps, in {tmp_path / 'run'}"
    if json_:
        assert json.loads(other)["run"]["steps"] == 3
    else:
        assert "Next:" in said


def test_the_start_is_announced_and_paths_are_checked_before_torch_is_imported(tiny_run, tmp_path):
    program = (
        "import sys\n"
        "from octavo.cli import main\n"
        "codes = [main(['train', sys.argv[1], wrong]) for wrong in sys.argv[2:]]\n"
        "print(codes, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    file, empty = tiny_run().file, tmp_path / "empty"
    empty.mkdir()
    wrong = {
        "data.source=none.jsonl": "data.source = 'none.jsonl': there is no such file.",
        "data.tokenizer=./none": "data.tokenizer = './none' is not a folder.",
        "model.source=./none": "model.source = './none' does not exist.",
        f"model.source={empty}": f"model.source = '{empty}' is a folder without config.json",
    }
    command = [sys.executable, "-c", program, str(file), *wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert [line.partition(": ")[2] for line in said[:-1]] == [f"reading {file} …"] * 4
    assert said[-1] == "[2, 2, 2, 2] False False"
    for line, words in zip(done.stderr.splitlines(), wrong.values(), strict=True):
        assert words in line


def test_rank_0_alone_announces_the_start(tiny_run, monkeypatch, capsys):
    monkeypatch.setattr("octavo.watchdog.processes.time.sleep", lambda seconds: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["train", str(tiny_run(f"of-{rank}").file), "data.source=none.jsonl"]) == 2
        assert ("reading" in capsys.readouterr().out) == (rank == 0)
