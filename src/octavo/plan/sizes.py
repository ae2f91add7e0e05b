"""Refusal of sizes by arithmetic, before a model is built, even on the meta device.

Sequences and vocabularies are compared with the model's, everything else with the memory of this machine, by lower bounds only:
parameters, gradients and optimizer states; the token ids of a step; one activation of the residual stream. A run that passes
may still run out of memory; `octavo.plan.advice` has the full estimate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.config.degrees import Degrees
from octavo.config.run import RunConfig
from octavo.data.corpus import Corpus
from octavo.data.prepared import PreparedData, prepared_or_none
from octavo.data.tokenizer import local_vocab_size
from octavo.dtypes import torch_dtype
from octavo.errors import InputError
from octavo.hardware import GIB, Device, system_memory_gib
from octavo.models.families import decoder_spec
from octavo.models.spec import ModelSpec
from octavo.parallel.world import rank_variable
from octavo.plan.memory import exact_bytes
from octavo.plan.saved import parameters

MOST_LAYERS = 16_384
"""Most layers of a model: a module takes about 1 ms to create, so a million would take 20 minutes before any check."""
MOST_PARAMETERS = 10**15
"""Most parameters of a planned model: PyTorch counts a tensor's bytes in 63 bits."""
MOST_RANKS = 4096
"""Most ranks that are tried, by doubling, and that a message suggests."""
TOKEN_BYTES = 24
"""Host memory of a token of a step: id, label and position, int64 each."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_FIELDS = {"vocab_size": "vocabulary", "num_hidden_layers": "layers", "intermediate_size": "ffn_size"}
"""Keys of model.config → fields of `ModelSpec` that may be lowered independently."""


def check_layers(overrides: Mapping[str, Any]) -> None:
    """Refuse a depth in model.config before transformers builds a config with lists of that length."""
    for key in _LAYERS:
        value = overrides.get(key)
        if isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(f"model.config.{key} = {value}: use at most {MOST_LAYERS}. Lower model.config.{key}.")


def check_length(config: RunConfig, hf_config: Any) -> None:
    """Refuse sequences longer than the model's positions."""
    limit = getattr(hf_config, "max_position_embeddings", None)
    length = config.data.sequence_length
    if isinstance(limit, int) and 0 < limit < length:  # xlnet has -1: no limit
        key = "data.sequence_length, or raise model.config.max_position_embeddings"
        if config.model.load and isinstance(getattr(hf_config, "rope_parameters", None), dict):
            key += " with model.config.rope_parameters"
        elif config.model.load:
            key = "data.sequence_length"
        raise InputError(
            f"data.sequence_length = {length} is longer than the model's {limit} positions: use at most {limit}. Change {key}."
        )


def needed_vocabulary(config: RunConfig, prepared: PreparedData | None, corpus: Corpus) -> int:
    """Tokens that a run's data needs: from the prepared data if it exists; else as many as are known; 0 if unknown."""
    prepared = prepared or prepared_or_none(config.data)
    if prepared is not None:
        return prepared.vocabulary
    if config.data.tokenizer == "train":
        return config.data.vocab_size if corpus.holds_text() else 0
    return local_vocab_size(config.data.tokenizer) or 0


def check_vocabulary(config: RunConfig, hf_config: Any, corpus: Corpus) -> None:
    """Refuse a tokenizer with more ids than the model, if that is known before tokenising."""
    data = config.data
    limit = hf_config.vocab_size
    size = data.vocab_size if data.tokenizer == "train" else local_vocab_size(data.tokenizer)
    if size is None or size <= limit:
        return
    fault, change = f"data.tokenizer = {data.tokenizer!r} has token ids up to {size - 1}, beyond", "another data.tokenizer"
    if data.tokenizer == "train":
        prepared = prepared_or_none(data)
        if (prepared is not None and prepared.manifest.vocab_size <= limit) or not corpus.holds_text():
            return  # the trained tokenizer has fewer ids than data.vocab_size, or the corpus has token ids and trains none
        fault, change = f"data.vocab_size = {size} is more than", f"data.vocab_size to at most {limit}"
    way = f"model.config.vocab_size to at least {size}"
    if config.model.load:
        most = "at most " if data.tokenizer == "train" else ""
        way = f"model.resize = true, which adds {most}{size - limit} rows to the weights"
    raise InputError(f"{fault} the model's vocabulary of {limit} (vocab_size). Set {way}, or {change}.")


def least_parameters(hf_config: Any) -> tuple[int, ModelSpec | None]:
    """Parameters of a config: exact with the decoder's spec; for a model's original code a lower bound."""
    layers = next((value for key in _LAYERS if isinstance(value := getattr(hf_config, key, None), int)), 0)
    if layers > MOST_LAYERS:
        raise InputError(f"the model has {layers:,} layers, at most {MOST_LAYERS:,}: lower num_hidden_layers (model.config).")
    spec, _ = decoder_spec(hf_config)
    if spec is not None:
        return parameters(spec), spec
    hidden = getattr(hf_config, "hidden_size", 0)
    vocabulary = getattr(hf_config, "vocab_size", 0)
    if not (isinstance(hidden, int) and isinstance(vocabulary, int)):
        return 0, None
    return hidden * vocabulary + layers * hidden * hidden, None


