"""Shrinks the model of a run file: everything that decides how ranks share the work stays the same.

Unchanged: the family, ties, biases, the kinds of layers (two of each), query heads that share key-value heads, experts, the
remainders modulo 128 of a tensor rank's rows of MLPs and of the vocabulary, windows shorter than a sequence, and the run's
recipe, recomputation, offloading, frozen parameters, adapters, losses and optimizer. Dropout and router noise are 0. Samples
are random tokens, some without targets, with documents if the run has them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from octavo.collectives.context import cheaper_exchange, splits_heads
from octavo.config.data import DataConfig
from octavo.config.degrees import Degrees
from octavo.config.effects import with_values
from octavo.config.optimizer import OptimizerConfig
from octavo.config.run import RunConfig
from octavo.data.packing import IGNORED, Batch
from octavo.errors import InputError
from octavo.models.spec import ModelSpec

HEAD_DIM = 16
LORA_RANK = 8
"""Largest rank of adapters; matrices have at least 32 rows."""
MICRO_BATCH, ACCUMULATION, STEPS, LAST = 2, 2, 3, 5
_WORDS, _SLICE = 16, 128
"""Multiple of a rank's vocabulary slice, whose first and last words are frequent in samples; and FP8's block size."""
_RATES, _LARGEST_OF_MUON = (1e-5, 3e-3), 0.02
_NO_NOISE = ("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "router_jitter_noise")


def small_config(hf_config: Any, spec: ModelSpec, degrees: Degrees, layers: Sequence[int]) -> Any:
    """A small Hugging Face config: these layers, and the smallest sizes that divide by the degrees like the full model's."""
    small = of_layers(hf_config, spec, layers)
    heads, kv_heads = _heads(spec, degrees)
    ffn = _of_slices(spec.ffn_size, degrees.tensor)
    sizes: dict[str, Any] = {
        "hidden_size": heads * HEAD_DIM,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": _of_slices(spec.dense_ffn_size or spec.ffn_size, degrees.tensor),
        "moe_intermediate_size": ffn,
        "vocab_size": vocabulary(spec, degrees),
        "sliding_window": _window(degrees),
        **dict.fromkeys(("num_local_experts", "num_experts"), experts_of(spec, degrees)),
        "num_experts_per_tok": min(spec.top_k, experts_of(spec, degrees)),
        **{key: number for number, key in enumerate(("pad_token_id", "bos_token_id", "eos_token_id"))},
        **dict.fromkeys(_NO_NOISE, 0.0),
    }
    for key, value in sizes.items():
        if getattr(small, key, None) is not None:
            setattr(small, key, value)
    small.use_cache = False
    return small


def of_layers(hf_config: Any, spec: ModelSpec, layers: Sequence[int]) -> Any:
    """A copy of a Hugging Face config with only these layers."""
    fewer = copy.deepcopy(hf_config)
    fewer.num_hidden_layers = len(layers)
    if getattr(fewer, "layer_types", None) is not None:
        fewer.layer_types = [hf_config.layer_types[layer] for layer in layers]
    if spec.dense:
        fewer.mlp_only_layers, fewer.decoder_sparse_step = [layers.index(n) for n in layers if n in spec.dense], 1
    return fewer


def with_packing_of_format(config: RunConfig) -> RunConfig:
    """The run with `data.packing` resolved from `data.format`: conversations and prompts are packed separately."""
    if config.data.packing is not None or config.data.format not in ("chat", "prompt"):
        return config
    return with_values(config, {"data.packing": "documents"})


def without_files(config: RunConfig) -> RunConfig:
    """The run on random weights and generated samples: its texts, tokenizer, weights and adapters need not be present."""
    shape = config.data.model_dump(include={"packing", "sequence_length"})
    data = DataConfig(source="python:docstrings", vocab_size=257, **shape)
    return with_values(
        config.model_copy(update={"data": data}), {"model.load": False, "model.resize": False, "lora.load": None}
    )


def small_run(config: RunConfig, degrees: Degrees, samples: int) -> RunConfig:
    """The run with `samples` samples per step, short sequences, and gradient clipping that takes effect."""
    values = {
        "data.sequence_length": length(degrees),
        "train.global_batch": samples,
        "train.steps": LAST,
        "optimizer.warmup_steps": 0,
        "optimizer.schedule": "constant",
        **_rates(config.optimizer),
        "moe.router_jitter_noise": None if config.moe.router_jitter_noise is None else 0.0,
        "optimizer.clip": 0.5 if config.optimizer.clip > 0 else config.optimizer.clip,
    }
    if config.lora.rank is not None:
        values |= {"lora.rank": min(config.lora.rank, LORA_RANK), "lora.dropout": 0.0}
    return with_values(config, values)


