"""The command line: what a mistake is answered with, what each command prints, what `--help` costs."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import traceback

import pytest

import octavo
from octavo.cli import main
from octavo.errors import InputError, RunStopped
from octavo.run.metrics import read_metrics

COMMANDS = ("train", "prepare", "describe", "export", "sample", "doctor", "bench")


def tree(folder):
    return sorted((p.relative_to(folder).as_posix(), p.lstat().st_size) for p in folder.rglob("*"))


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
    "the same as a bare word, and the way from a clone": (["log.trackers=wandb"], ["'wandb'", "pip install -e '.[wandb]'"]),
    "a key as an option": (["--optimizer.lr=3"], ["no such option: --optimizer.lr", "did you mean optimizer.lr=3?"]),
    "another name as an option": (["--batch-size", "3"], ["no such option: --batch-size", "did you mean train.global_batch=3"]),
    "a key, a space and a value": (["optimizer.lr", "3"], ["Did you mean optimizer.lr=3?"]),
    "a step that never ends": (["train.global_batch=1000000000"], ["use at most 67108863", "train.global_batch"]),
    "a size with too many digits": (["model.config.num_hidden_layers=2000000000"], ["num_hidden_layers", "at most 16384"]),
    "a corpus that is not there": (["data.source=nowhere.jsonl"], ["nowhere.jsonl"]),
    "a pattern that matches no file": (["data.source=./*.jsonl"], ["./*.jsonl", "matches no file"]),
    "a vocabulary that is too small": (["model.config.vocab_size=256"], ["data.vocab_size = 300", "model.config.vocab_size"]),
    "pretrained weights of a built-in shape": (["model.load=true", "model.config={}"], ["model.load", "built-in shape"]),
    "a margin beyond float32": (["fp8.margin=200"], ["fp8.margin = 200", "64"]),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_wrong_key_is_one_message_and_exit_2(refused, kind):
    overrides, words = KEYS[kind]
    message = refused(*overrides)
    for word in words:
        assert word in message


FOUND_EARLY = (
    "a corpus that is not there",
    "a pattern that matches no file",
    "a vocabulary that is too small",
    "pretrained weights of a built-in shape",
)


@pytest.mark.parametrize("kind", FOUND_EARLY)
def test_a_dry_run_finds_it_too_and_a_run_before_it_prepares_data(refused, monkeypatch, kind):
    def prepare(*_, **__):
        raise AssertionError("data is prepared")

    monkeypatch.setattr("octavo.train.setup.prepare_all", prepare)
    overrides, words = KEYS[kind]
    for more in ([], ["--dry-run"]):
        message = refused(*overrides, f"data.folder={refused.run.folder / 'fresh'}", *more)
        assert all(word in message for word in words)


def test_a_tokenizer_folder_with_more_ids_than_the_model_is_found_before_tokenising(refused, tmp_path):
    from octavo.data.tokenizer import train

    made = train(["some words to learn from, and some more words"] * 9, 280)
    made.save(tmp_path / "tokenizer")
    message = refused(f"data.tokenizer={tmp_path / 'tokenizer'}", "model.config.vocab_size=270", "--dry-run")
    assert f"token ids up to {made.vocab_size - 1}" in message
    assert f"model.config.vocab_size to at least {made.vocab_size}" in message


def test_a_vocabulary_to_learn_is_no_matter_where_none_is_learned(tiny_run, tmp_path, capsys):
    """A corpus of token ids trains no tokenizer, and data that is there may have fewer ids than were asked for."""
    ids = tmp_path / "ids.jsonl"
    ids.write_text((json.dumps({"input_ids": [1, 2, 3] * 30}) + "\n") * 20)
    run = tiny_run()
    dry = ["train", str(run.file), "--dry-run", f"data.folder={tmp_path / 'data'}", "data.vocab_size=9999"]
    assert main([*dry, f"data.source={ids}"]) == 0
    (tmp_path / "few.txt").write_text("abc " * 3000)
    few = f"data.source={tmp_path / 'few.txt'}"
    assert main([*dry, few]) == 2
    assert main(["prepare", *dry[1:2], *dry[3:], few]) == 0
    assert main([*dry, few]) == 0
    capsys.readouterr()


@pytest.fixture
def model_folder(tmp_path):
    """A Hugging Face model folder whose vocabulary fits the tiny run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def loads_from(source):
    return lambda text: f'[model]\nsource = "{source}"\nload = true\n' + text[text.index("[data]") :]


def test_weights_of_another_shape_are_found_from_the_headers(refused, model_folder, capsys):
    path = model_folder / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 64', '"intermediate_size": 96'))
    capsys.readouterr()
    message = refused("--dry-run", edit=loads_from(model_folder))
    assert "model.layers.0.mlp." in message
    assert "(64, 32)" in message
    assert "(96, 32)" in message


