"""`octavo.launch.ModelTrainer`: the trainer of SageMaker's SDK, version 3, for jobs of this machine.

It starts the job that `octavo.launch.PyTorch` starts: ranks, folders, channels and refusals are the same, in the words of this
call. What differs is what differs there: hyperparameters become arguments as JSON. A job has no limit of time unless one is
given, where the SDK's has an hour.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import InputError, nearest, warn
from octavo.launch import inputs, job
from octavo.launch.configs import MPI, Compute, Mode, value_of
from octavo.launch.distribution import check_parameters
from octavo.launch.environment import DRIVERS, check_hyperparameters, check_variables
from octavo.launch.keys import TRAINER
from octavo.launch.request import Request
from octavo.launch.sdk_arguments import TRAINER_CONFIGS_REFUSED, TRAINER_CONFIGS_SAID, TRAINER_MEANINGLESS, TRAINER_REFUSED
from octavo.launch.starting import run, start
from octavo.launch.training_job import TrainingJob

_OWN = (
    "training_mode", "base_job_name", "source_code", "distributed", "compute", "networking", "stopping_condition",
    "output_data_config", "input_data_config", "checkpoint_config", "training_input_mode", "environment", "hyperparameters",
)  # fmt: skip
_PLAIN_SOURCE = {"s3_data_type": (None, "S3Prefix"), "s3_data_distribution_type": (None, "FullyReplicated")}
_PLAIN_CHANNEL = {
    "input_mode": (None, "File", "FastFile"), "compression_type": (None, "None"), "record_wrapper_type": (None, "None"),
    "shuffle_config": (None,),
}  # fmt: skip
"""Values that describe a folder of files, which every channel is."""


class ModelTrainer:
    """A training script with its configuration, to be run by `train`. Values by keyword, the SDK's own objects too.

    Args:
        training_mode: both of `Mode` mean this machine.
        base_job_name: beginning of the names of jobs; that of the script if absent.
        source_code: `SourceCode`: folder, script and patterns of names to leave out.
        distributed: `Torchrun`, with `SMP`; None: the script is one process.
        compute: `Compute`: kind and number of machines; None: the SDK's default, a machine without GPUs.
        networking: `Networking`, without effect.
        stopping_condition: `StoppingCondition`: max_runtime_in_seconds, after which a job is stopped.
        output_data_config: `OutputDataConfig`: s3_output_path is a folder for jobs in place of ./jobs, or a remote address that
            gets model and output of a job at its end.
        input_data_config: a list of `InputData` or `Channel`.
        checkpoint_config: `CheckpointConfig`: s3_uri is a folder that is /opt/ml/checkpoints of each job, or a remote address.
        training_input_mode: "File" or "FastFile".
        environment: further variables of the script.
        hyperparameters: arguments of the script, or the path of a JSON or YAML file with them.
        sdk: other arguments of the SDK; those that mean nothing here are named once.

    Raises:
        InputError: an unknown argument, or arguments that contradict each other or this machine.
    """

    def __init__(
        self,
        *,
        training_mode: Any = Mode.SAGEMAKER_TRAINING_JOB,
        base_job_name: str | None = None,
        source_code: Any = None,
        distributed: Any = None,
        compute: Any = None,
        networking: Any = None,
        stopping_condition: Any = None,
        output_data_config: Any = None,
        input_data_config: Sequence[Any] | None = None,
        checkpoint_config: Any = None,
        training_input_mode: str | None = "File",
        environment: Mapping[str, str] | None = None,
        hyperparameters: Mapping[str, Any] | str | None = None,
        **sdk: Any,
    ) -> None:
        for name, value in sdk.items():
            if name in TRAINER_REFUSED and value is not None:
                raise InputError(f"{name} = {value!r}: {TRAINER_REFUSED[name]}")
            if name not in TRAINER_MEANINGLESS and name not in TRAINER_REFUSED:
                guess = nearest(name, (*_OWN, *TRAINER_MEANINGLESS))
                hint = f" Did you mean {guess!r}?" if guess else ""
                raise InputError(f"unknown argument {name!r} of ModelTrainer.{hint} The SDK has none of this name.")
        if getattr(training_mode, "value", training_mode) not in {mode.value for mode in Mode}:
            raise InputError(f"training_mode = {training_mode!r}: give Mode.LOCAL_CONTAINER or leave it out.")
        self.training_mode, self.base_job_name = training_mode, base_job_name
        self.source_code, self.distributed, self.compute = source_code, distributed, compute
        self.networking, self.stopping_condition = networking, stopping_condition
        self.output_data_config, self.checkpoint_config = output_data_config, checkpoint_config
        self.input_data_config, self.training_input_mode = input_data_config, training_input_mode
        self.environment = environment
        self.hyperparameters: Mapping[str, Any] = (
            _of_file(hyperparameters) if isinstance(hyperparameters, str) else hyperparameters or {}
        )
        self.latest_training_job: TrainingJob | None = None
        self._request().check()
        self._channels(None)
        ignored = [name for name, value in sdk.items() if value not in (None, [], {}, "")]
        ignored += self._without_effect()
        if ignored:
            warn(f"trainer: {', '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no meaning on this machine.")

    @property
    def _latest_training_job(self) -> TrainingJob | None:  # the SDK's name, which scripts use
        return self.latest_training_job

    @property
    def output_data(self) -> str:
        """The folder of what the newest job's script wrote to SM_OUTPUT_DATA_DIR.

        Raises:
            InputError: there is no job yet.
        """
        if self.latest_training_job is None:
            raise InputError("this trainer has no job yet: call train.")
        return str(self.latest_training_job.folder / "output" / "data")

    def train(
        self,
        input_data_config: Sequence[Any] | None = None,
        wait: bool | None = True,
        logs: bool | None = True,
        dry_run: bool = False,
    ) -> None:
        """Run the script as a job.

        Args:
            input_data_config: further channels; those of the same name replace the trainer's.
            wait: until its end, with its log on stdout. Else it runs on in the background: `latest_training_job` has its state.
            logs: False: no log while waiting.
            dry_run: check everything, and start nothing.

        Raises:
            InputError: an argument; nothing was started.
            JobFailed: the job failed; `exit_code` is that of the script.
            RunStopped: the job was stopped early.
        """
        job.wants_logs(logs)
        request, channels = self._request(), self._channels(input_data_config)
        request.check()
        if dry_run:
            inputs.addresses(channels, TRAINER.inputs)
            return
        record = {
            "face": TRAINER.face,
            "entry_point": request.entry,
            "source_dir": request.source_dir,
            "instance_type": request.instance_type,
            "instance_count": request.instance_count,
            "hyperparameters": request.hyperparameters,
        }
        self.latest_training_job = start(request, channels, None, record, waits=bool(wait), kind=TrainingJob)
        if wait:
            run(self.latest_training_job, logs)

    def with_checkpoint_config(self, checkpoint_config: Any = None) -> ModelTrainer:
        """Set `checkpoint_config`; returns the trainer."""
        self.checkpoint_config = checkpoint_config
        self._request().check()
        return self

    def _accepted(self, name: str) -> ModelTrainer:
        warn(f"trainer: {name} has no meaning on this machine.")
        return self

    def with_metric_definitions(self, metric_definitions: Sequence[Any]) -> ModelTrainer:
        """Without effect: read the log."""
        return self._accepted("metric_definitions")

    def with_tensorboard_output_config(self, tensorboard_output_config: Any = None) -> ModelTrainer:
        """Without effect: files stay where the script writes them."""
        return self._accepted("tensorboard_output_config")

    def with_retry_strategy(self, retry_strategy: Any) -> ModelTrainer:
        """Without effect: a job starts once."""
        return self._accepted("retry_strategy")

    def with_infra_check_config(self, infra_check_config: Any = None) -> ModelTrainer:
        """Without effect."""
        return self._accepted("infra_check_config")

    def with_session_chaining_config(self, session_chaining_config: Any = None) -> ModelTrainer:
        """Without effect."""
        return self._accepted("session_chaining_config")

    def with_remote_debug_config(self, remote_debug_config: Any) -> ModelTrainer:
        """Without effect."""
        return self._accepted("remote_debug_config")

    @classmethod
    def from_recipe(cls, training_recipe: str | None = None, *others: Any, **options: Any) -> ModelTrainer:
        """HyperPod's recipes, which are refused.

        Raises:
            InputError: always, with the way.
        """
        raise InputError(f"ModelTrainer.from_recipe({training_recipe!r}): {TRAINER_REFUSED['training_recipe']}")

    @classmethod
    def from_jumpstart_config(cls, *others: Any, **options: Any) -> ModelTrainer:
        """JumpStart's models, which are refused.

        Raises:
            InputError: always, with the way.
        """
        raise InputError("ModelTrainer.from_jumpstart_config: JumpStart is not here. Give a script in source_code.")

    def _request(self) -> Request:
        code, compute = self.source_code, self.compute or Compute()
        if code is None or not value_of(code, "entry_script"):
            command = value_of(code, "command")
            given = f"SourceCode.command = {command!r}: a job runs a script. " if command else "source_code has no script: "
            raise InputError(f'{given}Give SourceCode(source_dir=…, entry_script="train.py"), and hyperparameters.')
        for config, names in TRAINER_CONFIGS_REFUSED.items():
            for name, way in names.items():
                value = value_of({"SourceCode": code, "Compute": compute, "Networking": self.networking}[config], name)
                if value not in (None, False, []):
                    raise InputError(f"{config}.{name} = {value!r}: {way}")
        if self.training_input_mode not in (None, "File", "FastFile"):
            raise InputError(
                f'training_input_mode = {self.training_input_mode!r}: a channel is a folder of files here. Use "File".'
            )
        kind, count = value_of(compute, "instance_type") or "ml.m5.xlarge", value_of(compute, "instance_count")
        source_dir, requirements = value_of(code, "source_dir"), value_of(code, "requirements")
        if requirements and not Path(source_dir or ".", requirements).is_file():
            raise InputError(f"SourceCode.requirements = {requirements!r} is not in source_dir = {source_dir!r}.")
        processes, parameters = self._ranks()
        environment = self.environment or {}
        if not isinstance(environment, Mapping):
            raise InputError(f"environment = {environment!r} is no dictionary.")
        hyperparameters = check_hyperparameters(self.hyperparameters)
        if "mp_parameters" in hyperparameters:
            raise InputError('hyperparameters["mp_parameters"]: give SMP\'s parameters in Torchrun(smp=SMP(…)).')
        output, checkpoints = self.output_data_config, self.checkpoint_config
        output_path, address = value_of(output, "s3_output_path"), value_of(checkpoints, "s3_uri")
        return Request(
            entry=str(value_of(code, "entry_script")),
            source_dir=None if source_dir is None else str(source_dir),
            hyperparameters=hyperparameters,
            environment=check_variables(environment),
            instance_type="local" if kind == "local_cpu" else str(kind),
            instance_count=1 if count is None else count,
            distributed=self.distributed is not None,
            parameters=parameters,
            processes=processes,
            output=None if output_path is None else str(output_path),
            base_job_name=self.base_job_name,
            ignored=value_of(code, "ignore_patterns") or (),
            requirements=requirements,
            max_run=value_of(self.stopping_condition, "max_runtime_in_seconds"),
            checkpoints=None if address is None else str(address),
            checkpoint_path=value_of(checkpoints, "local_path"),
            keys=TRAINER,
            encoding=DRIVERS,
        )

    def _ranks(self) -> tuple[int | None, dict[str, Any] | None]:
        """Processes of a machine, and SMP's parameters."""
        kind = type(self.distributed).__name__
        if self.distributed is None:
            return None, None
        if isinstance(self.distributed, MPI) or kind != "Torchrun":
            raise InputError(f"distributed = {self.distributed!r} is not started here: use Torchrun(), with one rank a GPU.")
        processes = value_of(self.distributed, "process_count_per_node")
        if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
            raise InputError(f"process_count_per_node = {processes!r} is no number of processes: give 1 or more.")
        smp = value_of(self.distributed, "smp")
        if smp is None:
            return processes, None
        if type(smp).__name__ != "SMP":
            raise InputError(f"Torchrun.smp = {smp!r}: give SMP(…), such as SMP(context_parallel_degree=8).")
        given = vars(smp) if not hasattr(smp, "model_dump") else smp.model_dump()
        return processes, check_parameters({name: value for name, value in given.items() if value is not None}, TRAINER.smp)

    def _channels(self, more: Sequence[Any] | None) -> dict[str, Any]:
        """Channel → address."""
        found: dict[str, Any] = {}
        for one in [*(self.input_data_config or ()), *(more or ())]:
            name = value_of(one, "channel_name")
            if type(one).__name__ not in ("InputData", "Channel") or not name:
                raise InputError(f"input_data_config: {one!r}: give InputData(channel_name=…, data_source=…).")
            found[name] = _address(one, f"input_data_config[{name!r}]")
        return found

    def _without_effect(self) -> list[str]:
        """Values of the configurations that ask for something and have no effect."""
        given = {
            "Compute": self.compute,
            "Networking": self.networking,
            "StoppingCondition": self.stopping_condition,
            "OutputDataConfig": self.output_data_config,
        }
        return [
            f"{config}.{name}"
            for config, names in TRAINER_CONFIGS_SAID.items()
            for name, met in names.items()
            if value_of(given[config], name) not in (None, False, [], *([met] if met else []))
        ]


