"""Configuration classes of `ModelTrainer`, named as in SageMaker's SDK, version 3, with keyword arguments.

They check names, and `SMP` its values too; `octavo.compat.sagemaker.trainer` checks and uses the values. The trainer accepts
the SDK's objects too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from octavo.compat.sagemaker.distribution import SMP_PARAMETERS, check_parameters
from octavo.compat.sagemaker.keys import TRAINER
from octavo.errors import InputError, nearest


class Mode(Enum):
    """The SDK's modes of training: both run on this machine."""

    LOCAL_CONTAINER = "LOCAL_CONTAINER"
    SAGEMAKER_TRAINING_JOB = "SAGEMAKER_TRAINING_JOB"


class Config:
    """Base of the classes: keyword arguments become attributes; `defaults` has all names.

    Raises:
        InputError: an unknown name.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **values: Any) -> None:
        for name, value in {**self.defaults, **values}.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.defaults:
            guess = nearest(name, self.defaults)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise InputError(f"{type(self).__name__}: unknown argument {name!r}.{hint} Known: {', '.join(self.defaults)}.")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != self.defaults[name]}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


def _class(name: str, meaning: str, *names: str, **defaults: Any) -> type[Config]:
    """A class with these fields; `names` default to None."""
    fields = dict.fromkeys(names) | defaults
    return type(name, (Config,), {"defaults": fields, "__doc__": meaning, "__module__": __name__})


IGNORED = (".env", ".git", "__pycache__", ".DS_Store", ".cache", ".ipynb_checkpoints")
"""The SDK's default `ignore_patterns`."""
SourceCode = _class(
    "SourceCode", "The script and its folder.", "source_dir", "requirements", "entry_script", "command", "args",
    ignore_patterns=list(IGNORED),
)  # fmt: skip
Compute = _class(
    "Compute", "The machines.", "instance_type", "instance_count", "volume_kms_key_id", "keep_alive_period_in_seconds",
    "instance_groups", "training_plan_arn", "instance_placement_config", "instance_preferences",
    "enable_managed_spot_training", volume_size_in_gb=30,
)  # fmt: skip
Networking = _class(
    "Networking", "The network of AWS.", "security_group_ids", "subnets", "enable_network_isolation",
    "enable_inter_container_traffic_encryption",
)  # fmt: skip
InputData = _class("InputData", "A channel.", "channel_name", "data_source", "content_type")
Channel = _class(
    "Channel", "A channel, as AWS's interface has it.", "channel_name", "data_source", "content_type", "compression_type",
    "record_wrapper_type", "input_mode", "shuffle_config",
)  # fmt: skip
DataSource = _class("DataSource", "The data of a channel.", "s3_data_source", "file_system_data_source", "dataset_source")
S3DataSource = _class(
    "S3DataSource", "A folder or a file.", "s3_data_type", "s3_uri", "s3_data_distribution_type", "attribute_names",
    "instance_group_names", "model_access_config", "hub_access_config",
)  # fmt: skip
FileSystemDataSource = _class(
    "FileSystemDataSource", "A file system that this machine has mounted at directory_path.", "file_system_id",
    "file_system_access_mode", "file_system_type", "directory_path",
)  # fmt: skip
StoppingCondition = _class(
    "StoppingCondition", "Limits of time.", "max_runtime_in_seconds", "max_wait_time_in_seconds", "max_pending_time_in_seconds",
)  # fmt: skip
OutputDataConfig = _class("OutputDataConfig", "The folder of jobs.", "s3_output_path", "kms_key_id", "compression_type")
CheckpointConfig = _class("CheckpointConfig", "Checkpoints.", "s3_uri", local_path="/opt/ml/checkpoints")
TensorBoardOutputConfig = _class(
    "TensorBoardOutputConfig", "Files of TensorBoard.", "s3_output_path", local_path="/opt/ml/output/tensorboard"
)
DatasetSource = _class("DatasetSource", "A data set of AWS.", "dataset_arn")
HubAccessConfig = _class("HubAccessConfig", "A hub of AWS.", "hub_content_arn")
HyperPodCompute = _class(
    "HyperPodCompute", "A cluster of AWS.", cluster_name="", instance_type=None, namespace="kubeflow", node_count=1
)
InfraCheckConfig = _class("InfraCheckConfig", "Checks of AWS's machines.", "enable_infra_check")
InstanceGroup = _class("InstanceGroup", "Machines of one kind.", "instance_type", "instance_count", "instance_group_name")
MetricDefinition = _class("MetricDefinition", "A number in the log.", "name", "regex")
ModelAccessConfig = _class("ModelAccessConfig", "A licence.", "accept_eula")
RemoteDebugConfig = _class("RemoteDebugConfig", "A shell on AWS's machine.", "enable_remote_debug")
RetryStrategy = _class("RetryStrategy", "Repeated starts.", "maximum_retry_attempts")
SessionChainingConfig = _class("SessionChainingConfig", "Tags of a session.", "enable_session_tag_chaining")
ShuffleConfig = _class("ShuffleConfig", "An order of files.", "seed")
Tag = _class("Tag", "A tag.", "key", "value")
TrainingImageConfig = _class(
    "TrainingImageConfig", "A registry.", "training_repository_access_mode", "training_repository_auth_config"
)
TrainingRepositoryAuthConfig = _class(
    "TrainingRepositoryAuthConfig", "An account of a registry.", "training_repository_credentials_provider_arn"
)


class DistributedConfig(Config):
    """A launcher of ranks."""


class SMP(Config):
    """SMP's parameters, for `Torchrun`; None: SMP's default.

    Raises:
        InputError: an unknown name, a value of the wrong type, or an unsupported combination of degrees.
    """

    defaults = dict.fromkeys(SMP_PARAMETERS)

    def __init__(self, **values: Any) -> None:
        check_parameters({name: value for name, value in values.items() if value is not None}, TRAINER.smp)
        super().__init__(**values)


class Torchrun(DistributedConfig):
    """Ranks by torchrun: process_count_per_node on each machine, by default one for each GPU. smp: SMP's parameters."""

    defaults: ClassVar[Mapping[str, Any]] = {"process_count_per_node": None, "smp": None}


class MPI(DistributedConfig):
    """Ranks by mpirun, which `ModelTrainer` refuses."""

    defaults: ClassVar[Mapping[str, Any]] = {"process_count_per_node": None, "mpi_additional_options": None}


def value_of(config: Any, name: str) -> Any:
    """A value of a configuration or dictionary, None if unset; unset values of the SDK's classes are marker objects."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return None if type(value).__name__ == "Unassigned" else value
