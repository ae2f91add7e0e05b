"""FLOPs of a token, and the utilisation of a GPU's peak (MFU): one definition for plans, metrics and benchmarks.

    FLOPs a token = 6 × (matmul parameters active for it) + 12 × heads × head_dim × (keys its queries see), summed over layers

Matmul parameters include the output head, not the embedding, biases and norms. A causal query sees T/2 keys on average, which
gives the usual 6·L·d·T. Recomputed operations are not counted. Imports neither torch nor transformers.

A frozen matrix has no weight gradient: 4 instead of 6. With LoRA the adapters' parameters count 6 times, and all others 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.hardware import Gpu
from octavo.models.spec import ModelSpec


@dataclass(frozen=True)
class MatmulParameters:
    """Parameters of matrix multiplications.

    Attributes:
        layers: in the blocks' linear layers, active for a token; FP8 can compute their products.
        router: in the blocks' routers (0 without experts); they never run in FP8.
        head: in the output head, tied or not.
        inactive: in the experts that a token is not sent to.
    """

    layers: int
    router: int
    head: int
    inactive: int

    @property
    def stored(self) -> int:
        """All of them, a tied head counted once."""
        return self.layers + self.router + self.head + self.inactive


@dataclass(frozen=True)
class TokenFlops:
    """Operations of one token's forward and backward, by part of the model.

    Attributes:
        adapters: LoRA's products, which never run in FP8.
        head_products: number of the head's products: output, input gradient and, unless frozen, weight gradient.
    """

    layers: float
    router: float
    head: float
    attention: float
    adapters: float = 0.0
    head_products: int = 3

    @property
    def total(self) -> float:
        """All operations of a token."""
        return self.layers + self.router + self.head + self.attention + self.adapters

    def by_precision(self, *, layers: str = "bf16", head: str = "bf16", head_forward: str | None = None) -> dict[str, float]:
        """Operations in "bf16" and "fp8", from the precisions of the linear layers, the head and, if different, its forward."""
        split = {"bf16": self.router + self.attention + self.adapters, "fp8": 0.0}
        split[layers] += self.layers
        forward = self.head / self.head_products if head_forward else 0.0
        split[head_forward or head] += forward
        split[head] += self.head - forward
        return {precision: flops for precision, flops in split.items() if flops}


def mean_keys(sequence_length: int, window: int | None = None) -> float:
    """Keys that a causal query sees on average: T/2, or under a window W ≤ T, W − W²/2T (T/2 at W = T)."""
    seen = sequence_length if window is None else min(window, sequence_length)
    return seen - seen * seen / (2 * sequence_length)


def matmul_parameters(spec: ModelSpec) -> MatmulParameters:
    """Count the matrices of a decoder."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    column = (3 if spec.gated else 2) * spec.hidden_size
    expert, mixtures = column * spec.ffn_size, spec.mixtures
    mlp = column * (spec.dense_ffn_size or spec.ffn_size)
    return MatmulParameters(
        layers=spec.layers * attention + mixtures * spec.top_k * expert + (spec.layers - mixtures) * mlp,
        router=mixtures * spec.hidden_size * spec.experts,
        head=spec.vocabulary * spec.hidden_size,
        inactive=mixtures * (spec.experts - spec.top_k) * expert,
    )


def adapter_parameters(spec: ModelSpec, rank: int) -> int:
    """Parameters of LoRA adapters of this rank on all matrices of a decoder's blocks but experts and routers."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = 2 * (spec.hidden_size + q) + 2 * (spec.hidden_size + kv)
    mlp = (3 if spec.gated else 2) * (spec.hidden_size + (spec.dense_ffn_size or spec.ffn_size))
    return rank * (spec.layers * attention + (spec.layers - spec.mixtures) * mlp)


def model_flops(
    spec: ModelSpec, sequence_length: int, *, adapters: int | None = None, head_trained: bool = False
) -> TokenFlops:
    """Operations of one token of a decoder, averaged over a full sequence of `sequence_length` tokens.

    adapters: LoRA parameters on frozen matrices; None without LoRA. head_trained: the head is trained too.
    """
    parameters = matmul_parameters(spec)
    keys = sum(mean_keys(sequence_length, window) for window in spec.windows)
    products = 3 if adapters is None else 2
    head_products = 3 if head_trained else products
    return TokenFlops(
        layers=2.0 * products * parameters.layers,
        router=2.0 * products * parameters.router,
        head=2.0 * head_products * parameters.head,
        attention=12.0 * spec.heads * spec.head_dim * keys,
        adapters=6.0 * (adapters or 0),
        head_products=head_products,
    )


def mfu(flops_per_second: Mapping[str, float], gpu: Gpu | None) -> float | None:
    """Model FLOPs utilisation: a step's ideal time, in which every product runs at its peak, over its measured time.

    Args:
        flops_per_second: achieved FLOP/s of one GPU in "bf16" and "fp8", as `TokenFlops.by_precision` times tokens a second.
        gpu: its row of the table.

    Returns:
        A fraction, or None if the GPU is unknown or has no peak for a precision in use.
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
