"""`octavo.launch.PyTorch`: the estimator of SageMaker's SDK, for jobs of this machine.

A script and the call that starts it need no change but the import. The script runs as ranks of this host through
`octavo.compat`, with SageMaker's variables, arguments and folders. Every fault of the call is found before a folder is made.
"""

from __future__ import annotations

import atexit
import errno
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import InputError, nearest, warn
from octavo.launch import code, container_paths, environment, inputs, job
from octavo.launch.distribution import Layout, layout_of
from octavo.launch.environment import check_variables
from octavo.launch.job import JOBS, Job
from octavo.launch.sdk_arguments import ARGUMENTS, MEANINGLESS, REFUSED
from octavo.storage import describe_fault


class PyTorch:
    """A training script with its arguments, to be run by `fit`.

    Args:
        entry_point: the script, a .py file; inside of `source_dir` if that is given.
        source_dir: a folder that is taken along, and the current folder of the script.
        hyperparameters: arguments of the script, `--name value`; also SM_HP_NAME and SM_HPS.
        instance_type: a kind of machine, with or without "ml.": one rank for each of its GPUs, as far as this machine has them;
            on a machine without GPUs as many ranks on its CPU. "local_gpu": the GPUs of this machine; "local": its CPU.
        instance_count: machines of this kind.
        distribution: {"torch_distributed": {"enabled": True}} for ranks, and SMP's parameters under "smdistributed".
        output_path: a folder for jobs in place of ./jobs, or a remote address that gets model and output of a job at its end.
        base_job_name: beginning of the names of jobs; that of the script if absent.
        environment: further variables of the script.
        dependencies: files and folders that are copied beside the script.
        max_run: seconds after which a job is stopped.
        sdk: other arguments of the SDK; those that mean nothing here are named once.

    Raises:
        InputError: an unknown argument, or arguments that contradict each other or this machine.
    """

    def __init__(
        self,
        entry_point: str | Path,
        source_dir: str | Path | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        instance_type: str | None = None,
        instance_count: int = 1,
        distribution: Mapping[str, Any] | None = None,
        *,
        output_path: str | Path | None = None,
        base_job_name: str | None = None,
        environment: Mapping[str, str] | None = None,
        dependencies: Sequence[str] | None = None,
        max_run: float | None = None,
        **sdk: Any,
    ) -> None:
        _check_sdk(sdk)
        if instance_type is None:
            raise InputError('instance_type is missing: give a kind of machine, such as "ml.p5.48xlarge", or "local_gpu".')
        self.entry_point, self.source_dir = str(entry_point), None if source_dir is None else str(source_dir)
        self.instance_type, self.instance_count, self.distribution = instance_type, instance_count, distribution
        self.output_path = None if output_path is None else str(output_path)
        if isinstance(dependencies, str) or not isinstance(environment or {}, Mapping):
            raise InputError("dependencies is a list of paths, and environment a dictionary.")
        self.base_job_name = None if base_job_name is None else str(base_job_name)
        self.dependencies, self.max_run = [str(path) for path in dependencies or ()], max_run
        self.environment = check_variables(environment or {})
        self.latest_training_job: Job | None = None
        self.jobs: list[Job] = []
        self._hyperparameters = _check_values(hyperparameters)
        if max_run is not None and (isinstance(max_run, bool) or not isinstance(max_run, int | float) or not max_run > 0):
            raise InputError(f"max_run = {max_run!r} is no number of seconds above 0.")
        self._script()
        self._layout()
        _jobs_of(self.output_path)
        code.check_dependencies(self.dependencies)
        ignored = [name for name in sdk if name in MEANINGLESS and sdk[name] is not None]
        if ignored:
            warn(f"estimator: {', '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no meaning on this machine.")

    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters."""
        return dict(self._hyperparameters)

    def set_hyperparameters(self, **values: Any) -> None:
        """Set hyperparameters; others stay."""
        before = self._hyperparameters
        self._hyperparameters = before | _check_values(values)
        try:
            self._layout()
        except InputError:
            self._hyperparameters = before
            raise

    @property
    def model_data(self) -> str | None:
        """The folder of the newest job's model; None before a job."""
        return None if self.latest_training_job is None else self.latest_training_job.model_data

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: str | bool | Sequence[str] = "All",
        job_name: str | None = None,
        experiment_config: Mapping[str, str] | None = None,
    ) -> None:
        """Run the script as a job.

        Args:
            inputs: an address, or one for each channel: a local folder or file, `file://`, `s3://` and whatever fsspec knows.
            wait: until its end, with its log on stdout. Else it runs on in the background: `attach` reaches it by its name.
            logs: False or "None": no log while waiting.
            job_name: by default that of the script and the time. A name is used once.
            experiment_config: means nothing here.

        Raises:
            InputError: an input, or the name; nothing was started.
            JobFailed: the job failed; `exit_code` is that of the script.
            RunStopped: the job was stopped early.
        """
        if experiment_config is not None:
            warn("estimator: experiment_config has no meaning on this machine.")
        started = self._start(inputs, job_name, waits=wait)
        if not wait:
            return
        try:
            started.wait(logs=logs not in (False, None, "None", []))
        except KeyboardInterrupt:
            warn(f"stopping job {started.name} …")
            started.stop()
            raise

    def logs(self, wait: bool = True) -> None:
        """Print the log of the newest job, until its end unless `wait` is False."""
        self._newest().logs(wait)

    def stop(self, wait: bool = True) -> None:
        """Stop the newest job; `wait` for its end."""
        self._newest().stop(wait)

    @classmethod
    def attach(cls, training_job_name: str, sagemaker_session: Any = None, **other: Any) -> PyTorch:
        """The estimator of a job, by its name; from any process.

        Args:
            training_job_name: its name.
            sagemaker_session: means nothing here.
            other: `output_path`, the folder of jobs, if it was not ./jobs.

        Raises:
            InputError: there is no such job.
        """
        folder = other.pop("output_path", None)
        other.pop("model_channel_name", None)
        if other:
            raise InputError(f"attach: unknown argument {next(iter(other))!r}. Known: training_job_name, output_path.")
        found = job.find(_jobs_of(folder)[0], training_job_name)
        made = cls.__new__(cls)
        record = job.read(found.folder / "job.json").get("estimator")
        if not isinstance(record, dict):
            raise InputError(f"{found.folder / 'job.json'} is not the record of a job: its estimator is missing.")
        vars(made).update(record)
        made._hyperparameters = vars(made).pop("hyperparameters")
        made.environment, made.latest_training_job, made.jobs = {}, found, [found]
        return made

    def _newest(self) -> Job:
        if self.latest_training_job is None:
            raise InputError("this estimator has no job yet: call fit, or PyTorch.attach(name) for a job that runs.")
        return self.latest_training_job

    def _script(self) -> tuple[Path, Path]:
        """The folder to take along, or the script's own, and the script in it."""
        if self.source_dir is not None and (":" in self.source_dir.partition("/")[0] or self.source_dir.endswith(".tar.gz")):
            raise InputError(f"source_dir = {self.source_dir!r}: give a folder of this machine.")
        folder = inputs.expanded(self.source_dir or ".", "source_dir")
        if not folder.is_dir():
            raise InputError(f"source_dir = {self.source_dir!r} is no folder. Give the one that holds {self.entry_point!r}.")
        script = folder / inputs.expanded(self.entry_point, "entry_point")
        if script.suffix != ".py":
            raise InputError(f"entry_point = {self.entry_point!r} is no Python script: give a .py file.")
        if not script.is_file():
            near = nearest(script.name, [path.name for path in script.parent.glob("*.py")])
            hint = f" Did you mean {near!r}?" if near else ""
            raise InputError(f"entry_point = {self.entry_point!r} is not in {str(script.parent)!r}.{hint}")
        if self.source_dir is None:
            return script.parent.absolute(), script.absolute()
        if not script.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"entry_point = {self.entry_point!r} lies outside of source_dir = {self.source_dir!r}.")
        return folder.absolute(), script.absolute()

    def _layout(self) -> Layout:
        return layout_of(str(self.instance_type), self.instance_count, self.distribution, self._hyperparameters)

    def _start(self, given: Any, job_name: str | None, *, waits: bool) -> Job:
        folder_of_code, script = self._script()
        layout, (jobs, remote) = self._layout(), _jobs_of(self.output_path)
        channels = inputs.addresses(given)
        for name, address in channels.items():
            if inputs.local_path(address, name) is None:
                inputs.check_address(address, f"inputs[{name!r}] = {address!r}")
        files = code.files_of(folder_of_code, jobs) if self.source_dir is not None else [script]
        code.check_dependencies(self.dependencies)
        self._mapped(Path(), channels)  # refused before there is a folder
        folder = job.make_folder(jobs, job_name or job.new_name(self.base_job_name or script.stem)).absolute()
        try:
            for part in ("code", "input/config", "input/data", "model", "output/data"):
                (folder / part).mkdir(parents=True)
            code.copy(files, folder_of_code, folder / "code")
            code.copy_dependencies(self.dependencies, folder / "code")
            laid = {name: str(inputs.lay(name, address, folder / "input" / "data")) for name, address in channels.items()}
            hyperparameters, variables_of_script = self._mapped(folder, channels)
            if (hyperparameters, variables_of_script) != (self._hyperparameters, self.environment):
                (folder / "checkpoints").mkdir()
                warn(f"estimator: paths below /opt/ml are those of the job: {folder}")
            command, variables = self._command(
                layout, folder, script.relative_to(folder_of_code).as_posix(), laid, hyperparameters
            )
            record = {
                "estimator": self._record(),
                "command": command,
                "ranks": layout.ranks,
                "gpus": layout.gpus,
                "parameters": layout.parameters,
                "source": str(folder_of_code),
                "inputs": channels,
                "send_to": remote,
                "max_run": self.max_run,
                "created": job.now(),
            }
            job.write(folder / "job.json", record)
            started = _supervise(folder, environment.inherited() | variables | variables_of_script, waits=waits)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)  # nothing has run in it
            if isinstance(error, OSError) and error.errno == errno.E2BIG:
                raise InputError(
                    f"hyperparameters of {len(str(self._hyperparameters)):,} characters are too long for the variables of a "
                    "process: put long values into a file of source_dir."
                ) from error
            if isinstance(error, OSError):
                raise InputError(f"job {folder.name} was not started: {describe_fault(error)[0]}") from error
            raise
        for note in layout.notes:
            warn(note)
        if (folder / "code" / "requirements.txt").is_file():
            warn(f"requirements.txt is not installed by a job: use {sys.executable} -m pip install -r for what is missing.")
        warn(f"job {folder.name} in {folder}" + ("" if waits else ", in the background"))
        self.latest_training_job = started
        self.jobs.append(started)
        return started

    def _mapped(self, folder: Path, channels: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Hyperparameters and variables with SageMaker's paths in the job's folder."""
        given = {"hyperparameters": self._hyperparameters, "environment": self.environment}
        found = (
            {name: container_paths.mapped(value, folder, channels, f"{what}[{name!r}]") for name, value in values.items()}
            for what, values in given.items()
        )
        hyperparameters, variables = found
        return hyperparameters, variables

    def _command(
        self, layout: Layout, folder: Path, script: str, channels: Mapping[str, str], hyperparameters: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        """The job's command, and its variables."""
        handed = dict(hyperparameters)
        if layout.parameters is not None and "--mp_parameters" in (folder / "code" / script).read_text(errors="replace"):
            handed["mp_parameters"] = layout.parameters
        arguments = environment.arguments_of(handed)
        variables = environment.variables_of(
            layout,
            hyperparameters,
            channels,
            folder,
            script=script,
            instance_type=str(self.instance_type),
            arguments=arguments,
        )
        config = folder / "input" / "config"
        job.write(config / "hyperparameters.json", dict(hyperparameters))
        job.write(config / "resourceconfig.json", environment.resources_of(str(self.instance_type)))
        job.write(config / "inputdataconfig.json", environment.input_config(channels))
        if layout.gpus == 0:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "octavo.compat", script, *arguments]
        if layout.ranks is not None:
            command = [sys.executable, "-P", "-m", "octavo.watchdog", str(layout.ranks), *command]
        return command, variables

    def _record(self) -> dict[str, Any]:
        """The fields that `attach` restores, without variables, which may be secrets."""
        kept = ("entry_point", "source_dir", "instance_type", "instance_count", "output_path", "base_job_name", "dependencies")
        values = {name: getattr(self, name) for name in kept}
        return values | {
            "distribution": None if self.distribution is None else dict(self.distribution),
            "hyperparameters": self._hyperparameters,
            "max_run": self.max_run,
        }


