"""[lora]: low-rank adapters on frozen weights; and `octavo.LoRA`, the same options for `octavo.transform`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from octavo.config.peft_settings import ALL_LINEAR, CONFIG, peft_settings
from octavo.config.section import Section, refuse_addresses, several
from octavo.errors import InputError, unknown
from octavo.storage import local_path, path_fault

_DEFAULTS: dict[str, Any] = {"rank": 16, "alpha": None, "targets": ALL_LINEAR, "rslora": False, "save_whole": ()}


@dataclass(frozen=True, init=False)
class LoRA:
    """Adapters y + scale · B · A · dropout(x) on frozen matrices, as in PEFT's LoRA.

    Shapes: x [..., K], y [..., N], A [rank, K], B [N, rank].

    Attributes:
        rank: rows of A and columns of B; default 16.
        alpha: the scale is alpha / rank; default 2 x rank.
        dropout: dropout of the input of A, in training.
        targets: "all-linear" for all matrices of the blocks, including experts and routers, or patterns (`fnmatch`) of Hugging
            Face's module names or their suffixes, such as "q_proj" or "model.layers.0.*".
        rslora: the scale is alpha / √rank.
        save_whole: patterns of modules outside the blocks that are trained and saved whole, such as "lm_head".
        load: a PEFT folder (adapter_config.json, adapter_model.safetensors) with initial adapters. It sets rank, alpha,
            targets, rslora and save_whole unless they are given.
        base: "fp8" stores the frozen matrices of the blocks only in FP8, 1 byte a parameter, by the recipe of the products.

    Raises:
        InputError: a value out of range.
    """

    rank: int
    alpha: float | None
    dropout: float
    targets: str | Sequence[str]
    rslora: bool
    save_whole: Sequence[str]
    load: str | None
    base: Literal["params_dtype", "fp8"]

    def __init__(
        self,
        rank: int | None = None,
        alpha: float | None = None,
        dropout: float = 0.0,
        targets: str | Sequence[str] | None = None,
        rslora: bool | None = None,
        save_whole: Sequence[str] | None = None,
        load: str | None = None,
        base: Literal["params_dtype", "fp8"] = "params_dtype",
    ) -> None:
        load = None if load is None else str(local_path(load, "lora.load"))
        arguments = {"rank": rank, "alpha": alpha, "targets": targets, "rslora": rslora, "save_whole": save_whole}
        of_folder = peft_settings(load).taken if load is not None and None in arguments.values() else {}
        values = _DEFAULTS | {key: tuple(value) if isinstance(value, list) else value for key, value in of_folder.items()}
        values |= {key: value for key, value in arguments.items() if value is not None}
        for key, value in {**values, "dropout": dropout, "load": load, "base": base}.items():
            object.__setattr__(self, key, value)  # the dataclass is frozen
        self._check()

    def _check(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise InputError(f"lora.rank = {self.rank!r}: give a whole number from 1, such as 16.")
        if not _is_number(self.scale_factor) or self.scale_factor <= 0:
            raise InputError(f"lora.alpha = {self.alpha!r}: give a finite number above 0, such as {2 * self.rank}.")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise InputError(f"lora.dropout = {self.dropout!r}: give a number from 0 and below 1, such as 0.05.")
        for name, patterns in (("targets", self.targets), ("save_whole", self.save_whole)):
            if name == "targets" and patterns == ALL_LINEAR:
                continue
            if isinstance(patterns, str) or not all(isinstance(one, str) and one for one in patterns):
                shown = f'"{ALL_LINEAR}" or a list' if name == "targets" else "a list"
                raise InputError(f'lora.{name} = {patterns!r}: give {shown} of patterns, such as ["q_proj", "v_proj"].')
        if self.base not in ("params_dtype", "fp8"):
            raise unknown("base", str(self.base), ("params_dtype", "fp8"), key="lora.base")
        if not self.targets:
            raise InputError(
                f'lora.targets = []: no matrix gets an adapter. Give "{ALL_LINEAR}", or patterns such as "q_proj".'
            )

    @property
    def scale_factor(self) -> float:
        """`alpha` with its default resolved."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """Factor of B · A."""
        return self.scale_factor / (math.sqrt(self.rank) if self.rslora else self.rank)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class LoraConfig(Section):
    """Low-rank adapters, the only trained parameters; absent without `rank`."""

    rank: int | None = Field(
        None, ge=1, description="Rank of the adapters on frozen weights; by default there are no adapters."
    )
    alpha: float | None = Field(None, gt=0, description="The adapters' output is scaled by alpha / rank; by default 2 x rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the adapters' input in training.")
    targets: str | list[str] = Field(
        ALL_LINEAR,
        description='"all-linear" for all matrices of the blocks, or patterns (`fnmatch`) for Hugging Face\'s module names '
        'or their last components, such as ["q_proj", "v_proj"].',
    )
    rslora: bool = Field(False, description="Scale the adapters' output by alpha / √rank.")
    save_whole: list[str] = several('Patterns for modules outside the blocks that are trained whole, such as ["lm_head"].')
    load: str | None = Field(
        None,
        description="PEFT folder with the adapters to start from; it also sets rank, alpha, targets, rslora and save_whole "
        "where these are absent.",
    )
    base: Literal["params_dtype", "fp8"] = Field(
        "params_dtype",
        description='"fp8": the frozen matrices of the blocks are stored only in FP8, 1 byte per parameter (not with '
        'rowwise scaling). "params_dtype": in model.params_dtype.',
    )

    @model_validator(mode="wrap")
    @classmethod
    def _take_settings(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill absent settings from the folder in `load`; they do not count as set in the run file."""
        load = values.get("load") if isinstance(values, Mapping) else None
        if not isinstance(load, str) or path_fault(load):
            return handler(values)
        absent = {key for key in _DEFAULTS if values.get(key) is None}
        if absent <= {"alpha"}:  # as in a run's recorded file, where an absent alpha is 2 x rank
            return handler(values)
        folder = local_path(load, "lora.load")
        if "rank" not in absent and not (folder / CONFIG).is_file():
            return handler(values)  # refused by the plan: the folder may exist only on the training machine
        taken = {key: value for key, value in peft_settings(folder).taken.items() if key in absent}
        section = handler({**values, **taken})
        section.model_fields_set.difference_update(taken)
        return section

    @field_validator("load")
    @classmethod
    def _check_paths(cls, value: str | None) -> str | None:
        return value if value is None else str(local_path(refuse_addresses(value), "lora.load"))

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str) and value != ALL_LINEAR:
            raise ValueError(f'give "{ALL_LINEAR}", or a list of patterns: ["{value}"]')
        if not value:
            raise ValueError(f'no matrix gets an adapter. Give "{ALL_LINEAR}", or patterns such as ["q_proj"]')
        return value

    @property
    def options(self) -> LoRA | None:
        """The adapters; None without."""
        if self.rank is None:
            return None
        targets = self.targets if isinstance(self.targets, str) else tuple(self.targets)
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha  # set, so that no folder is read
        return LoRA(self.rank, alpha, self.dropout, targets, self.rslora, tuple(self.save_whole), self.load, self.base)
