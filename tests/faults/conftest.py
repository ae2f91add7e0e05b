"""Real `octavo` processes for the fault tests, cheap enough to be killed by the dozen."""

import sys
import time
from pathlib import Path

import pytest

import command_lines

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
import held


def starter(folder):
    """`start("train", file, …)` starts a command line, with HELD_STEP one of `held`. And all that were started."""
    started = []

    def start(*arguments, file_limit=None, **environment):
        process = command_lines.CommandLine(
            held.octavo if "HELD_STEP" in environment else command_lines.octavo,
            folder / f"process-{len(started)}",
            [str(a) for a in arguments],
            environment=environment,
            file_limit=file_limit,
        )
        started.append(process)
        return process

    return start, started


@pytest.fixture
def octavo(tmp_path):
    """Starts command lines; see `starter`. Processes of a failed test are killed."""
    start, started = starter(tmp_path)
    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, tiny_run_in):
    """An undisturbed run of 20 steps, and its seconds: (run, seconds)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = tiny_run_in(folder / "tiny", steps=20, every=4)
    start, _ = starter(folder)
    assert start("prepare", run.file).wait() == 0
    began = time.monotonic()
    process = start("train", run.file)
    assert process.wait() == 0, process.stderr
    return run, time.monotonic() - began
