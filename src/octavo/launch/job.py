"""A job: its folder, its state, its log, and how other processes reach it.

    jobs/<name>/  job.json      what was started: the estimator's arguments, command, ranks
                  state.json    InProgress, Stopping, Completed, Failed or Stopped; the supervisor's process; the exit code
                  log.txt       output of all ranks
                  code/ input/ model/ output/    folders of the script, as SageMaker lays them

The supervisor (`octavo.launch.supervisor`) writes the state. A job whose supervisor ended without a final state was killed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.errors import EXIT_FAILED, EXIT_STOPPED, InputError, OctavoError, RunStopped, nearest, some, warn
from octavo.launch import faults
from octavo.storage import folder_fault, why_unusable, write_atomic
from octavo.supervision import Process, boot_id, start_time

FINAL = ("Completed", "Failed", "Stopped")
JOBS = Path("jobs")
"""Default folder of jobs, unless `output_path` names another on this machine."""
_NAME = re.compile(r"[A-Za-z0-9](-*[A-Za-z0-9]){0,62}")
_POLL_SECONDS = 0.1
_START_SECONDS = 60.0
_SECONDARY = {"InProgress": "Training"}
_LOGS = {"All": True, "Training": True, "Rules": False, "None": False}
"""Supported values of the SDK's `logs`; those of rules have no effect here."""


