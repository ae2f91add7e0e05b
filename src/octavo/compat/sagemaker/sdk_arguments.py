"""Arguments of the SDK's estimator and trainer that Octavo accepts without effect, or refuses with a remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import InputError, nearest

MEANINGLESS = (
    "code_location", "container_log_level", "debugger_hook_config", "disable_output_compression", "disable_profiler",
    "enable_infra_check", "enable_remote_debug", "enable_sagemaker_metrics", "enable_session_tag_chaining",
    "encrypt_inter_container_traffic", "framework_version", "image_uri", "image_uri_region", "input_mode",
    "instance_placement_config",
    "keep_alive_period_in_seconds", "max_retry_attempts", "max_wait", "metric_definitions", "output_kms_key",
    "profiler_config", "py_version", "role", "rules", "sagemaker_session", "security_group_ids", "subnets", "tags",
    "tensorboard_output_config", "training_repository_access_mode", "training_repository_credentials_provider_arn",
    "use_spot_instances", "volume_kms_key", "volume_size", "wait",
)  # fmt: skip
"""Accepted without effect: a job runs here, under this user, in this Python. `wait` is `fit`'s; the SDK ignores it here."""

_RECIPE = "HyperPod recipes are not supported: give a script as entry_point, or train a run file (octavo train presets/…)."
REFUSED = {
    "training_recipe": _RECIPE,
    "recipe_overrides": _RECIPE,
    "container_arguments": "give hyperparameters: the script is entry_point.",
    "container_entry_point": "give the script as entry_point.",
    "git_config": "clone the repository, and give its folder as source_dir.",
    "instance_groups": "give instance_type and instance_count: the ranks of a job are alike.",
    "model_uri": "give the model as a channel of inputs.",
    "model_channel_name": "give the model as a channel of inputs.",
    "enable_network_isolation": "a job has the network of this machine. Leave it out.",
    "training_plan": "a job starts at once, on this machine.",
    "compiler_config": "SageMaker's training compiler is not supported. Leave it out.",
    "train_instance_type": "the SDK renamed it: give instance_type.",
    "train_instance_count": "the SDK renamed it: give instance_count.",
    "train_max_run": "the SDK renamed it: give max_run.",
}

_OWN = (
    "entry_point", "source_dir", "hyperparameters", "instance_type", "instance_count", "distribution", "output_path",
    "base_job_name", "environment", "dependencies", "max_run", "checkpoint_s3_uri", "checkpoint_local_path",
)  # fmt: skip
ARGUMENTS = (*_OWN, *MEANINGLESS)
"""Every accepted argument, to suggest the nearest of a mistyped one."""

_MET: Mapping[str, tuple[Any, ...]] = {
    "debugger_hook_config": (False,),
    "disable_output_compression": (True,),
    "disable_profiler": (True,),
    "enable_infra_check": (False,),
    "enable_remote_debug": (False,),
    "enable_sagemaker_metrics": (False,),
    "enable_session_tag_chaining": (False,),
    "encrypt_inter_container_traffic": (False, True),
    "input_mode": ("File",),
    "keep_alive_period_in_seconds": (0,),
    "max_retry_attempts": (0,),
    "use_spot_instances": (False,),
    "wait": (True,),
}
"""Argument → values that are true of every job, such as no debugger. Ranks of one machine send nothing over a network."""


def without_effect(arguments: Mapping[str, Any]) -> list[str]:
    """Names of arguments that have no effect, unless their value is true of every job."""
    asked = {name: value for name, value in arguments.items() if value is not None and value not in ([], (), {}, "")}
    return [name for name, value in asked.items() if not any(value is met or value == met for met in _MET.get(name, ()))]


_ENDPOINT = "Load the folder model_data with transformers, and serve it from there."
_STUDIO = "Read the log: estimator.logs()."
NOT_HERE = {
    "deploy": _ENDPOINT,
    "create_model": _ENDPOINT,
    "register": _ENDPOINT,
    "transformer": _ENDPOINT,
    "compile_model": _ENDPOINT,
    "training_job_analytics": _STUDIO,
    "get_app_url": _STUDIO,
    "enable_default_profiling": "Give octavo.train's [metrics] or torch.profiler to the script.",
    "update_profiler": "Give torch.profiler to the script.",
}
"""Methods of the SDK's estimator that are not supported → what to do instead."""

