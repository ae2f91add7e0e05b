"""Keys that may change when a run continues; a change of any other key is an error.

Keys that affect the losses may not change: one curve of two different runs is worse than an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from fractions import Fraction
from pathlib import Path
from typing import Any

from octavo.config.effects import is_given, settled, value_of, with_values, without_effect
from octavo.config.run import RunConfig, known_keys
from octavo.data.special_tokens import ROLES
from octavo.errors import InputError, warn

CHANGEABLE: dict[str, str] = {
    "log.*": "reporting only",
    "checkpoint.*": "checkpoints only",
    "train.output": "the folder may have been moved",
    "train.validate_every": "validation does not change the run",
    "train.validate_batches": "validation does not change the run",
    "data.validation": "validation does not change the run; a remaining set must have the same text",
    "train.eval": "evaluations do not change the run",
    "train.eval_every": "evaluations do not change the run",
    "train.eval_reduce": "evaluations do not change the run",
    "train.eval_tasks": "evaluations do not change the run",
    "train.eval_limit": "evaluations do not change the run",
    "train.eval_shots": "evaluations do not change the run",
    "train.eval_batch": "evaluations do not change the run",
    "train.early_stopping": "an earlier end, of the same steps",
    "train.sample_every": "samples do not change the run",
    "train.sample_prompt": "samples do not change the run",
    "train.sample_tokens": "samples do not change the run",
    "train.compare_bf16": "a separate run, after this one",
    "train.verify": "a check of the first start",
    "train.micro_batch": "the same gradient, in another order of summation; warns about other effects (`warn_of_other_layout`)",
    "train.recompute": "the same numbers, for less memory",
    "train.mlp_chunks": "the same model, with scales and sums of a part of the tokens",
    "train.offload": "the same numbers, for less memory",
    "train.graph": "the same numbers, launched at once; packed documents by another kernel of attention",
    "train.compile": "the same model, by other kernels; true is refused",
    "train.deterministic": "the same model, by other kernels",
    "train.loss_scale": "the same gradient, in another part of float16's range; a too large scale must be correctable",
    "data.workers": "the same batches, prefetched",
    "data.folder": "the same tokens in another place; the fingerprint is compared",
    "parallel.*_degree": "a checkpoint loads in any layout; warns about effects (`warn_of_other_layout`)",
    "parallel.cp_comm_type": "the same keys and values, by another exchange",
    "parallel.reshard_after_forward": "the same numbers, for less memory",
    "parallel.sync_each_micro_batch": "the same gradient, in another order of summation",
    "parallel.sm_activation_offloading": "the same numbers, for less memory",
    "parallel.activation_loading_horizon": "the same numbers, for less memory",
    "launch.*": "timeouts of the watchdog",
}
"""Patterns of keys that may differ from the run that wrote the checkpoint, each with the reason."""

FP8_CHANGES: dict[str, str] = {
    "fp8.enabled": 'true or false: layers enter or leave FP8; "auto" is measured only at the start, and refused',
    "fp8.recipe": "layers with another recipe start with new scales",
    "fp8.format": "the same, of delayed and current scaling",
    "fp8.amax_history_len": "the same, of delayed scaling",
    "fp8.amax_compute_algo": "the same, of delayed scaling",
    "fp8.margin": "the same, of delayed scaling",
    "fp8.use_power_2_scales": "the same, of current scaling, which has no state",
    "fp8.fast_accumulation": "the same scales, with other sums; nothing is dropped",
    "fp8.skip": "layers that enter FP8 start with new scales, and layers that leave it drop their state",
    "fp8.layers": "the same",
    "fp8.schedule": "for steps that are not done yet",
    "fp8.head": "the head starts with new scales",
    "fp8.emulate": "the same numbers, on another device",
}
"""Keys of `[fp8]` that may change in an unfinished run, with the effect; an absent key keeps the run's value."""

_OLDER_DEFAULTS = {"fp8.head": False, "fp8.fast_accumulation": False}
"""Defaults of older versions, whose run files leave these keys out."""

BALANCED = "the number of sequences over which experts are balanced"
ASSIGNED = "the group of tokens by which experts are assigned"
VALIDATED = "the number of sequences in a validation"
DRAWN = "the draw of dropout's masks"
SHARED = "the number of parts in which the gradient of a key-value head is cast to FP8"
SCALED = "what has an FP8 scale of its own"
"""Keys of a checkpoint's layout."""

_BEYOND = {
    DRAWN: "other masks are drawn, so the losses from here on differ from those of an uninterrupted run, as with another seed.",
    SHARED: "parts are rounded separately, so gradients from here on differ from those of an uninterrupted run by the "
    "rounding of FP8.",
    SCALED: "casts have other scales, so losses and gradients from here on differ from those of an uninterrupted run by the "
    "rounding of FP8.",
}
"""Effects of a changed layout beyond the last bits."""