def _rates(optimizer: OptimizerConfig) -> dict[str, float | None]:
    """The rates, within those whose updates a comparison sees, and whose roundings to 16 bits it bounds."""
    smallest, largest = _RATES
    of_muon = optimizer.name == "muon" and optimizer.muon_scale == "original"
    rates = {"optimizer.lr": min(max(optimizer.lr, smallest), _LARGEST_OF_MUON if of_muon else largest)}
    adamw = optimizer.adamw_lr
    return rates | {"optimizer.adamw_lr": None if adamw is None else min(max(adamw, smallest), largest)}


def length(degrees: Degrees) -> int:
    """Tokens of a sequence."""
    return math.lcm(2 * degrees.context * degrees.tensor, 8) * max(1, 32 // math.lcm(2 * degrees.context * degrees.tensor, 8))


def vocabulary(spec: ModelSpec, degrees: Degrees) -> int:
    """A vocabulary with the model's remainder modulo the ranks' blocks."""
    rows = _SLICE * degrees.tensor
    left = spec.vocabulary % rows
    return left if left >= 32 * degrees.tensor else rows + left


def _window(degrees: Degrees) -> int:
    return length(degrees) // 2 - 3


def exchange(strategy: str, spec: ModelSpec, like: Degrees, of: Degrees) -> str:
    """The exchange of keys and values, for "auto" that of the whole model's heads: those of the small one would choose another.

    Args:
        strategy: the run's.
        spec: the whole model's.
        like: degrees by which the small one shrinks.
        of: those of the layout.
    """
    if strategy != "auto":
        return strategy
    whole, small = (
        [max(1, count // of.tensor) for count in heads] for heads in ((spec.heads, spec.kv_heads), _heads(spec, like))
    )
    chosen = cheaper_exchange(whole[0], whole[1], of.context)
    return chosen if chosen != "a2a" or splits_heads(small[0], small[1], of.context) else "all_gather"


def _heads(spec: ModelSpec, degrees: Degrees) -> tuple[int, int]:
    """Query heads and key-value heads."""
    parts, group = degrees.tensor * degrees.context, spec.heads // spec.kv_heads
    kv_heads = next((n for n in (parts, degrees.tensor) if spec.kv_heads % n == 0), spec.kv_heads)
    kv_heads = max(kv_heads, min(2, spec.kv_heads))
    each = math.lcm(kv_heads, parts) // kv_heads
    return kv_heads * (max(each, 2) if group > 1 else each), kv_heads


def _of_slices(size: int, ranks: int) -> int:
    """A small size whose slices have the same remainder modulo a block as those of `size`."""
    left = size // ranks % _SLICE
    return ranks * (left if left >= 32 else _SLICE + left)


def experts_of(spec: ModelSpec, degrees: Degrees) -> int:
    """Experts of a layer."""
    return min(spec.experts, max(4, 2 * degrees.expert))


class Samples:
    """The samples of each step, the same for every layout; `step` returns a data-parallel rank's, in micro-batches.

    documents: each sequence has a second document.
    """

    def __init__(
        self, words: int, tokens: int, *, rank: int, ranks: int, micro_batch: int, documents: bool, padding: bool, seed: int
    ) -> None:
        self._words, self._tokens, self._rank, self._ranks, self._micro_batch = words, tokens, rank, ranks, micro_batch
        self._documents, self._padding, self._seed = documents, padding, seed

    def step(self, first: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins with sample `first`."""
        draw = torch.Generator().manual_seed(1_000_003 * self._seed + first)
        batches = []
        for _ in range(ACCUMULATION):
            shape = self._ranks * self._micro_batch, self._tokens
            ids = torch.randint(3, self._words, shape, generator=draw)
            ends = (ids // _WORDS * _WORDS - torch.randint(2, shape, generator=draw)).clamp(min=3)
            ids = torch.where(torch.rand(shape, generator=draw) < 0.4, ends, ids)
            labels = ids.masked_fill(torch.rand(shape, generator=draw) < 0.2, IGNORED)
            positions = torch.arange(self._tokens).expand(shape).clone()
            lengths = torch.full(shape[:1], self._tokens)
            if self._documents:
                begins = torch.randint(2, self._tokens - 2, shape[:1], generator=draw)
                later = positions >= begins[:, None]
                labels[positions == begins[:, None]] = IGNORED
                positions = torch.where(later, positions - begins[:, None], positions)
            if self._padding:
                lengths = torch.randint(self._tokens // 2, self._tokens + 1, shape[:1], generator=draw)
                labels[torch.arange(self._tokens) >= lengths[:, None]] = IGNORED
            rows = slice(self._rank * self._micro_batch, (self._rank + 1) * self._micro_batch)
            batches.append(Batch(ids[rows], labels[rows], positions[rows], lengths[rows]))
        return batches


def check_small(spec: ModelSpec | None, name: str, reason: str) -> ModelSpec:
    """Raise an InputError for a model that is not Octavo's decoder."""
    if spec is None:
        why = f": {reason}" if reason else ""
        raise InputError(f"octavo verify shrinks Octavo's decoders, and {name} runs its original code{why}: not verifiable.")
    return spec
