"""Starts a job (its folder, its command, its supervisor) and waits for its end."""

from __future__ import annotations

import atexit
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from octavo.compat.sagemaker import code, container_paths, environment, inputs
from octavo.compat.sagemaker.checkpoints import Checkpoints
from octavo.compat.sagemaker.distribution import Layout, memory_advice
from octavo.compat.sagemaker.keys import ESTIMATOR, FACE, TRAINER
from octavo.compat.sagemaker.request import Request, jobs_of
from octavo.errors import EXIT_INTERRUPTED, InputError, warn
from octavo.launch import addresses, job
from octavo.launch.job import Job
from octavo.process import process
from octavo.storage import describe_fault

_SPEAKER = {ESTIMATOR.face: "estimator", TRAINER.face: "trainer"}
_LONG = 100_000
"""Characters of a value that the message names as long; Linux limits a variable, also SM_HPS with all, to 131,072 bytes."""
_LITERAL = re.compile(r"""["'](/opt/ml(?:/[^"'\s]*)?)["']""")


Kind = TypeVar("Kind", bound=Job)


class Checked(NamedTuple):
    """A checked job, before it has a folder.

    Attributes:
        root: source_dir, or the script's folder.
        script: its path.
        files: files of code, to be copied.
        layout: the processes.
        jobs: the folder of jobs.
        remote: an address for results; None without.
        checkpoints: their folder and address.
        channels: name → address.
    """

    root: Path
    script: Path
    files: list[Path]
    layout: Layout
    jobs: Path
    remote: str | None
    checkpoints: Checkpoints
    channels: dict[str, str]


def check(request: Request, data: Any) -> Checked:
    """Check everything that can be checked before the job has a folder. data: its channels, as in `fit`.

    Raises:
        InputError: the first fault.
    """
    keys = request.keys
    request.check()
    root, script = request.script()
    jobs, remote = jobs_of(request.output, keys.output)
    job.check_jobs(jobs)
    channels = inputs.addresses(data, keys.inputs)
    for name, address in channels.items():
        if addresses.local_path(address, name) is None:
            addresses.check_address(address, f"{keys.inputs}[{name!r}] = {address!r}")
    files = code.files_of(root, jobs, request.ignored) if request.source_dir is not None else [script]
    if script not in files and not any(file.samefile(script) for file in files):
        raise InputError(f"{keys.entry} = {request.entry!r} is left out by ignore_patterns = {list(request.ignored)!r}.")
    _mapped(request, Path(), channels)
    return Checked(root, script, files, request.layout(), jobs, remote, request.checkpoint_folder(), channels)


