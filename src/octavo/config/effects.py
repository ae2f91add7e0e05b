"""Keys that have an effect only beside certain values of others: one table.

A run file in which such a key is set to no effect is refused. "Set" is another value than the default: a resolved run file may
list a key at its default. `to_toml` leaves such keys out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePath
from typing import Any

from octavo.config.fp8 import KEYS_OF_RECIPES

RunConfig = Any
"""`octavo.config.run.RunConfig`, which imports this module."""


@dataclass(frozen=True)
class Idle:
    """A key without effect; `by`: the keys that decide so; `why`: the reason and the remedy."""

    key: str
    by: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class _Need:
    """Keys, those that they depend on, the condition of an effect, and what it is."""

    keys: tuple[str, ...]
    by: tuple[str, ...]
    met: Callable[[RunConfig], bool]
    what: str


def _recipes(config: RunConfig) -> set[str]:
    return {config.fp8.recipe, *config.fp8.layers.values()}


def _any_source(config: RunConfig, *suffixes: str) -> bool:
    """True if a source is neither Python's own text nor a file of these kinds."""
    names = [config.data.source] if isinstance(config.data.source, str) else config.data.source
    return any(not name.startswith("python:") and PurePath(name).suffix not in suffixes for name in names)


def _of_recipes(key: str) -> _Need:
    having = [name for name, keys in KEYS_OF_RECIPES.items() if key in keys]
    what = "fp8.recipe (or a value of fp8.layers) = " + " or ".join(f'"{name}"' for name in having)
    return _Need((f"fp8.{key}",), ("fp8.recipe", "fp8.layers"), lambda config: not _recipes(config).isdisjoint(having), what)


_FP8_KEYS = ("recipe", "skip", "layers", "head", "emulate", *dict.fromkeys(key for k in KEYS_OF_RECIPES.values() for key in k))
_NEEDS = (
    _Need(
        (*(f"fp8.{key}" for key in _FP8_KEYS), "train.compare_bf16"),
        ("fp8.enabled",),
        lambda config: config.fp8.enabled is not False,
        'fp8.enabled = true or "auto"',
    ),
    *(_of_recipes(key) for key in dict.fromkeys(key for keys in KEYS_OF_RECIPES.values() for key in keys)),
    _Need(("train.loss_scale",), ("model.dtype",), lambda config: config.model.dtype == "float16", 'model.dtype = "float16"'),
    _Need(
        ("optimizer.min_lr_fraction",),
        ("optimizer.schedule",),
        lambda config: config.optimizer.schedule != "constant",
        'optimizer.schedule = "cosine" or "linear"',
    ),
    _Need(
        ("train.validate_every", "train.validate_batches"),
        ("data.validation_fraction",),
        lambda config: config.data.validation_fraction > 0,
        "data.validation_fraction above 0",
    ),
    _Need(
        ("data.vocab_size",), ("data.tokenizer",), lambda config: config.data.tokenizer == "train", 'data.tokenizer = "train"'
    ),
    _Need(
        ("data.text_field",),
        ("data.source",),
        lambda config: _any_source(config, ".txt"),
        "a data.source with columns: .jsonl or .parquet files, or a data set",
    ),
    _Need(
        ("data.subset", "data.split"),
        ("data.source",),
        lambda config: _any_source(config, ".txt", ".jsonl", ".parquet"),
        "a data set as data.source",
    ),
    _Need(
        ("parallel.cp_comm_type",),
        ("parallel.context_parallel_degree",),
        lambda config: config.parallel.context_parallel_degree > 1,
        "parallel.context_parallel_degree of 2 or more",
    ),
    _Need(("checkpoint.async",), ("checkpoint.every",), lambda config: config.checkpoint.every > 0, "checkpoint.every above 0"),
)
_OF_SEVERAL_RANKS = ("parallel.reshard_after_forward", "parallel.param_dtype", "parallel.reduce_dtype", "launch.*")


def without_effect(config: RunConfig) -> Iterator[Idle]:
    """Every key that has no effect in this run, at its default or not."""
    seen: set[str] = set()
    for need in _NEEDS:
        if not need.met(config):
            now = " and ".join(shown(config, key) for key in need.by if value_of(config, key) != {})
            for key in need.keys:
                if key not in seen:
                    yield Idle(key, need.by, f"has no effect with {now}: it needs {need.what}")
            seen.update(need.keys)


def idle_keys(config: RunConfig) -> list[Idle]:
    """The keys that are set, to no effect."""
    return [idle for idle in without_effect(config) if value_of(config, idle.key) != _default(config, idle.key)]


def settled(config: RunConfig, idle: Sequence[Idle]) -> RunConfig:
    """The same run with these keys at their defaults."""
    for each in idle:
        section, _, name = _field(config, each.key)
        table = getattr(config, section)
        default = _default(config, each.key)
        config = config.model_copy(update={section: table.model_copy(update={name: default})})
    return config


def warnings(config: RunConfig, *, one_rank: bool) -> Iterator[str]:
    """Settings that are plausibly mistakes, and those without effect on one rank."""
    steps, warmup = config.train.steps, config.optimizer.warmup_steps
    if warmup >= steps:
        yield (
            f"optimizer.warmup_steps = {warmup} lasts the whole run of train.steps = {steps}: the rate rises to "
            f"{config.optimizer.lr * steps / warmup:g} at the last step and never falls. Lower optimizer.warmup_steps unless "
            "that is meant."
        )
    for key, what in (
        ("train.validate_every", "the only validation is at the end"),
        ("checkpoint.every", "the only checkpoint is at the end"),
        ("log.every", "the only progress line is at the end"),
    ):
        if (every := value_of(config, key)) > steps and every != _default(config, key):
            yield f"{key} = {every} is more than train.steps = {steps}: {what}."
    if one_rank:
        for key in _keys(config):
            if any(fnmatch(key, pattern) for pattern in _OF_SEVERAL_RANKS) and value_of(config, key) != _default(config, key):
                yield f"{shown(config, key)} has no effect on one rank."


def _keys(config: RunConfig) -> list[str]:
    tables = type(config).model_fields
    return [f"{s}.{field.alias or name}" for s in tables for name, field in type(getattr(config, s)).model_fields.items()]


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


def shown(config: RunConfig, key: str) -> str:
    """`section.key = value`, as in a run file."""
    return f"{key} = {json.dumps(value_of(config, key), ensure_ascii=False)}"


def _default(config: RunConfig, key: str) -> Any:
    return _field(config, key)[1].get_default(call_default_factory=True)
