"""The command line: what a mistake is answered with, what each command prints, what `--help` costs."""

import json
import subprocess
import sys

import pytest

import octavo
from octavo.cli import main
from octavo.train.metrics import read_metrics

COMMANDS = ("train", "prepare", "export", "doctor", "bench")


def tree(folder):
    return sorted((p.relative_to(folder).as_posix(), p.stat().st_size) for p in folder.rglob("*"))


@pytest.fixture
def refused(tiny_run, tmp_path, monkeypatch, capsys):
    """`refused(*overrides)` → the one message of a training that is refused; it leaves no trace and exits with 2."""
    monkeypatch.chdir(tmp_path)
    run = tiny_run()

    def check(*overrides, edit=None, command="train"):
        if edit:
            run.file.write_text(edit(run.file.read_text()))
        before = tree(tmp_path)
        assert main([command, str(run.file), *overrides]) == 2
        captured = capsys.readouterr()
        assert tree(tmp_path) == before
        assert captured.err.startswith("octavo: ")
        assert captured.err.count("\n") == 1, captured.err
        assert "Traceback" not in captured.err
        return captured.err

    check.run = run
    return check


KEYS = {
    "unknown key, with the nearest": (["optimizer.lrr=1"], ["unknown key optimizer.lrr", "Did you mean optimizer.lr?"]),
    "unknown section": (["optimiser.lr=1"], ["unknown section optimiser", "Did you mean optimizer?"]),
    "a key of another section": (["train.amax_history_len=4"], ["train.amax_history_len", "fp8.amax_history_len"]),
    "wrong type": (["train.steps=many"], ["train.steps = 'many'"]),
    "a number out of range": (["train.steps=0"], ["train.steps = 0", "greater than or equal to 1"]),
    "an override that is none": (["train.steps"], ["override 'train.steps' is not section.key=value"]),
    "sequence length 1": (["data.sequence_length=1"], ["data.sequence_length = 1", "at least 2"]),
    "a warm-up longer than the run": (["optimizer.warmup_steps=9"], ["warmup_steps = 9", "use at most 8"]),
    "micro-batch that does not divide": (["train.micro_batch=3"], ["train.micro_batch = 3", "2 or 4", "train.micro_batch"]),
    "degrees that do not fit": (["parallel.tensor_parallel_degree=2"], ["tensor 2 does not divide the world of 1"]),
    "expert degree": (
        ["parallel.expert_parallel_degree=3"],
        ["expert 3 does not divide", "parallel.expert_parallel_degree to 1"],
    ),
    "unknown recipe": (["fp8.recipe=delayd"], ["fp8.recipe = 'delayd'", "delayed", "current", "rowwise", "block"]),
    "unknown format": (["fp8.format=E5M2"], ["fp8.format = 'E5M2'", "HYBRID"]),
    "unknown built-in shape": (["model.source=lama-tiny"], ["lama-tiny", "Did you mean 'llama-tiny'?"]),
    "a model folder that is not there": (["model.source=./nowhere/model"], ["./nowhere/model", "does not exist"]),
    "unknown key of model.config": (["model.config.hiden_size=64"], ["hiden_size", "hidden_size"]),
    "heads that do not divide": (["model.config.num_key_value_heads=3"], ["3"]),
    "pretrained weights of another shape": (["model.load=true"], ["model.load must be false"]),
    "a skip pattern that matches nothing": (["fp8.skip=['layers.9.*']"], ["fp8.skip pattern 'layers.9.*' matches no"]),
    "a sequence beyond the positions": (["data.sequence_length=4096"], ["4096", "at most 2048"]),
    "a tracker that is not installed": (["log.trackers=['wandb']"], ["'wandb'", "pip install 'octavo[wandb]'"]),
    "a corpus that is not there": (["data.source=nowhere.jsonl"], ["nowhere.jsonl"]),
    "a vocabulary that is too small": (["model.config.vocab_size=256"], ["vocab", "model.config.vocab_size"]),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_wrong_key_is_one_message_and_exit_2(refused, kind):
    overrides, words = KEYS[kind]
    message = refused(*overrides)
    for word in words:
        assert word in message


def test_all_faults_of_a_file_are_told_at_once(refused):
    message = refused("optimizer.lrr=1", "train.steps=0", "data.sequence_length=1")
    assert all(word in message for word in ("optimizer.lrr", "train.steps", "data.sequence_length"))


def test_a_run_file_that_is_no_toml_or_not_there(refused, tmp_path, capsys):
    assert "is not valid TOML" in refused(edit=lambda text: text + "\n[train\n")
    assert main(["train", str(tmp_path / "tiny" / "tinny.toml")]) == 2
    err = capsys.readouterr().err
    assert "does not exist" in err
    assert "tiny.toml?" in err


CORPORA = {
    "an empty file": ("empty.jsonl", "", ["empty"]),
    "a line that is no JSON": ("bad.jsonl", '{"text": "one"}\n{"text": "tw\n', ["bad.jsonl", "2"]),
    "a line without the field": ("field.jsonl", '{"text": "one"}\n{"txt": "two"}\n', ["field.jsonl", "2", "text"]),
    "bytes that are no UTF-8": ("bytes.txt", b"one\n\xff\xfe\n", ["bytes.txt"]),
    "a parquet file that is none": ("rows.parquet", "no parquet", ["rows.parquet"]),
    "token ids beyond the vocabulary": (
        "ids.jsonl",
        "".join(json.dumps({"input_ids": [1, 2, 319 + (i == 40)] * 20}) + "\n" for i in range(50)),
        ["320", "vocab", "model.config.vocab_size"],
    ),
}


@pytest.mark.parametrize(
    ("command", "kind"),
    # Preparing data knows of no model, hence of no vocabulary.
    [
        (c, kind)
        for c in ("train", "prepare")
        for kind in CORPORA
        if (c, kind) != ("prepare", "token ids beyond the vocabulary")
    ],
)
def test_a_corpus_that_cannot_be_used_is_named_with_the_line(refused, tmp_path, kind, command):
    name, content, words = CORPORA[kind]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    # Its own data folder: what is refused must not leave one behind, and what was right in itself may stay.
    message = refused(f"data.source={path}", f"data.folder={tmp_path.parent / (tmp_path.name + '-data')}", command=command)
    for word in words:
        assert word in message


def test_a_model_of_an_unknown_family(refused, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "lama"}')
    message = refused(edit=lambda text: f'[model]\nsource = "{folder}"\n' + text[text.index("[data]") :])
    assert "unknown model family 'lama'" in message
    assert "llama" in message


def test_an_output_that_is_no_folder(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    message = refused(f"train.output={tmp_path / 'file'}")
    assert "train.output" in message
    assert "cannot be used" in message


def test_several_ranks(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE = 2" in refused()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["No such command 'trian'"]),
        (["train"], ["Missing argument"]),
        (["train", "x.toml", "--dry-rum"], ["No such option"]),
        (["bench", "two-gpus"], ["unknown benchmark suite 'two-gpus'"]),
        (["export", "nowhere", "--to", "x"], ["'nowhere' is not the folder of a run"]),
        (["export", ".", "--to", "x"], ["is not the folder of a run"]),
    ],
)
def test_a_wrong_command_line_is_exit_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words)
    assert "Traceback" not in err
    assert tree(tmp_path) == []


