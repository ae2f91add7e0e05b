"""Names of a job's arguments for messages: the estimator's or the trainer's, by the class that the user called."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Names of arguments.

    Attributes:
        face: the class.
        entry: the script.
        smp: SMP's parameters.
        ranks: an argument that starts ranks.
        machines: the arguments for the number of ranks.
        inputs: the channels.
        call: a call with channels.
        output: the folder of jobs, or the address of results.
        checkpoints: the address of checkpoints.
        checkpoint_path: their folder in the job.
        runtime: the seconds after which a job is stopped.
    """

    face: str
    entry: str
    smp: str
    ranks: str
    machines: str
    inputs: str
    call: str
    output: str
    checkpoints: str
    checkpoint_path: str
    runtime: str


_NAMES = {
    "face": ("PyTorch", "ModelTrainer"),
    "entry": ("entry_point", "entry_script"),
    "smp": ('distribution["smdistributed"]["modelparallel"]["parameters"]', "SMP(…)"),
    "ranks": ('distribution={"torch_distributed": {"enabled": True}}', "distributed=Torchrun()"),
    "machines": ("instance_type and instance_count", "Compute(instance_type=…, instance_count=…)"),
    "inputs": ("inputs", "input_data_config"),
    "call": ("fit(inputs={…})", "input_data_config=[InputData(…)]"),
    "output": ("output_path", "s3_output_path"),
    "checkpoints": ("checkpoint_s3_uri", "CheckpointConfig.s3_uri"),
    "checkpoint_path": ("checkpoint_local_path", "CheckpointConfig.local_path"),
    "runtime": ("max_run", "max_runtime_in_seconds"),
}
"""Field → the estimator's name, and the trainer's."""

ESTIMATOR, TRAINER = (Keys(**{field: names[face] for field, names in _NAMES.items()}) for face in (0, 1))
FACE = "OCTAVO_LAUNCH_FACE"
"""Environment variable of a job with ranks: the class that its user called."""


def of_this_job() -> Keys | None:
    """The names for messages in a job's ranks; None outside of a job."""
    return next((keys for keys in (ESTIMATOR, TRAINER) if os.environ.get(FACE) == keys.face), None)
