"""Run file: all sections, in from TOML and overrides, and out as TOML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from octavo.config.checkpoint import CheckpointConfig
from octavo.config.data import DataConfig
from octavo.config.effects import Idle, idle_keys, of_one_rank, settled, shown, value_of, warnings, without_effect
from octavo.config.fp8 import Fp8Config
from octavo.config.launch import LaunchConfig
from octavo.config.log import LogConfig
from octavo.config.lora import LoraConfig
from octavo.config.model import ModelConfig
from octavo.config.moe import MoeConfig
from octavo.config.optimizer import OptimizerConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.reading import apply_overrides, read_file
from octavo.config.section import Section, keys_of
from octavo.config.train import TrainConfig
from octavo.errors import InputError, nearest, warn
from octavo.storage import local_path

EVALUATION = "evaluation/"
"""Prefix of the figures of evaluations."""


class RunConfig(Section):
    """All sections of a run file."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    moe: MoeConfig = Field(default_factory=MoeConfig)
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    _notes: list[str] = PrivateAttr(default_factory=list)
    _notes_of_one: list[str] = PrivateAttr(default_factory=list)  # for runs on one rank
    _given: str = PrivateAttr("")  # train.tokens or train.epochs of the run file, which `with_steps` converted to steps

    @model_validator(mode="after")
    def _refuse_idle_keys(self, info: ValidationInfo) -> RunConfig:
        if not info.context and (idle := idle_keys(self)):
            raise ValueError(_refusal(self, idle))
        return self

    @model_validator(mode="after")
    def _refuse_muon_of_adapters(self) -> RunConfig:
        if self.optimizer.name == "muon" and self.lora.rank is not None:
            raise ValueError(
                f'optimizer.name = "muon" and lora.rank = {self.lora.rank}: an adapter is trained as two low-rank factors. If '
                'each is orthogonalised, their product does not get the update of a matrix. Set optimizer.name = "adamw", or '
                "train without lora"
            )
        return self

    @model_validator(mode="after")
    def _check_best(self) -> RunConfig:
        best, sets = self.checkpoint.best, self.data.validation
        unnamed = self.data.held_out > 0 or self.data.validation_source is not None
        known = [*sets, "evaluation/FIGURE"]
        if isinstance(best, str) and best not in sets and not (best.startswith(EVALUATION) and best != EVALUATION):
            guess = nearest(best, known)
            raise ValueError(
                f"checkpoint.best = {best!r} is not a set of [data.validation] ({', '.join(sets) or 'there is none'}), and "
                f"figures of evaluations begin with {EVALUATION}.{f' Did you mean {guess!r}?' if guess else ''}"
            )
        if isinstance(best, str) and best not in sets and self.checkpoint.best_is is None:
            raise ValueError(
                f'checkpoint.best = {best!r} needs checkpoint.best_is = "lowest" or "highest": a figure does not say which is '
                "better"
            )
        if (best is True or (best is False and self.train.early_stopping)) and self.data.validates and not unnamed:
            key = "checkpoint.best = true" if best is True else f"train.early_stopping = {self.train.early_stopping}"
            raise ValueError(
                f"{key} is by validation_loss, and there are only named sets: set checkpoint.best to the name of one of "
                f"{', '.join(sets)}"
            )
        if best is True and not self.data.validates and self.train.evaluations:
            raise ValueError(
                'checkpoint.best = true is by validation_loss, and nothing is validated: set checkpoint.best = "evaluation/…"'
            )
        of_figure = isinstance(best, str) and best not in sets
        if (
            (best is not False or self.train.early_stopping)
            and not of_figure
            and self.train.eval_every
            and not self.train.validate_every
        ):
            raise ValueError("checkpoint.best and train.early_stopping use a validation loss: set train.validate_every above 0")
        return self

    @property
    def best_figure(self) -> tuple[str, bool]:
        """The key in metrics.jsonl for `checkpoint.best` and `train.early_stopping`; and True if the lowest value is best."""
        best = self.checkpoint.best
        if not isinstance(best, str):
            return "validation_loss", True
        return (
            (f"validation_loss/{best}", True) if best in self.data.validation else (best, self.checkpoint.best_is == "lowest")
        )

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        recorded: bool = False,
    ) -> RunConfig:
        """Read a run file and apply `section.key=value` overrides, or keys by section.

        Keys of the file that lose their effect because of an override are dropped, with a note for `tell_notes`: another
        recipe, for example, has other settings. For a run's own file, which older versions wrote with all keys, and for a
        `recorded` one, all keys without effect are dropped.

        Raises:
            InputError: the file is missing, is not TOML, or has an invalid key or value, or one without effect.
        """
        path = local_path(path, "run file")
        values = read_file(path)
        apply_overrides(values, overrides, cls)
        for section, keys in (sections or {}).items():
            if isinstance(table := values.setdefault(section, {}), dict):  # other values are refused below
                _merge(table, keys)
        train = values.get("train")
        if isinstance(train, dict):
            train.setdefault("output", f"runs/{path.stem}")
        config = cls.from_dict(values, where=str(path), context={"idle": "allowed"})
        set_keys = {".".join(part.strip() for part in override.partition("=")[0].split(".")[:2]) for override in overrides}
        set_keys |= {f"{section}.{key}" for section, keys in (sections or {}).items() for key in keys}
        recorded_by_run = recorded or (path.parent / "environment.json").is_file()
        moved = None
        of_run = path.name == "run.toml" and "train.output" not in set_keys and (path.parent / "environment.json").is_file()
        if of_run and config.output.resolve() != path.parent.resolve():  # the run's folder was moved or copied
            moved = str(config.output)
            config = config.model_copy(update={"train": config.train.model_copy(update={"output": str(path.parent)})})
        idle = idle_keys(config)
        ineffective = [each for each in idle if each.key in set_keys or not (recorded_by_run or set_keys.intersection(each.by))]
        if ineffective:
            raise InputError(f"{path}: {_refusal(config, ineffective)}")
        settled_config = settled(config, idle)
        left_out = [f"{path}: {shown(config, each.key)} {each.why}. It is ignored." for each in idle]
        if moved is not None:
            left_out.append(
                f"{path} belongs to the run in its folder, which was in {moved!r} before: train.output = {str(path.parent)!r}."
            )
        settled_config._notes = [*left_out, *warnings(settled_config)]
        settled_config._notes_of_one = [*of_one_rank(settled_config)]
        return settled_config

    def tell_notes(self, world_size: int | None = None) -> None:
        """Print the notes of `from_file` for an accepted run, once and on rank 0: absent effects and likely mistakes.

        world_size: ranks of the run; None for those of this process.
        """
        alone = (world_size or int(os.environ.get("WORLD_SIZE") or "1")) == 1
        notes, self._notes = [*self._notes, *(self._notes_of_one if alone else ())], []
        self._notes_of_one = []
        if os.environ.get("RANK", "0") in ("", "0"):
            for note in notes:
                warn(note)

    def to_toml(self) -> str:
        """The run file with every key that has an effect; reading it back gives an equal RunConfig."""
        tables = self.model_dump()
        for each in without_effect(self):
            section, _, key = each.key.partition(".")
            del tables[section][key]
        return tomli_w.dumps({section: table for section, table in _without_none(tables).items() if table})

    @property
    def offloads(self) -> bool:
        """True if activations saved for backward are stored in host memory, by either key."""
        return self.train.offload or self.parallel.sm_activation_offloading

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None for a number of epochs, which depends on the prepared data."""
        train = self.train
        if train.tokens is not None:
            return -(-train.tokens // (train.global_batch * self.data.sequence_length))
        return None if train.epochs is not None else train.steps

    def with_steps(self, steps: int) -> RunConfig:
        """The run with its length as `train.steps`.

        Raises:
            InputError: `train.extended` reaches beyond it.
        """
        extended = self.train.extended
        if extended and extended[-1] >= steps:
            raise InputError(
                f"train.extended = {extended}, but {self.length(steps)}: the former last steps lie below the last one. Set "
                f"{self.key_of_length(extended[-1] + 1)} or more."
            )
        changed = {"steps": steps, "tokens": None, "epochs": None}
        changed_config = self.model_copy(update={"train": self.train.model_copy(update=changed)})
        changed_config._given = self._given or _given_length(self.train)
        return changed_config

    def length(self, steps: int) -> str:
        """The length of a run of `steps` steps in its file's unit, for messages: "train.tokens = 1000 (8 steps)"."""
        stated = self._given or _given_length(self.train)
        return f"{stated} ({steps} steps)" if stated else f"train.steps = {steps}"

    def key_of_length(self, steps: int) -> str:
        """The key and value for a length of `steps` steps; `train.steps` instead of `train.epochs`."""
        stated = self._given or _given_length(self.train)
        if stated.startswith("train.tokens"):
            return f"train.tokens = {steps * self.train.global_batch * self.data.sequence_length}"
        return f"train.steps = {steps}" + (" in place of train.epochs" if stated else "")

    @property
    def output(self) -> Path:
        """The run's folder.

        Raises:
            InputError: it begins with the ~ of an unknown user.
        """
        path = Path(self.train.output or "runs/run")
        try:
            return path.expanduser()
        except RuntimeError:
            raise InputError(
                f"train.output = {str(path)!r}: there is no user {path.parts[0][1:]!r}. Write the full path."
            ) from None


def _refusal(config: RunConfig, idle: Sequence[Idle]) -> str:
    said = "; ".join(f"{shown(config, each.key)} {each.why}" for each in idle)
    needed = [key for each in idle if "it needs a run without" not in each.why for key in each.by]
    absent = dict.fromkeys(key for key in needed if value_of(config, key) is None)
    if not absent:
        return f"{said}. Remove one of the two."
    return f"{said}. Set {' or '.join(absent)}, or remove {', '.join(each.key for each in idle)}."


def _given_length(train: TrainConfig) -> str:
    """`train.tokens` or `train.epochs` with its value; empty for a length in steps."""
    if train.tokens is not None:
        return f"train.tokens = {train.tokens}"
    return "" if train.epochs is None else f"train.epochs = {train.epochs:g}"


def known_keys() -> list[str]:
    """Every `section.key` of a run file, in order."""
    return keys_of(RunConfig)


def _merge(values: dict[str, Any], keys: Mapping[str, Any]) -> None:
    """Override keys of a table, recursively."""
    for key, value in keys.items():
        inner = values.get(key)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            _merge(inner, value)
        else:
            values[key] = value


def _without_none(value: Any) -> Any:
    """Drop keys without a value: TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value
