"""`octavo.launch.PyTorch`: the estimator of SageMaker's SDK, for jobs of this machine.

A script and the call that starts it work with another import only. The script runs as ranks of this host through
`octavo.compat`, with SageMaker's variables, arguments and folders. Mistakes in the call are found before a folder is created.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.compat.sagemaker.distribution import read_distribution
from octavo.compat.sagemaker.environment import check_hyperparameters, check_variables
from octavo.compat.sagemaker.keys import ESTIMATOR
from octavo.compat.sagemaker.request import Request, jobs_of
from octavo.compat.sagemaker.sdk_arguments import ARGUMENTS, NOT_HERE, REFUSED, check_sdk, without_effect
from octavo.compat.sagemaker.starting import run, start
from octavo.compat.sagemaker.values import text_of
from octavo.errors import InputError, warn
from octavo.launch import job
from octavo.launch.job import Job


class PyTorch:
    """A training script with its arguments, to be run by `fit`.

    Args:
        entry_point: the script, a .py file; relative to `source_dir`, if given.
        source_dir: a folder that is copied into the job, and the script's working directory.
        hyperparameters: arguments of the script, `--name value`; also SM_HP_NAME and SM_HPS.
        instance_type: an AWS instance type, with or without "ml.": one rank for each of its GPUs, at most one for each of this
            machine; without GPUs here, as many ranks on the CPU. "local_gpu": the GPUs of this machine; "local": its CPU.
        instance_count: instances of this type.
        distribution: {"torch_distributed": {"enabled": True}} for ranks, and SMP's parameters under "smdistributed".
        output_path: a folder for jobs instead of ./jobs, or a remote address to which model and output of a job are copied.
        base_job_name: beginning of the names of jobs; None: the script's name.
        environment: further variables of the script.
        dependencies: files and folders that are copied beside the script.
        max_run: seconds after which a job is stopped.
        checkpoint_s3_uri: a folder, /opt/ml/checkpoints of every job; or a remote address, copied there before the script
            starts, and back at the end. Without it, checkpoints stay in the job's folder.
        checkpoint_local_path: a folder in /opt/ml/checkpoints, to be used instead of the whole.
        sdk: other arguments of the SDK; those without an effect on this machine are logged once.

    Raises:
        InputError: an unknown argument, or arguments that contradict each other or do not fit this machine.
    """

    face = ESTIMATOR.face

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
        checkpoint_s3_uri: str | Path | None = None,
        checkpoint_local_path: str | None = None,
        **sdk: Any,
    ) -> None:
        _check_sdk(sdk)
        if instance_type is None:
            raise InputError('instance_type is missing: give a kind of machine, such as "ml.p5.48xlarge", or "local_gpu".')
        self.entry_point, self.source_dir = str(text_of(entry_point, "entry_point")), text_of(source_dir, "source_dir")
        self.instance_type, self.instance_count, self.distribution = instance_type, instance_count, distribution
        self.output_path = text_of(output_path, "output_path")
        paths = dependencies is None or isinstance(dependencies, list | tuple)
        if not paths or not all(isinstance(path, str | Path) for path in dependencies or ()):
            raise InputError(f"dependencies = {dependencies!r}: give a list of paths.")
        environment = {} if environment is None else environment
        if not isinstance(environment, Mapping):
            raise InputError(f"environment = {environment!r} is not a dictionary.")
        self.base_job_name = text_of(base_job_name, "base_job_name")
        self.dependencies, self.max_run = [str(path) for path in dependencies or ()], max_run
        self.checkpoint_s3_uri = text_of(checkpoint_s3_uri, ESTIMATOR.checkpoints)
        self.checkpoint_local_path = text_of(checkpoint_local_path, ESTIMATOR.checkpoint_path)
        self.environment = check_variables(environment)
        self.latest_training_job: Job | None = None
        self.jobs: list[Job] = []
        self._hyperparameters = check_values(hyperparameters)
        self._request().check()
        if checkpoint_s3_uri is None and checkpoint_local_path is not None:
            sdk["checkpoint_local_path"] = checkpoint_local_path
        if ignored := without_effect(sdk):
            warn(f"estimator: {', '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no effect on this machine.")

    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters."""
        return dict(self._hyperparameters)

    def set_hyperparameters(self, **values: Any) -> None:
        """Set hyperparameters; others stay."""
        before = self._hyperparameters
        self._hyperparameters = before | check_values(values)
        try:
            self._request().layout()
        except InputError:
            self._hyperparameters = before
            raise

    @property
    def model_data(self) -> str | None:
        """The folder of the newest job's model; None before the first job."""
        return None if self.latest_training_job is None else self.latest_training_job.model_data

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: str | bool | Sequence[str] | None = "All",
        job_name: str | None = None,
        experiment_config: Mapping[str, str] | None = None,
    ) -> None:
        """Run the script as a job.

        Args:
            inputs: an address, or one for each channel: a local folder or file, `file://`, `s3://` and other schemes of fsspec.
            wait: wait for the end of the job, with its log on stdout. Otherwise it runs in the background; see `attach`.
            logs: the log while waiting: "All" or "Training", True, or a list of these; "None" or False: no log.
            job_name: a new name; None: the script's name and the time.
            experiment_config: no effect.

        Raises:
            InputError: a fault in an input or the name, before anything has started.
            JobFailed: the job failed; `exit_code` is the script's.
            RunStopped: the job was stopped early.
        """
        job.wants_logs(logs)
        if self.face != ESTIMATOR.face:
            raise InputError(f"this job was started by {self.face}: an estimator reads its log and stops it; call train there.")
        if experiment_config is not None:
            warn("estimator: experiment_config has no effect on this machine.")
        self.latest_training_job = started = start(self._request(), inputs, job_name, self._record(), waits=wait, kind=Job)
        self.jobs.append(started)
        if wait:
            run(started, logs)

    def logs(self, wait: bool = True) -> None:
        """Print the log of the newest job; with `wait` until its end."""
        self._newest().logs(wait)

    def stop(self, wait: bool = True) -> None:
        """Stop the newest job; with `wait` until its end."""
        self._newest().stop(wait)

    @classmethod
    def attach(cls, training_job_name: str, sagemaker_session: Any = None, **other: Any) -> PyTorch:
        """The estimator of a job, from any process.

        Args:
            training_job_name: the job's name.
            sagemaker_session: no effect.
            **other: `output_path`, the folder of jobs, if it is not ./jobs.

        Raises:
            InputError: there is no such job.
        """
        folder = other.pop("output_path", None)
        other.pop("model_channel_name", None)
        if other:
            raise InputError(f"attach: unknown argument {next(iter(other))!r}. Known: training_job_name, output_path.")
        started = job.find(jobs_of(folder)[0], training_job_name)
        estimator = cls.__new__(cls)
        record = job.read(started.folder / "job.json").get("estimator")
        if not isinstance(record, dict):
            raise InputError(f"{started.folder / 'job.json'} is not the record of a job: its estimator is missing.")
        vars(estimator).update(record)
        estimator._hyperparameters = vars(estimator).pop("hyperparameters")
        estimator.environment, estimator.latest_training_job, estimator.jobs = {}, started, [started]
        return estimator

    def _newest(self) -> Job:
        if self.latest_training_job is None:
            raise InputError("this estimator has no job yet: call fit, or PyTorch.attach(name) for a job that runs.")
        return self.latest_training_job

    def _request(self) -> Request:
        read = read_distribution(self.distribution)
        return Request(
            entry=self.entry_point,
            source_dir=self.source_dir,
            hyperparameters=self._hyperparameters,
            environment=self.environment,
            instance_type=str(self.instance_type),
            instance_count=self.instance_count,
            distributed=read.ranks,
            parameters=read.parameters,
            notes=read.notes,
            output=self.output_path,
            base_job_name=self.base_job_name,
            dependencies=self.dependencies,
            max_run=self.max_run,
            checkpoints=self.checkpoint_s3_uri,
            checkpoint_path=self.checkpoint_local_path,
        )

    def __getattr__(self, name: str) -> Any:
        if name in NOT_HERE:
            raise Missing(f"{type(self).__name__}.{name} needs AWS's cloud. {NOT_HERE[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _record(self) -> dict[str, Any]:
        """The fields that `attach` restores; environment variables are left out, since they may be secrets."""
        stored = (
            "entry_point", "source_dir", "instance_type", "instance_count", "output_path", "base_job_name", "dependencies",
            "checkpoint_s3_uri", "checkpoint_local_path",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in stored}
        return values | {
            "distribution": None if self.distribution is None else dict(self.distribution),
            "hyperparameters": self._hyperparameters,
            "max_run": self.max_run,
        }


class Missing(InputError, AttributeError):
    """An absent method of the SDK; an AttributeError, so that `hasattr` is False."""


def check_values(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check hyperparameters.

    Raises:
        InputError: a name or a value that cannot be passed to a script.
    """
    hyperparameters = check_hyperparameters(values)
    if "mp_parameters" in hyperparameters:
        raise InputError('hyperparameters["mp_parameters"]: give SMP\'s parameters in distribution["smdistributed"].')
    return hyperparameters


def _check_sdk(sdk: Mapping[str, Any]) -> None:
    check_sdk(sdk, "PyTorch", ARGUMENTS, REFUSED)
    mode = sdk.get("input_mode")
    if mode not in (None, "File", "FastFile"):
        raise InputError(f'input_mode = {mode!r}: a channel is a folder of files here. Use "File".')
