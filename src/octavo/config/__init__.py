"""Keys of a run file, their types, defaults and checks: one file per section; `octavo.config.run` composes them.

May import hardware, storage, libraries, job_ranks, supervision and lower levels. These files read only the run file and do
not import torch, so that a mistake is reported in milliseconds, before data or a GPU is touched.
"""

from octavo.config.checkpoint import CheckpointConfig
from octavo.config.data import DataConfig
from octavo.config.fp8 import Fp8Config
from octavo.config.launch import LaunchConfig
from octavo.config.log import LogConfig
from octavo.config.model import ModelConfig
from octavo.config.moe import MoeConfig
from octavo.config.optimizer import OptimizerConfig
from octavo.config.parallel import InitConfig, ParallelConfig
from octavo.config.run import RunConfig, known_keys
from octavo.config.train import TrainConfig

__all__ = [
    "CheckpointConfig", "DataConfig", "Fp8Config", "InitConfig", "LaunchConfig", "LogConfig", "ModelConfig", "MoeConfig",
    "OptimizerConfig", "ParallelConfig", "RunConfig", "TrainConfig", "known_keys",
]  # fmt: skip