OF_ESTIMATOR = {
    "entry_point": "source_code=SourceCode(entry_script=…)",
    "source_dir": "source_code=SourceCode(source_dir=…)",
    "dependencies": "source_code=SourceCode(source_dir=…), a folder that holds them",
    "instance_type": "compute=Compute(instance_type=…)",
    "instance_count": "compute=Compute(instance_count=…)",
    "distribution": "distributed=Torchrun(smp=SMP(…))",
    "output_path": "output_data_config=OutputDataConfig(s3_output_path=…)",
    "max_run": "stopping_condition=StoppingCondition(max_runtime_in_seconds=…)",
    "checkpoint_s3_uri": "checkpoint_config=CheckpointConfig(s3_uri=…)",
    "checkpoint_local_path": "checkpoint_config=CheckpointConfig(local_path=…)",
    "image_uri": "training_image=…",
    "inputs": "input_data_config=[InputData(…)]",
}
"""Argument of the estimator → that of the trainer, for calls that mix both."""
OF_TRAINER = {
    "source_code": "entry_point and source_dir",
    "compute": "instance_type and instance_count",
    "distributed": "distribution",
    "stopping_condition": "max_run",
    "output_data_config": "output_path",
    "checkpoint_config": "checkpoint_s3_uri",
    "input_data_config": "the channels in fit(inputs=…)",
    "training_image": "image_uri",
    "networking": "subnets and security_group_ids",
}
"""Argument of the trainer → that of the estimator."""
TRAINER_MEANINGLESS = (
    "role", "sagemaker_session", "training_image", "training_image_config", "tags", "input_s3_key_prefix",
    "local_container_root", "config_mgr",
)  # fmt: skip
"""Arguments of the trainer, accepted without effect: a job runs here, under this user, in this Python."""
TRAINER_REFUSED = {
    "algorithm_name": "algorithms of AWS's marketplace are not supported. Give a script in source_code.",
    "model_package_config": "a model registry is not supported. Leave it out.",
    "training_recipe": _RECIPE.replace("entry_point", "SourceCode.entry_script"),
    "recipe_overrides": _RECIPE.replace("entry_point", "SourceCode.entry_script"),
}
TRAINER_CONFIGS_REFUSED: Mapping[str, Mapping[str, str]] = {
    "SourceCode": {
        "command": "a job runs entry_script: leave command out.",
        "args": "they belong to command: give hyperparameters.",
    },
    "Compute": {
        "instance_groups": "give instance_type and instance_count: the ranks of a job are alike.",
        "instance_preferences": "give instance_type.",
        "training_plan_arn": REFUSED["training_plan"],
    },
    "Networking": {"enable_network_isolation": REFUSED["enable_network_isolation"]},
}
"""Configuration of the trainer → its refused values → what to do instead."""
TRAINER_CONFIGS_SAID: Mapping[str, Mapping[str, Any]] = {
    "Compute": {
        "volume_size_in_gb": 30,
        "volume_kms_key_id": None,
        "keep_alive_period_in_seconds": 0,
        "enable_managed_spot_training": None,
        "instance_placement_config": None,
    },
    "Networking": {"security_group_ids": None, "subnets": None},
    "StoppingCondition": {"max_wait_time_in_seconds": None, "max_pending_time_in_seconds": None},
    "OutputDataConfig": {"kms_key_id": None, "compression_type": "NONE"},
    "CheckpointConfig": {"local_path": "/opt/ml/checkpoints"},
}
"""Configuration of the trainer → its values without effect → the neutral one, which is not logged."""


def check_sdk(arguments: Mapping[str, Any], face: str, known: Collection[str], refused: Mapping[str, str]) -> None:
    """Check the SDK's further arguments, in `**sdk` of the estimator or the trainer.

    Args:
        arguments: name → value; a refused argument may be None.
        face: the class, PyTorch or ModelTrainer.
        known: all accepted names.
        refused: name → what to do instead.

    Raises:
        InputError: an argument is refused, belongs to the other class, or is unknown.
    """
    other, places = ("ModelTrainer", OF_TRAINER) if face == "PyTorch" else ("PyTorch", OF_ESTIMATOR)
    for name, value in arguments.items():
        if name in refused and value is not None:
            raise InputError(f"{name} = {value!r}: {refused[name]}")
        if name not in known and name not in refused:
            if name in places:
                raise InputError(f"{name!r} is an argument of {other}: give {face} {places[name]}.")
            guess = nearest(name, known)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise InputError(f"unknown argument {name!r} of {face}.{hint} The SDK has none of this name.")
