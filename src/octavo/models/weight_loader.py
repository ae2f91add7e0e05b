"""Reads rows of a source's matrices into a rank's part of a parameter: one matrix at a time, only the rows needed."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.collectives.blocks import parameters_of, shape_of
from octavo.dtypes import short_name
from octavo.errors import InputError, some, warn
from octavo.kernels.reference import BLOCK
from octavo.models.convert import check_names_and_shapes, conversion_of
from octavo.models.decoder import Decoder
from octavo.models.published import PublishedWeights, causal_lm_on_meta
from octavo.models.resized import ResizedWeights
from octavo.models.sources import load_config
from octavo.models.weight_files import LISTED, Fp8Source, InMemoryWeights, WeightFiles, Weights
from octavo.nn.lora import is_adapter

_NO_PART = re.compile(
    r"^_|_token_id$|dropout|pdrop|^(use_cache|dtype|architectures|transformers_version|initializer_range|pretraining_tp|output_.*"
    r"|return_dict|id2label|label2id|problem_type|tokenizer_class|tie_word_embeddings|is_encoder_decoder)$"
)
"""Config keys without effect on the forward of trained weights, or checked elsewhere."""


def folder_weights(folder: str | Path, model: nn.Module | None, config: Any = None, *, resize: bool = False) -> Weights:
    """The weights of a Hugging Face folder as transformers would load them, checked against a model; reads only headers.

    Args:
        model: the destination, with original code or with Octavo's blocks; None for the causal language model of `config`.
        config: the Hugging Face config; needed without a model, or for Octavo's decoder.
        resize: add rows for tokens of the config beyond the folder's vocabulary (`ResizedWeights`).

    Raises:
        InputError: the folder is of another model, or transformers would not load its safetensors.
    """
    files = WeightFiles(folder)
    of_transformers = isinstance(model, PreTrainedModel)
    if model is None or isinstance(model, Decoder):
        model = causal_lm_on_meta(config)
    if conversion_of(model) is not None:  # timm's, with the names of the files
        return files
    described = isinstance(model, PreTrainedModel) and (files.folder / "config.json").is_file()
    others = _differences(model.config, files.folder) if described else ""
    published = PublishedWeights(files, model)
    weights = ResizedWeights(published, model, load_config(str(folder)).vocab_size) if resize else published
    check_names_and_shapes(model, weights)
    if others and of_transformers:  # a run's config is the folder's, with keys changed on purpose
        _warn_once(f"{folder}: its config.json has {others}. The model's config is used.")
    if files.spare:
        _warn_once(
            f"{folder}: {some(files.spare, LISTED)}: scales of activations or of attention's cache, for inference, not loaded."
            " Training computes scales by its recipe."
        )
    elif files.cache:
        _warn_once(f"{folder}: config.json has kv_cache_scheme, for inference: attention here has no cache in FP8.")
    if published.unused:
        _warn_once(f"{folder}: {some(published.unused, LISTED)}: not part of {type(model).__name__}, and not loaded.")
    return weights


def model_weights(model: nn.Module, *, received: bool) -> InMemoryWeights | None:
    """The tensors of a model whose parameters all have values; None if none has. received: rank 0 sends the values.

    Raises:
        InputError: only some parameters have values: initialisation would overwrite them.
    """
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not absent:
        return InMemoryWeights(dict(model.state_dict()))
    if not received and len(absent) < sum(1 for _ in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has values for some parameters, and none for {some(absent)}: initialisation would "
            "overwrite all. Give all weights (load_from), or build the whole model under octavo.delayed_init()."
        )
    return None


@functools.cache
def _warn_once(message: str) -> None:
    """Warn once in a process, only on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        warn(message)


