"""FLOPs of a token, and the utilisation of a GPU's peak (MFU).

One definition for the plan before the run, the metrics in it and the benchmarks after it:

    FLOPs a token = 6 × (matmul parameters active for it) + 12 × d × (keys its queries see), summed over layers

Forward and backward are three products of two operations a parameter; the attention's two products (scores, values) likewise,
with d = heads × head_dim. The matmul parameters include the output head and leave out the embedding, biases and norms. A
causal query sees T/2 keys on average, which gives the usual 6·L·d·T. Recomputed operations are not counted: they are a cost,
not progress.

Arithmetic on numbers and on a model's spec: neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.hardware import Gpu
from octavo.models.spec import ModelSpec


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
        """Parameters whose products a token computes, head included."""
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


def matmul_parameters(spec: ModelSpec) -> MatmulParameters:
    """Count the matrices of a decoder."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    mlp = (3 if spec.gated else 2) * spec.hidden_size * spec.ffn_size
    visited = spec.visited if spec.experts else 1
    return MatmulParameters(
        layers=spec.layers * (attention + visited * mlp),
        router=spec.layers * spec.hidden_size * spec.experts,
        head=spec.vocabulary * spec.hidden_size,
        inactive=spec.layers * (max(spec.experts, 1) - visited) * mlp,
    )


def model_flops(spec: ModelSpec, sequence_length: int) -> TokenFlops:
    """Operations of one token of a decoder at `sequence_length` tokens."""
    return flops_per_token(
        matmul_parameters(spec),
        attention_width=spec.heads * spec.head_dim,
        sequence_length=sequence_length,
        windows=spec.windows,
    )


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
