"""`python -m octavo.launch.supervisor FOLDER`: starts a job, minds it until its end, and writes its state.

It outlives the estimator of `fit(wait=False)`. Its ranks do not outlive it: the launcher dies with it, each rank with the
launcher, and what ranks have started and left behind is ended with the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from octavo.errors import EXIT_FAILED, EXIT_STOPPED, InputError
from octavo.launch import failure, faults, inputs
from octavo.launch.job import identity, now, read, stopped_reason, write

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP_SECONDS = 120.0
_POLL_SECONDS = 0.05


class _Stop:
    """A request to stop: its reason and time."""

    def __init__(self) -> None:
        self.asked, self.at = "", 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):  # schedulers send the last two
            signal.signal(number, self._on_signal)

    def ask(self, why: str) -> None:
        if not self.asked:
            self.asked, self.at = why, time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask("it was stopped")


def main(folder: Path) -> int:
    """Run the job of a folder; returns its exit code."""
    stop = _Stop()
    _adopt(dies_with_parent=os.environ.pop("OCTAVO_LAUNCH_WAITS", "") != "")
    job = read(folder / "job.json")
    state: dict[str, Any] = {"status": "InProgress", "exit_code": None, "reason": "", "began": now(), **identity()}
    write(folder / "state.json", state)
    code = 0
    try:
        code = _run(folder, job, state, stop)
        if stop.asked or code == EXIT_STOPPED:
            state |= {"status": "Stopped", "reason": stopped_reason(code, stop.asked)}
        elif code:
            state |= {"status": "Failed", "reason": failure.reason(folder / "log.txt", job)}
        else:
            state |= {"status": "Completed"}
        if state["status"] != "Failed" and job["send_to"]:
            for part in ("model", "output/data"):
                inputs.send(folder / part, f"{job['send_to'].rstrip('/')}/{folder.name}/{part}", job["output_key"])
        if job["send_checkpoints"]:  # of a failed job too: the next resumes from them
            inside, address, key = job["send_checkpoints"]
            inputs.send(folder / inside, address, key)
    except InputError as error:  # of `send`
        before = f"{state['reason']}. " if state["status"] == "Failed" else ""
        code = code or EXIT_FAILED
        state |= {"status": "Failed", "reason": f"{before}{str(error).rstrip('.')}. The results stay in {folder}"}
    except OSError as error:
        code = EXIT_FAILED
        state |= {"status": "Failed", "reason": str(error).rstrip(".")}
    if state["status"] == "Failed":  # where SageMaker expects the reason
        with contextlib.suppress(OSError):
            (folder / "output" / "failure").write_text(state["reason"] + "\n", encoding="utf-8")
    if folder.is_dir():
        write(folder / "state.json", state | {"exit_code": code, "ended": now()})
    return code


def _run(folder: Path, job: dict[str, Any], state: dict[str, Any], stop: _Stop) -> int:
    """Start the command and wait for its end, asking it to stop where that is due."""
    environment = dict(os.environ, OCTAVO_LAUNCH_PARENT=str(os.getpid()), **{faults.VARIABLE: str(folder / faults.NAME)})
    deadline = None if job["max_run"] is None else time.monotonic() + job["max_run"]
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            job["command"],
            cwd=folder / "code",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=partial(_die_with, os.getpid()),  # this process has no other thread
        )
        told = False
        while (code := process.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                stop.ask(f"{job['runtime_key']} = {job['max_run']} seconds were over")
            if stop.asked and not told:
                told = True
                write(folder / "state.json", state | {"status": "Stopping"})
                process.terminate()
            if stop.asked and time.monotonic() > stop.at + _STOP_SECONDS:
                process.kill()
            if not folder.is_dir():  # removed by hand: nobody reaches the job any more
                process.kill()
            time.sleep(_POLL_SECONDS)
        _end_descendants()
    if code < 0:  # without a launcher that explains it
        names = {int(number): number.name for number in signal.Signals}  # those of real time have none
        with (folder / "log.txt").open("a", encoding="utf-8") as log_text:
            log_text.write(f"octavo: the script was ended by {names.get(-code, f'signal {-code}')}.\n")
    return code if code >= 0 else 128 - code


def _adopt(*, dies_with_parent: bool) -> None:
    """Become the parent of processes that lose theirs; Linux only. dies_with_parent: stop with the process that waits."""
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if dies_with_parent:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _die_with(supervisor: int) -> None:
    """In the job's first process: have the kernel kill it when the supervisor ends; Linux only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it had ended before
        os._exit(EXIT_FAILED)


def _end_descendants() -> None:
    """End the processes that the job has left behind, also those in sessions of their own."""
    for _ in range(100):
        children = _children()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_SECONDS)


def _children() -> list[int]:
    """Living children of this process; those of a process that ends become children too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = path.read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