_PROVENANCE = {
    *("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures", "use_cache"),
    *ROLES,  # the tokenizer's ids, which the data's fingerprint covers
}
"""Keys of a Hugging Face config that do not change the model."""


def with_keys_of(before: RunConfig, now: RunConfig, resolved: RunConfig) -> tuple[RunConfig, list[str]]:
    """The run file `now` with the run's earlier values for absent keys; and a text for each that is not the default.

    A key that may change gets its default. resolved: `now` with its defaults resolved for the model.
    """
    before = _recorded(before)
    now = with_own_scale(before, now)
    absent = [key for key in known_keys() if not is_given(now, key) and not _may_change(key)]
    taken = {key: value_of(before, key) for key in absent}
    unknown = {"data.packing"} if resolved.data.packing is None else set()  # its default follows from the data
    others = [
        f"{key} = {json.dumps(value)}"
        for key, value in taken.items()
        if key not in unknown and value != value_of(resolved, key)
    ]
    return with_values(now, taken), others


def with_own_scale(before: RunConfig, now: RunConfig) -> RunConfig:
    """The run file `now` with the earlier `data.weights` if both give the same shares, on different scales."""
    old, new = before.data.weights, now.data.weights
    if not old or not new or len(old) != len(new):
        return now
    shares = [[Fraction(repr(weight)) / Fraction(repr(weights[0])) for weight in weights] for weights in (old, new)]
    return with_values(now, {"data.weights": old}) if shares[0] == shares[1] else now


def check_extended(before: RunConfig, saved: Mapping[str, Any], run_file: Path) -> None:
    """Check `train.extended` of a run's file against the newest checkpoint, which has the rates of its schedule.

    saved: the state of the checkpoint; older versions do not record it.

    Raises:
        InputError: the key was changed by hand.
    """
    done, ended = saved.get("step"), saved.get("schedule_ends")
    if not isinstance(done, int) or not isinstance(ended, list) or not ended or before.optimizer.schedule == "constant":
        return
    now = before.train.extended
    past, recorded = ([end for end in ends if end < done] for ends in (now, ended))
    going, went = (next((end for end in ends if end >= done), None) for ends in (now, ended))
    moved = going is not None and going != went and before.optimizer.schedule != "wsd"  # wsd has no end before its decay
    if past != recorded or moved:
        raise InputError(
            f"{run_file}: train.extended = {now}, but the run was trained with {ended[:-1]}, and this key records its past. "
            f"Restore train.extended = {ended[:-1]}, or set another train.output."
        )


def extend(before: RunConfig, now: RunConfig, done: int) -> RunConfig:
    """Check a changed number of steps; returns `now`, with `train.extended` if it is needed.

    A constant schedule has no end, and wsd none before its decay. Otherwise only a finished run can be extended: wsd repeats
    its decay, and the rates of the other schedules jump, so that `train.extended` must be set.

    Args:
        done: steps of the newest checkpoint.

    Raises:
        InputError: finished steps would have had other rates, or the extension was not requested.
    """
    old, new, schedule = before.train.steps, now.train.steps, now.optimizer.schedule
    if old is None or new is None or old == new or schedule == "constant" or schedule != before.optimizer.schedule:
        return now
    ends = [*before.train.extended, old]
    asked = now.train.extended == ends
    if schedule == "wsd" and not asked and done <= min(before.optimizer.decay_start(old), now.optimizer.decay_start(new)):
        return now
    rates = f'the rates of optimizer.schedule = "{schedule}" depend on the last step'
    if new < old:
        raise InputError(
            f"{now.length(new)}, but the run was started with {old} steps, and {rates}. Set {now.key_of_length(old)}."
        )
    if done < old:
        raise InputError(
            f"{now.length(new)}, but the run has done {done} of {old} steps, and {rates}. Train it to step {old} first "
            f"({now.key_of_length(old)}), then extend it."
        )
    if schedule != "wsd" and not asked:
        raise InputError(
            f"{now.length(new)}, but the run has ended at step {old}, and {rates}. To continue with the rates of {new} steps, "
            f"which are higher than the last one, set train.extended={json.dumps(ends)} too."
        )
    return with_values(now, {"train.extended": ends})


def check_resumable(
    before: RunConfig,
    now: RunConfig,
    folder: Path,
    *,
    remedy: str = "Restore them to continue it, or set another train.output.",
) -> None:
    """Check that a run continues with the configuration that it was started with.

    `extend` has checked `train.steps`.

    Raises:
        InputError: lists each changed key with old and new value, without keys that another changed key makes ineffective.
    """
    now = _without_default_split(now)
    idle = {each.key: each.by for config in (before, now) for each in without_effect(config)}
    now = settled(now, list(without_effect(now)))
    if now.train.extended == [*before.train.extended, before.train.steps]:
        before = with_values(before, {"train.extended": now.train.extended})
    old, new = (_flat(config.model_dump(mode="json")) for config in (_recorded(before), now))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key) and not _may_change(key)]
    if not changed:
        return
    causes = [key for key in changed if not set(idle.get(key, ())).intersection(changed)] or changed
    if causes == ["parallel.expert_dispatch_fp8"] and now.parallel.expert_parallel_degree == 1:
        remedy = (
            "Continue it with parallel.expert_parallel_degree of 2 or more, since with 1 no token is sent in FP8, "
            "or set another train.output."
        )
    raise InputError(f"the run in {str(folder)!r} was started with other settings: {_differences(old, new, causes)}. {remedy}")


