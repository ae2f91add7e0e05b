"""The folder of a run: what may be in it before, and a disk that is full."""

import errno
import os

import pytest

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
    assert f"something else than a run ({name})" in capsys.readouterr().err
    assert [entry.name for entry in run.output.iterdir()] == [name]
    assert (run.output / name).read_text() == "mine"


def test_a_start_that_was_killed_after_its_first_file_is_continued(tiny_run, monkeypatch, capsys):
    run = tiny_run(steps=1)
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