def test_an_unforeseen_fault_keeps_its_traceback(tiny_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="many"):
        main(["train", str(tiny_run().file)])


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_an_example(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"Example: octavo {command}" in capsys.readouterr().out


def test_help_version_and_a_wrong_key_load_no_torch(tiny_run):
    program = (
        "import sys\n"
        "from octavo.cli import main\n"
        "codes = [main(['--help']), main(['--version']), main(['train', sys.argv[1], 'optimizer.lrr=1'])]\n"
        "print(codes, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tiny_run().file], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"{octavo.__version__}\n[0, 0, 2] False False\n")


def test_a_dry_run_shows_the_arithmetic_and_writes_nothing(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tiny_run(steps=8)
    before = tree(tmp_path)
    arguments = ["train", str(run.file), "train.global_batch=6", f"data.folder={tmp_path / 'fresh'}", "--dry-run"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tree(tmp_path) == before
    assert found["batch"] == {
        "global_batch": 6, "data_parallel": 1, "micro_batch": 2, "accumulation": 3,
        "tokens_per_step": 6 * 32, "steps": 8, "tokens": 6 * 32 * 8, "epochs": None,
    }  # fmt: skip
    # Embedding (tied), two blocks of query/key/value, projection, gate/up, down and two norms, and the last norm.
    block = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert found["parameters"] == 320 * 32 + 2 * block + 32
    assert f"{found['parameters']:,}" in text
    assert "6 sequences = 1 data-parallel x 2 micro-batch x 3 accumulation" in text
    assert 'schedule = "cosine"' in text


def test_a_dry_run_counts_epochs_once_the_data_is_there(tiny_run, capsys):
    run = tiny_run(steps=8)
    assert main(["prepare", str(run.file), "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert main(["train", str(run.file), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["epochs"] == 8 * 4 / (tokens["train"] // 32)


def test_prepare_first_then_train_makes_the_same_run(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=2)
    own = f"data.folder={tmp_path / 'own'}"
    assert main(["prepare", str(run.file), own]) == 0
    assert str(tmp_path / "own") in capsys.readouterr().out
    assert main(["train", str(run.file), own]) == 0
    direct = tiny_run("direct", steps=2)
    assert main(["train", str(direct.file), f"data.folder={tmp_path / 'other'}"]) == 0
    assert [r["loss"] for r in read_metrics(run.output / "metrics.jsonl")] == [
        r["loss"] for r in read_metrics(direct.output / "metrics.jsonl")
    ]


def test_doctor_speaks_text_and_json(capsys):
    assert main(["doctor"]) == 0
    assert f"octavo {octavo.__version__}" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["octavo"] == octavo.__version__


def test_the_three_commands_of_the_closing_words_work(tiny_run, capsys):
    run = tiny_run(steps=2)
    assert main(["train", str(run.file)]) == 0
    lines = capsys.readouterr().out.split("Next:\n")[1].splitlines()
    assert len(lines) == 3
    for line in lines:
        command = line.split()
        assert command[0] == "octavo"
        assert main(command[1:]) == 0


def test_a_gpu_without_fp8_trains_without_and_says_so():
    from octavo.config import Fp8Config
    from octavo.fp8.recipe import DelayedScaling
    from octavo.hardware import Device
    from octavo.train.setup import choose_fp8

    ampere = Device("NVIDIA A100-SXM4-80GB", None, (8, 0), 79.0, "cuda")
    hopper = Device("NVIDIA H200", None, (9, 0), 139.0, "cuda")
    processor = Device("a CPU", None, None, 16.0, "cpu")

    def chosen(device, native, **values):
        return choose_fp8(Fp8Config.model_validate(values), DelayedScaling(), device, native=native)

    for enabled in (True, "auto"):
        use, note = chosen(ampere, False, enabled=enabled)
        assert not use
        assert "capability 8.0" in note
        assert "8.9" in note
        assert "fp8.emulate = true" in note
        assert "\n" not in note
        assert chosen(ampere, False, enabled=enabled, emulate=True)[0]
        assert chosen(hopper, True, enabled=enabled)[0]
        assert chosen(processor, False, enabled=enabled)[0]
    for device in (ampere, hopper, processor):
        assert not chosen(device, True, enabled=False)[0]
