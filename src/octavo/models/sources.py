"""A model's config and weights from a folder, an id of the Hub, or a built-in shape; no pickle, no code of others."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from octavo import hub
from octavo.errors import InputError, is_unreachable, unknown, unreachable
from octavo.models.families import DECODER_FAMILIES, FAMILIES, outside, spec_of
from octavo.models.fp8_folders import QUANTIZED_KEYS
from octavo.models.shapes import SHAPES, check_source
from octavo.models.weight_files import INDEX
from octavo.storage import why_unusable


def _above_0(value: float) -> bool:
    return 0 < value < math.inf


_SIZES = frozenset(
    (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
        *("vocab_size", "max_position_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok", "num_layers"),
        *("moe_intermediate_size", "shared_expert_intermediate_size"),
    )
)
"""Keys of Hugging Face's configs for sizes of at least 1."""
_LIMITS = dict.fromkeys(_SIZES - {"max_position_embeddings"}, 2**24) | dict.fromkeys(
    ("num_hidden_layers", "num_layers", "num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"), 2**14
)
"""Upper limits of sizes: a number with too many digits is a typo, and PyTorch would overflow or never finish."""
_ROTATION: dict[str, tuple[Callable[[float], bool], str]] = {
    "rope_theta": (_above_0, "use a number above 0, such as 10000.0"),
    "partial_rotary_factor": (
        lambda value: 0 <= value <= 1,
        "the share of a head's columns that rotate is from 0 to 1, such as 0.25",
    ),
    "factor": (_above_0, "use a number above 0, such as 8.0"),
    "attention_factor": (_above_0, "use a number above 0, such as 1.0"),
    "original_max_position_embeddings": (_above_0, "use the number of positions before the scaling, such as 8192"),
}
"""Key of `rope_parameters` → the check of its number, and the remedy."""
_OF_SCALINGS = frozenset(("factor", "attention_factor", "original_max_position_embeddings"))
_DTYPE = "model.dtype and model.params_dtype are the dtypes of a run"
_NOT_OF_THE_MODEL = {
    "model_type": "model.source is of one family, and other keys belong to another",
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "rope_scaling": "its name in this version of transformers is rope_parameters",
} | dict.fromkeys(
    (
        *("architectures", "transformers_version", "output_hidden_states", "output_attentions", "return_dict", "problem_type"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "num_labels", "_name_or_path"),
    ),
    "it has no effect on a causal language model in training",
)
"""Keys of a Hugging Face config without effect on the model, or with an unexpected one, and the reason."""

_VALIDATOR = re.compile(r"(Class v|V)alidation error for ")
_ERROR_TYPE = re.compile(r"^\w+Error: ")


