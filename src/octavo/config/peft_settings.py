"""The settings of a PEFT adapter folder: rank, alpha and targets for a run that starts from it.

Read without torch, from `adapter_config.json` and the header of the weights. Settings that Octavo's adapters do not support are
refused by key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import InputError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a PEFT folder."""
PEFT_PREFIX = "base_model.model."
"""Prefix of parameter names in a PEFT model."""
ALL_LINEAR = "all-linear"
"""All matrices of all blocks."""
FUSED = r".*\.gate_up_proj"
"""PEFT's pattern of fused matrices, whose rank and alpha are doubled."""
GATES, UPS, DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
"""PEFT's names of an expert's matrices; gate and up are fused, with twice the rank."""
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "bias": ("none",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "use_qalora": (False, None),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "layers_to_transform": (None,),
    "layers_pattern": (None,),
    "exclude_modules": (None, []),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Keys of PEFT's config that change adapters or their gradients → their values without effect."""
_OTHERS = frozenset(
    {
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "target_parameters", "rank_pattern"),
        *("alpha_pattern", "modules_to_save", "init_lora_weights", "peft_type", "base_model_name_or_path"),  # read
        *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # initial values of adapters
        *("megatron_core", "qalora_group_size"),  # parts of keys above
        "ensure_weight_tying",  # a tied embedding is refused in modules_to_save and target_modules
    }
)
"""All other keys of PEFT's config."""
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""`init_lora_weights` that leave the base weights unchanged and train both factors."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda value: _is_number(value) and isinstance(value, int) and value > 0, "a whole number from 1"),
    "lora_alpha": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "lora_dropout": (lambda value: value is None or (_is_number(value) and 0 <= value < 1), "a number from 0 and below 1"),
    "use_rslora": (lambda value: value is None or isinstance(value, bool), "true or false"),
    "target_modules": (lambda value: value is None or isinstance(value, str) or _is_texts(value), "a list of names, or a text"),
    "target_parameters": (lambda value: value is None or _is_texts(value), "a list of names"),
    "modules_to_save": (lambda value: value is None or _is_texts(value), "a list of names"),
    "rank_pattern": (lambda value: value is None or isinstance(value, dict), "an object"),
    "alpha_pattern": (lambda value: value is None or isinstance(value, dict), "an object"),
    "base_model_name_or_path": (lambda value: value is None or isinstance(value, str), "a text"),
}
"""Keys that are read → a test of the value, and its kind in words."""
_LONGEST_HEADER = 100_000_000
"""Most bytes of a safetensors header."""


@dataclass(frozen=True)
class PeftSettings:
    """Settings of a folder by the keys of `[lora]`; base: folder or id of its base model."""

    rank: int
    alpha: float
    dropout: float
    targets: str | tuple[str, ...]
    rslora: bool
    save_whole: tuple[str, ...]
    base: str | None

    @property
    def taken(self) -> dict[str, Any]:
        """The keys of `[lora]` that the folder sets unless the run does."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        of_adapters = {"rank": self.rank, "alpha": self.alpha, "targets": targets, "rslora": self.rslora}
        return of_adapters | ({"save_whole": list(self.save_whole)} if self.save_whole else {})


def is_of_experts(module: str) -> bool:
    """True for an expert matrix, by Hugging Face's name."""
    return ".experts." in module


def is_router(module: str) -> bool:
    """True for a router, by Hugging Face's name."""
    return module.endswith(".mlp.gate")


def peft_settings(folder: str | Path) -> PeftSettings:
    """The settings of a PEFT folder.

    Raises:
        InputError: it is not a PEFT folder, or its adapters have unsupported settings.
    """
    path = Path(folder).expanduser()
    config = _config(path)
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets != ALL_LINEAR:  # a regular expression
        targets = sorted({_module(key) for key in _names(path) if key.endswith((".lora_A.weight", ".lora_B.weight"))})
        if config.get("target_parameters"):
            targets = [one for one in targets if not (is_of_experts(f"{one}.") or is_router(one))]
    if parameters := _of_parameters(path, config):
        targets = [*(targets or ()), *parameters]
    return PeftSettings(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        dropout=float(config.get("lora_dropout") or 0.0),
        targets=ALL_LINEAR if targets == ALL_LINEAR else tuple(targets or ()),
        rslora=bool(config.get("use_rslora", False)),
        save_whole=tuple(config.get("modules_to_save") or ()),
        base=config.get("base_model_name_or_path"),
    )


