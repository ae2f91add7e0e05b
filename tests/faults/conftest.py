"""Real `octavo` processes for the fault tests, cheap enough to be killed by the dozen."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


class Process:
    """An `octavo` command line that runs."""

    def __init__(self, runner, folder, arguments, environment, file_limit):
        self._runner, self.folder = runner, folder
        order = {"arguments": arguments, "environment": environment, "folder": str(folder), "file_limit": file_limit}
        runner.stdin.write(json.dumps(order) + "\n")
        runner.stdin.flush()
        self.pid = self._answer()["pid"]
        self._status = None

    def _answer(self):
        return json.loads(self._runner.stdout.readline())

    def wait(self):
        """Exit code, or minus the signal that ended it."""
        if self._status is None:
            self._status = self._answer()["status"]
        return self._status

    def kill(self, number=signal.SIGKILL):
        """Send a signal; a process that has ended on its own is left alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait_for_steps(self, metrics, count):
        """Return once `count` lines of metrics are there."""
        while not metrics.is_file() or metrics.read_bytes().count(b"\n") < count:
            time.sleep(0.002)

    @property
    def stdout(self):
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self):
        return (self.folder / "stderr").read_text()


def start_runner():
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("runner.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def stop_runner(runner):
    runner.stdin.close()
    runner.wait()
    runner.stdout.close()


@pytest.fixture(scope="session")
def runners():
    """Two runners, for the test in which two runs meet."""
    both = [start_runner(), start_runner()]
    yield both
    for runner in both:
        stop_runner(runner)


def starter(runners, folder):
    """`start("train", file, …)` starts a command line; `second=True` beside another that runs. And all that were started."""
    started = []

    def start(*arguments, second=False, file_limit=None, **environment):
        own = folder / f"process-{len(started)}"
        own.mkdir(parents=True)
        process = Process(runners[second], own, [str(a) for a in arguments], environment, file_limit)
        started.append(process)
        return process

    return start, started


@pytest.fixture
def octavo(runners, tmp_path):
    """Starts command lines; see `starter`. Processes of a failed test are killed."""
    start, started = starter(runners, tmp_path)
    yield start
    for process in started:
        if process._status is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def undisturbed(runners, tmp_path_factory, tiny_run_in):
    """An undisturbed run of 20 steps, and its seconds: (run, seconds)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = tiny_run_in(folder / "tiny", steps=20, every=4)
    start, _ = starter(runners, folder)
    assert start("prepare", run.file).wait() == 0
    began = time.monotonic()
    process = start("train", run.file)
    assert process.wait() == 0, process.stderr
    return run, time.monotonic() - began
