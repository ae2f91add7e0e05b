"""Recognises finished runs from their folder in half a second, without importing torch and transformers.

In any doubt there is no answer, and the run starts normally, which explains the problem. Checkpoints are verified by the same
checksums. Several ranks would have to agree, which needs torch, so they get no answer either.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from octavo.checkpoint.manifest import step_folders, verify
from octavo.config.run import RunConfig
from octavo.data import manifest
from octavo.data.corpus import Corpus
from octavo.data.prepared import folder_of
from octavo.errors import InputError, OctavoError
from octavo.run.folder import RunFolder
from octavo.run.records import label_of, newest_state, read_json
from octavo.run.resume import check_extended, check_resumable, with_keys_of
from octavo.run.summary import Result, Summary, summarise

_RESOLVED_FOR_MODEL = ("fp8.head", "fp8.fast_accumulation")
"""Keys whose defaults depend on the model; the run's file has their values."""


def finished(config: RunConfig) -> tuple[Result, list[str]] | None:
    """The result of a finished run, with a line for each training; None if it is not certainly finished.

    config: the run file of this start. With `train.compare_bf16` the run without FP8 has to be finished too.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" or config.steps is None:
        return None
    config = config.with_steps(config.steps)
    folder = RunFolder(config.output)
    try:
        now = _continued(folder, config)
        if now is None or _has_other_data(now, newest_state(folder.path)):
            return None
        summary = _summary(folder, now)
        label, bf16, twin = label_of(folder.path, now), None, without_fp8(now)
        lines = [_line(label, folder, summary)]
        if now.train.compare_bf16 and label == "fp8":
            other = RunFolder(twin.output)
            if _continued(other, twin) is None:
                return None
            bf16 = _summary(other, twin)
            lines.append(_line(label_of(other.path, twin), other, bf16))
    except (OctavoError, OSError):  # the normal start reports it
        return None
    return Result(folder.path, now, summary, bf16), lines


def without_fp8(config: RunConfig) -> RunConfig:
    """The same run without FP8, in the folder `bf16` inside the run's."""
    fp8 = config.fp8.model_copy(update={"enabled": False})
    train = config.train.model_copy(update={"output": str(config.output / "bf16"), "compare_bf16": False})
    return config.model_copy(update={"fp8": fp8, "train": train})


def _continued(folder: RunFolder, config: RunConfig) -> RunConfig | None:
    """The configuration with which the run in `folder` would continue; None if there is none or the model may differ.

    Raises:
        InputError: the run was started with other settings, or its run file was changed.
    """
    before = folder.config()
    if before is None or any(folder.checkpoints.glob(".tmp-*")):  # left by a killed write: the normal start removes it
        return None
    now, taken = with_keys_of(before, config, config)
    if any(text.partition(" = ")[0] not in _RESOLVED_FOR_MODEL for text in taken):
        return None  # the normal start names these keys
    if now.train.steps != before.train.steps:
        return None
    check_extended(before, newest_state(folder.path), folder.run_file)
    check_resumable(before, now, folder.path)
    return now if _agrees(now.model.config, read_json(folder.model / "config.json")) else None


def _summary(folder: RunFolder, config: RunConfig) -> Summary:
    """Figures of a finished training.

    Raises:
        OctavoError: the metrics end before the last step, or the last step has no complete checkpoint.
    """
    newest = next(iter(step_folders(folder.checkpoints)), (0, folder.checkpoints))
    if newest[0] != config.train.steps:
        raise OctavoError(f"{newest[1]} is not of step {config.train.steps}.")
    summary = summarise(folder.metrics, config.train.steps)
    verify(newest[1])
    return summary


def _has_other_data(config: RunConfig, saved: Mapping[str, Any]) -> bool:
    """True if the data certainly differs from the checkpoint's; deleted data counts as unchanged."""
    try:
        prepared = manifest.read(folder_of(config.data), config.data)
        if prepared is None:
            return False
        if prepared.fingerprint != saved.get("data"):
            return True
        return manifest.changes(prepared, manifest.source_files(config.data, Corpus(config.data).files))[0] is not None
    except InputError:
        return False


def _agrees(overrides: Any, recorded: Any) -> bool:
    """True if the values of `model.config` are those of the recorded Hugging Face config."""
    if isinstance(overrides, Mapping):
        return isinstance(recorded, Mapping) and all(
            key in recorded and _agrees(value, recorded[key]) for key, value in overrides.items()
        )
    return bool(overrides == recorded)


def _line(label: str, folder: RunFolder, summary: Summary) -> str:
    return f"{label}: already trained, {summary.steps} of {summary.steps} steps, in {folder.path}"
