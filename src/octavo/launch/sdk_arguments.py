"""Arguments of the SDK's estimator beside those of `PyTorch`: without meaning on one's own machine, or refused with the way."""

from __future__ import annotations

MEANINGLESS = (
    "checkpoint_local_path", "checkpoint_s3_uri", "code_location", "container_arguments", "container_entry_point",
    "container_log_level", "debugger_hook_config", "disable_output_compression", "disable_profiler", "enable_infra_check",
    "enable_network_isolation", "enable_remote_debug", "enable_sagemaker_metrics", "enable_session_tag_chaining",
    "encrypt_inter_container_traffic", "framework_version", "image_uri", "image_uri_region", "input_mode",
    "keep_alive_period_in_seconds", "max_retry_attempts", "max_wait", "metric_definitions", "output_kms_key", "profiler_config",
    "py_version", "role", "rules", "sagemaker_session", "security_group_ids", "subnets", "tags", "tensorboard_output_config",
    "training_repository_access_mode", "training_repository_credentials_provider_arn", "use_spot_instances", "volume_kms_key",
    "volume_size", "wait",
)  # fmt: skip
"""Accepted: a job runs here, under this user, in this Python. `wait` is of `fit`; the SDK takes and forgets it."""

_RECIPE = "HyperPod's recipes are not here: give a script as entry_point, or train a run file (octavo train presets/…)."
REFUSED = {
    "training_recipe": _RECIPE,
    "recipe_overrides": _RECIPE,
    "git_config": "clone the repository, and give its folder as source_dir.",
    "instance_groups": "give instance_type and instance_count: the ranks of a job are alike.",
    "model_uri": "give the model as a channel of inputs.",
    "model_channel_name": "give the model as a channel of inputs.",
    "training_plan": "a job starts at once, on this machine.",
    "compiler_config": "SageMaker's training compiler is not here.",
    "train_instance_type": "the SDK renamed it: give instance_type.",
    "train_instance_count": "the SDK renamed it: give instance_count.",
    "train_max_run": "the SDK renamed it: give max_run.",
}

_OWN = (
    "entry_point", "source_dir", "hyperparameters", "instance_type", "instance_count", "distribution", "output_path",
    "base_job_name", "environment", "dependencies", "max_run",
)  # fmt: skip
ARGUMENTS = (*_OWN, *MEANINGLESS)
"""Every argument that is accepted, for the nearest of a mistyped one."""