def _jobs_of(output_path: str | Path | None) -> tuple[Path, str | None]:
    """The folder of jobs for an `output_path`, and its remote address for results, or None."""
    if output_path is None:
        return JOBS, None
    address = str(output_path)
    if not address:
        raise InputError("output_path is empty: give a folder, or leave it out for ./jobs.")
    local = inputs.local_path(address, "output_path")
    if local is None:
        inputs.check_address(address, f"output_path = {address!r}")
        return JOBS, address
    return local, None


def _check_values(values: Mapping[str, Any] | None) -> dict[str, Any]:
    found = environment.check_hyperparameters(values)
    if "mp_parameters" in found:
        raise InputError('hyperparameters["mp_parameters"]: give SMP\'s parameters in distribution["smdistributed"].')
    return found


def _check_sdk(sdk: Mapping[str, Any]) -> None:
    for name, value in sdk.items():
        if name in REFUSED and value is not None:
            raise InputError(f"{name} = {value!r}: {REFUSED[name]}")
        if name not in MEANINGLESS and name not in REFUSED:
            guess = nearest(name, ARGUMENTS)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise InputError(f"unknown argument {name!r} of PyTorch.{hint} The SDK has none of this name.")
    mode = sdk.get("input_mode")
    if mode not in (None, "File", "FastFile"):
        raise InputError(f'input_mode = {mode!r}: a channel is a folder of files here. Use "File".')


def _supervise(folder: Path, variables: Mapping[str, str], *, waits: bool) -> Job:
    """Start the job's supervisor, and wait until it has it in hand."""
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo.launch.supervisor", str(folder)],
            env={**variables, **({"OCTAVO_LAUNCH_WAITS": "1"} if waits else {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    found = Job(folder)

    def in_hand() -> bool:
        return (folder / "state.json").is_file() or not folder.is_dir()  # a script may remove its own folder at once

    try:
        while not in_hand():
            if process.poll() is not None and not in_hand():  # asked again: a short job may have run in between
                text = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
                raise InputError(f"the job could not be started: {text[-1] if text else 'its supervisor ended'}.")
            found.until(lambda: in_hand() or process.poll() is not None, 1.0)
    except BaseException:  # such as Ctrl-C: its folder will be removed
        process.kill()
        process.wait()
        raise
    _SUPERVISORS.append(process)
    return found


_SUPERVISORS: list[subprocess.Popen[bytes]] = []


@atexit.register
def _leave_running() -> None:
    """Jobs in the background outlive this process: no warning about them."""
    for process in _SUPERVISORS:
        if process.poll() is None:
            process.returncode = 0