def _differences(config: Any, folder: Path) -> str:
    """Keys of a folder's config.json that differ from a config, with both values; different heads are an InputError."""
    try:
        theirs = load_config(str(folder))
    except InputError:  # a family that transformers does not know, or timm
        return ""
    if theirs.model_type != config.model_type:
        return ""  # names and shapes say whether it is the same model
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        asked, stored = getattr(config, key, None), getattr(theirs, key, None)
        if asked != stored and None not in (asked, stored):
            raise InputError(
                f"{folder}: its config.json has {key} = {stored}, and the model's config has {asked}: the weights were trained"
                f" for other heads. Set {key} = {stored}."
            )
    known, ours = theirs.to_dict(), config.to_dict()
    others = [key for key in sorted(known.keys() & ours.keys()) if known[key] != ours[key] and not _NO_PART.search(key)]
    return ", ".join(f"{key} = {known[key]} (the model's config: {ours[key]})" for key in others[:4])


class WeightLoader:
    """Reads the weights of a model by its names: `load(name, out, start)`.

    Attributes:
        names: parameters and persistent buffers with a source; tied ones under all their names.

    Raises:
        InputError: a weight is missing or has another shape than the model's.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        check_names_and_shapes(model, weights)
        self._weights = weights
        self._sources = dict(_sources(model, weights))
        self.names = self._sources.keys()

    @torch.no_grad()
    def __call__(self, name: str, out: Tensor, start: int) -> None:
        """Fill `out` [n, …] with the rows from `start` on of the named tensor [N, …], converted to its dtype and device."""
        parts = self._sources[name]
        if len(parts) == 1:  # `out` may be the source itself
            stop = start + (out.shape[0] if out.dim() else 1)
            values = self._rows(parts[0][0], start, stop, out.dim()).to(out.device)
            out.copy_(values)
            _check_range(parts[0][0], values, out)
            return
        for source, at, first, last in _of_parts(parts, start, out.shape[0]):
            # In the source they are contiguous: one read for all, and one copy to the device.
            values = self._weights.read(source, first, last).to(out.device)
            converted = values.to(out.dtype)
            _check_range(source, values, converted)
            out.index_copy_(0, at.to(out.device), converted)

    def stored(self, name: str, start: int, rows: int, *, block: bool, power_of_two: bool) -> Fp8Rows | None:
        """Rows of a matrix that its source stores in FP8; None if it does not.

        Args:
            name: name of the matrix.
            start, rows: the first row, and the number of rows.
            block: request a scale for each 128 × 128 block; otherwise one scale for the whole matrix.
            power_of_two: the scale of a whole matrix has to be a power of two.
        """
        parts = self._sources[name]
        sources = {source: self._weights.fp8(source) for source, _, _ in parts}
        there = {source: rows for source, rows in sources.items() if rows is not None}
        if not there:
            return None
        if reason := _not_as_stored(parts, there, block=block, power_of_two=power_of_two):
            return Fp8Rows(reason)
        data = torch.empty(rows, self._weights.shape(parts[0][0])[1], dtype=torch.float8_e4m3fn, device="cpu")
        for source, at, first, last in _of_parts(parts, start, rows):
            data.view(torch.uint8).index_copy_(0, at, there[source].bytes(first, last).view(torch.uint8))
        scales = there[parts[0][0]].scales
        if block and len(parts) > 1:
            rows_of_blocks = sum(len(there[source].scales) for source in there)
            scales = scales.new_empty(rows_of_blocks, scales.shape[1])
            in_blocks = [(source, first // BLOCK, length // BLOCK) for source, first, length in parts]
            for source, at, first, last in _of_parts(in_blocks, 0, rows_of_blocks):
                scales.index_copy_(0, at, there[source].scales[first:last])
        return Fp8Rows("", data, scales)

    def in_fp8(self, name: str) -> bool:
        """True if a parameter, or a part of it, is read from bytes in FP8."""
        return any(self._weights.in_fp8(source) for source, _, _ in self._sources[name])

    def _rows(self, source: str, start: int, stop: int, dims: int) -> Tensor:
        """Rows of a tensor; a stack of matrices is read as one matrix, one after the other."""
        shape = self._weights.shape(source)
        if len(shape) == dims:
            return self._weights.read(source, start, stop)
        first = start // shape[1]
        matrices = self._weights.read(source, first, -(-stop // shape[1]))
        return matrices.flatten(0, 1)[start - first * shape[1] : stop - first * shape[1]]


@dataclass(frozen=True)
class Fp8Rows:
    """Rows of a matrix [N, K] that a folder stores in FP8.

    Attributes:
        reason: why its bytes and scales cannot be copied; empty if they can.
        data: E4M3 [rows, K]. scale_inv: float32 of the whole matrix, [] or [⌈N/128⌉, ⌈K/128⌉].
    """

    reason: str
    data: Tensor | None = None
    scale_inv: Tensor | None = None


def _of_parts(parts: Sequence[tuple[str, int, int]], start: int, rows: int) -> Iterator[tuple[str, Tensor, int, int]]:
    """(source, places among the `rows` rows from `start` on, the source's first row and end) of each part."""
    period = sum(length for _, _, length in parts)
    numbers = torch.arange(start, start + rows, device="cpu")
    repetition = numbers // period
    inside = numbers % period  # row within the repetition
    for source, first, length in parts:
        at = ((inside >= 0) & (inside < length)).nonzero().flatten()
        if at.numel():
            theirs = (first + repetition * length + inside)[at]
            yield source, at, int(theirs[0]), int(theirs[-1]) + 1
        inside = inside - length  # counts from 0 in the next part


def _not_as_stored(
    parts: Sequence[tuple[str, int, int]], there: Mapping[str, Fp8Source], *, block: bool, power_of_two: bool
) -> str:
    """The reason why a matrix of these parts cannot reuse the bytes and scales of its sources; empty if it can."""
    if len(there) < len({source for source, _, _ in parts}):
        return "parts of which only some are in FP8"
    matrices = [rows.matrix for rows in there.values()]
    if block:
        if not all(matrix.is_block for matrix in matrices):
            return "other scales than one for each 128 by 128"
        if len(parts) > 1 and any(first % BLOCK or length % BLOCK for _, first, length in parts):
            return "blocks with rows of several matrices, which are one here"
        return ""
    if any(matrix.group is not None for matrix in matrices):
        return "more than one scale a matrix"
    scales = [rows.scales for rows in there.values()]
    if any(not torch.equal(one, scales[0]) for one in scales):
        return "matrices of different scales, which are one here"
    if power_of_two and float(scales[0].frexp()[0]) != 0.5:
        return "scales that are no powers of two (fp8.use_power_2_scales)"
    return ""


def _check_range(name: str, values: Tensor, converted: Tensor) -> None:
    """Raise an InputError if finite values became infinite in a dtype of a smaller range."""
    if not (values.is_floating_point() and converted.is_floating_point()):
        return
    largest = torch.finfo(converted.dtype).max
    if largest < torch.finfo(values.dtype).max / 2 and bool((converted.isinf() & values.isfinite()).any()):
        value = values[values.isfinite()].abs().max().item()
        raise InputError(
            f"{name} has a value of {value:.4g}, and the largest of {short_name(converted.dtype)} is {largest:.4g}: take"
            " params_dtype bfloat16 or float32."
        )


def _sources(model: nn.Module, weights: Weights) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Name → `Conversion.parts`; in a model's original code one part of the same name."""
    way = conversion_of(model)
    state, blocks = model.state_dict(keep_vars=True), parameters_of(model)
    there = {id(tensor): name for name, tensor in reversed(state.items()) if name in weights.shapes}
    for name, tensor in state.items():
        if name in weights.optional or is_adapter(name):
            continue
        rows = shape_of(tensor, blocks)[0] if tensor.dim() else 1
        if way is not None:
            yield name, way.parts(way.tied.get(name, name), rows)
        else:  # a tied tensor may have either name
            yield name, [(name if name in weights.shapes else there[id(tensor)], 0, rows)]
