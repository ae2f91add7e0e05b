"""Which keys may change when a run continues, and the refusal of the others.

A continued run should be the run that was started. Keys that only say how often something is reported or kept, where data
lies, or how memory is traded for time may change; everything that the losses depend on may not, since a curve made of two
runs under one name is worse than a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from octavo.config.run import RunConfig
from octavo.errors import InputError

CHANGEABLE: dict[str, str] = {
    "log.*": "what is reported",
    "checkpoint.*": "what is kept",
    "train.output": "the folder may have been moved",
    "train.validate_every": "validation leaves the run as it is",
    "train.validate_batches": "validation leaves the run as it is",
    "train.compare_bf16": "a second run, after this one",
    "train.micro_batch": "the same gradient, summed in another order",
    "train.recompute": "the same numbers, for less memory",
    "train.offload": "the same numbers, for less memory",
    "train.compile": "the same model, in other kernels",
    "train.deterministic": "the same model, in other kernels",
    "train.loss_scale": "the same gradient, in another part of float16's range; a scale that is too large must be mendable",
    "data.workers": "the same batches, read ahead",
    "data.folder": "tokenised again in another place; the fingerprint is compared",
    "parallel.*_degree": "a checkpoint loads in any layout",
    "parallel.cp_comm_type": "the same keys and values, by another way",
    "parallel.reshard_after_forward": "the same numbers, for less memory",
    "parallel.sm_activation_offloading": "the same numbers, for less memory",
    "parallel.activation_loading_horizon": "the same numbers, for less memory",
    "launch.*": "how ranks are watched",
}
"""Patterns of keys, and why each may differ from the run that wrote the checkpoint."""


def check_resumable(
    before: RunConfig,
    now: RunConfig,
    folder: Path,
    *,
    remedy: str = "Put them back to continue it, or set another train.output.",
) -> None:
    """Refuse to continue a run under another configuration.

    `train.steps` may change only under a constant schedule: the others have spent their rate on reaching the old end.

    Raises:
        InputError: naming each key with its old and new value.
    """
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key) and not _may_change(key, now)]
    if not changed:
        return
    shown = "; ".join(f"{key} was {_show(old.get(key))} and is now {_show(new.get(key))}" for key in changed)
    why = ""
    if "train.steps" in changed:
        why = f" The {now.optimizer.schedule} schedule ends at train.steps: only a constant one can be prolonged."
    raise InputError(
        f"the run in {str(folder)!r} was started with other settings: {shown}.{why} "
        f"{remedy} Keys that may change: {', '.join(CHANGEABLE)}."
    )


def _may_change(key: str, config: RunConfig) -> bool:
    if key == "train.steps":
        return config.optimizer.schedule == "constant"
    return any(fnmatch(key, pattern) for pattern in CHANGEABLE)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if f"{prefix}{key}" == "fp8.layers":  # whose last pattern wins, so that their order counts
            flat["fp8.layers"] = list(value.items())
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _show(value: Any) -> str:
    return "absent" if value is None else repr(value)
