"""Trackers: what they print stays out of stdout, and their failures cost a run nothing but the curve."""

import importlib.util
import json
from typing import ClassVar

import pytest

from octavo.cli import main
from octavo.run import trackers
from octavo.run.metrics import read_metrics
from octavo.train import loop


class Chatty:
    """Prints wherever it can, and fails where its test says so."""

    fails = ()
    events: ClassVar = []

    def __init__(self, folder, config, first_step):
        self.events.append("open")
        print("a banner")
        if "open" in self.fails:
            raise RuntimeError("no key is set\nand more")

    def log(self, step, values):
        self.events.append(step)
        print("a step")
        if step in self.fails:
            raise OSError("the server is gone")

    def close(self):
        self.events.append("close")
        print("a summary")
        if "close" in self.fails:
            raise OSError("the server is gone")


class Quiet(Chatty):
    """A second one, which never fails."""

    fails = ()
    events: ClassVar = []


@pytest.fixture
def run(tiny_run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name in trackers.TRACKERS or found(name, *a))
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Chatty)
    monkeypatch.setitem(trackers.TRACKERS, "trackio", Quiet)
    monkeypatch.setattr(Chatty, "events", [])
    monkeypatch.setattr(Quiet, "events", [])
    run = tiny_run(steps=3)
    run.command = ["train", str(run.file), "log.trackers=['trackio', 'wandb']", "--json"]
    return run


def test_what_a_tracker_prints_leaves_stdout_to_the_json(run, capsys):
    assert main(run.command) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["run"]["steps"] == 3
    assert all(line in captured.err for line in ("a banner", "a step", "a summary"))
    assert Chatty.events == Quiet.events == ["open", 1, 2, 3, "close"]


def test_a_tracker_that_does_not_open_is_a_mistake_of_the_input_before_a_model_is_built(run, monkeypatch, capsys):
    monkeypatch.setattr(Chatty, "fails", ("open",))
    monkeypatch.setattr(loop, "build", None)
    assert main(run.command) == 2
    err = capsys.readouterr().err
    assert "log.trackers names 'wandb', which does not start: RuntimeError: no key is set. Log in" in err
    assert "WANDB_MODE=offline" in err
    assert Quiet.events == ["open", "close"]
    assert not run.output.exists()


def test_a_tracker_that_fails_later_is_dropped_with_one_warning(run, monkeypatch, capsys):
    monkeypatch.setattr(Chatty, "fails", (2,))
    assert main(run.command) == 0
    assert capsys.readouterr().err.count("octavo: log.trackers: wandb failed at step 2") == 1
    assert Chatty.events == ["open", 1, 2]
    assert Quiet.events == ["open", 1, 2, 3, "close"]
    assert len(read_metrics(run.output / "metrics.jsonl")) == 3


def test_a_tracker_that_cannot_be_closed_is_a_warning(run, monkeypatch, capsys):
    monkeypatch.setattr(Chatty, "fails", ("close",))
    assert main(run.command) == 0
    captured = capsys.readouterr()
    assert "wandb could not be closed (OSError: the server is gone)" in captured.err
    assert Quiet.events[-1] == "close"
