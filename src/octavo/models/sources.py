"""A model's config and weights from a folder, an id of the Hub, or a built-in shape; no pickle, no code of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from octavo.errors import InputError, unknown
from octavo.models.families import DECODER_FAMILIES
from octavo.models.shapes import SHAPES
from octavo.models.weight_files import INDEX


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
    known = config.to_dict()
    for key in overrides or {}:
        if key not in known and not hasattr(config, key):
            raise unknown("key of model.config", key, [k for k in known if not k.startswith("_")], key="model.config")
    if overrides:
        values = known | dict(overrides)
        model_type = values.pop("model_type")
        if "head_dim" not in overrides and {"hidden_size", "num_attention_heads"} & set(overrides):
            values.pop("head_dim", None)  # derived from the two that changed
        try:
            config = AutoConfig.for_model(model_type, **values)
        except Exception as error:  # transformers validates with several exception types of its own
            raise InputError(f"model.config: {_first_line(error)}") from None
    return config


def _read_config(source: str) -> Any:
    folder = Path(source)
    if folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise InputError(f"model.source = {source!r} is a folder without config.json: give a Hugging Face model folder.")
        try:
            kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise InputError(f"{path} is not a Hugging Face config: {error}.") from None
        if kind not in AutoConfig.for_model.__globals__["CONFIG_MAPPING"]:
            raise unknown("model family", str(kind), DECODER_FAMILIES, key=f'"model_type" in {path}')
    elif source.count("/") != 1 or source.startswith((".", "/", "~")):
        # Not a folder that exists, and not an id of the form owner/name.
        if "/" in source:
            raise InputError(f"model.source = {source!r} does not exist. Built-in shapes: {', '.join(SHAPES)}.")
        raise unknown("model", source, SHAPES, key="model.source (a folder or id of Hugging Face works too)")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.source = {source!r} could not be read: {_first_line(error)} Give a folder on disk, or a built-in shape: "
            f"{', '.join(SHAPES)}."
        ) from None
    config.__dict__.pop("auto_map", None)  # names Python files of the source, which transformers would offer to run
    return config


def load_generation_config(source: str) -> Any | None:
    """The generation config of a folder, or of an id with downloaded weights; None for any other source."""
    if source in SHAPES:
        return None
    try:
        return GenerationConfig.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError):
        return None


def weights_folder(source: str) -> Path:
    """The local folder with the weights of a model folder or of an id of the Hub, downloaded if need be.

    Raises:
        InputError: `source` is a built-in shape, or its weights are neither in reach nor in the local cache.
    """
    if source in SHAPES:
        raise InputError(
            f"model.load = true, but model.source = {source!r} is a built-in shape, which has no weights: set model.load = "
            "false for random ones, or give a Hugging Face folder or id as model.source."
        )
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    remedy = f"Run `hf download {source}` where there is a network, or give a folder on disk as model.source."
    try:
        folder = Path(snapshot_download(source, allow_patterns=["*.safetensors", INDEX, "*.json"]))
    except Exception as error:  # huggingface_hub raises its own types, and those of the HTTP library below it
        raise InputError(
            f"model.source = {source!r}: the weights could not be fetched: {_first_line(error)} {remedy}"
        ) from None
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"model.source = {source!r}: no .safetensors file is there or in the local cache. {remedy}")
    return folder


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
