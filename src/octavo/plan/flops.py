"""How many floating-point operations a token costs, and what share of a GPU's peak a rate is.

One definition for the plan before the run, the metrics in it and the benchmarks after it:

    FLOPs a token = 6 × (matmul parameters active for it) + 12 × d × (keys its queries see), summed over layers

Forward and backward are three products of two operations a parameter; the attention's two products (scores, values) likewise,
with d = heads × head_dim. The matmul parameters include the output head and leave out the embedding, biases and norms. A
causal query sees T/2 keys on average, which gives the usual 6·L·d·T. Recomputed operations are not counted: they are a cost,
not progress.

Arithmetic on numbers and on the attributes of a Hugging Face config: neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import unknown
from octavo.hardware import Gpu

MLP_MATRICES = {
    "llama": 3,
    "mistral": 3,
    "mixtral": 3,
    "qwen2": 3,
    "qwen3": 3,
    "gpt_neox": 2,
    "gpt_neo": 2,
}
"""Families that are counted (`config.model_type`), and the matrices of one MLP: 3 with a gate, 2 without."""


@dataclass(frozen=True)
class MatmulParameters:
    """Parameters that multiply a token's activations.

    Attributes:
        layers: in the blocks' linear layers, active for a token: the products that FP8 can take.
        router: in the blocks' routers (0 without experts); they never run in FP8.
        head: in the output head, tied or not.
        inactive: in the experts that a token does not visit.
    """

    layers: int
    router: int
    head: int
    inactive: int

    @property
    def active(self) -> int:
        """Those that cost operations."""
        return self.layers + self.router + self.head

    @property
    def stored(self) -> int:
        """All of them, the head counted once."""
        return self.active + self.inactive


@dataclass(frozen=True)
class TokenFlops:
    """Operations of one token's forward and backward, by what may run in another precision."""

    layers: float
    router: float
    head: float
    attention: float

    @property
    def total(self) -> float:
        """All operations of a token."""
        return self.layers + self.router + self.head + self.attention

    def by_precision(self, *, layers: str = "bf16", head: str = "bf16", head_forward: str | None = None) -> dict[str, float]:
        """Operations in "bf16" and "fp8", when the linear layers and the head run in the given ones.

        head_forward: of the head's forward, where that is another.
        """
        split = {"bf16": self.router + self.attention, "fp8": 0.0}
        split[layers] += self.layers
        forward = 0.0 if head_forward is None else self.head / 3
        split[head_forward or head] += forward
        split[head] += self.head - forward
        return {precision: flops for precision, flops in split.items() if flops}


def flops_per_token(
    parameters: MatmulParameters,
    *,
    attention_width: int,
    sequence_length: int,
    windows: Sequence[int | None],
    causal: bool = True,
) -> TokenFlops:
    """Operations of one token, averaged over a full sequence.

    Args:
        parameters: matmul parameters of the model.
        attention_width: d = heads × head_dim.
        sequence_length: T, in tokens.
        windows: one entry a layer: None for full attention, else the keys that a sliding window keeps.
        causal: whether a query sees only keys up to its own.
    """
    keys = sum(mean_keys(sequence_length, window, causal=causal) for window in windows)
    return TokenFlops(
        layers=6.0 * parameters.layers,
        router=6.0 * parameters.router,
        head=6.0 * parameters.head,
        attention=12.0 * attention_width * keys,
    )


def mean_keys(sequence_length: int, window: int | None = None, *, causal: bool = True) -> float:
    """Keys that a query sees on average: T, or T/2 when causal; under a causal window W ≤ T, W − W²/2T (T/2 at W = T)."""
    seen = sequence_length if window is None else min(window, sequence_length)
    return seen - seen * seen / (2 * sequence_length) if causal else float(seen)


def matmul_parameters(config: Any) -> MatmulParameters:
    """Count the matrices of a decoder from its Hugging Face config (attributes only).

    Raises:
        InputError: a `model_type` whose matrices are not known here.
    """
    family = str(getattr(config, "model_type", None))
    if family not in MLP_MATRICES:
        raise unknown("model family", family, MLP_MATRICES)
    hidden = int(config.hidden_size)
    heads = _number(config, "num_attention_heads", "num_heads")
    head_dim = _number(config, "head_dim", default=hidden // heads)
    kv_heads = _number(config, "num_key_value_heads", default=heads)
    intermediate = _number(config, "intermediate_size", default=4 * hidden)
    depth = _number(config, "num_hidden_layers", "num_layers")
    experts = _number(config, "num_local_experts", default=0)
    visited = _number(config, "num_experts_per_tok", default=1) if experts else 1
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = MLP_MATRICES[family] * hidden * intermediate
    return MatmulParameters(
        layers=depth * (attention + visited * mlp),
        router=depth * hidden * experts,
        head=int(config.vocab_size) * hidden,
        inactive=depth * (max(experts, 1) - visited) * mlp,
    )


def from_hf_config(config: Any, sequence_length: int) -> TokenFlops:
    """Operations of one token of this decoder at `sequence_length` tokens.

    Raises:
        InputError: a `model_type` whose matrices are not known here.
    """
    heads = _number(config, "num_attention_heads", "num_heads")
    head_dim = _number(config, "head_dim", default=int(config.hidden_size) // heads)
    return flops_per_token(
        matmul_parameters(config),
        attention_width=heads * head_dim,
        sequence_length=sequence_length,
        windows=attention_windows(config),
    )


def attention_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, None where attention is full.

    Models that mix both list their layers: `layer_types` in most, `attention_layers` in GPT-Neo, whose window is `window_size`.
    """
    depth = _number(config, "num_hidden_layers", "num_layers")
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is None:
        return [window] * depth
    return [window if kind in ("sliding_attention", "local") else None for kind in kinds]


def mfu(flops_per_second: Mapping[str, float], gpu: Gpu | None) -> float | None:
    """Model FLOPs utilisation against the peak of the precision that each product runs in.

    The ideal time of a step is the sum of its operations in each precision over the peak in it; the utilisation is ideal time
    over measured time, so 1 means that every product ran at its own peak.

    Args:
        flops_per_second: achieved FLOP/s of one GPU in "bf16" and "fp8", as `TokenFlops.by_precision` times tokens a second.
        gpu: its row of the table.

    Returns:
        A fraction, or None where the GPU is unknown or has no peak in a precision that was used.
    """
    if gpu is None:
        return None
    share = 0.0
    for precision, rate in flops_per_second.items():
        peak = gpu.peak(precision)
        if peak is None:
            return None
        share += rate / peak
    return share


def _number(config: Any, *names: str, default: int | None = None) -> int:
    """The first of these attributes that is there and not None (families name the same number differently)."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    if default is None:
        raise AttributeError(f"{type(config).__name__} has none of {', '.join(names)}")
    return default
