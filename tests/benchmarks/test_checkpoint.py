"""The checkpoint suite on a CPU: what two ranks save one restores, the figures are there, and nothing stays on the disk."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import checkpoint
from benchmarks.cases import CASES
from benchmarks.checkpoint import Fingerprint, difference
from benchmarks.plain import PlainDecoder
from benchmarks.records import render
from benchmarks.run import run_suite
from octavo.errors import InputError

SECONDS = [f"{what}_seconds" for what in ("build", "save", "stall", "first_stall", "whole", "verify", "restore")]


def run(tmp_path, **changes):
    asked = {
        "cases": ["tiny"], "steps": 2, "warmup": 2, "output": tmp_path / "results", "device": "cpu", "gpus": 2,
        "folder": tmp_path / "disk", "command": "python -m benchmarks checkpoint", **changes,
    }  # fmt: skip
    return run_suite("checkpoint", **asked)


@pytest.mark.long
def test_what_two_ranks_save_one_restores(tmp_path, forked_workers):
    said = []
    results = run(tmp_path, say=said.append)
    assert json.loads((tmp_path / "results" / "checkpoint-tiny.json").read_text()) == results
    assert list((tmp_path / "disk").iterdir()) == []
    (figures,) = results["rows"]
    assert "error" not in figures, figures
    assert [figures[key] for key in ("workload", "entry", "head", "gpus", "restore_gpus")] == [
        "tiny", "octavo-delayed", "bf16", 2, 1,
    ]  # fmt: skip
    parameters = sum(p.numel() for p in PlainDecoder(CASES["tiny"].spec).parameters())
    assert figures["bytes"] > 12 * parameters  # weights and two moments in float32
    assert all(figures[key] > 0 for key in SECONDS)
    assert figures["stall_seconds"] <= figures["whole_seconds"]
    assert figures["save_gb_per_second"] == pytest.approx(figures["bytes"] / figures["save_seconds"] / 1e9)
    assert figures["restore_gb_per_second"] == pytest.approx(figures["bytes"] / figures["restore_seconds"] / 1e9)
    assert figures["steps_while_writing"] >= 1
    assert min(figures["step_ms"], figures["step_ms_while_writing"]) > 0
    assert figures["tensors_compared"] == 10
    assert figures["restored_loss"] == pytest.approx(figures["loss"], rel=1e-4)
    assert abs(figures["loss"] - math.log(512)) < 0.5
    assert len(said) <= 8
    text = io.StringIO()
    render(results, Console(file=text, width=80))
    assert f"{figures['save_seconds']:.1f}" in text.getvalue()
    assert "…" not in text.getvalue()


@pytest.mark.long
def test_a_rank_that_fails_leaves_no_files(tmp_path, break_rank_1, forked_workers, monkeypatch):
    monkeypatch.setattr("benchmarks.group.GRACE_SECONDS", 1.0)  # no process ends
    break_rank_1("raise RuntimeError('no device')")
    (figures,) = run(tmp_path, entries=["octavo-bf16"])["rows"]
    assert figures["error"] == "rank 1: RuntimeError: no device"
    assert figures["build_seconds"] > 0
    assert list((tmp_path / "disk").iterdir()) == []


def test_folders_and_options_are_checked_before_a_run(tmp_path):
    (tmp_path / "file").touch()
    said = []
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/octavo")):
        with pytest.raises(InputError, match=f"^--folder {folder} cannot be written to: "):
            run(tmp_path, folder=folder, say=said.append)
    for option, value in (("folder", tmp_path), ("restore_gpus", 1), ("saves", 3)):
        with pytest.raises(InputError, match=f"{value}: only the suite checkpoint saves. Leave this out of the suite one-gpu"):
            run_suite("one-gpu", cases=["tiny"], device="cpu", command="python -m benchmarks", **{option: value})
    assert not said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_does_not_come_back_is_an_error():
    saved = Fingerprint({"weight of a": "1", "FP8 state": "2"}, 6.0)
    assert difference(saved, Fingerprint({"weight of a": "1", "FP8 state": "2"}, 6.001)) is None
    assert difference(saved, Fingerprint({"weight of a": "1", "FP8 state": "3"}, 6.0)) == (
        "FP8 state was restored with other content than was saved"
    )
    assert difference(saved, Fingerprint({"weight of a": "1"}, 6.0)) is not None
    for loss in (6.1, math.nan):
        assert difference(saved, Fingerprint(saved.digests, loss)) == f"the next loss is {loss} after restoring, and was 6.0"


def test_a_loss_that_is_no_number_is_an_error_in_a_file_of_json(tmp_path, monkeypatch):
    class Diverged:
        started = 0.0
        close = staticmethod(lambda: None)

        def __init__(self, *asked, **options):
            pass

        def ask(self, do, **arguments):
            if do.startswith("save"):
                (Path(arguments["folder"]) / f"step-{arguments['step']}").mkdir()
            seconds = dict.fromkeys(("stall_seconds", "whole_seconds", "verify_seconds", "restore_seconds"), 1.0)
            return [{**seconds, "seconds": 1.0 if do == "save" else [1.0], "bytes": 1, "loss": math.nan, "digests": {}}]

    monkeypatch.setattr(checkpoint, "Group", Diverged)
    run(tmp_path, entries=["octavo-bf16"])
    (figures,) = json.loads((tmp_path / "results" / "checkpoint-tiny.json").read_text())["rows"]
    assert figures["error"] == "the next loss is nan after restoring, and was nan"
    assert "loss" not in figures
