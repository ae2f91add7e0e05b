"""The folder of a run: what may be in it before, and a disk that is full."""

import errno
import os

import pytest
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig

from octavo.cli import main
from octavo.run import folder


def test_files_that_others_open_first_are_no_reason_to_refuse(tiny_run):
    run = tiny_run(steps=1)
    run.output.mkdir()
    for name in ("slurm-1.out", "train.log"):
        (run.output / name).write_text("mine")
    (run.output / ".environment.json.1-ab.tmp").write_text("")  # of a start that was killed
    assert main(["train", str(run.file)]) == 0
    assert (run.output / "train.log").read_text() == "mine"
    assert main(["train", str(run.file)]) == 0


@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl", "model.safetensors"])
def test_a_file_of_somebody_is_not_overwritten(tiny_run, capsys, name):
    run = tiny_run(steps=1)
    run.output.mkdir()
    (run.output / name).write_text("mine")
    assert main(["train", str(run.file)]) == 2
    assert f"not a run's ({name})" in capsys.readouterr().err
    assert [entry.name for entry in run.output.iterdir()] == [name]
    assert (run.output / name).read_text() == "mine"


def test_a_start_that_was_killed_after_its_first_file_is_continued(tiny_run, monkeypatch, capsys):
    run = tiny_run(steps=3)
    write = folder.write_atomic

    def full(path, data):
        if path.name == "run.toml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    monkeypatch.setattr(folder, "write_atomic", full)
    assert main(["train", str(run.file)]) == 1
    err = capsys.readouterr().err
    assert f"the run's files could not be written to {run.output}: No space left on device" in err
    assert "bytes are free" in err
    assert err.count("\n") == 1
    assert (run.output / "environment.json").is_file()
    monkeypatch.undo()
    assert main(["train", str(run.file)]) == 0


def test_a_start_that_saved_nothing_leaves_no_tokenizer_to_the_next(tiny_run, tmp_path):
    run, source = tiny_run(steps=3), tmp_path / "model"
    config = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(**config).save_pretrained(source)
    GenerationConfig(max_new_tokens=7).save_pretrained(source)
    text = run.file.read_text()
    run.file.write_text(f'[model]\nsource = "{source}"\n' + text[text.index("[data]") :])
    diverging = ["optimizer.lr=1e30", "optimizer.clip=0", "optimizer.warmup_steps=0"]
    assert main(["train", str(run.file), *diverging]) == 1
    assert not list((run.output / "checkpoints").glob("step-*"))
    run.file.write_text(text)
    assert main(["train", str(run.file), "data.vocab_size=270"]) == 0
    assert Tokenizer.from_file(str(run.output / "tokenizer" / "tokenizer.json")).get_vocab_size() == 270
    assert sorted(path.name for path in (run.output / "model").iterdir()) == ["config.json"]
