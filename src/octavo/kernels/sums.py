"""Sums over the rows of a matrix in float32: the gradient of a bias.

Each program adds up some columns of a tile of rows; the tiles' partial sums are added afterwards, so that a sum repeats bit for
bit. PyTorch's reduction over the first dimension reads at a third of the device's bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _TILE_ROWS, _WARPS = 256, 128, 32, 4
"""Rows and columns of a program, rows that it holds at once, and its warps."""


@triton.jit
def _column_sums(
    x_ptr, partial_ptr, rows, columns, stride, ROWS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    summed = tl.zeros([TILE_R, TILE_C], tl.float32)
    for first in range(0, ROWS, TILE_R):
        r = tl.program_id(0) * ROWS + first + tl.arange(0, TILE_R)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        summed += tl.load(x_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * columns + c, tl.sum(summed, 0), mask=c < columns)


def launch(x: Tensor) -> Tensor:
    """Run the kernel; see `column_sums`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    tiles = triton.cdiv(rows, _ROWS)
    partial = torch.empty(tiles, columns, dtype=torch.float32, device=x.device)
    if x.numel():
        _column_sums[(tiles, triton.cdiv(columns, _COLUMNS))](
            x, partial, rows, columns, x.stride(0), ROWS=_ROWS, TILE_R=_TILE_ROWS, TILE_C=_COLUMNS, num_warps=_WARPS
        )
    return partial.sum(0)


def column_sums(x: Tensor) -> Tensor:
    """x [R, C], any float dtype, summed over its rows: float32 [C]."""
    return launch(x) if x.device.type == "cuda" else x.sum(0, dtype=torch.float32)
