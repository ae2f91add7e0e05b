"""The settings of a folder of PEFT's adapters: rank, alpha and targets of a run that begins with them.

Read without torch, from `adapter_config.json` and the header of the weights. What Octavo's adapters would compute otherwise is
refused by its key.
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
"""Files of PEFT's folder."""
PEFT_PREFIX = "base_model.model."
"""Of the names of parameters in a model of PEFT's."""
ALL_LINEAR = "all-linear"
"""Every matrix of every block."""
FUSED = r".*\.gate_up_proj"
"""PEFT's pattern of the matrices that stand for two, whose rank and alpha are doubled."""
GATES, UPS, DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
"""Names of each expert's matrices, as PEFT takes them: those of gate and up are one of twice the rank."""
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
"""Keys of PEFT's config that change what adapters or their gradients compute → the values under which they do not."""
_OTHERS = frozenset(
    {
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "target_parameters", "rank_pattern"),
        *("alpha_pattern", "modules_to_save", "init_lora_weights", "peft_type", "base_model_name_or_path"),  # read
        *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of values that adapters begin with
        *("megatron_core", "qalora_group_size"),  # of keys above
        "ensure_weight_tying",  # an embedding that is the head too is refused in modules_to_save and target_modules
    }
)
"""All other keys of PEFT's config."""
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""`init_lora_weights` under which the base has its original weights, and both factors are trained."""


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
"""Bytes, as safetensors bounds it."""


@dataclass(frozen=True)
class PeftSettings:
    """Settings of a folder, by the names of `[lora]`; base: the folder or id that its base was loaded from."""

    rank: int
    alpha: float
    dropout: float
    targets: str | tuple[str, ...]
    rslora: bool
    save_whole: tuple[str, ...]
    base: str | None

    @property
    def taken(self) -> dict[str, Any]:
        """The keys of `[lora]` that a run takes where they are not given."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        of_adapters = {"rank": self.rank, "alpha": self.alpha, "targets": targets, "rslora": self.rslora}
        return of_adapters | ({"save_whole": list(self.save_whole)} if self.save_whole else {})


def is_of_experts(module: str) -> bool:
    """True for a matrix of experts, by Hugging Face's name."""
    return ".experts." in module


def is_router(module: str) -> bool:
    """True for a router, by Hugging Face's name."""
    return module.endswith(".mlp.gate")


def peft_settings(folder: str | Path) -> PeftSettings:
    """The settings of a folder of PEFT's.

    Raises:
        InputError: it is none, or its adapters compute something that Octavo's do not.
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
    """The targets of a folder's adapted parameters, and its patterns of ranks, as Octavo names them.

    Raises:
        InputError: other parameters than those of experts and routers, or other ranks and alphas than PEFT's of gate and up.
    """
    parameters = list(config.get("target_parameters") or ())
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    fused = bool(ranks or alphas)
    if fused and (ranks, alphas) != ({FUSED: 2 * config["r"]}, {FUSED: 2 * config["lora_alpha"]}):
        key = "rank_pattern" if ranks else "alpha_pattern"
        raise InputError(
            f"{path / CONFIG}: {key} = {config[key]!r} is not supported: adapters have one rank, and those of gate and "
            "up of experts twice as much where PEFT has. Keep the model's own code: "
            "octavo.transform(PeftModel.from_pretrained(model, folder))."
        )
    found: list[str] = []
    for one in sorted(parameters):
        container, _, leaf = one.removesuffix(".weight").rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj", "gate"):
            raise InputError(
                f"{path / CONFIG}: target_parameters = {parameters!r}: {one!r} is no matrix of experts or router. Keep the "
                "model's own code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
        container = container or ("mlp" if leaf == "gate" else "experts")
        halves = (GATES[0], UPS[0]) if fused and leaf == "gate_up_proj" else (leaf,)
        found += [f"{container}.{half}" for half in halves]
    return found


def _config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"lora.load = {str(path)!r} is no folder of PEFT's adapters: {CONFIG} cannot be read ({error}). Give the folder "
            "that model.save_pretrained or octavo export has written."
        ) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or "r" not in config or "lora_alpha" not in config:
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise InputError(f"{file}: peft_type = {kind!r}: Octavo loads LoRA alone.")
    for key, (fits, words) in _VALUES.items():
        if key in config and not fits(config[key]):
            raise InputError(f"{file}: {key} = {config[key]!r} is not {words}. Correct it, or copy the folder again.")
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise InputError(
                f"{file}: {key} = {config[key]!r} is not supported: Octavo's adapters have {key} = {neutral[0]!r}. Keep the "
                "model's own code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
    for key in sorted(config.keys() - _NEUTRAL.keys() - _OTHERS):
        if config[key] not in (None, False):
            raise InputError(
                f"{file}: {key} = {config[key]!r} is not known, and may change what adapters compute. Remove it if it does "
                "not; else keep the model's own code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
    start = config.get("init_lora_weights")
    if start == "mica":
        raise InputError(
            f"{file}: init_lora_weights = 'mica' trains lora_A alone, and Octavo trains both. Keep the model's own code: "
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
    """The names in a file of safetensors: 8 bytes with the length of a header of JSON, and the header."""
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
