"""Run file: all sections, TOML in and out, `section.key=value` overrides."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, model_validator

from octavo.config.checkpoint import CheckpointConfig
from octavo.config.data import DataConfig
from octavo.config.fp8 import Fp8Config
from octavo.config.launch import LaunchConfig
from octavo.config.log import LogConfig
from octavo.config.model import ModelConfig
from octavo.config.optimizer import OptimizerConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.section import Section, keys_of
from octavo.config.train import TrainConfig
from octavo.errors import InputError, nearest


class RunConfig(Section):
    """All sections of a run file."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @model_validator(mode="after")
    def _check_warmup(self) -> RunConfig:
        warmup, steps = self.optimizer.warmup_steps, self.train.steps
        if warmup > steps:
            raise ValueError(f"optimizer.warmup_steps = {warmup} is more than train.steps = {steps}: use at most {steps}")
        return self

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a run file and apply `section.key=value` overrides.

        Raises:
            InputError: the file is missing, is not TOML, or has an invalid key or value.
        """
        path = Path(path)
        if not path.is_file():
            folder, fault = (path, "is a folder") if path.is_dir() else (path.parent, "does not exist")
            names = sorted(file.name for file in folder.glob("*.toml"))
            inside = next((name for name in names if name != "pyproject.toml"), None)
            guess = inside if path.is_dir() else nearest(path.name, names)
            hint = f" Did you mean {folder / guess}?" if guess else ""
            raise InputError(f"run file {str(path)!r} {fault}.{hint} Give the path of a TOML file, such as presets/demo.toml.")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"run file {str(path)!r} is not valid TOML: {error}.") from None
        for override in overrides:
            _apply_override(values, override)
        train = values.get("train")
        if isinstance(train, dict):
            train.setdefault("output", f"runs/{path.stem}")
        return cls.from_dict(values, where=str(path))

    def to_toml(self) -> str:
        """The run file with every key; reading it back gives an equal RunConfig."""
        return tomli_w.dumps(_without_none(self.model_dump()))

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.train.output or "runs/run")


def known_keys() -> list[str]:
    """Every `section.key` of a run file, in order."""
    return keys_of(RunConfig)


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise InputError(f"override {override!r} is not section.key=value, as in optimizer.lr=1e-4.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: train.output=runs/two
    table = values
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InputError(f"override {override!r}: {part} is a value, not a table.")
        table = inner
    table[parts[-1]] = value


def _without_none(value: Any) -> Any:
    """Leave out keys without a value: TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value