def changed_fp8(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Keys of `[fp8]` that changed, each with old and new value; keys without effect in both are omitted."""
    idle = {each.key: each.by for config in (before, now) for each in without_effect(config)}
    both = _recorded(before), settled(now, list(without_effect(now)))
    old, new = ({key: value_of(config, key) for key in FP8_CHANGES} for config in both)
    changed = {key: (old[key], new[key]) for key in FP8_CHANGES if _ordered(old[key]) != _ordered(new[key])}
    return {key: pair for key, pair in changed.items() if changed.keys().isdisjoint(idle.get(key, ()))}


def _ordered(value: Any) -> Any:
    """A table as pairs: later patterns win, so order matters."""
    return list(value.items()) if isinstance(value, dict) else value


def check_same_model(recorded: Path, hf_config: Any) -> None:
    """Check that the source of a continued run still has the Hugging Face config that the run began with.

    Raises:
        InputError: lists each changed key with old and new value.
    """
    if not recorded.is_file():
        return
    old, new = _flat(json.loads(recorded.read_text(encoding="utf-8"))), _flat(json.loads(hf_config.to_json_string()))
    changed = [key for key in sorted({*old} & {*new} - _PROVENANCE) if old[key] != new[key]]
    if changed:
        raise InputError(
            f"the model of the run is not the one that it began with ({recorded}): {_differences(old, new, changed)}. "
            "Restore model.source and model.config, or set another train.output."
        )


def _recorded(before: RunConfig) -> RunConfig:
    """The run file of an earlier start, also of an older version, without keys that have no effect."""
    before = _without_default_split(before)
    if before.fp8.enabled is not False:
        older = {key: value for key, value in _OLDER_DEFAULTS.items() if value_of(before, key) is None}
        before = with_values(before, older)
    return settled(before, list(without_effect(before)))


def _without_default_split(config: RunConfig) -> RunConfig:
    """The configuration without the default of data.split, which older versions' files list; the fingerprint covers it."""
    return with_values(config, {"data.split": None}) if config.data.split == "train" else config


def _may_change(key: str) -> bool:
    return key == "train.steps" or key.startswith("data.validation.") or any(fnmatch(key, pattern) for pattern in CHANGEABLE)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if f"{prefix}{key}" in ("fp8.layers", "optimizer.rates"):  # later patterns win, so order matters
            flat[f"{prefix}{key}"] = list(value.items())
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]) -> str:
    return "; ".join(f"{key} was {_show(old.get(key))} and is now {_show(new.get(key))}" for key in keys)


def _show(value: Any) -> str:
    return "absent" if value is None else repr(value)


def warn_of_other_layout(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn about a continuation on other ranks or another device, and about each effect beyond the last bits.

    saved, now: device, threads, ranks and degrees; `VALIDATED`; `DRAWN` if the model draws masks; in FP8 `SHARED` and `SCALED`;
    `BALANCED` if a loss balances the experts, or `ASSIGNED` if experts are assigned other than by the largest probabilities.
    """
    changed = {
        key: f"{key} was {saved[key]} and is now {value}" for key, value in now.items() if saved.get(key, value) != value
    }
    balanced, assigned, validated = (changed.pop(key, None) for key in (BALANCED, ASSIGNED, VALIDATED))
    beyond = {key: changed.pop(key) for key in _BEYOND if key in changed}
    if changed:
        if any(key == "ranks" or key.endswith("_degree") for key in changed):  # older versions did not record the rest
            beyond |= {key: f"{key} is now {now[key]}" for key in _BEYOND if key in now and key not in saved}
        warn(
            f"{checkpoint} continues, but {'; '.join(changed.values())}: sums have another order and are rounded elsewhere, so "
            "the losses may differ from those of an uninterrupted run in the last bits."
        )
    for key, text in beyond.items():
        warn(f"{checkpoint} continues, but {text}: {_BEYOND[key]}")
    if balanced is not None:
        warn(
            f"{checkpoint} continues, but {balanced} (micro-batch x data-parallel ranks): the losses from here on "
            "differ from those of an uninterrupted run."
        )
    if assigned is not None:
        warn(f"{checkpoint} continues, but {assigned}: the losses from here on differ from those of an uninterrupted run.")
    if validated is not None:
        warn(
            f"{checkpoint} continues, but {validated} (train.validate_batches x train.micro_batch or train.global_batch): "
            "validation losses from here on are not comparable with earlier ones, but train.early_stopping and "
            "checkpoint.best still compare them."
        )