def start(
    request: Request, data: Any, job_name: str | None, record: Mapping[str, Any], *, waits: bool, kind: type[Kind]
) -> Kind:
    """Start a job in the background.

    Args:
        request: the job.
        data: its channels, as in `fit`.
        job_name: its name; None: the script's name and the time.
        record: the arguments of the estimator or trainer, stored with the job.
        waits: the caller waits for the job, which ends with this process.
        kind: class of the result.

    Raises:
        InputError: a fault in the request; nothing has started.
    """
    keys = request.keys
    root, script, files, layout, jobs, remote, checkpoints, channels = check(request, data)
    folder = job.make_folder(jobs, job_name or job.new_name(request.base_job_name or script.stem)).absolute()
    try:
        for part in ("code", "input/config", "input/data", "model", "output/data"):
            (folder / part).mkdir(parents=True)
        code.copy(files, root, folder / "code")
        code.copy_dependencies(request.dependencies, folder / "code")
        checkpoints.lay(folder, keys.checkpoints)
        laid = {
            name: str(inputs.lay(name, address, folder / "input" / "data", keys.inputs)) for name, address in channels.items()
        }
        hyperparameters, variables_of_script = _mapped(request, folder, channels)
        command, variables = _command(request, layout, folder, script.relative_to(root).as_posix(), laid, hyperparameters)
        content = {
            "estimator": dict(record),
            "command": command,
            "ranks": layout.ranks,
            "gpus": layout.gpus,
            "parameters": layout.parameters,
            "memory_advice": memory_advice(record.get("hyperparameters"), layout.parameters, layout.ranks),
            "source": str(root),
            "inputs": channels,
            "send_to": remote,
            "send_checkpoints": [checkpoints.inside, checkpoints.remote, keys.checkpoints] if checkpoints.remote else None,
            "output_key": keys.output,
            "max_run": request.max_run,
            "runtime_key": keys.runtime,
            "created": job.now(),
        }
        job.write(folder / "job.json", content)
        started = _supervise(
            folder, environment.joined(environment.inherited() | variables, variables_of_script), waits=waits, kind=kind
        )
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # nothing has run there
        if isinstance(error, OSError) and error.errno == errno.E2BIG:
            raise InputError(_too_long(request)) from error
        if isinstance(error, OSError):
            raise InputError(f"job {folder.name} was not started: {describe_fault(error)[0]}") from error
        raise
    for note in (*request.notes, *layout.notes, *environment.shared_variables(request.hyperparameters, request.encoding)):
        warn(note)
    if (hyperparameters, variables_of_script) != (request.hyperparameters, request.environment):
        warn(f"{_SPEAKER[keys.face]}: paths below /opt/ml are those of the job: {folder}")
    _say_literals(folder, request.hyperparameters)
    if request.requirements is not None and (folder / "code" / request.requirements).is_file():
        warn(f"{request.requirements} is not installed by a job: use {sys.executable} -m pip install -r for what is missing.")
    warn(f"job {folder.name} in {folder}" + ("" if waits else ", in the background"))
    return started


def _too_long(request: Request) -> str:
    """The message for values that exceed the limit of a process's variables."""
    tables = {"hyperparameters": request.hyperparameters, "environment": request.environment}
    lengths = {f"{what}[{key!r}]": len(str(value)) for what, values in tables.items() for key, value in values.items()}
    what = max(lengths, key=lambda name: lengths[name], default="")
    subject = f"{what} of {lengths[what]:,} characters is" if lengths.get(what, 0) >= _LONG else ""
    subject = subject or f"hyperparameters and environment of {sum(lengths.values()):,} characters together are"
    return f"{subject} too long for the variables of a process: put long values into a file of source_dir."


def run(started: Job, logs: Any) -> None:
    """Wait for the end of a job, with its log if `logs`. Ctrl-C stops the job; a second Ctrl-C returns at once.

    Raises:
        JobFailed: it failed.
        RunStopped: it was stopped.
        KeyboardInterrupt: after Ctrl-C; a script that does not catch it ends with exit code 130 and no traceback.
    """
    try:
        started.wait(logs=logs)
    except KeyboardInterrupt as interrupt:
        warn(f"stopping job {started.name} …")
        started.told = True
        _without_traceback(interrupt)
        try:
            started.stop()
        except KeyboardInterrupt:
            warn(f"job {started.name} is left to its supervisor, which ends its ranks.")
        raise interrupt from None


def _without_traceback(interrupt: KeyboardInterrupt) -> None:
    """End the process with exit code 130 and no traceback unless `interrupt` is caught: the job's message is printed."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is interrupt:
            raise SystemExit(EXIT_INTERRUPTED)
        before(kind, error, trace)

    sys.excepthook = hook


def _mapped(request: Request, folder: Path, channels: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Hyperparameters and variables, with paths below /opt/ml replaced by those in the job's folder."""
    tables: dict[str, Mapping[str, Any]] = {"hyperparameters": request.hyperparameters, "environment": request.environment}
    hyperparameters, variables = (
        {
            name: container_paths.mapped(value, folder, channels, f"{what}[{name!r}]", request.keys.call)
            for name, value in values.items()
        }
        for what, values in tables.items()
    )
    return hyperparameters, variables


