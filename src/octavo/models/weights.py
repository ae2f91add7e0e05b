"""Hugging Face in and out: configs, weights and folders.

Octavo's decoder keeps matrices that are used together as one parameter; Hugging Face keeps them apart. `to_hugging_face` and
`from_hugging_face` are each other's inverse, bit for bit, and are driven by the family's table. Files are safetensors only;
nothing is unpickled and no code from a hub is run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from octavo.errors import InputError, unknown
from octavo.models.decoder import Decoder
from octavo.models.families import FAMILIES, SHAPES, Family
from octavo.nn.attention import merge_qkv, split_qkv
from octavo.nn.mlp import deinterleave, interleave

_SHARD_BYTES = 5 << 30
_INDEX = "model.safetensors.index.json"


def load_config(source: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """The Hugging Face config of a folder, an id, or a built-in shape, with single keys overridden.

    Raises:
        InputError: there is no such source or family, or an override names a key that the config does not have.
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
            raise unknown("model family", str(kind), FAMILIES, key=f'"model_type" in {path}')
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


def weights_folder(source: str) -> Path:
    """The local folder that holds the weights of a model folder or of an id of the Hub, which is downloaded if need be.

    Raises:
        InputError: `source` is a built-in shape, or the weights can neither be reached nor are in the local cache.
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
        folder = Path(snapshot_download(source, allow_patterns=["*.safetensors", _INDEX, "*.json"]))
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


def family_of(config: Any) -> tuple[Family | None, str]:
    """The family whose decoder computes this config, or None and the reason why the model keeps its own code."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None, f"no decoder for the family {config.model_type!r}"
    for key, values in family.requires.items():
        if getattr(config, key, None) not in values:
            return None, f"{key} = {getattr(config, key, None)!r} is not one of {', '.join(map(str, values))}"
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in family.rope_types:
        return None, f"rope_type = {kind!r} is not one of {', '.join(family.rope_types)}"
    return family, ""


def hugging_face_names(name: str, family: Family) -> tuple[str, ...]:
    """The Hugging Face names of one of the decoder's parameters."""
    if name in family.names:
        return (family.names[name],)
    _, index, rest = name.split(".", 2)
    theirs = family.block_names[rest]
    return tuple(f"{family.block_prefix}.{index}.{part}" for part in ([theirs] if isinstance(theirs, str) else theirs))


def join_rule(name: str, family: Family) -> str | None:
    """How a parameter is joined from Hugging Face's: "qkv", "gate_up", or None for one that is theirs."""
    return None if name in family.names else family.joined.get(name.split(".", 2)[2])


def to_hugging_face(tensors: Mapping[str, Tensor], config: Any, family: Family) -> dict[str, Tensor]:
    """The decoder's parameters under Hugging Face's names, joined matrices taken apart; tied ones appear once."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "head.weight" and config.tie_word_embeddings:
            continue
        rule = join_rule(name, family)
        if rule == "qkv":
            parts: tuple[Tensor, ...] = split_qkv(tensor, config.num_attention_heads, config.num_key_value_heads)
        elif rule == "gate_up":
            parts = deinterleave(tensor)
        else:
            parts = (tensor,)
        out.update(zip(hugging_face_names(name, family), parts, strict=True))
    return out


def from_hugging_face(name: str, parts: tuple[Tensor, ...], config: Any, family: Family) -> Tensor:
    """One of the decoder's parameters, from its parts under Hugging Face's names (in the order of `hugging_face_names`)."""
    rule = join_rule(name, family)
    if rule == "qkv":
        q, k, v = parts
        return merge_qkv(q, k, v, config.num_key_value_heads)
    if rule == "gate_up":
        return interleave(*parts)
    return parts[0]


def _files_of(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is damaged ({type(error).__name__}: {error}): copy it again.") from None


class Weights(Protocol):
    """Tensors by their Hugging Face names, of which any rows can be had."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; an InputError if there is none of that name."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor (all of one that has no dimensions)."""


class InMemoryWeights:
    """Weights in memory: those of a model that was loaded or trained already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; an InputError if there is none of that name."""
        if name not in self.shapes:
            raise InputError(f"the model has no weight {name!r}: it is not of the family that its config names.")
        return self.shapes[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, which share its memory."""
        self.shape(name)
        tensor = self.tensors[name].detach()
        return tensor[start:stop] if tensor.dim() else tensor


