"""Keys that have an effect only with certain values of other keys, in one table.

A run file with a value that has no effect is refused. Defaults are accepted, since a resolved run file may list them. `to_toml`
omits keys without effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import chain
from typing import Any

from octavo.config.data import kind_of
from octavo.config.fp8 import KEYS_OF_RECIPES
from octavo.config.section import keys_of

RunConfig = Any
"""`octavo.config.run.RunConfig`, which imports this module."""


@dataclass(frozen=True)
class Idle:
    """A key without effect, the keys that it depends on, and the reason with the remedy."""

    key: str
    by: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class _Need:
    """Keys, the keys that they depend on, and the condition under which they have an effect: as a function, and in words."""

    keys: tuple[str, ...]
    by: tuple[str, ...]
    met: Callable[[RunConfig], bool]
    condition: str


def _any_source(names: Sequence[str], *suffixes: str) -> bool:
    """True if a source is neither a python: source nor a file with these suffixes."""
    return any(not name.startswith("python:") and kind_of(name) not in suffixes for name in names)


def _any_data_set(names: Sequence[str]) -> bool:
    return _any_source(names, ".txt", ".jsonl", ".json", ".csv", ".parquet")


def _of_recipes(key: str) -> _Need:
    having = [name for name, keys in KEYS_OF_RECIPES.items() if key in keys]
    condition = "fp8.recipe (or a value of fp8.layers) = " + " or ".join(f'"{name}"' for name in having)
    return _Need((f"fp8.{key}",), ("fp8.recipe", "fp8.layers"), lambda config: config.fp8.uses(key), condition)


_RECIPE_KEYS = tuple(dict.fromkeys(chain.from_iterable(KEYS_OF_RECIPES.values())))
_FP8_KEYS = ("recipe", "skip", "layers", "schedule", "head", "emulate", *_RECIPE_KEYS)
_NEEDS = (
    _Need(
        (*(f"fp8.{key}" for key in _FP8_KEYS), "train.compare_bf16"),
        ("fp8.enabled",),
        lambda config: config.fp8.enabled is not False,
        'fp8.enabled = true or "auto"',
    ),
    *map(_of_recipes, _RECIPE_KEYS),
    _Need(("train.loss_scale",), ("model.dtype",), lambda config: config.model.dtype == "float16", 'model.dtype = "float16"'),
    _Need(
        tuple(f"optimizer.{key}" for key in ("adamw_lr", "muon_momentum", "muon_nesterov", "muon_scale")),
        ("optimizer.name",),
        lambda config: config.optimizer.name == "muon",
        'optimizer.name = "muon"',
    ),
    _Need(
        ("optimizer.min_lr_fraction",),
        ("optimizer.schedule",),
        lambda config: config.optimizer.schedule != "constant",
        'optimizer.schedule = "cosine", "linear" or "wsd"',
    ),
    _Need(
        ("optimizer.decay_steps",),
        ("optimizer.schedule",),
        lambda config: config.optimizer.schedule == "wsd",
        'optimizer.schedule = "wsd"',
    ),
    _Need(("train.epochs",), ("train.tokens",), lambda config: config.train.tokens is None, "a run without train.tokens"),
    _Need(
        ("train.steps",),
        ("train.tokens", "train.epochs"),
        lambda config: config.train.tokens is None and config.train.epochs is None,
        "a run without train.tokens and train.epochs",
    ),
    _Need(
        ("parallel.activation_loading_horizon",),
        ("train.offload", "parallel.sm_activation_offloading"),
        lambda config: config.offloads,
        "train.offload = true",
    ),
    _Need(
        ("train.early_stopping", "checkpoint.best"),
        ("train.validate_every",),
        lambda config: config.train.validate_every > 0 or config.train.eval_every > 0,
        "train.validate_every above 0, or for a figure of train.eval train.eval_every",
    ),
    _Need(
        ("train.sample_every", "train.sample_prompt"),
        ("train.sample_tokens",),
        lambda config: config.train.sample_tokens > 0,
        "train.sample_tokens above 0",
    ),
    _Need(
        ("train.extended",),
        ("optimizer.schedule",),
        lambda config: config.optimizer.schedule != "constant",
        "a schedule that ends",
    ),
    _Need(
        ("train.validate_every",),
        ("data.validation_fraction",),
        lambda config: config.data.validates or bool(config.train.evaluations),
        "data.validation_fraction above 0, a data.validation_source, a set in [data.validation] or train.eval",
    ),
    _Need(
        ("train.validate_batches",),
        ("data.validation_fraction",),
        lambda config: config.data.validates,
        "data.validation_fraction above 0, a data.validation_source or a set in [data.validation]",
    ),
    _Need(
        ("checkpoint.best_is",),
        ("checkpoint.best",),
        lambda config: isinstance(config.checkpoint.best, str) and config.checkpoint.best not in config.data.validation,
        "a checkpoint.best that is a figure of an evaluation",
    ),
    _Need(
        ("train.eval_tasks", "train.eval_limit", "train.eval_shots", "train.eval_batch"),
        ("train.eval",),
        lambda config: bool(config.train.lm_eval_names),
        'a task in train.eval, such as "lm-eval:arc_easy"',
    ),
    _Need(
        ("data.validation_fraction",),
        ("data.validation_source",),
        lambda config: config.data.validation_source is None,
        "validation on a part of data.source, without a data.validation_source",
    ),
    _Need(
        ("data.validation_split",),
        ("data.validation_source",),
        lambda config: _any_data_set(config.data.validation_sources),
        "a data set as data.validation_source",
    ),
    _Need(
        tuple(f"lora.{key}" for key in ("alpha", "dropout", "targets", "rslora", "save_whole", "load", "base")),
        ("lora.rank",),
        lambda config: config.lora.rank is not None,
        "lora.rank",
    ),
    _Need(("train.freeze",), ("lora.rank",), lambda config: config.lora.rank is None, "a run without lora.rank"),
    _Need(("model.resize",), ("model.load",), lambda config: config.model.load, "model.load = true"),
    _Need(("data.weights",), ("data.source",), lambda config: len(config.data.sources) > 1, "several sources in data.source"),
    _Need(
        ("data.vocab_size",), ("data.tokenizer",), lambda config: config.data.tokenizer == "train", 'data.tokenizer = "train"'
    ),
    _Need(
        ("data.chat_template", "data.chat_template_variables", "data.train_on", "data.faulty_rows"),
        ("data.format",),
        lambda config: config.data.format != "text",
        'data.format = "chat" or "prompt"',
    ),
    _Need(
        ("data.chat_template", "data.chat_template_variables"),
        ("data.format",),
        lambda config: config.data.format != "prompt",
        'data.format = "chat"',
    ),
    _Need(
        ("data.overlong",),
        ("data.packing",),
        lambda config: config.data.packing == "documents" or (config.data.packing is None and config.data.format != "text"),
        'data.packing = "documents", or conversations',
    ),
    _Need(
        ("data.text_field",),
        ("data.source",),
        lambda config: _any_source([*config.data.sources, *config.data.validation_sources], ".txt"),
        "a data.source with columns: .jsonl, .csv or .parquet files, or a data set",
    ),
    _Need(
        ("data.text_field",),
        ("data.format",),
        lambda config: config.data.format != "prompt",
        'data.format = "chat" or "text", since prompts are in the columns prompt and completion',
    ),
    _Need(
        ("data.subset", "data.split"),
        ("data.source",),
        lambda config: _any_data_set([*config.data.sources, *config.data.validation_sources]),
        "a data set as data.source",
    ),
    _Need(
        ("moe.moe_aux_loss_coeff",),
        ("moe.moe_load_balancing",),
        lambda config: config.moe.moe_load_balancing in (None, "aux_loss"),
        'moe.moe_load_balancing = "aux_loss"',
    ),
    _Need(
        ("parallel.expert_dispatch_fp8",),
        ("parallel.expert_parallel_degree",),
        lambda config: config.parallel.expert_parallel_degree > 1,
        "parallel.expert_parallel_degree of 2 or more",
    ),
    _Need(
        ("parallel.expert_dispatch_fp8",),
        ("fp8.enabled",),
        lambda config: config.fp8.enabled is not False,
        'fp8.enabled = true or "auto"',
    ),
    _Need(
        ("parallel.cp_comm_type",),
        ("parallel.context_parallel_degree",),
        lambda config: config.parallel.context_parallel_degree > 1,
        "parallel.context_parallel_degree of 2 or more",
    ),
    _Need(("checkpoint.async",), ("checkpoint.every",), lambda config: config.checkpoint.every > 0, "checkpoint.every above 0"),
)
_FORMER_DEFAULTS = {"parallel.reshard_after_forward": True, "data.split": "train"}
"""Defaults of older versions, which their resolved run files list."""
_OF_SEVERAL_RANKS = (
    *("parallel.reshard_after_forward", "parallel.sync_each_micro_batch", "parallel.param_dtype", "parallel.reduce_dtype"),
    "launch.*",
)


def without_effect(config: RunConfig) -> Iterator[Idle]:
    """Every key without effect in this run, whether at its default or not."""
    seen: set[str] = set()
    for need in _NEEDS:
        if not need.met(config):
            keys = [key for key in need.by if value_of(config, key) != {}]
            set_keys = [key for key in keys if value_of(config, key) is not None] or keys
            now = " and ".join(f"no {key}" if value_of(config, key) is None else shown(config, key) for key in set_keys)
            for key in need.keys:
                if key not in seen:
                    yield Idle(key, need.by, f"has no effect with {now}: it needs {need.condition}")
            seen.update(need.keys)


def idle_keys(config: RunConfig) -> list[Idle]:
    """Keys that were set but have no effect; false counts as unset for keys without a default."""
    changed = [
        idle
        for idle in without_effect(config)
        if _is_changed(config, idle.key) and value_of(config, idle.key) != _FORMER_DEFAULTS.get(idle.key)
    ]
    return [idle for idle in changed if value_of(config, idle.key) is not False or _default(config, idle.key) is not None]


def settled(config: RunConfig, idle: Sequence[Idle]) -> RunConfig:
    """The same run with these keys at their defaults."""
    return with_values(config, {each.key: _default(config, each.key) for each in idle})


def of_one_rank(config: RunConfig) -> Iterator[str]:
    """Messages about settings without effect on one rank."""
    for key in keys_of(type(config)):
        if not any(fnmatch(key, pattern) for pattern in _OF_SEVERAL_RANKS):
            continue
        if _is_changed(config, key) and value_of(config, key) != _FORMER_DEFAULTS.get(key):
            yield f"{shown(config, key)} has no effect on one rank."


def warnings(config: RunConfig) -> Iterator[str]:
    """Messages about likely mistakes."""
    steps, warmup = config.steps, config.optimizer.warmup_steps
    if steps is None:
        return
    if warmup >= steps:
        yield (
            f"optimizer.warmup_steps = {warmup} lasts the whole run of {config.length(steps)}: the rate rises to "
            f"{config.optimizer.lr * steps / warmup:g} at the last step and never falls. Lower optimizer.warmup_steps unless "
            "that is intended."
        )
    decay = config.optimizer.decay_start(steps) if config.optimizer.schedule == "wsd" else steps
    begun = max([warmup, *config.train.extended])
    if decay < begun < steps:
        yield (
            f"optimizer.decay_steps: the decay of wsd would begin after step {decay}, before step {begun} of the full rate, "
            f"and lasts {steps - begun} steps. Lower optimizer.decay_steps unless that is intended."
        )
    for key, consequence in (
        ("train.validate_every", "the only validation is at the end"),
        ("checkpoint.every", "the only checkpoint is at the end"),
    ):
        if (every := value_of(config, key)) > steps and _is_changed(config, key):
            yield f"{key} = {every} is more than {config.length(steps)}: {consequence}."


def _field(config: RunConfig, key: str) -> tuple[str, Any, str]:
    """(section, field, its name in Python) of a key."""
    section, _, key_name = key.partition(".")
    fields = type(getattr(config, section)).model_fields
    name = next(name for name, field in fields.items() if (field.alias or name) == key_name)
    return section, fields[name], name


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a `section.key`."""
    section, _, name = _field(config, key)
    return getattr(getattr(config, section), name)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The same run with other values of keys such as `optimizer.lr`."""
    for key, value in values.items():
        section, _, name = _field(config, key)
        table = getattr(config, section)
        config = config.model_copy(update={section: table.model_copy(update={name: value})})
    return config


def is_given(config: RunConfig, key: str) -> bool:
    """True if the run file names this `section.key`."""
    section, _, name = _field(config, key)
    return name in getattr(config, section).model_fields_set


def shown(config: RunConfig, key: str) -> str:
    """`section.key = value`, as in a run file."""
    return f"{key} = {json.dumps(value_of(config, key), ensure_ascii=False)}"


def _is_changed(config: RunConfig, key: str) -> bool:
    return bool(value_of(config, key) != _default(config, key))


def _default(config: RunConfig, key: str) -> Any:
    return _field(config, key)[1].get_default(call_default_factory=True)