@pytest.mark.long
def test_weights_by_an_id_come_from_the_cache_without_a_network(tiny_run, model_folder, tmp_path):
    cached = tmp_path / "cache" / "models--owner--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir()
    model_folder.rename(snapshot)
    run = tiny_run(steps=2)
    run.file.write_text(loads_from("owner/tiny")(run.file.read_text()))
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "octavo.cli", "train", str(run.file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_weights_that_cannot_be_fetched_are_explained(monkeypatch, tmp_path):
    from octavo.errors import InputError
    from octavo.models.sources import weights_folder

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"'owner/none'.*could not be fetched.*hf download owner/none"):
        weights_folder("owner/none")
    cached = tmp_path / "models--owner--bare"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"'owner/bare'.*no \.safetensors file.*hf download owner/bare"):
        weights_folder("owner/bare")


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


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("file", "it is a file"),
        ("file/inner", "is a file"),
        ("loop", "a broken symbolic link"),
        ("loop/inner", "a broken symbolic link"),
        ("x" * 300, "File name too long"),
        ("/proc/nope", "No such file or directory"),
        ("~nobody-of-this-name/x", "no user"),
        (".", "it holds files that are not a run's"),
        ("/", "it holds files that are not a run's"),
        ("checkout", "it holds files that are not a run's (.git/, model/, run.toml), which the run might overwrite"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry-run"])
def test_an_output_that_is_no_folder_for_a_run(refused, tmp_path, output, words, more):
    if output == "/proc/nope" and more:
        pytest.skip("only an attempt shows it")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "checkout" / ".git").mkdir(parents=True)
    (tmp_path / "checkout" / "model").mkdir()
    (tmp_path / "checkout" / "run.toml").write_text("mine")
    message = refused(f"train.output={output}", *more)
    assert "train.output" in message
    assert words in message


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("file", "it is a file"),
        ("file/inner", "is a file"),
        ("loop", "symbolic link"),
        ("x" * 300, "File name too long"),
        (".", "it is not empty"),
        ("~nobody-of-this-name/x", "no such user"),
    ],
)
def test_a_folder_for_an_export_that_cannot_be_used(tmp_path, monkeypatch, capsys, to, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    before = tree(tmp_path)
    assert main(["export", str(tmp_path), "--to", to]) == 2
    err = capsys.readouterr().err
    assert err.startswith("octavo: --to '")
    assert words in err
    assert err.count("\n") == 1
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(refused, tmp_path, tiny_run):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert f"{str(closed)!r} cannot be written" in refused(f"train.output={closed / 'run'}")
    assert "Permission denied" in refused(f"train.output={closed}")
    (tmp_path / "secret.txt").write_text("text")
    (tmp_path / "secret.txt").chmod(0)
    assert "secret.txt" in refused(f"data.source={tmp_path / 'secret.txt'}")
    refused.run.file.chmod(0)
    assert main(["train", str(refused.run.file)]) == 2


def test_several_ranks(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE = 2" in refused()
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert "WORLD_SIZE = 'x'" in refused()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["No such command 'trian'"]),
        (["train"], ["Missing argument"]),
        (["train", "x.toml", "--dry-rum"], ["No such option"]),
        (["bench", "two-gpus"], ["unknown benchmark suite 'two-gpus'"]),
        (["train", "."], ["'.' is a folder", "Give the path of a TOML file"]),
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


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


def test_an_unforeseen_fault_keeps_its_traceback_and_ends_with_one_line(tiny_run, monkeypatch):
    monkeypatch.setattr("octavo.plan.run.check", fail_with(ValueError("unforeseen")))
    with pytest.raises(ValueError, match="unforeseen") as raised:
        main(["train", str(tiny_run().file), "--dry-run"])
    last = traceback.format_exception(raised.value)[-1]
    assert last.startswith(f"Octavo {octavo.__version__} does not expect")
    assert last.endswith("octavo doctor --json\n")
    assert last.count("\n") == 1


@pytest.mark.parametrize("place", ["octavo.plan.run.check", "octavo.config.run.RunConfig.from_file"])
def test_an_interrupt_is_one_line(tiny_run, monkeypatch, capsys, place):
    monkeypatch.setattr(place, fail_with(KeyboardInterrupt()))
    assert main(["train", str(tiny_run().file), "--dry-run"]) == 130
    assert capsys.readouterr().err == "octavo: interrupted.\n"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), 2),
        (OSError(errno.EROFS, "Read-only file system", "x"), 2),
        (OSError(errno.EIO, "Input/output error", "x"), 1),
    ],
    ids=["name", "read-only", "disk"],
)
def test_a_path_that_the_system_refuses_is_one_line(tiny_run, monkeypatch, capsys, fault, code):
    monkeypatch.setattr("octavo.plan.run.check", fail_with(fault))
    assert main(["train", str(tiny_run().file), "--dry-run"]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert fault.strerror in err
    assert ("'x' cannot be used" in err) == (code == 2)


def test_an_error_is_left_for_torchrun(tmp_path, monkeypatch, capsys):
    """In the form that torch.distributed.elastic reads into its report."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert main(["train", "no.toml"]) == 2
    said = capsys.readouterr().err.strip()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert f"octavo: {failure.message['message']}" == said
    assert failure.timestamp > 0


def test_an_export_to_a_full_disk_is_one_message(tiny_run, tmp_path, monkeypatch, capsys):
    run = tiny_run(steps=2)
    assert main(["train", str(run.file)]) == 0
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        assert main(["export", str(run.output), "--to", str(tmp_path / "hf")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    err = capsys.readouterr().err
    assert f"'{tmp_path}/hf' could not be written" in err
    assert not (tmp_path / "hf").exists()
    assert "bytes are free" in err
    assert err.count("\n") == 1


def test_an_export_to_a_place_that_cannot_be_made_is_one_message(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=2)
    assert main(["train", str(run.file)]) == 0
    capsys.readouterr()
    (tmp_path / "file").write_text("mine")
    for to in ("/proc/nope", str(tmp_path / "file" / "inner")):
        assert main(["export", str(run.output), "--to", to]) == 2
        err = capsys.readouterr().err
        assert to in err
        assert err.count("\n") == 1


def test_a_fault_of_the_machine_is_one_line_and_exit_1(tiny_run, monkeypatch, capsys):
    fault = OSError(28, "No space left on device", "/full/disk")
    monkeypatch.setattr("octavo.plan.run.check", fail_with(fault))
    assert main(["train", str(tiny_run().file), "--dry-run"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("octavo: no space for '/full/disk': ")
    assert err.endswith(" bytes are free (No space left on device). Free some.\n")


def test_a_full_output_is_named(tiny_run, monkeypatch, capsys):
    monkeypatch.setattr("octavo.plan.run.check", fail_with(OSError(28, "No space left on device")))
    assert main(["train", str(tiny_run().file), "--dry-run"]) == 1
    assert capsys.readouterr().err.endswith(
        "no space for standard output, or for a file (No space left on device). Free some.\n"
    )


def test_a_deleted_working_folder_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "octavo: the current folder was deleted: change to another one.\n"


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


@pytest.mark.usefixtures("trials_once")
def test_doctor_speaks_text_and_json(capsys):
    assert main(["doctor"]) == 0
    assert f"octavo {octavo.__version__}" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["octavo"] == octavo.__version__


def test_a_rank_outside_of_its_world(refused, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert "RANK = 1 in the environment, but WORLD_SIZE is not set" in refused()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "RANK = 1 in the environment, but WORLD_SIZE = 1: ranks count from 0" in refused()


def ended_by(error, monkeypatch):
    import octavo.cli

    def fail(run_file, overrides):
        raise error

    monkeypatch.setattr(octavo.cli, "_config", fail)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return main(["train", "run.toml"])


@pytest.mark.parametrize(
    ("rank", "error", "code", "said"),
    [
        ("0", RunStopped("stopped, saved."), 75, "octavo: stopped, saved.\n"),
        ("1", RunStopped("stopped, saved."), 75, ""),  # the first one says it
        ("1", InputError("no such folder."), 2, "octavo: rank 1: no such folder.\n"),  # perhaps on this host alone
    ],
)
def test_of_several_ranks_one_says_what_concerns_all(rank, error, code, said, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ended_by(error, monkeypatch) == code
    assert capsys.readouterr().err == said


@pytest.mark.usefixtures("trials_once")
def test_what_a_launcher_left_in_the_environment_does_not_silence_a_command(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")  # as in a pod that is the second node of a job
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert ended_by(RunStopped("stopped, saved."), monkeypatch) == 75
    assert capsys.readouterr().err == "octavo: stopped, saved.\n"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_gpu_without_fp8_trains_without_and_says_so():
    from octavo.config.fp8 import Fp8Config
    from octavo.fp8.recipe import DelayedScaling
    from octavo.hardware import Device
    from octavo.plan.run import choose_fp8

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
        assert chosen(processor, False, enabled=enabled, emulate=True)[0]
    assert chosen(processor, False, enabled=True)[0]
    use, note = chosen(processor, False, enabled="auto")
    assert not use
    assert "never faster" in note
    assert "fp8.enabled = true" in note
    for device in (ampere, hopper, processor):
        assert not chosen(device, True, enabled=False)[0]
