"""Jobs from the scripts and calls that were written for SageMaker: estimator, trainer, and the supervisor of a job.

May import config and the levels above, but not _version, dtypes, hub. Nothing imports torch: an estimator answers in
milliseconds, and runs on a machine without it.
"""

from octavo.launch.configs import (
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
from octavo.launch.estimator import PyTorch
from octavo.launch.inputs import FileSystemInput, TrainingInput
from octavo.launch.job import Job, JobFailed
from octavo.launch.trainer import ModelTrainer
from octavo.launch.training_job import TrainingJob

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
