"""Files that are no run files, overrides, and names of other trainers."""

import os
from pathlib import Path

import pytest
from minimal_run import MINIMAL, message

from octavo.config.run import RunConfig, known_keys
from octavo.config.synonyms import _SYNONYMS, closest
from octavo.errors import InputError


def test_a_missing_file_is_answered_with_the_nearest(run_file, tmp_path):
    said = message(RunConfig.from_file, tmp_path / "my-rum.toml")
    assert str(tmp_path / "my-rum.toml") in said
    assert f"Did you mean {run_file}?" in said
    said = message(RunConfig.from_file, tmp_path / "none" / "x.toml")
    assert "does not exist" in said
    assert "Did you mean" not in said
    said = message(RunConfig.from_file, tmp_path)
    assert f"is a folder. Did you mean {run_file}?" in said
    run_file.rename(tmp_path / "pyproject.toml")
    assert "Did you mean" not in message(RunConfig.from_file, tmp_path)


def test_presets_are_found_outside_of_a_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunConfig.from_file("presets/demo.toml").train.output == "runs/demo"
    said = message(RunConfig.from_file, "presets/demmo.toml")
    assert "demo.toml?" in said
    (tmp_path / "presets").mkdir()  # a folder of one's own hides them all
    assert "'presets/demo.toml' does not exist" in message(RunConfig.from_file, "presets/demo.toml")


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optimizer.lr=1e-4", lambda c: c.optimizer.lr == 1e-4),
        ("optimizer.lr=3", lambda c: c.optimizer.lr == 3.0),
        (" optimizer.lr = 0.5 ", lambda c: c.optimizer.lr == 0.5),
        ("train.steps=1_000", lambda c: c.train.steps == 1000),
        ("train.output=runs/two", lambda c: c.train.output == "runs/two"),
        ('train.output="runs/a b"', lambda c: c.train.output == "runs/a b"),
        ("train.output='runs/c'", lambda c: c.train.output == "runs/c"),
        ("train.output=a=b", lambda c: c.train.output == "a=b"),
        ("fp8.enabled=true", lambda c: c.fp8.enabled is True),
        ("fp8.enabled=auto", lambda c: c.fp8.enabled == "auto"),
        ("data.source=texts/*.jsonl", lambda c: c.data.source == "texts/*.jsonl"),
        ('data.source=["a.txt", "b.txt"]', lambda c: c.data.source == ["a.txt", "b.txt"]),
        ("optimizer.betas=[0.8, 0.9]", lambda c: c.optimizer.betas == (0.8, 0.9)),
        ("fp8.skip=[]", lambda c: c.fp8.skip == []),
        ("model.config.hidden_size=96", lambda c: c.model.config == {"hidden_size": 96}),
        ("model.config.hidden_act=gelu", lambda c: c.model.config == {"hidden_act": "gelu"}),
        ("model.config.rope_parameters.factor=2.0", lambda c: c.model.config == {"rope_parameters": {"factor": 2.0}}),
    ],
)
def test_overrides(run_file, override, read):
    assert read(RunConfig.from_file(run_file, [override]))


def test_overrides_join_what_the_file_says_and_the_last_wins(run_file):
    run_file.write_text(MINIMAL + "[model.config]\nhidden_size = 32\nvocab_size = 99\n")
    config = RunConfig.from_file(run_file, ["model.config.hidden_size=64", "train.steps=3", "train.steps=4"])
    assert config.model.config == {"hidden_size": 64, "vocab_size": 99}
    assert config.train.steps == 4
    assert config.train.global_batch == 4


@pytest.mark.parametrize("override", ["optimizer.lr", "lr=1", "=1", ".lr=1", "optimizer.=1", "", "a..b=1"])
def test_an_override_of_bad_form_is_shown_with_an_example(run_file, override):
    said = message(RunConfig.from_file, run_file, [override])
    assert repr(override) in said
    assert "section.key=value" in said


