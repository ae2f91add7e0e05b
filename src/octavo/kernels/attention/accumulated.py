"""FlashAttention-4's float32 gradient sums, before its rounding: blocks of 64 tokens × 8 columns, in the order of registers.

The package rounds the sums to bf16 and reorders them in another kernel. The rotation's kernel, which reads every gradient
anyway, reads the sums instead: this saves the rounding, and one write and one read of each gradient.

Blocks of 64 tokens are contiguous. In a block, from the slowest index to the fastest: 16 tokens, a token of 8, a pair of
columns, the first or second 8 of the 16 tokens, a column of the pair: the registers of a warp group's product (WGMMA).
`tests/gpu/test_accumulated.py` compares with the kernels of the package.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Accumulated(NamedTuple):
    """A gradient [B, T, H, D], which is `scale` times these sums: float32 [B, H, R·D], R ≥ T a multiple of 64, D one of 8."""

    sums: Tensor
    scale: float
    shape: tuple[int, int, int, int]

    def dense(self) -> Tensor:
        """The gradient, float32 [B, T, H, D]."""
        batch, tokens, heads, head_dim = self.shape
        blocks = self.sums.reshape(batch, heads, -1, head_dim // 8, 4, 8, 4, 2, 2)
        in_order = blocks.permute(0, 2, 4, 7, 5, 1, 3, 6, 8).reshape(batch, -1, heads, head_dim)
        return in_order[:, :tokens] * self.scale


Gradient = Tensor | Accumulated


@triton.jit
def token_offsets(t, D: tl.constexpr):
    """Offset of tokens in a head's sums."""
    r = t % 64
    return (t // 64) * (64 * D) + (r // 16) * 128 + (r % 8) * 16 + (r % 16 // 8) * 2


@triton.jit
def column_offsets(column, PAIRS: tl.constexpr):
    """Offset of columns from a token's. PAIRS: elements 2i and 2i + 1 of `column` are a pair, which one load reads."""
    offset = column // 8 * 512 + column % 8 // 2 * 4 + column % 2
    if PAIRS:
        offset = tl.max_contiguous(tl.multiple_of(offset, 2), 2)
    return offset
