"""Errors that several ranks of a job meet: printed once, and the first is the job's reason."""

import subprocess
import sys

import pytest

from octavo.launch import JobFailed, PyTorch, faults
from octavo.launch.faults import Faults, first

RANKS = {"torch_distributed": {"enabled": True}}
SCRIPT = """
import os, sys
mode = sys.argv[2]
if mode == "all":
    raise ValueError("no such thing")
if mode == "said":
    from octavo.errors import InputError
    raise InputError("degree = 3 divides nothing. Set it to 4.")
if mode == "children":  # those of a rank do not count
    import subprocess
    subprocess.run([sys.executable, "-c", "raise KeyError('of a child')"], stderr=subprocess.DEVNULL)
    sys.exit("the end")
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("of rank 1")
dist.all_reduce(torch.ones(2))
"""


@pytest.fixture
def failed(tmp_path, monkeypatch, capfd):
    """`failed(mode)`: the error of a job, of two ranks but for "children", and its log as it was printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(mode):
        ranks = {} if mode == "children" else {"instance_count": 2, "distribution": RANKS}
        one = PyTorch("train.py", hyperparameters={"mode": mode}, instance_type="local", **ranks)
        with pytest.raises(JobFailed) as raised:
            one.fit()
        return str(raised.value), capfd.readouterr().out

    return run


def test_an_error_of_all_ranks_is_printed_once(failed):
    error, log = failed("all")
    assert log.count("Traceback") == log.count("ValueError: no such thing") == 1
    assert "failed with exit code 1: ValueError: no such thing. Its log is" in error


def test_a_message_of_octavo_is_the_error_alone(failed):
    error, log = failed("said")
    assert log == ""
    assert error.count("degree = 3 divides nothing. Set it to 4.") == 1
    assert "exit code 2" in error


def test_the_reason_is_the_first_error_and_not_those_of_ranks_that_lost_their_peer(failed):
    error, log = failed("lost")
    assert "failed with exit code 1: ValueError: of rank 1. " in error
    assert log.count("Traceback") == 1
    assert "Connection closed" not in log


def test_errors_of_a_ranks_children_are_not_the_jobs(failed):
    assert "its log ends with: the end" in failed("children")[0]


def test_the_file_tells_what_to_print(tmp_path, monkeypatch):
    path = tmp_path / "faults.jsonl"
    assert first(path) == ""
    assert Faults(path, 1).record("RuntimeError: Connection closed by peer", "RuntimeError: Connection closed by peer")
    assert Faults(path, 0).record("trace\nOSError: a", "OSError: a")
    assert not Faults(path, 2).record("trace\nOSError: a", "OSError: a")
    assert Faults(path, 3).record("trace\nOSError: b", "OSError: b")
    assert not Faults(path, 4).record("RuntimeError: Broken pipe 4", "RuntimeError: Broken pipe 4")
    assert first(path) == "OSError: a"
    assert Faults(tmp_path / "gone" / "x", 0).record("a", "a")
    monkeypatch.setenv(faults.VARIABLE, str(path))
    assert faults.of_this_process() is not None
    assert faults.of_this_process() is None


def test_an_error_of_octavo_in_a_thread_is_one_line(tmp_path):
    (tmp_path / "threads.py").write_text(
        "import threading\nfrom octavo.launch import PyTorch\n"
        "def launch(): PyTorch('nowhere.py', instance_type='local')\n"
        "def other(): raise KeyError('x')\n"
        "for each in (launch, other):\n    t = threading.Thread(target=each, daemon=True); t.start(); t.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "octavo.compat", "threads.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr.startswith(f"octavo: {tmp_path}/threads.py, line 3: entry_point = 'nowhere.py' is not in")
    assert done.stderr.count("Traceback") == 1
    assert "KeyError: 'x'" in done.stderr