def test_mistakes_in_overrides(run_file):
    assert "source is a value" in message(RunConfig.from_file, run_file, ["model.source.name=x"])
    assert "Did you mean optimizer.lr?" in message(RunConfig.from_file, run_file, ["optimizer.rl=1"])
    assert "optimizer.lr = 'fast'" in message(RunConfig.from_file, run_file, ["optimizer.lr=fast"])
    assert "model.load must be false" in message(
        RunConfig.from_file, run_file, ["model.load=true", "model.config.vocab_size=9"]
    )


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer.learning_rate=1", "optimizer.lr?"),
        ("train.learning-rate=1", "optimizer.lr?"),
        ("train.batch_size=8", "train.global_batch (sequences in an optimizer step"),
        ("train.per_device_train_batch_size=8", "train.micro_batch (sequences in a forward of one rank"),
        ("train.gradient_accumulation_steps=8", "train.global_batch (train.micro_batch x ranks x accumulation steps)?"),
        ("optimizer.warmup_ratio=0.1", "optimizer.warmup_steps (in optimizer steps: the ratio x train.steps)?"),
        ("optimizer.max_grad_norm=1", "optimizer.clip?"),
        ("train.bf16=true", 'model.dtype (model.dtype = "bfloat16", the default)?'),
        ("train.max_steps=9", "train.steps?"),
        ("data.context_length=9", "data.sequence_length?"),
        ("train.output_dir=x", "train.output?"),
        ("model.model_name_or_path=x", "model.source (and model.load = true for its weights)?"),
        ("data.dataset=x", "data.source?"),
        ("train.save_steps=5", "checkpoint.every?"),
        ("train.eval_steps=5", "train.validate_every?"),
        ("log.logging_steps=5", "log.every?"),
        ("train.Steps=5", "train.steps?"),
        ("Train.Steps=5", "train.steps?"),
        ("Train.steps=5", "train?"),
        ("hparams.learning_rate=5", "optimizer.lr?"),
        ("checkpoint.async_=true", "checkpoint.async?"),
    ],
)
def test_a_name_of_other_trainers_is_answered_with_the_key(run_file, override, meant):
    assert f"Did you mean {meant}" in message(RunConfig.from_file, run_file, [override])


def test_every_name_of_other_trainers_leads_to_a_known_key_and_is_none_itself():
    known = known_keys()
    for name, key, _ in _SYNONYMS:
        if key in known:
            assert f"{key.partition('.')[0]}.{name}" not in known
            assert closest(name, known)[0] in known
    assert closest("num_train_epochs", known)[0] == "train.epochs"
    assert closest("xyzzy", known) == (None, "")


def test_a_section_that_is_a_value_is_refused_beside_keywords_too(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f"optimizer = 3\n{MINIMAL}")
    with pytest.raises(InputError, match=r"optimizer = 3: Input should be"):
        RunConfig.from_file(file, sections={"optimizer": {"lr": 1e-4}})


