"""`python -m octavo.launch.supervisor FOLDER`: starts a job, watches it until its end, and writes its state.

It outlives the estimator of `fit(wait=False)`. Its ranks do not outlive it: the launcher dies with it, each rank with the
launcher, and processes that ranks leave behind are ended with the job.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from octavo.errors import EXIT_FAILED, EXIT_STOPPED, InputError
from octavo.launch import addresses, failure, faults
from octavo.launch.job import identity, now, read, stopped_reason, write
from octavo.supervision import Supervisor, die_with_parent, signal_name

_STOP_SECONDS = 120.0


def main(folder: Path) -> int:
    """Run the job of a folder; returns its exit code."""
    # A script expects SIGTERM, not schedulers' other signals. A signal that the caller ignores must not end the job.
    with Supervisor(sends=signal.SIGTERM, patience=_STOP_SECONDS, always=True) as processes:
        if waits := os.environ.pop("OCTAVO_LAUNCH_WAITS", ""):  # the process whose end also ends the job
            die_with_parent(int(waits), signal.SIGTERM)
        return _main(folder, processes)


def _main(folder: Path, processes: Supervisor) -> int:
    """Run the job from its first state to its last."""
    job = read(folder / "job.json")
    state: dict[str, Any] = {"status": "InProgress", "exit_code": None, "reason": "", "began": now(), **identity()}
    write(folder / "state.json", state)
    code = 0
    try:
        code, asked = _run(folder, job, state, processes)
        if asked or code == EXIT_STOPPED:
            state |= {"status": "Stopped", "reason": stopped_reason(code, asked)}
        elif code:
            state |= {"status": "Failed", "reason": failure.reason(folder / "log.txt", job)}
        else:
            state |= {"status": "Completed"}
        if state["status"] != "Failed" and job["send_to"]:
            for part in ("model", "output/data"):
                addresses.send(folder / part, f"{job['send_to'].rstrip('/')}/{folder.name}/{part}", job["output_key"])
        if job["send_checkpoints"]:  # also after a failure: the next job resumes from them
            inside, address, key = job["send_checkpoints"]
            addresses.send(folder / inside, address, key)
    except InputError as error:  # from `send`
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


def _run(folder: Path, job: dict[str, Any], state: dict[str, Any], processes: Supervisor) -> tuple[int, str]:
    """Start the command, stop it if requested, wait for its end; returns its exit code, and why it was asked to stop."""
    environment = {**os.environ, faults.VARIABLE: str(folder / faults.NAME)}
    deadline = math.inf if job["max_run"] is None else time.monotonic() + job["max_run"]
    asked = ""
    with (folder / "log.txt").open("ab") as log:
        processes.start(job["command"], environment, folder=folder / "code", output=log)
        for _ in processes.wait():
            if time.monotonic() > deadline and not processes.asked:
                asked = f"{job['runtime_key']} = {job['max_run']} seconds were over"
                processes.stop()
            if processes.asked and state["status"] != "Stopping":
                state |= {"status": "Stopping"}
                write(folder / "state.json", state)
            if not folder.is_dir():  # removed by hand: the job can no longer be reached
                processes.kill()
        processes.end()
    if processes.asked:
        asked = asked or "it was stopped"
    (code,) = processes.codes.values()
    if code < 0:  # without a launcher that explains it
        with (folder / "log.txt").open("a", encoding="utf-8") as log_text:
            log_text.write(f"octavo: the script was ended by {signal_name(-code)}.\n")
    return code if code >= 0 else 128 - code, asked


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
