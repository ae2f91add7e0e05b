"""Weights to and from a model's source, bit for bit: by a family's table of names, and the row order of joined matrices.

Octavo stores matrices that are used together as one parameter, whose rows interleave: a fixed number of rows of the first
matrix, then of the second, …, then the next rows of the first.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging

from octavo.collectives.blocks import parameters_of, shape_of
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError, OctavoError, first_line, warn
from octavo.fp8.scaling import states_of
from octavo.models.families import FAMILIES, Join, NameTable, decoder_spec
from octavo.models.fp8_folders import DEQUANTISE, QUANTIZED_KEYS
from octavo.models.original_code import float32_names
from octavo.models.spec import ModelSpec
from octavo.models.structure import difference_from, warn_of_hooks
from octavo.models.weight_files import Weights, kind_of, save_shards
from octavo.nn.derived import written_class
from octavo.nn.lora import is_adapter
from octavo.nn.mlp import gate_up_block
from octavo.storage import free_bytes, fsync_folder, fsync_tree, local_path, use_umask

if TYPE_CHECKING:  # transformers' model classes import torchao, a peer that may be broken
    from transformers import PreTrainedModel

_ATTACHED = "octavo_conversion"
Encode = Callable[[str, Tensor, dict[str, Tensor]], dict[str, Tensor]]
"""(A parameter's name, the parameter, its parts by their published names) → tensors of a file."""


@dataclass(frozen=True)
class Conversion:
    """Conversion between a model's parameters and those of its source.

    Attributes:
        table: names of the parameters in both.
        heads, kv_heads: query and key-value heads of attention.
        tied: names that the source may leave out → the parameter that they share.
        layout: name of the layout of the parameters in checkpoints.
        experts: number of experts per MoE layer.
    """

    table: NameTable
    heads: int
    kv_heads: int
    tied: Mapping[str, str]
    layout: str
    experts: int = 0

    def names(self, name: str) -> tuple[str, ...]:
        """The source's names of a parameter."""
        return self.table.names(name)

    def repetition(self, name: str, rows: int) -> tuple[int, ...]:
        """Rows of each part in one repetition of a parameter with `rows` rows."""
        match self.table.join(name):
            case Join.QKV:
                head_dim = rows // (self.heads + 2 * self.kv_heads)
                return self.heads // self.kv_heads * head_dim, head_dim, head_dim
            case Join.GATE_UP:
                return (gate_up_block(rows // 2),) * 2
            case None | Join.EXPERTS | Join.EXPERT_B:
                return (rows,)

    def parts(self, name: str, rows: int) -> list[tuple[str, int, int]]:
        """(the source's name, first row in it, rows in one repetition) of each part of a parameter."""
        lengths, names = self.repetition(name, rows), self.names(name)
        if len(names) == len(lengths):
            return [(source, 0, length) for source, length in zip(names, lengths, strict=True)]
        repeated = rows // sum(lengths)
        return [(names[0], sum(lengths[:part]) * repeated, length) for part, length in enumerate(lengths)]

    def join(self, name: str, parts: tuple[Tensor, ...]) -> Tensor:
        """A parameter [rows, …] from its source's tensors, in the order of `names`."""
        match self.table.join(name):
            case None:
                return parts[0]
            case Join.EXPERTS:
                return parts[0].flatten(0, 1)
            case Join.EXPERT_B:
                return parts[0].unflatten(1, (-1, self.experts)).permute(2, 0, 1).flatten(0, 1)
        lengths = self.repetition(name, sum(part.shape[0] for part in parts))
        if len(parts) == 1:
            repeated = parts[0].shape[0] // sum(lengths)
            parts = parts[0].split([length * repeated for length in lengths])
        blocks = [part.unflatten(0, (-1, length)) for part, length in zip(parts, lengths, strict=True)]
        return torch.cat(blocks, 1).flatten(0, 1)

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The source's tensors of a parameter [rows, …]; none for a tied one."""
        if name in self.tied:
            return {}
        names = self.names(name)
        match self.table.join(name):
            case None:
                return {names[0]: tensor}
            case Join.EXPERTS:
                return {names[0]: tensor.unflatten(0, (self.experts, -1))}
            case Join.EXPERT_B:
                return {names[0]: tensor.unflatten(0, (self.experts, -1)).permute(1, 2, 0).flatten(1)}
        lengths = self.repetition(name, tensor.shape[0])
        parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (-1, sum(lengths))).split(lengths, 1)]
        return dict(zip(names, parts if len(names) > 1 else [torch.cat(parts)], strict=True))


def conversion_of(model: nn.Module) -> Conversion | None:
    """The conversion of a model with Octavo's blocks; None for a model's original code, which has the source's names."""
    spec, attached = vars(model).get("spec"), vars(model).get(_ATTACHED)
    return conversion(spec) if isinstance(spec, ModelSpec) else attached  # only a decoder has a spec


def attach(model: nn.Module, way: Conversion) -> None:
    """Give a model its conversion."""
    vars(model)[_ATTACHED] = way


def conversion(spec: ModelSpec) -> Conversion:
    """The conversion between a decoder and the Hugging Face model of its family."""
    names = FAMILIES[spec.family].names
    assert names is not None
    tied = {"head.weight": "embedding.weight"} if spec.tied else {}
    return Conversion(names, spec.heads, spec.kv_heads, tied, f"octavo/{spec.family}", spec.experts)


def check_names_and_shapes(model: nn.Module, weights: Weights) -> None:
    """Compare names, shapes and kinds of dtypes of weights with a model, also on meta or sharded; reads no weight.

    Raises:
        InputError: weights are missing, or one has another shape or kind, such as quantised.
    """
    way = conversion_of(model)
    state = model.state_dict(keep_vars=True)
    if way is None:  # a tied tensor may have either name
        present = {id(tensor) for name, tensor in state.items() if name in weights.shapes}
        state = {name: tensor for name, tensor in state.items() if name in weights.shapes or id(tensor) not in present}
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    blocks = parameters_of(model)
    before_cast = {state.weight: state.stored.dtype for _, state in states_of(model) if state.stored is not None}
    for name, tensor in state.items():
        if is_adapter(name):
            continue
        # Only the shape: splitting a sharded matrix would gather it.
        shape = torch.empty(shape_of(tensor, blocks), device="meta")
        for theirs, part in ({name: shape} if way is None else way.split(name, shape)).items():
            if theirs not in weights.optional:
                wanted[theirs] = tuple(part.shape), before_cast.get(tensor, tensor.dtype)
    if [name for name in wanted if name not in weights.shapes] == ["lm_head.weight"]:
        raise InputError(
            f"{weights.owner} has no weight 'lm_head.weight'. If the output head is the embedding, set tie_word_embeddings ="
            " true (config.json); else copy the whole model folder again."
        )
    weights.check_present(list(wanted))
    for theirs, (asked, dtype) in wanted.items():
        stored = weights.shape(theirs)
        _check_kind(theirs, weights, dtype)
        if stored != asked:
            raise InputError(
                f"{theirs}: the weights have shape {stored}, and the config needs {asked}. Use the config that belongs to these"
                f" weights (for a resized or padded vocabulary: vocab_size in config.json)."
            )


def _check_kind(name: str, weights: Weights, dtype: torch.dtype) -> None:
    kind = weights.kinds[name]
    if kind != kind_of(dtype):
        raise InputError(
            f"{name} in {weights.owner} is of kind {kind}, but the model has {str(dtype).removeprefix('torch.')}: the values"
            f" cannot be copied.{'' if kind == 'complex' else ' ' + DEQUANTISE}"
        )


def write_pretrained(
    tensors: Mapping[str, Tensor],
    config: Any,
    folder: str | Path,
    tokenizer_folder: Path | None = None,
    *,
    read: Callable[[str], Tensor] | None = None,
    model: PreTrainedModel | None = None,
    generation: Any = None,
    replace: bool = False,
    shard_bytes: int | None = None,
    encode: Encode | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads, bit for bit.

    Args:
        tensors: under Octavo's names (of the decoder, or of a model with its original code).
        config: the Hugging Face config.
        folder: new, or empty; it appears complete or not at all.
        tokenizer_folder: its content is copied next to the weights.
        read: as in `write_weights`.
        model: the tensors' model, if it has its original code; by default the causal language model of the config.
        generation: the generation config, written unchanged: `save_pretrained` refuses some that are on the Hub.
        replace: replace a model in the folder; its other files stay.
        shard_bytes: most bytes of one file of weights.
        encode: for Octavo's decoder, returns the tensors that replace a parameter's, with additional ones; for tensors on meta,
            their shapes.
        more: keys of config.json that override those of the config.

    Raises:
        InputError: the folder is not empty or cannot be written.
        OctavoError: the disk is full, or writing failed otherwise.
    """
    reference, way = _source(tensors, config, model)
    with new_folder(folder, replace=replace) as new:
        _write_tensors(tensors, new, way, read, reference, shard_bytes, encode)
        _config_of(reference, config, tensors).save_pretrained(new)
        if more:
            path = new / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | dict(more), indent=2, sort_keys=True) + "\n")
        if generation is not None:
            (new / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
        for path in sorted(tokenizer_folder.iterdir()) if tokenizer_folder else ():
            if path.is_file() and path.name not in ("config.json", "generation_config.json"):
                shutil.copyfile(path, new / path.name)
            elif path.is_dir():  # chat templates
                shutil.copytree(path, new / path.name)


def write_weights(
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    way: Conversion | PreTrainedModel | None,
    *,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write weights under the names of their source, bit for bit, as safetensors; errors as in `write_pretrained`.

    Args:
        tensors: under Octavo's names.
        folder: new, or empty.
        way: conversion to the source; a model of transformers for its published names; None for the source's names.
        read: returns the values of `tensors` on the meta device when their file is written, so that only one file's values are
            in memory. A tensor with parts in two files is read twice.
    """
    with new_folder(folder) as new:
        _write_tensors(tensors, new, way, read)


def load_pretrained(
    tensors: Mapping[str, Tensor], config: Any, *, read: Callable[[str], Tensor] | None = None, generation: Any = None
) -> PreTrainedModel:
    """transformers' causal language model with these weights, bit for bit, in evaluation mode on the CPU.

    Arguments as in `write_pretrained`; no memory is shared with `tensors`.
    """
    reference, way = _source(tensors, config, None)
    pieces, theirs = _pieces(tensors, way)
    values = read or tensors.__getitem__
    state: dict[str, Tensor] = {}
    for names in pieces:
        group = {name: values(name).detach().cpu() for name in names}
        memory = {tensor.untyped_storage().data_ptr() for tensor in group.values()}
        for name, tensor in theirs(group).items():
            unshared = tensor.untyped_storage().data_ptr() not in memory and tensor.is_contiguous()
            state[name] = tensor if unshared else tensor.clone(memory_format=torch.contiguous_format)
    config = _config_of(reference, config, tensors)
    on_cpu = contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with without_progress_bar(), on_cpu:
        model, loading = type(reference).from_pretrained(
            None, config=config, state_dict=state, dtype=config.dtype, output_loading_info=True
        )
    lost = {kind: names for kind, names in loading.items() if names}
    if lost:  # transformers has filled them with random values
        raise OctavoError(f"transformers did not take all weights of {type(reference).__name__}: {lost}.")
    if generation is not None:
        model.generation_config = copy.deepcopy(generation)
    return model


def is_tied(model: Any) -> bool:
    """True if the head of Octavo's decoder shares the embedding's weight, in its config and in fact."""
    return bool(model.spec.tied and model.head.weight is model.embedding.weight)


def check_tie(model: Any) -> None:
    """Raise an InputError if the tie of head and embedding of Octavo's decoder differs from its config."""
    spec: ModelSpec = model.spec
    if spec.tied != (model.head.weight is model.embedding.weight):
        raise InputError(
            f"the head has {'a separate weight' if spec.tied else 'the weight of the embedding'}, and model.config has "
            f"tie_word_embeddings = {str(spec.tied).lower()}, which would load a different head: set it before "
            "octavo.transform, and do not change head and embedding afterwards."
        )


def check_decoder(model: Any) -> None:
    """Raise an InputError for a decoder whose parts, ties or config have changed: its folder would load as another model.

    Models that are not Octavo's decoder pass.
    """
    spec = vars(model).get("spec")
    if not isinstance(spec, ModelSpec):
        return
    check_tie(model)
    _check_config(model.config, spec)
    warn_of_other_weights(spec)
    make: dict[str, Any] = {"dtype": model.dtype, "params_dtype": model.dtype, "buffer_dtype": model.rotary.dtype}
    shared: dict[str, Any] = {"tensor": model.tensor, "spread": model.spread}
    reference: Any = written_class(model)(model.config, spec, **make, device="meta", **shared)
    different = difference_from(model, reference)
    rotary = model.rotary
    if not different and (
        type(rotary) is not type(reference.rotary)
        or rotary.factor != reference.rotary.factor
        or not torch.equal(rotary.inv_freq.cpu(), reference.rotary.inv_freq)
    ):
        different = "its rotary frequencies differ from the config's"
    if different:
        raise other_model(different)
    warn_of_hooks(model)


def other_model(different: str) -> InputError:
    """The error of a model that Hugging Face would load as another one."""
    return InputError(
        f"{different}. A folder for Hugging Face holds weights and a config, and would load as a different model: give the "
        "model the parts that its config describes, or save it unchanged by octavo.save(path, model)."
    )


def warn_of_other_weights(spec: ModelSpec) -> None:
    """Warn, once per shape of experts, if Hugging Face's model weights experts differently from this decoder in evaluation.

    After "sinkhorn" it does, except for a top-k of 2 or more with unnormalised probabilities, which its Qwen3-MoE supports.
    """
    if spec.mixtures and spec.assignment == "sinkhorn":
        if spec.top_k == 1:
            _warn_once(
                _OTHER_WEIGHTS.format(ours="the sigmoid of its logit", theirs="1" if spec.normalized else "its probability")
            )
        elif spec.normalized and spec.top_k < spec.experts:
            _warn_once(_OTHER_WEIGHTS.format(ours="its probability", theirs="that divided by the sum of a token's experts"))


_OTHER_WEIGHTS = (
    "trained with moe_load_balancing = \"sinkhorn\": this model multiplies an expert's output by {ours}, and Hugging Face's by "
    "{theirs}, so the same weights give other logits there. octavo.save saves the unchanged model."
)


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)


_OF_TRAINING = {
    *("attention_dropout", "hidden_dropout", "embedding_dropout", "initializer_range", "padding"),
    *("jitter", "balance", "router_z_loss", "assignment"),
}
"""Fields of a spec that do not affect inference, or that `octavo.transform(moe=…)` overrides."""


def _check_config(config: Any, spec: ModelSpec) -> None:
    """Raise an InputError for a config that was edited after the spec was created."""
    now, reason = decoder_spec(config)
    if now is None:
        raise other_model(f"model.config was changed since the decoder was built: {reason}")
    ignored = _OF_TRAINING | ({"max_positions"} if spec.rotary.get("rope_type", "default") == "default" else set())
    for field in dataclasses.fields(spec):
        before, after = getattr(spec, field.name), getattr(now, field.name)
        if field.name not in ignored and before != after:
            raise other_model(
                f"model.config was changed since the decoder was built: {field.name} is now {after!r}, and the decoder has "
                f"{before!r}"
            )


def to_huggingface(model: nn.Module) -> PreTrainedModel:
    """A model of transformers with a copy of the weights of Octavo's decoder, bit for bit, in evaluation mode.

    Dtype and device are those of the parameters. For a sharded model all ranks call it, and each gets whole weights.

    Raises:
        InputError: the model runs its original code, or its head was tied or untied since it was built.
    """
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        raise InputError(
            "octavo.to_huggingface: the model has adapters (lora). octavo.export(model, folder) writes them as PEFT's, for "
            "PeftModel.from_pretrained(base, folder), whose merge_and_unload() is the whole model."
        )
    if not isinstance(vars(model).get("spec"), ModelSpec):
        raise InputError(
            f"octavo.to_huggingface: {type(model).__name__} is not Octavo's decoder. A model with its original code needs "
            "no conversion: it is called as before, and runs in FP8 only under octavo.fp8_autocast; for one without Octavo's "
            "layers call octavo.export(model, folder), and load the folder."
        )
    check_decoder(model)
    tensors = model.state_dict()
    device = next(iter(tensors.values())).device

    generation = getattr(model, "generation_config", None)
    return load_pretrained(tensors, model.config, read=lambda name: whole_tensor(tensors[name]), generation=generation).to(
        device
    )


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """Load a transformers model without its progress bar on stderr."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _source(
    tensors: Mapping[str, Tensor], config: Any, model: PreTrainedModel | None
) -> tuple[PreTrainedModel, Conversion | PreTrainedModel]:
    """(transformers' model that the tensors belong to, the conversion to its names)."""
    from octavo.models.published import causal_lm_on_meta

    spec = decoder_spec(config)[0] if "embedding.weight" in tensors else None
    reference = causal_lm_on_meta(config) if model is None else model
    return reference, reference if spec is None else conversion(spec)


def _config_of(reference: PreTrainedModel, config: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A copy of a config, with the class of the model and the dtype of its parameters."""
    config = type(config).from_dict(config.to_dict())
    for key in QUANTIZED_KEYS:  # of the source
        vars(config).pop(key, None)
    buffers = {name for name, _ in reference.named_buffers()}  # their dtypes may differ
    dtypes = {name: t.dtype for name, t in tensors.items() if t.is_floating_point() and name not in buffers}
    in_float32 = float32_names(reference, min(dtypes.values(), key=lambda dtype: dtype.itemsize))
    chosen = [dtype for name, dtype in dtypes.items() if name not in in_float32]
    config.dtype = functools.reduce(torch.promote_types, chosen)  # float32 for float16 and bfloat16 together
    config.architectures = [type(reference).__name__.removeprefix("FSDP")]  # the prefix of a sharded model's class
    return config


def _pieces(
    tensors: Mapping[str, Tensor],
    way: Conversion | PreTrainedModel | None,
    reference: PreTrainedModel | None = None,
    encode: Encode | None = None,
) -> tuple[dict[tuple[str, ...], dict[str, Tensor]], Callable[[Mapping[str, Tensor]], dict[str, Tensor]]]:
    """(the source's tensors of each group of names, on the meta device; the function that computes them from a group).

    reference: transformers' model of a `Conversion`, whose published names replace its module names. encode: as in
    `write_pretrained`.
    """
    from octavo.models.published import groups, published

    def theirs(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(way, nn.Module):
            return published(way, group)
        if way is None:
            return dict(group)
        parts = {source: part for name, tensor in group.items() for source, part in way.split(name, tensor).items()}
        parts = parts if reference is None else published(reference, parts)
        if encode is None:
            return parts
        ((name, tensor),) = group.items()  # each parameter is a group
        return encode(name, tensor, parts)

    # Only the shapes, without reading: matrices are split on the meta device.
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    if isinstance(way, nn.Module):
        ignored: set[str] = set(getattr(way, "_keys_to_ignore_on_save", None) or ())
        shapes = {name: tensor for name, tensor in shapes.items() if name not in ignored}
    together = groups(way, shapes) if isinstance(way, nn.Module) else [(name,) for name in shapes]
    return {names: theirs({name: shapes[name] for name in names}) for names in together}, theirs


def _write_tensors(
    tensors: Mapping[str, Tensor],
    folder: Path,
    way: Conversion | PreTrainedModel | None,
    read: Callable[[str], Tensor] | None,
    reference: PreTrainedModel | None = None,
    shard_bytes: int | None = None,
    encode: Encode | None = None,
) -> None:
    pieces, theirs = _pieces(tensors, way, reference, encode)
    values = read or tensors.__getitem__
    save_shards(pieces, lambda names: theirs({name: values(name) for name in names}), folder, shard_bytes)


@contextlib.contextmanager
def new_folder(folder: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder that replaces `folder` when the block ends, and is removed after an error.

    replace: allow a folder that is not empty: files of the same names and a model's other shards are replaced.

    Raises:
        InputError: `folder` is not empty, or cannot be written.
        OctavoError: the disk is full, or writing failed otherwise.
    """
    folder = local_path(folder, "folder")
    filled = folder.is_dir() and any(folder.iterdir())
    if folder.exists() and (not folder.is_dir() or (filled and not replace)):
        raise InputError(f"{str(folder)!r} exists and is not empty: export writes a new folder. Give another path.")
    if folder.is_mount() and not filled:
        raise InputError(f"{str(folder)!r} is a mount point, which no folder can replace: give {str(folder / 'model')!r}.")
    temporary = folder.absolute().parent / f".{folder.absolute().name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be created: {error.strerror or error}. Give another folder.") from None
    try:
        yield temporary
        use_umask(temporary)
        fsync_tree(temporary)
        if filled:
            _move_files(temporary, folder)
        else:
            temporary.replace(folder)  # an empty folder is overwritten
        fsync_folder(temporary.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OctavoError(
            f"{str(folder)!r} could not be written: {reason}. Nothing is left there."
            f" {free_bytes(temporary):,} bytes are free: give a folder with more room."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_files(source: Path, folder: Path) -> None:
    """Replace a model's files by those of another; weights last, after other shards are removed."""
    new = sorted(source.iterdir(), key=lambda path: path.name.startswith("model"))
    for old in folder.glob("model*.safetensors*"):
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", old.name) and not (source / old.name).exists():
            old.unlink()
    for path in new:
        path.replace(folder / path.name)
    fsync_folder(folder)