def test_a_key_outside_of_all_sections_is_answered_with_its_section(run_file):
    run_file.write_text("learning_rate = 3\n" + MINIMAL)
    assert "learning_rate outside of all sections. Did you mean optimizer.lr?" in message(RunConfig.from_file, run_file)
    run_file.write_text(MINIMAL.replace("[train]", "[[train]]"))
    assert "write [train], not [[train]]" in message(RunConfig.from_file, run_file)
    run_file.write_text(MINIMAL + '[log]\ntrackers = "wandb"\n')
    assert 'write a list: ["wandb"]' in message(RunConfig.from_file, run_file)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lr=1"], ["Did you mean optimizer.lr=1?"]),
        (["--lr", "3"], ["Did you mean optimizer.lr=3?"]),
        (["optimizer.lr", "3"], ["Did you mean optimizer.lr=3?"]),
        (["optimizer.lr", "=", "3"], ["Did you mean optimizer.lr=3?"]),
        (["train.steps:4"], ["Did you mean train.steps=4?"]),
        (["train/steps=4"], ["Did you mean train.steps=4?"]),
        (["train.steps=", "3"], ["has no value", "Write train.steps=3"]),
        (["train.output="], ["has no value"]),
        (["optimizer=3"], ["optimizer is a section", "optimizer.lr"]),
        (["other.toml"], ["One command takes one run file"]),
        (["optimizer.lr.x=3"], ["lr is a value, not a table"]),
        (["train.output='a"], ["the quote is not closed"]),
        (["optimizer.lr=3e-4,"], ["write 0.0003"]),
        (['optimizer.lr="3e-4"'], ["write 0.0003"]),
        (["train.steps=1e3"], ["write 1000"]),
        (["train.steps=1,000"], ["write 1000"]),
        (["train.steps=\u0664"], ["write 4"]),
        (["fp8.enabled=True"], ["write true"]),
        (["train.micro_batch=None"], ["leave the key out"]),
        (["train.steps=1e400"], ["train.steps = inf"]),
        ([f"train.seed={10**30}"], [f"train.seed = {10**30}", f"at most {2**63 - 1}"]),
        ([f"train.steps={'9' * 5000}"], ["train.steps", "…"]),
        (["optimizer.lr=1\ntrain.steps=7"], ["optimizer.lr"]),
        (["log.trackers=wandb,mlflow"], ["'mlflow'", "tensorboard"]),
        (["log.trackers=wandb,wandb"], ["listed twice"]),
        (["train.output=~nobody-of-this-name/x"], ["train.output", "no user 'nobody-of-this-name'"]),
    ],
    ids=str,
)
def test_a_plausible_form_of_an_override_is_answered_with_the_right_one(run_file, overrides, words):
    said = message(lambda: RunConfig.from_file(run_file, overrides).output)
    assert all(word in said for word in words), said
    assert len(said) < 1500


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("log.trackers=wandb", lambda c: c.log.trackers == ["wandb"]),
        ("log.trackers=wandb,trackio", lambda c: c.log.trackers == ["wandb", "trackio"]),
        ("log.trackers=[wandb, trackio]", lambda c: c.log.trackers == ["wandb", "trackio"]),
        ('log.trackers=["wandb", "trackio"]', lambda c: c.log.trackers == ["wandb", "trackio"]),
        ("fp8.skip=layers.0.*", lambda c: c.fp8.skip == ["layers.0.*"]),
        ("fp8.skip=[layers.0.*,layers.[12].*]", lambda c: c.fp8.skip == ["layers.0.*", "layers.[12].*"]),
        ("fp8.skip=layers.[1,2].*", lambda c: c.fp8.skip == ["layers.[1,2].*"]),
        ("data.source=[a.txt,b.txt]", lambda c: c.data.source == ["a.txt", "b.txt"]),
        ("data.source=a.txt,b.txt", lambda c: c.data.source == ["a.txt", "b.txt"]),
        ("data.source=[ab].txt", lambda c: c.data.source == "[ab].txt"),
        ("optimizer.betas=0.8,0.9", lambda c: c.optimizer.betas == (0.8, 0.9)),
        ("train.output=2026-01-31", lambda c: c.train.output == "2026-01-31"),
        ("train.output=007", lambda c: c.train.output == "007"),
        ("train.output=17", lambda c: c.train.output == "17"),
        ("train.output=~/x", lambda c: c.output == Path("~/x").expanduser()),
    ],
)
def test_a_bare_word_is_read_by_the_type_of_its_key(run_file, override, read):
    assert read(RunConfig.from_file(run_file, [override]))


def test_a_file_whose_name_has_a_comma_stays_one_source(run_file, tmp_path):
    (tmp_path / "a,b.txt").write_text("text")
    assert RunConfig.from_file(run_file, [f"data.source={tmp_path}/a,b.txt"]).data.source == f"{tmp_path}/a,b.txt"


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbf" + MINIMAL.encode(), MINIMAL.replace("\n", "\r\n").encode(), MINIMAL.replace("\n", "\n\t").encode()],
    ids=["byte order mark", "CRLF", "tabs"],
)
def test_files_of_other_editors_are_read(run_file, content):
    run_file.write_bytes(content)
    assert RunConfig.from_file(run_file).train.steps == 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (MINIMAL.encode("utf-16"), "byte 1 is not UTF-8"),
        (b"\0" * 10_000, "not valid TOML"),
        (b"[model]\nsource = " + b"[" * 10_000, "nested too deeply"),
        (b"[train]\nsteps = " + b"9" * 5000, "thousands of digits"),
        ((".".join(["a"] * 3000) + " = 1\n").encode(), "unknown section a"),
        (b"", "add a [model] section"),
    ],
    ids=["UTF-16", "zeros", "nested", "digits", "dots", "empty"],
)
def test_a_file_that_is_no_run_file_is_one_message(run_file, content, words):
    run_file.write_bytes(content)
    assert words in message(RunConfig.from_file, run_file)


def test_a_path_that_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    (tmp_path / "file").write_text("")
    assert "is a pipe or a device" in message(RunConfig.from_file, tmp_path / "pipe.toml")
    assert "is a broken symbolic link" in message(RunConfig.from_file, tmp_path / "loop.toml")
    assert "does not exist" in message(RunConfig.from_file, tmp_path / "file" / "x.toml")
    assert "File name too long" in message(RunConfig.from_file, tmp_path / ("x" * 300))
    assert f"run file {str(Path.home() / 'none.toml')!r} does not exist" in message(RunConfig.from_file, "~/none.toml")