def _say_literals(folder: Path, hyperparameters: Mapping[str, Any]) -> None:
    """Log the first path below /opt/ml in the code that is not a hyperparameter: paths in code are not replaced."""
    handed = {value for value in hyperparameters.values() if isinstance(value, str)}
    for path in sorted((folder / "code").rglob("*.py")):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for literal in _LITERAL.findall(line.partition("#")[0]):
                if literal not in handed:
                    warn(
                        f"{path.relative_to(folder / 'code')}, line {number} names {literal}, which a job of this machine has "
                        f"in its folder: use SageMaker's variables (SM_MODEL_DIR and the like), or pass it as a "
                        "hyperparameter."
                    )
                    return


def _command(
    request: Request,
    layout: Layout,
    folder: Path,
    script: str,
    channels: Mapping[str, str],
    hyperparameters: Mapping[str, Any],
) -> tuple[list[str], dict[str, str]]:
    """The job's command, and its variables."""
    handed = dict(hyperparameters)
    if layout.parameters is not None and "--mp_parameters" in (folder / "code" / script).read_text(errors="replace"):
        handed["mp_parameters"] = layout.parameters
    arguments = request.encoding.arguments(handed)
    variables = environment.variables_of(
        layout,
        hyperparameters,
        channels,
        folder,
        script=script,
        instance_type=request.instance_type,
        arguments=arguments,
        encoding=request.encoding,
    )
    config = folder / "input" / "config"
    stored = {name: request.encoding.stored(value) for name, value in hyperparameters.items()}
    job.write(config / "hyperparameters.json", stored)
    job.write(config / "resourceconfig.json", environment.resources_of(request.instance_type))
    job.write(config / "inputdataconfig.json", environment.input_config(channels))
    if layout.gpus == 0:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "octavo.compat", script, *arguments]
    if layout.ranks is not None:
        variables[FACE] = request.keys.face
        command = [sys.executable, "-P", "-m", "octavo.watchdog", str(layout.ranks), *command]
    return command, variables


def _supervise(folder: Path, variables: Mapping[str, str], *, waits: bool, kind: type[Kind]) -> Kind:
    """Start the job's supervisor, and wait until it has started the job."""
    with (folder / "log.txt").open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo.launch.supervisor", str(folder)],
            env={**variables, **({"OCTAVO_LAUNCH_WAITS": str(os.getpid())} if waits else {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    started = kind(folder)

    def in_hand() -> bool:
        return (folder / "state.json").is_file() or not folder.is_dir()  # a script may remove its job's folder at once

    try:
        while not in_hand():
            if supervisor.poll() is not None and not in_hand():  # the second check: a short job may have run in between
                text = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
                raise InputError(f"the job could not be started: {text[-1] if text else 'its supervisor ended'}.")
            started.until(lambda: in_hand() or supervisor.poll() is not None, 1.0)
    except BaseException as error:  # such as Ctrl-C: its folder will be removed
        if isinstance(error, KeyboardInterrupt):
            _without_traceback(error)
        supervisor.kill()
        supervisor.wait()
        raise
    process.started_jobs.append((started, supervisor, waits))
    return started


@atexit.register
def _at_exit() -> None:
    """Log what happens to jobs that are still running when this process ends."""
    for started, supervisor, waits in process.started_jobs:
        running = supervisor.poll() is None
        if running:
            supervisor.returncode = 0  # it outlives this process, or ends with it: no warning of Python's
        if started.told:
            continue
        try:
            status = started.status
            if status == "Failed":
                warn(started.failure())
            elif status == "Stopped":
                warn(f"job {started.name}: {started.state['reason']}. Its folder is {started.folder}.")
            elif running and waits:
                warn(f"job {started.name} ends with this process, which waits for it: wait=False leaves it in the background.")
            elif running:
                warn(f"job {started.name} continues in the background: {started.reached_by} reaches it.")
        except InputError as error:  # its state cannot be read
            warn(str(error))
