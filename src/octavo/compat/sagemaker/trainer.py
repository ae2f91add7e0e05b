"""`octavo.launch.ModelTrainer`: the trainer of SageMaker's SDK, version 3, for jobs of this machine.

It starts the same jobs as `octavo.launch.PyTorch`: ranks, folders, channels and refusals are the same, with the trainer's
argument names. As in the SDK, hyperparameters become arguments in JSON. A job has no time limit by default; in the SDK it is
one hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.compat.sagemaker.configs import Compute, Mode, value_of
from octavo.compat.sagemaker.distribution import check_parameters
from octavo.compat.sagemaker.environment import DRIVERS, check_hyperparameters, check_variables
from octavo.compat.sagemaker.keys import TRAINER
from octavo.compat.sagemaker.request import Request
from octavo.compat.sagemaker.sdk_arguments import (
    TRAINER_CONFIGS_REFUSED,
    TRAINER_CONFIGS_SAID,
    TRAINER_MEANINGLESS,
    TRAINER_REFUSED,
    check_sdk,
)
from octavo.compat.sagemaker.starting import check, run, start
from octavo.compat.sagemaker.training_job import TrainingJob
from octavo.compat.sagemaker.values import channels_of, config_of, hyperparameters_of, is_a, text_of
from octavo.errors import InputError, nearest, warn
from octavo.launch import job

ARGUMENTS = (
    "training_mode", "base_job_name", "source_code", "distributed", "compute", "networking", "stopping_condition",
    "output_data_config", "input_data_config", "checkpoint_config", "training_input_mode", "environment", "hyperparameters",
)  # fmt: skip
_KINDS = {
    "source_code": "SourceCode", "compute": "Compute", "networking": "Networking", "stopping_condition": "StoppingCondition",
    "output_data_config": "OutputDataConfig", "checkpoint_config": "CheckpointConfig",
}  # fmt: skip
"""Argument → class of its value."""


class ModelTrainer:
    """A training script with its configuration, to be run by `train`. All arguments by keyword; the SDK's objects work too.

    Args:
        training_mode: both of `Mode` mean this machine.
        base_job_name: beginning of the names of jobs; None: the script's name.
        source_code: `SourceCode`: folder, script and patterns of names to leave out.
        distributed: `Torchrun`, with `SMP`; None: the script is one process.
        compute: `Compute`: kind and number of machines; None: the SDK's default, a machine without GPUs.
        networking: `Networking`, without effect.
        stopping_condition: `StoppingCondition`: max_runtime_in_seconds, after which a job is stopped.
        output_data_config: `OutputDataConfig`: s3_output_path is a folder for jobs instead of ./jobs, or a remote address to
            which model and output of a job are copied at its end.
        input_data_config: a list of `InputData` or `Channel`.
        checkpoint_config: `CheckpointConfig`: s3_uri is a folder, /opt/ml/checkpoints of every job, or a remote address.
        training_input_mode: "File" or "FastFile".
        environment: further variables of the script.
        hyperparameters: arguments of the script, or the path of a JSON or YAML file with them.
        sdk: other arguments of the SDK; those without an effect on this machine are logged once.

    Raises:
        InputError: an unknown argument, or arguments that contradict each other or do not fit this machine.
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
        hyperparameters: Mapping[str, Any] | str | Path | None = None,
        **sdk: Any,
    ) -> None:
        check_sdk(sdk, "ModelTrainer", (*ARGUMENTS, *TRAINER_MEANINGLESS), TRAINER_REFUSED)
        if getattr(training_mode, "value", training_mode) not in [mode.value for mode in Mode]:
            raise InputError(f"training_mode = {training_mode!r}: give Mode.LOCAL_CONTAINER or leave it out.")
        self.training_mode, self.base_job_name = training_mode, base_job_name
        self.source_code, self.distributed, self.compute = source_code, distributed, compute
        self.networking, self.stopping_condition = networking, stopping_condition
        self.output_data_config, self.checkpoint_config = output_data_config, checkpoint_config
        self.input_data_config, self.training_input_mode = input_data_config, training_input_mode
        self.environment = environment
        self.hyperparameters: Mapping[str, Any] = hyperparameters_of(hyperparameters)
        self.latest_training_job: TrainingJob | None = None
        self._request().check()
        channels_of(self.input_data_config, TRAINER.inputs)
        ignored = [name for name, value in sdk.items() if value not in (None, [], {}, "")]
        ignored += self._without_effect()
        if ignored:
            warn(f"trainer: {', '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no effect on this machine.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (*ARGUMENTS, "latest_training_job"):
            guess = nearest(name, ARGUMENTS)
            raise InputError(f"ModelTrainer has no {name!r} to set.{f' Did you mean {guess!r}?' if guess else ''}")
        super().__setattr__(name, value)

    @property
    def _latest_training_job(self) -> TrainingJob | None:  # the SDK's name, which scripts use
        return self.latest_training_job

    @property
    def output_data(self) -> str:
        """The newest job's output folder, SM_OUTPUT_DATA_DIR in its script.

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
            wait: wait for the end, with the log on stdout. Else the job runs in the background: see `latest_training_job`.
            logs: False: no log while waiting.
            dry_run: only check the arguments.

        Raises:
            InputError: a fault in the arguments, before anything has started.
            JobFailed: the job failed; `exit_code` is the script's.
            RunStopped: the job was stopped early.
        """
        job.wants_logs(logs)
        request, key = self._request(), TRAINER.inputs
        channels = channels_of(self.input_data_config, key) | channels_of(input_data_config, key)
        if dry_run:
            check(request, channels)
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
        warn(f"trainer: {name} has no effect on this machine.")
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
            InputError: always, with what to do instead.
        """
        raise InputError(f"ModelTrainer.from_recipe({training_recipe!r}): {TRAINER_REFUSED['training_recipe']}")

    @classmethod
    def from_jumpstart_config(cls, *others: Any, **options: Any) -> ModelTrainer:
        """JumpStart's models, which are refused.

        Raises:
            InputError: always, with what to do instead.
        """
        raise InputError("ModelTrainer.from_jumpstart_config: JumpStart is not supported. Give a script in source_code.")

    def _request(self) -> Request:
        code, compute = self._config("source_code"), self._config("compute") or Compute()
        networking, stopping = self._config("networking"), self._config("stopping_condition")
        output, checkpoints = self._config("output_data_config"), self._config("checkpoint_config")
        if code is None or not value_of(code, "entry_script"):
            command = value_of(code, "command")
            fault = f"SourceCode.command = {command!r}: a job runs a script. " if command else "source_code has no script: "
            raise InputError(f'{fault}Give SourceCode(source_dir=…, entry_script="train.py"), and hyperparameters.')
        for config, names in TRAINER_CONFIGS_REFUSED.items():
            for name, way in names.items():
                value = value_of({"SourceCode": code, "Compute": compute, "Networking": networking}[config], name)
                if value not in (None, False, []):
                    raise InputError(f"{config}.{name} = {value!r}: {way}")
        ignored = value_of(code, "ignore_patterns")
        ignored = () if ignored is None else ignored
        if not isinstance(ignored, list | tuple) or not all(isinstance(one, str) for one in ignored):
            raise InputError(f"SourceCode.ignore_patterns = {ignored!r}: give a list of patterns of names, such as ['data'].")
        if self.training_input_mode not in (None, "File", "FastFile"):
            raise InputError(
                f'training_input_mode = {self.training_input_mode!r}: a channel is a folder of files here. Use "File".'
            )
        kind, count = value_of(compute, "instance_type"), value_of(compute, "instance_count")
        kind = "ml.m5.xlarge" if kind is None else kind
        source_dir = text_of(value_of(code, "source_dir"), "source_dir")
        requirements = text_of(value_of(code, "requirements"), "SourceCode.requirements")
        if requirements and not Path(source_dir or ".", requirements).is_file():
            raise InputError(f"SourceCode.requirements = {requirements!r} is not in source_dir = {source_dir!r}.")
        processes, parameters = self._ranks()
        environment = {} if self.environment is None else self.environment
        if not isinstance(environment, Mapping):
            raise InputError(f"environment = {environment!r} is not a dictionary.")
        hyperparameters = check_hyperparameters(self.hyperparameters, DRIVERS.arguments)
        if "mp_parameters" in hyperparameters:
            raise InputError('hyperparameters["mp_parameters"]: give SMP\'s parameters in Torchrun(smp=SMP(…)).')
        return Request(
            entry=str(text_of(value_of(code, "entry_script"), TRAINER.entry)),
            source_dir=source_dir,
            hyperparameters=hyperparameters,
            environment=check_variables(environment),
            instance_type="local" if kind == "local_cpu" else str(text_of(kind, "instance_type")),
            instance_count=1 if count is None else count,
            distributed=self.distributed is not None,
            parameters=parameters,
            processes=processes,
            output=text_of(value_of(output, "s3_output_path"), TRAINER.output),
            base_job_name=text_of(self.base_job_name, "base_job_name"),
            ignored=ignored,
            requirements=requirements,
            max_run=value_of(stopping, "max_runtime_in_seconds"),
            checkpoints=text_of(value_of(checkpoints, "s3_uri"), TRAINER.checkpoints),
            checkpoint_path=text_of(value_of(checkpoints, "local_path"), TRAINER.checkpoint_path),
            keys=TRAINER,
            encoding=DRIVERS,
        )

    def _ranks(self) -> tuple[int | None, dict[str, Any] | None]:
        """(processes on each machine, SMP's parameters); None for the default, and without SMP."""
        if self.distributed is None:
            return None, None
        if not is_a(self.distributed, "Torchrun"):
            raise InputError(f"distributed = {self.distributed!r} is not started here: use Torchrun(), with one rank a GPU.")
        processes = value_of(self.distributed, "process_count_per_node")
        if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
            raise InputError(f"process_count_per_node = {processes!r} is not a number of processes: give 1 or more.")
        smp = value_of(self.distributed, "smp")
        if smp is None:
            return processes, None
        if not is_a(smp, "SMP"):
            raise InputError(f"Torchrun.smp = {smp!r}: give SMP(…), such as SMP(context_parallel_degree=8).")
        fields = vars(smp) if not hasattr(smp, "model_dump") else smp.model_dump()
        return processes, check_parameters({name: value for name, value in fields.items() if value is not None}, TRAINER.smp)

    def _config(self, name: str) -> Any:
        return config_of(getattr(self, name), _KINDS[name], name)

    def _without_effect(self) -> list[str]:
        """Values of the configurations that are not neutral and have no effect."""
        configs = {kind: self._config(name) for name, kind in _KINDS.items()}
        if value_of(configs["CheckpointConfig"], "s3_uri") is not None:  # with an address, its local_path has an effect
            configs["CheckpointConfig"] = None
        named = ["InputData.content_type"] * any(value_of(one, "content_type") for one in self.input_data_config or ())
        return named + [
            f"{config}.{name}"
            for config, names in TRAINER_CONFIGS_SAID.items()
            for name, met in names.items()
            if value_of(configs[config], name) not in (None, False, [], *([met] if met else []))
        ]