class JobFailed(OctavoError):
    """A job ended with an error; `exit_code` is that of the rank that failed first."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Job:
    """A job by its folder: `name`, `status`, `exit_code`, `model_data`, `describe`, `logs`, `wait` and `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.name = self.job_name = folder.name
        self.told = False
        """True once this process has reported the job's end."""

    def __repr__(self) -> str:
        return f"<Job {self.name}: {self.status}>"

    @property
    def log_file(self) -> Path:
        """The output of all ranks."""
        return self.folder / "log.txt"

    @property
    def reached_by(self) -> str:
        """A call that reaches the job from another process."""
        return self._call("PyTorch.attach")

    def _call(self, function: str) -> str:
        elsewhere = "" if self.folder.parent == JOBS.absolute() else f", output_path={str(self.folder.parent)!r}"
        return f"{function}({self.name!r}{elsewhere})"

    @property
    def model_data(self) -> str:
        """The folder of the model."""
        return str(self.folder / "model")

    @property
    def state(self) -> dict[str, Any]:
        """The current state: `status`, `exit_code`, `reason` and others."""
        state = read(self.folder / "state.json")
        if state.get("status") in FINAL or self._is_alive(state):
            return state
        if not state:  # its supervisor is being started, unless the folder has been removed
            gone = not self.folder.is_dir()
            reason = f"its folder was removed: {self.folder}" if gone else ""
            return {"status": "Failed" if gone else "InProgress", "exit_code": EXIT_FAILED if gone else None, "reason": reason}
        state = read(self.folder / "state.json")  # it may have ended meanwhile
        if state.get("status") in FINAL:
            return state
        return state | {
            "status": "Failed",
            "exit_code": EXIT_FAILED,
            "reason": "the job was killed: its supervisor ended without a final state (kill -9, no memory, or a restart)",
        }

    @property
    def status(self) -> str:
        """InProgress, Stopping, Completed, Failed or Stopped."""
        return str(self.state["status"])

    @property
    def exit_code(self) -> int | None:
        """The exit code of the rank that failed first, or 0; None while the job runs."""
        return self.state.get("exit_code")

    def describe(self) -> dict[str, Any]:
        """The job in SageMaker's words, with `ExitCode` and `Folder`."""
        state, record = self.state, read(self.folder / "job.json")
        return {
            "TrainingJobName": self.name,
            "TrainingJobStatus": state["status"],
            "SecondaryStatus": _SECONDARY.get(state["status"], state["status"]),
            "FailureReason": state.get("reason") or "",
            "ExitCode": state.get("exit_code"),
            "ModelArtifacts": {"S3ModelArtifacts": self.model_data},
            "HyperParameters": record.get("estimator", {}).get("hyperparameters"),
            "CreationTime": record.get("created"),
            "TrainingStartTime": state.get("began"),
            "TrainingEndTime": state.get("ended"),
            "Folder": str(self.folder),
        }

    def logs(self, wait: bool = True) -> None:
        """Print the log; until the job has ended, unless `wait` is False."""
        for text in self.follow(wait):
            _print(text)

    def follow(self, wait: bool = True) -> Iterator[str]:
        """The log in pieces, as it grows."""
        at, rest = 0, b""
        while True:
            ended = not wait or self.status in FINAL  # checked before the log is read: nothing is written afterwards
            if self.log_file.exists():
                with self.log_file.open("rb") as file:
                    file.seek(at)
                    while piece := file.read(1 << 20):
                        at += len(piece)
                        whole, line, rest = (rest + piece).rpartition(b"\n")
                        if line:
                            yield (whole + line).decode(errors="replace")
            if ended:
                if rest:
                    yield rest.decode(errors="replace") + "\n"
                return
            time.sleep(_POLL_SECONDS)

    def wait(self, logs: Any = False) -> None:
        """Wait for the end of the job, and print its log if `logs` is one of the SDK's values True, "All", ["All"].

        Raises:
            InputError: `logs` is none of the SDK's values.
            JobFailed: it failed, or was killed.
            RunStopped: it was stopped.
        """
        if wants_logs(logs):
            self._print_but_reason()
        while self.status not in FINAL:
            time.sleep(_POLL_SECONDS)
        self.check()

    def _print_but_reason(self) -> None:
        """Print the log until the end, without a last line that `check`'s error repeats."""
        held = ""
        for text in self.follow():
            held += text
            start = held.rstrip("\n").rfind("\n") + 1
            last = held[start:]
            # A rank records its error before it prints the line.
            if last.startswith("octavo: ") and _is_reason(last, faults.first(self.folder / faults.NAME)):
                _print(held[:start])
                held = last
            else:
                _print(held)
                held = ""
        if not _is_reason(held, self.state.get("reason", "")):
            _print(held)

    def check(self) -> None:
        """Raise the errors of `wait` if the job ended without completing."""
        self.told = True
        state = self.state
        if state["status"] == "Failed":
            raise JobFailed(self.failure(), state["exit_code"] or EXIT_FAILED)
        if state["status"] == "Stopped":
            raise RunStopped(f"job {self.name}: {state['reason']}. Its folder is {self.folder}.")

    def failure(self) -> str:
        """The message about a failed job."""
        state = self.state
        return f"job {self.name} failed with exit code {state['exit_code']}: {state['reason']}. Its log is {self.log_file}."

    def stop(self, wait: bool = True) -> None:
        """Stop the job: its ranks get SIGTERM, and 120 seconds to save. No effect on an ended job.

        Raises:
            InputError: it runs on another machine.
        """
        state = self.state
        self.told = self.told or wait  # the caller requests the end
        if state["status"] in FINAL:
            warn(f"job {self.name} has ended already: {state['status']}.")
            return
        if not state.get("pid"):
            self.until(lambda: bool(self.state.get("pid")) or self.status in FINAL, _START_SECONDS)
            state = self.state
        if state.get("host") != socket.gethostname():
            raise InputError(f"job {self.name} runs on {state.get('host')}, and this is {socket.gethostname()}: stop it there.")
        if self._is_alive(state):
            supervisor = Process(state["pid"], state["ticks"])
            supervisor.send(signal.SIGTERM)
            supervisor.close()
        while wait and self.status not in FINAL:
            time.sleep(_POLL_SECONDS)

    def until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition; False after the timeout."""
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _is_alive(self, state: dict[str, Any]) -> bool:
        if not state:
            return False
        if state.get("host") != socket.gethostname():  # on a shared file system
            return True
        ticks = start_time(state["pid"])
        return state.get("boot") == boot_id() and ticks is not None and ticks == state["ticks"]


def wants_logs(logs: Any) -> bool:
    """True if the SDK's `logs` asks for the log of a job: True, "All", "Training", or a list of these.

    Raises:
        InputError: another value.
    """
    if logs is None or isinstance(logs, bool):
        return bool(logs)
    names = [logs] if isinstance(logs, str) else logs
    if not isinstance(names, list | tuple) or not all(name in _LOGS for name in names):
        raise InputError(f"logs = {logs!r}: give True, False, or a list of {', '.join(map(repr, _LOGS))}.")
    return any(_LOGS[name] for name in names)


def _is_reason(line: str, reason: str) -> bool:
    return line.removeprefix("octavo: ").strip().rstrip(".") == reason.rstrip(".")


def _print(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def read(path: Path) -> dict[str, Any]:
    """A JSON file; empty if there is none.

    Raises:
        InputError: it is not a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path} was changed by hand, or damaged: it is not a JSON object. The job cannot be reached.")
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_atomic(path, json.dumps(content, indent=1) + "\n")


def identity() -> dict[str, Any]:
    """This process, for `Job._is_alive`."""
    return {"pid": os.getpid(), "ticks": start_time(os.getpid()), "boot": boot_id(), "host": socket.gethostname()}


def now() -> str:
    """The time, as text."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_name(base: str) -> str:
    """A name for a job: `base` and the time."""
    moment = datetime.now(UTC).strftime("%Y-%m-%d-%H-%M-%S-%f")[:-3]
    start = re.sub(r"[^A-Za-z0-9]+", "-", base).strip("-")[:34].rstrip("-") or "job"
    return f"{start}-{moment}-{secrets.token_hex(1)}"


def check_jobs(jobs: Path) -> None:
    """Check that a folder of jobs can be used.

    Raises:
        InputError: it cannot.
    """
    if fault := folder_fault(jobs):
        raise InputError(f"the folder of jobs, {str(jobs)!r}, cannot be used: {fault}")


def make_folder(jobs: Path, name: str) -> Path:
    """A new folder of a job.

    Raises:
        InputError: the name is taken or invalid.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"job_name = {name!r} is not a job name: use at most 63 letters, digits and hyphens, with no hyphen first or last."
        )
    folder = jobs / name
    check_jobs(jobs)
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileNotFoundError as error:  # in /proc, where nothing can be created
        raise InputError(f"the folder of jobs, {str(jobs)!r}, cannot be used: {why_unusable(error)}") from None
    except FileExistsError:
        raise InputError(
            f"job_name = {name!r}: a job of this name exists in {str(jobs.absolute())!r} and is not overwritten. Give "
            "another name, or leave job_name out."
        ) from None
    return folder


def find(jobs: Path, name: str) -> Job:
    """The job of this name.

    Raises:
        InputError: there is none.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and (jobs / name / "job.json").is_file():
        return Job(jobs / name)
    known = sorted(path.parent.name for path in jobs.glob("*/job.json"))
    guess = nearest(str(name), known)
    hint = f" Did you mean {guess!r}?" if guess else ""
    raise InputError(f"there is no job {name!r} in {str(jobs.absolute())!r}.{hint} Jobs there: {some(known) or 'none'}.")


def stopped_reason(exit_code: int, asked: str) -> str:
    """The reason of a stopped job."""
    saved = ", and had saved" if exit_code == EXIT_STOPPED else ""
    return f"{asked or 'it stopped early'}{saved}" + ("; run it again" if exit_code == EXIT_STOPPED else "")