def _of_parameters(path: Path, config: Mapping[str, Any]) -> list[str]:
    """The targets for a folder's adapted parameters, and its rank patterns, in Octavo's names.

    Raises:
        InputError: parameters other than experts and routers, or ranks and alphas other than PEFT's doubling for gate and up.
    """
    parameters = list(config.get("target_parameters") or ())
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    fused = bool(ranks or alphas)
    if fused and (ranks, alphas) != ({FUSED: 2 * config["r"]}, {FUSED: 2 * config["lora_alpha"]}):
        key = "rank_pattern" if ranks else "alpha_pattern"
        raise InputError(
            f"{path / CONFIG}: {key} = {config[key]!r} is not supported: adapters have one rank, doubled only for fused gate "
            "and up of experts. Use the model's original code: "
            "octavo.transform(PeftModel.from_pretrained(model, folder))."
        )
    names: list[str] = []
    for one in sorted(parameters):
        container, _, leaf = one.removesuffix(".weight").rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj", "gate"):
            raise InputError(
                f"{path / CONFIG}: target_parameters = {parameters!r}: {one!r} is not a matrix of experts or a router. Use the "
                "model's original code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
        container = container or ("mlp" if leaf == "gate" else "experts")
        halves = (GATES[0], UPS[0]) if fused and leaf == "gate_up_proj" else (leaf,)
        names += [f"{container}.{half}" for half in halves]
    return names


def _config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"lora.load = {str(path)!r} is not a PEFT folder: {CONFIG} cannot be read ({error}). Give a folder that "
            "model.save_pretrained or octavo export has written."
        ) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or "r" not in config or "lora_alpha" not in config:
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise InputError(f"{file}: peft_type = {kind!r}: Octavo loads only LoRA.")
    for key, (fits, words) in _VALUES.items():
        if key in config and not fits(config[key]):
            raise InputError(f"{file}: {key} = {config[key]!r} is not {words}. Correct it, or copy the folder again.")
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise InputError(
                f"{file}: {key} = {config[key]!r} is not supported: Octavo's adapters have {key} = {neutral[0]!r}. Use the "
                "model's original code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
    for key in sorted(config.keys() - _NEUTRAL.keys() - _OTHERS):
        if config[key] not in (None, False):
            raise InputError(
                f"{file}: {key} = {config[key]!r} is not known, and may change what adapters compute. Remove it if it does "
                "not; else use the model's original code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
    start = config.get("init_lora_weights")
    if start == "mica":
        raise InputError(
            f"{file}: init_lora_weights = 'mica' trains lora_A alone, and Octavo trains both. Use the model's original code: "
            "octavo.transform(PeftModel.from_pretrained(model, folder))."
        )
    if start not in _STARTS:
        raise InputError(
            f"{file}: init_lora_weights = {start!r} changes the base weights. Save the adapters for the original weights: "
            "model.save_pretrained(folder, path_initial_model_for_weight_conversion=…)."
        )
    return config


def check_weights(path: Path) -> Path:
    """The file of a folder's adapters.

    Raises:
        InputError: it does not exist.
    """
    file = path / WEIGHTS
    if not file.is_file():
        other = path / "adapter_model.bin"
        way = f": convert {other.name} by PeftModel.from_pretrained(…).save_pretrained(…)" if other.is_file() else ""
        raise InputError(f"lora.load: {file} does not exist{way or '. Copy the whole folder again'}.")
    return file


def _names(path: Path) -> list[str]:
    """The tensor names in a safetensors file, from its JSON header."""
    file = check_weights(path)
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
        return [name for name in header if name != "__metadata__"]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"lora.load: {file} cannot be read: {error}. Copy it again.") from None


def _module(key: str) -> str:
    return key.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0]
