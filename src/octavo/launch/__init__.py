"""Jobs of this machine: each has a folder, a supervisor that watches its ranks, and a state that other processes read.

SageMaker's names that start jobs are imported lazily from `octavo.compat.sagemaker`. May import
config and lower levels, but not _version, dtypes, hub. Nothing imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.launch.job import Job, JobFailed

if TYPE_CHECKING:
    from octavo.compat.sagemaker.configs import (
        MPI,
        SMP,
        Channel,
        CheckpointConfig,
        Compute,
        DataSource,
        FileSystemDataSource,
        InputData,
        Networking,
        OutputDataConfig,
        S3DataSource,
        SourceCode,
        StoppingCondition,
        Torchrun,
    )
    from octavo.compat.sagemaker.estimator import PyTorch
    from octavo.compat.sagemaker.inputs import FileSystemInput, TrainingInput
    from octavo.compat.sagemaker.trainer import ModelTrainer
    from octavo.compat.sagemaker.training_job import TrainingJob

_HOME = {
    "PyTorch": "estimator",
    "ModelTrainer": "trainer",
    "TrainingJob": "training_job",
    "FileSystemInput": "inputs",
    "TrainingInput": "inputs",
}
"""Name → its module in `octavo.compat.sagemaker`; `configs` for others."""

__all__ = [
    "MPI",
    "SMP",
    "Channel",
    "CheckpointConfig",
    "Compute",
    "DataSource",
    "FileSystemDataSource",
    "FileSystemInput",
    "InputData",
    "Job",
    "JobFailed",
    "ModelTrainer",
    "Networking",
    "OutputDataConfig",
    "PyTorch",
    "S3DataSource",
    "SourceCode",
    "StoppingCondition",
    "Torchrun",
    "TrainingInput",
    "TrainingJob",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo.launch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"octavo.compat.sagemaker.{_HOME.get(name, 'configs')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
