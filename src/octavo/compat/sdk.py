"""The shim of SageMaker's SDK, for scripts that start jobs: `octavo.launch` under the SDK's names. Loads no torch.

Not installed beside the SDK itself: then a script means AWS's cloud. `--replace-installed` overrides that.
"""

from __future__ import annotations

import os

from octavo.compat import finder
from octavo.compat.finder import REPLACE, Names, Shim

_SESSION: Names = {"octavo.compat.sagemaker.session": "Session get_execution_role"}
_IMAGES: Names = {"octavo.compat.sagemaker.session": "retrieve"}
_CONFIGS: Names = {
    "octavo.compat.sagemaker.configs": "Channel CheckpointConfig Compute DataSource DatasetSource FileSystemDataSource "
    "HubAccessConfig "
    "HyperPodCompute InfraCheckConfig InputData InstanceGroup MetricDefinition ModelAccessConfig Networking OutputDataConfig "
    "RemoteDebugConfig RetryStrategy S3DataSource SessionChainingConfig ShuffleConfig SourceCode StoppingCondition Tag "
    "TensorBoardOutputConfig TrainingImageConfig TrainingRepositoryAuthConfig"
}
_DISTRIBUTED: Names = {"octavo.compat.sagemaker.configs": "MPI SMP DistributedConfig Torchrun"}
_TRAINER: Names = {"octavo.compat.sagemaker.trainer": "ModelTrainer", "octavo.compat.sagemaker.configs": "Mode"}
_TRAINED: Names = {
    "octavo.compat.sagemaker.trainer": "ModelTrainer",
    "octavo.compat.sagemaker.configs": "Compute HyperPodCompute",
}
_INPUTS: Names = {"octavo.compat.sagemaker.inputs": "FileSystemInput TrainingInput"}
_ESTIMATOR: Names = {"octavo.compat.sagemaker.sdk": "PyTorch"}

MODULES: dict[str, Names] = {
    "sagemaker": {**_SESSION, **_INPUTS},
    "sagemaker.session": _SESSION,
    "sagemaker.image_uris": _IMAGES,
    "sagemaker.local": {"octavo.compat.sagemaker.session": "LocalSession"},
    "sagemaker.inputs": _INPUTS,
    "sagemaker.pytorch": _ESTIMATOR,
    "sagemaker.pytorch.estimator": _ESTIMATOR,
    # Version 3, and late releases of version 2.
    "sagemaker.train": {**_SESSION, **_TRAINED},
    "sagemaker.train.model_trainer": _TRAINER,
    "sagemaker.train.configs": _CONFIGS,
    "sagemaker.train.distributed": _DISTRIBUTED,
    "sagemaker.modules": _SESSION,
    "sagemaker.modules.train": {"octavo.compat.sagemaker.trainer": "ModelTrainer"},
    "sagemaker.modules.train.model_trainer": _TRAINER,
    "sagemaker.modules.configs": _CONFIGS,
    "sagemaker.modules.distributed": _DISTRIBUTED,
    "sagemaker.core": {},
    "sagemaker.core.image_uris": _IMAGES,
    "sagemaker.core.helper": {},
    "sagemaker.core.helper.session_helper": _SESSION,
    "sagemaker.core.inputs": _INPUTS,
    "sagemaker.core.resources": {"octavo.compat.sagemaker.training_job": "TrainingJob"},
    "sagemaker.core.shapes": _CONFIGS,
    "sagemaker.core.training": {},
    "sagemaker.core.training.configs": _CONFIGS,
}
_FOLDERS = "Give folders of this machine, or addresses that fsspec knows, as inputs and output_path."
WAYS = {
    "sagemaker.huggingface": "sagemaker.pytorch.PyTorch starts its script: leave transformers_version and pytorch_version out.",
    "sagemaker.estimator": "sagemaker.pytorch.PyTorch starts a script: give it as entry_point.",
    "sagemaker.debugger": "Leave it out: torch.profiler in the script writes a profile.",
    "sagemaker.tuner": "Start a job for each set of hyperparameters: fit(wait=False).",
    "sagemaker.train.tuner": "Start a job for each set of hyperparameters: train(wait=False).",
    "sagemaker.s3": _FOLDERS,
    "sagemaker.s3_utils": _FOLDERS,
    "sagemaker": "Jobs run on this machine: octavo.launch.PyTorch and octavo.launch.ModelTrainer start them.",
}

SHIM = Shim("sagemaker", "SageMaker's SDK", MODULES, WAYS)


def install_if_absent() -> None:
    """Give this process the SDK's names, unless the SDK is installed."""
    if SHIM.real() is None or os.environ.get(REPLACE) == "1":
        finder.install(SHIM)