def check_sizes(
    config: RunConfig, hf_config: Any, degrees: Degrees, micro_batch: int, hardware: Device, *, planned: bool, here: bool
) -> None:
    """Refuse a run that exceeds the whole memory of its machine.

    planned: the run may exceed its devices' memory, but not PyTorch's arithmetic. here: it runs on this machine, whose memory
    has to hold the token ids of a step.

    Raises:
        InputError: states the bytes, the memory, the nearest size that fits and its key.
    """
    count, spec = least_parameters(hf_config)
    if here:
        _check_tokens(config, degrees, system_memory_gib() * GIB)
    if planned:
        if count > MOST_PARAMETERS:
            raise _too_many(config, spec, count, MOST_PARAMETERS, f"more than {MOST_PARAMETERS:,} can be planned")
        return
    of_device = hardware.memory_gib * GIB
    if hardware.kind == "cpu":  # ranks on this machine share it
        of_device /= max(1, rank_variable("LOCAL_WORLD_SIZE", degrees.world))
    stored = config.lora.rank is not None and config.lora.base == "fp8"
    params_bytes = 1 if stored else torch_dtype(config.model.params_dtype).itemsize
    # Patterns cannot be matched yet: if a run freezes any parameter, only parameters count.
    frozen = count if config.train.freeze or config.lora.rank is not None else 0
    # Muon's matrices are unknown too: they may be all parameters.
    hidden = count if config.optimizer.name == "muon" and not frozen else 0
    each = exact_bytes(1, params_bytes, frozen=min(1, frozen), hidden=min(1, hidden))
    shards = degrees.hybrid_shard * degrees.tensor  # norms are whole on each tensor-parallel rank
    exact = exact_bytes(count, params_bytes, shards, frozen=frozen, hidden=hidden)
    if exact > of_device:
        most = int(of_device * shards / each)
        what = (
            f"{exact / GIB:,.0f} GiB of {'weights' if frozen else 'weights, gradients and optimizer states'} for "
            f"{'one rank' if degrees.world == 1 else f'each of {degrees.world} ranks'} "
            f"({each} bytes a parameter), beyond the {of_device / GIB:,.0f} GiB of "
            f"{hardware.name} for a rank"
        )
        options = []
        if not stored and exact * 2 <= of_device * params_bytes and config.model.dtype != "float16":
            options.append('set model.params_dtype = "bfloat16"')
        ranks = 1 << max(0, math.ceil(math.log2(count * each / of_device)))
        if hardware.kind == "cuda" and ranks <= MOST_RANKS:
            options.append(f"start {ranks} ranks with parallel.hybrid_shard_degree = 0")
        elif hardware.kind == "cpu":
            options.append("plan it on GPUs with --dry-run --gpu h200")
        raise _too_many(config, spec, count, most, what, options)
    hidden = getattr(hf_config, "hidden_size", 1)
    token = hidden * torch_dtype(config.model.dtype).itemsize
    length = math.ceil(config.data.sequence_length / (degrees.context * degrees.tensor))
    if micro_batch * length * token > of_device:
        most = int(of_device // (length * token))
        advice = (
            f"train.micro_batch to at most {most}" if most else f"data.sequence_length to at most {int(of_device // token)}"
        )
        raise InputError(
            f"{micro_batch} x {length} tokens (train.micro_batch x data.sequence_length) are "
            f"{micro_batch * length * token / GIB:,.0f} GiB in a single activation, beyond the {of_device / GIB:,.0f} GiB of "
            f"{hardware.name} for a rank. Set {advice}."
        )


def _check_tokens(config: RunConfig, degrees: Degrees, host: float) -> None:
    """Refuse a step whose token ids the host cannot hold: a rank reads all of its micro-batches first."""
    length, batch = config.data.sequence_length, config.train.global_batch
    share = batch // degrees.data * length * TOKEN_BYTES
    if share <= host:
        return
    most = int(host // (length * TOKEN_BYTES)) * degrees.data
    advice = f"train.global_batch to at most {most}" if most else f"data.sequence_length to at most {int(host // TOKEN_BYTES)}"
    raise InputError(
        f"train.global_batch = {batch} sequences of data.sequence_length = {length} tokens are {share / GIB:,.0f} GiB of "
        f"token ids in a rank's step, beyond the {host / GIB:,.0f} GiB of this machine. Set {advice}."
    )


def _too_many(
    config: RunConfig, spec: ModelSpec | None, count: int, most: int, what: str, others: Sequence[str] = ()
) -> InputError:
    """The error for `count` parameters, with the largest value of an overridden key and other settings that fit."""
    options = [f"set model.config.{key} to at most {value}" for key, value in _lowered(config, spec, most).items()]
    options = [*(options or [f"choose a model.source of at most {most:,} parameters"]), *others]
    advice = ", or ".join(options)
    source = config.model.source
    return InputError(f"model.source = {source!r}: {count:,} parameters are {what}. {advice[0].upper()}{advice[1:]}.")


def _lowered(config: RunConfig, spec: ModelSpec | None, most: int) -> dict[str, int]:
    """The first key of model.config whose largest value with at most `most` parameters is usable, with that value."""
    if spec is None:
        return {}
    for key in config.model.config:
        if key == "hidden_size":
            low, high, step = 0, spec.hidden_size // (2 * spec.heads), 2 * spec.heads
        elif key in _FIELDS:
            low, high, step = 0, getattr(spec, _FIELDS[key]), 1
        else:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            value = middle * step
            changes: dict[str, Any] = (
                {"hidden_size": value, "head_dim": 2 * middle} if key == "hidden_size" else {_FIELDS[key]: value}
            )
            low, high = (middle, high) if parameters(dataclasses.replace(spec, **changes)) <= most else (low, middle)
        if low:
            return {key: low * step}
    return {}
