"""What a user may say in a run file, and what the defaults are.

A run file is TOML with one table a section; every key is a typed, documented field of a model below, and nothing else is
accepted. The models hold values only: they open no file but the run file itself and import no torch, so that a mistake is
answered in milliseconds, before data or a GPU is touched. `octavo.launch` reads them on machines without torch.

    config = RunConfig.from_file("run.toml", ["optimizer.lr=1e-4"])
    config.to_toml()            # the resolved file that is kept in the run folder

One file a section, each with its own checks; `octavo.config.run` composes them.
"""

from octavo.config.checkpoint import CheckpointConfig
from octavo.config.data import DataConfig
from octavo.config.fp8 import Fp8Config
from octavo.config.launch import LaunchConfig
from octavo.config.log import LogConfig
from octavo.config.model import ModelConfig
from octavo.config.optimizer import OptimizerConfig
from octavo.config.parallel import InitConfig, ParallelConfig
from octavo.config.run import RunConfig, known_keys
from octavo.config.train import TrainConfig

__all__ = [
    "CheckpointConfig", "DataConfig", "Fp8Config", "InitConfig", "LaunchConfig", "LogConfig", "ModelConfig", "OptimizerConfig",
    "ParallelConfig", "RunConfig", "TrainConfig", "known_keys",
]  # fmt: skip