def _address(channel: Any, key: str) -> str:
    """The address of an `InputData` or a `Channel`."""
    source = value_of(channel, "data_source")
    for name, plain in _PLAIN_CHANNEL.items():
        if value_of(channel, name) not in plain:
            raise InputError(f"{key}: {name} = {value_of(channel, name)!r} is not there: a channel is a folder of files.")
    if type(source).__name__ == "DataSource":
        inner = [value_of(source, name) for name in ("s3_data_source", "file_system_data_source", "dataset_source")]
        source = next((one for one in inner if one is not None), None)
    kind = type(source).__name__
    if kind == "FileSystemDataSource":
        return inputs.mounted(str(value_of(source, "directory_path")), key)
    if kind == "S3DataSource":
        for name, plain in _PLAIN_SOURCE.items():
            if value_of(source, name) not in plain:
                raise InputError(
                    f"{key}: {name} = {value_of(source, name)!r} is not there: a channel is a folder of files, {plain[1]!r}."
                )
        source = value_of(source, "s3_uri")
    if not isinstance(source, str | Path) or not str(source):
        raise InputError(f"{key} = {source!r} is no address: give a folder, file://… or s3://….")
    return str(source)


def _of_file(name: str) -> dict[str, Any]:
    """Hyperparameters of a JSON or YAML file."""
    path = inputs.expanded(name, "hyperparameters")
    if not path.is_file():
        raise InputError(f"hyperparameters = {name!r}: there is no such file. Give a dictionary, or a JSON or YAML file.")
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        import yaml  # type: ignore[import-untyped]

        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"hyperparameters = {name!r} is neither JSON nor YAML: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"hyperparameters = {name!r} holds no names and values.")
    return found