def load_config(source: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """The Hugging Face config of a folder, an id, or a built-in shape, with single keys overridden.

    Raises:
        InputError: an unknown source or family, or an override of a key that the config does not have.
    """
    if source in SHAPES:
        values = dict(SHAPES[source])
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    else:
        config = _read_config(source)
    if overrides:
        config = _overridden(config, overrides)
    _check_sizes(config)
    return config


def _overridden(config: Any, overrides: Mapping[str, Any]) -> Any:
    known = config.to_dict()
    settable = [key for key in known if not key.startswith("_") and key not in _NOT_OF_THE_MODEL]
    for key in overrides:
        if key in _NOT_OF_THE_MODEL and known.get(key) != overrides[key]:
            raise InputError(f"model.config.{key} = {overrides[key]!r}: {_NOT_OF_THE_MODEL[key]}. Remove it.")
        if key not in (*known, *config.attribute_map) and key not in vars(config):
            raise unknown("key of model.config", key, settable, key="model.config")
    overrides = _by_stored_names(overrides, known, config.attribute_map)
    values = known | {key: _joined(known.get(key), value) for key, value in overrides.items()}
    model_type = values.pop("model_type")
    if "head_dim" not in overrides and {"hidden_size", "num_attention_heads"} & set(overrides):
        values.pop("head_dim", None)  # derived from the two that changed
    try:
        hf_config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers validates with several exception types
        raise InputError(f"model.config: {_reason(error)}") from None
    rope = overrides.get("rope_parameters")
    if isinstance(rope, dict):
        _check_rope(rope, hf_config.rope_parameters)
    return hf_config


def _by_stored_names(overrides: Mapping[str, Any], known: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Overrides under the stored names of `known`: some families ignore an alias if the stored name is there too.

    names: alias → stored name, such as Qwen3-MoE's num_experts → num_local_experts.

    Raises:
        InputError: both names of a key, with different values.
    """
    by_stored_name: dict[str, Any] = {}
    for key, value in overrides.items():
        stored = names.get(key, key) if names.get(key) in known else key
        if stored in by_stored_name and by_stored_name[stored] != value:
            other = next(each for each in overrides if each != key and names.get(each, each) == stored)
            raise InputError(
                f"model.config.{other} = {overrides[other]!r} and model.config.{key} = {value!r} are two names of one key. "
                "Remove one of the two."
            )
        by_stored_name[stored] = value
    return by_stored_name


def _joined(old: Any, new: Any) -> Any:
    """A value with an override: a table's other keys remain, unless the type of rotary scaling changes."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return copy.deepcopy(new)  # transformers writes into it
    if new.get("rope_type", old.get("rope_type")) != old.get("rope_type"):
        old = {key: value for key, value in old.items() if key in ("rope_theta", "partial_rotary_factor")}
    return old | {key: _joined(old.get(key), value) for key, value in new.items()}


def _check_rope(asked: Mapping[str, Any], resolved: Mapping[str, Any]) -> None:
    """Refuse keys of `rope_parameters` that its type does not read: without scaling, all except the base."""
    if any(isinstance(value, dict) for value in asked.values()):  # a separate table for each kind of layer
        for kind, table in asked.items():
            _check_rope(table if isinstance(table, dict) else {}, resolved[kind])
        return
    ignored = set(asked) - {"rope_type", "rope_theta", "partial_rotary_factor"}
    if ignored and resolved.get("rope_type") == "default":
        key = sorted(ignored)[0]
        raise InputError(
            f'model.config.rope_parameters.{key} = {asked[key]!r} has no effect with rope_type = "default", which scales '
            'nothing. Set model.config.rope_parameters.rope_type too, such as to "linear" or "yarn".'
        )


_KEYS_OF_ROPE = {
    "linear": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""Type of scaling → its keys, in addition to those of every type."""


def check_positions(source: str, overrides: Mapping[str, Any]) -> str:
    """Check overrides of the positions of pretrained weights; returns a notice, or nothing.

    Raises:
        InputError: the model has no rotary positions, or a key would give a different number of positions.
    """
    before, after = load_config(source), load_config(source, overrides)
    old, new = (getattr(config, "rope_parameters", None) for config in (before, after))
    if not isinstance(old, dict) or not isinstance(new, dict) or not isinstance(old.get("rope_theta"), int | float):
        key = next(iter(overrides))
        raise InputError(
            f"model.config.{key} with model.load = true: a {before.model_type} has no single table of rotary positions to "
            f"extend. Remove model.config.{key}."
        )
    kind, asked = new["rope_type"], overrides.get("rope_parameters", {})
    if asked.get("partial_rotary_factor", old.get("partial_rotary_factor")) != old.get("partial_rotary_factor"):
        raise InputError(
            "model.config.rope_parameters.partial_rotary_factor belongs to the pretrained weights: it is the share of a head's "
            "columns that rotate. Remove it."
        )
    scaled = old["factor"] if old.get("rope_type") == "linear" else 1  # linear has no key for the original positions
    trained = int(old.get("original_max_position_embeddings") or before.max_position_embeddings / scaled)
    limit = int(after.max_position_embeddings)
    if limit < trained:
        raise InputError(
            f"model.config.max_position_embeddings = {limit} is less than the {trained} positions of {source}. Use {trained} "
            "or more, and data.sequence_length for shorter sequences."
        )
    if kind == old.get("rope_type") and not asked:
        same = "rope_theta and rope_type stay"
    elif kind == "default":
        same = ""
    elif kind not in _KEYS_OF_ROPE:
        raise InputError(
            f'model.config.rope_parameters.rope_type = "{kind}" is not one of {", ".join(_KEYS_OF_ROPE)} and default: its '
            "angles depend on the length of each sequence. Use one of them."
        )
    else:
        same = ""
        known = ("rope_type", "rope_theta", "partial_rotary_factor", *_KEYS_OF_ROPE[kind])
        for key in asked:
            if key not in known:
                raise unknown(f"key of {kind} scaling", key, known, key="model.config.rope_parameters")
        if kind != "linear" and kind != old.get("rope_type") and "original_max_position_embeddings" not in asked:
            raise InputError(
                f'model.config.rope_parameters with rope_type = "{kind}" scales by the positions before the extension: set '
                f"original_max_position_embeddings = {trained} there."
            )
        original = new.get("original_max_position_embeddings")
        if original is not None and kind != "linear" and original != trained:
            raise InputError(
                f"model.config.rope_parameters.original_max_position_embeddings = {original}, but {source} was trained with "
                f"{trained} positions. Set {trained}."
            )
        if kind == "llama3" and not 0 < new["low_freq_factor"] < new["high_freq_factor"]:
            raise InputError(
                f"model.config.rope_parameters.low_freq_factor = {new['low_freq_factor']!r} has to be above 0 and below "
                f"high_freq_factor = {new['high_freq_factor']!r}, such as 1.0 and 4.0."
            )
        reach = trained * float(new["factor"] or limit / trained)
        if new["factor"] is not None and new["factor"] < 1:
            raise InputError(f"model.config.rope_parameters.factor = {new['factor']!r}: an extension needs 1 or more.")
        if kind == "llama3":  # its factor does not determine the last position
            return ""
        if limit > reach:
            factor = math.ceil(limit / trained * 1000) / 1000
            raise InputError(
                f"model.config.max_position_embeddings = {limit}, but {kind} scaling by factor = {new['factor']:g} reaches "
                f"{reach:g} = {trained} x {new['factor']:g} positions. Set factor = {factor:g}, or max_position_embeddings = "
                f"{int(reach)}."
            )
        if limit == before.max_position_embeddings and limit < int(reach):
            raise InputError(
                f"model.config.rope_parameters.factor = {new['factor']:g} reaches {int(reach)} positions, but "
                f"max_position_embeddings is still {limit}. Set model.config.max_position_embeddings = {int(reach)}."
            )
    if same and limit > before.max_position_embeddings:
        return (
            f"model.config.max_position_embeddings = {limit}: {same} as they were trained for {before.max_position_embeddings} "
            "positions. Unless that is meant, set rope_type and factor in model.config.rope_parameters."
        )
    return ""


def _check_sizes(config: Any) -> None:
    """Refuse sizes below 1, which transformers accepts, and non-finite numbers."""
    common_names = {stored: common for common, stored in config.attribute_map.items()}
    for key, value in config.to_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"model.config.{key} = {value}: use a finite number.")
        if common_names.get(key, key) in _SIZES and isinstance(value, int) and value < 1:
            raise InputError(f"model.config.{key} = {value}: a size of a model is at least 1.")
        if key == "decoder_sparse_step" and isinstance(value, int) and value < 1:
            raise InputError(
                f"model.config.{key} = {value}: use 1 for experts in every layer, 2 for every second one, and so on."
            )
        limit = _LIMITS.get(common_names.get(key, key))
        if limit is not None and isinstance(value, int) and value > limit:
            raise InputError(f"model.config.{key} = {value}: use at most {limit}.")
        if key.endswith(("norm_eps", "norm_epsilon")) and isinstance(value, float) and value < 0:
            raise InputError(f"model.config.{key} = {value}: use a number of at least 0, such as 1e-5.")
    if config.model_type in DECODER_FAMILIES and outside(spec := spec_of(config)):
        raise InputError(
            f"model.config.pad_token_id = {spec.padding}: the vocabulary has {spec.vocabulary} tokens (vocab_size). Use one of"
            " them; JSON's null, in config.json, for none."
        )
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        _check_rotation(rope, config.model_type)


def _check_rotation(rope: Mapping[str, Any], family: str) -> None:
    """Refuse numbers of `rope_parameters` that define no rotation; transformers only warns."""
    kind, known = rope.get("rope_type"), FAMILIES.get(family)
    unused = () if known is None or known.partial_rotary else ("partial_rotary_factor",)
    for key, (allowed, remedy) in _ROTATION.items():
        if key not in rope or (kind == "default" and key in _OF_SCALINGS):
            continue
        value = rope[key]
        if value is None and (key in unused or key == "attention_factor" or (kind == "yarn" and key == "factor")):
            continue  # transformers computes it
        if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
            raise InputError(f"model.config.rope_parameters.{key} = {value!r}: {remedy}.")


def _read_config(source: str) -> Any:
    check_source(source)
    source = str(Path(source).expanduser())  # transformers knows no ~
    path = Path(source) / "config.json"
    if path.is_file():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(
                f"model.source: {path} is not a Hugging Face config: {error}. Put the model's config there."
            ) from None
        except OSError as error:
            raise InputError(f"model.source: {path} cannot be read: {why_unusable(error)}") from None
        if not isinstance(content, dict) or not isinstance(kind := content.get("model_type"), str):
            raise InputError(
                f'model.source: {path} is not a Hugging Face config: it has no "model_type". Give the folder of a model that '
                "transformers has saved."
            )
        if kind not in AutoConfig.for_model.__globals__["CONFIG_MAPPING"]:
            raise unknown("model family", kind, DECODER_FAMILIES, key=f'"model_type" in {path}')
    try:
        with contextlib.nullcontext() if Path(source).is_dir() else hub.bounded():
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers validates with several exception types
        if is_unreachable(error):
            raise unreachable("model.source", source, "model", f"a built-in shape: {', '.join(SHAPES)}") from None
        if path.is_file():
            raise InputError(f"model.source: {path} is refused by transformers: {_reason(error)} Correct it there.") from None
        raise InputError(
            f"model.source = {source!r} could not be read: {_reason(error)} Give a folder on disk, or a built-in shape: "
            f"{', '.join(SHAPES)}."
        ) from None
    config.__dict__.pop("auto_map", None)  # names the source's Python files, which transformers would offer to run
    for key in QUANTIZED_KEYS:  # they describe the source's weights, not this model's
        config.__dict__.pop(key, None)
    return config


def weights_folder(source: str) -> Path:
    """The local folder with the weights of a model folder or of an id of the Hub, downloaded if need be.

    Raises:
        InputError: `source` is a built-in shape, or its weights can neither be downloaded nor found in the local cache.
    """
    if source in SHAPES:
        raise InputError(
            f"model.load = true, but model.source = {source!r} is a built-in shape, which has no weights: set model.load = "
            "false for random ones, or give a Hugging Face folder or id as model.source."
        )
    if (folder := Path(source).expanduser()).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    remedy = f"Run `hf download {source}` where there is a network, or give a folder on disk as model.source."
    try:
        with hub.bounded():
            folder = Path(snapshot_download(source, allow_patterns=["*.safetensors", INDEX, "*.json"]))
    except Exception as error:  # exceptions of huggingface_hub and of its HTTP library
        raise InputError(f"model.source = {source!r}: the weights could not be fetched: {_reason(error)} {remedy}") from None
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"model.source = {source!r}: no .safetensors file is there or in the local cache. {remedy}")
    return folder


def _reason(error: Exception) -> str:
    """The first two lines of an error as a sentence; for a validator's error the second line, with field and value."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and _VALIDATOR.match(lines[0]):
        lines = [_ERROR_TYPE.sub("", lines[1])]
    reason = " ".join(lines[:2]) if lines else type(error).__name__
    return reason if reason.endswith((".", "!", "?")) else f"{reason}."