class WeightFiles:
    """The safetensors of a Hugging Face model folder, of which any rows can be read.

    Raises:
        InputError: the folder has none (a pickled checkpoint is not read).
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"no folder {str(folder)!r} with weights: give a local Hugging Face model folder.")
        index = self.folder / _INDEX
        files = _files_of(index) if index.is_file() else []
        files = files or sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            pickled = next(self.folder.glob("*.bin"), None)
            hint = f" {pickled.name} is a pickle, which Octavo never opens: convert it to safetensors." if pickled else ""
            raise InputError(f"{self.folder} has no .safetensors files.{hint}")
        self.where: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            if not (self.folder / file).is_file():
                raise InputError(f"{self.folder / file} is missing, though {_INDEX} names it: copy the whole model folder.")
            try:
                with safe_open(self.folder / file, "pt") as opened:
                    self.where.update(dict.fromkeys(opened.keys(), file))
                    self.shapes.update((name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys())  # noqa: SIM118
            except SafetensorError as error:
                raise InputError(f"{self.folder / file} is damaged ({error}): copy it again.") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from the header of its file."""
        if name not in self.shapes:
            raise InputError(f"{self.folder} has no weight {name!r}: it is not a checkpoint of this model.")
        return self.shapes[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor by its Hugging Face name, on the CPU; all of one that has no dimensions.

        The file is open for this read only: its pages would count as this process's memory as long as it is mapped.
        """
        dimensions = len(self.shape(name))  # explains a weight that is not there
        with safe_open(self.folder / self.where[name], "pt") as opened:
            return opened.get_slice(name)[start:stop] if dimensions else opened.get_tensor(name)


def _check_shape(name: str, found: tuple[int, ...], wanted: torch.Size) -> None:
    if found != tuple(wanted):
        raise InputError(f"{name}: the weights have shape {found}, the config asks for {tuple(wanted)}.")


def check_weights(model: nn.Module, files: Weights) -> None:
    """Hold names and shapes in the files' headers against a model, which may be on meta or sharded; reads no weight.

    Raises:
        InputError: the first weight that is missing or has another shape.
    """
    if isinstance(model, Decoder):
        # Shapes alone: taking a sharded matrix apart would gather it.
        shapes = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
        wanted = to_hugging_face(shapes, model.config, model.family)
    else:
        state = model.state_dict(keep_vars=True)
        present = {id(tensor) for name, tensor in state.items() if name in files.shapes}
        wanted = {name: tensor for name, tensor in state.items() if name in files.shapes or id(tensor) not in present}
    for name, tensor in wanted.items():
        _check_shape(name, files.shape(name), tensor.shape)


def write_pretrained(
    tensors: Mapping[str, Tensor],
    config: Any,
    folder: str | Path,
    tokenizer_folder: Path | None = None,
    *,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads, bit for bit.

    Args:
        tensors: under Octavo's names (of the decoder, or of a model that kept its own code).
        config: the Hugging Face config.
        folder: new, or empty.
        tokenizer_folder: whose files are copied beside the weights.
        read: gives the values, where `tensors` are on the meta device. A file's tensors are read when it is written, so that
            no more than those of one file are in memory; one whose parts go into two files is read twice.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty: export writes a new folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be made: {error.strerror or error}. Give another folder.") from None
    family, _ = family_of(config)
    known = family if "embedding.weight" in tensors else None

    def theirs(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor} if known is None else to_hugging_face({name: tensor}, config, known)

    # The shapes alone: taking a matrix apart on the meta device says what there will be without reading it.
    pieces = {name: theirs(name, torch.empty_like(tensor, device="meta")) for name, tensor in tensors.items()}
    values = read or tensors.__getitem__
    _save_shards(pieces, lambda name: theirs(name, values(name)), folder)
    config = type(config).from_dict(config.to_dict())
    config.dtype = next(iter(tensors.values())).dtype
    if not config.architectures:
        config.architectures = [_causal_lm_class(config)]
    config.save_pretrained(folder)
    for path in sorted(tokenizer_folder.iterdir()) if tokenizer_folder else ():
        if path.is_file() and path.name not in ("config.json", "generation_config.json"):
            shutil.copyfile(path, folder / path.name)


def _causal_lm_class(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]


def _save_shards(pieces: Mapping[str, Mapping[str, Tensor]], read: Callable[[str], Mapping[str, Tensor]], folder: Path) -> None:
    """Write tensors in files of at most `_SHARD_BYTES` (or one tensor), with an index if there are several.

    `pieces` has, for each name that `read` takes, what it will give, on the meta device.
    """
    shards: list[dict[str, list[str]]] = [{}]  # what is read for each file, and what of it goes there
    size = total = 0
    for name, parts in pieces.items():
        for theirs, part in parts.items():
            if shards[-1] and size + part.nbytes > _SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1].setdefault(name, []).append(theirs)
            size += part.nbytes
            total += part.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content: dict[str, Tensor] = {}
        for name, wanted in shard.items():
            values = read(name)
            content |= {theirs: values[theirs].detach().cpu().contiguous() for theirs in wanted}
        save_file(content, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(content, file))
        del content
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
