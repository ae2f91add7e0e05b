"""Sums over the rows of a matrix in float32: the gradient of a bias.

Each program sums some columns of a tile of rows, and the tiles' partial sums are added afterwards: a sum repeats bit for bit.
Kernels that write a matrix can leave its partial sums. PyTorch's reduction over the first dimension reads at a third of the
device's bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.tiles import adjacent_columns, cdiv, load_tile

_ROWS, _COLUMNS, _TILE_ROWS, _WARPS = 256, 128, 32, 4
"""Rows and columns of a program, rows that it reads at once, and its warps."""
_PARTS, _FEW_COLUMNS, _PARTS_WARPS = 256, 16, 8
"""Partial sums that a program holds at once, its columns (few: narrow programs end sooner) and its warps."""


@triton.jit
def _column_sums(x_ptr, partial_ptr, rows, columns, stride, ROWS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    summed = tl.zeros([TILE_R, TILE_C], tl.float32)
    for first in range(0, ROWS, TILE_R):
        r = tl.program_id(0) * ROWS + first + tl.arange(0, TILE_R)
        summed += load_tile(x_ptr, r, c, stride, (r < rows)[:, None] & (c < columns)[None, :])
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * columns + c, tl.sum(summed, 0), mask=c < columns)


@triton.jit
def _add_up(parts_ptr, sums_ptr, parts, columns, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    c = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    parts_ptr += tl.program_id(1).to(tl.int64) * parts * columns
    summed = tl.zeros([TILE_R, TILE_C], tl.float32)
    for first in range(0, parts, TILE_R):
        r = first + tl.arange(0, TILE_R)
        summed += load_tile(parts_ptr, r, c, columns, (r < parts)[:, None] & (c < columns)[None, :])
    total = tl.sum(summed, 0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + tl.program_id(1) * columns + c, total, mask=c < columns)


def launch_add_up(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Run the kernel; see `add_up`."""
    *leading, rows, columns = parts.shape
    summed = torch.empty(*leading, columns, dtype=dtype, device=parts.device)
    if summed.numel():
        _add_up[(cdiv(columns, _FEW_COLUMNS), summed.numel() // columns)](
            parts.contiguous(), summed, rows, columns, TILE_R=_PARTS, TILE_C=_FEW_COLUMNS, num_warps=_PARTS_WARPS
        )
    return summed


def add_up(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Partial sums [P, C] or [S, P, C] in float32, added up over P and rounded once: [C] or [S, C]."""
    return launch_add_up(parts, dtype) if parts.device.type == "cuda" else parts.sum(-2).to(dtype)


def launch(x: Tensor) -> Tensor:
    """Run the kernel; see `column_sums`."""
    x = adjacent_columns(x)
    rows, columns = x.shape
    tiles = cdiv(rows, _ROWS)
    partial = torch.empty(tiles, columns, dtype=torch.float32, device=x.device)
    if x.numel():
        _column_sums[(tiles, cdiv(columns, _COLUMNS))](
            x, partial, rows, columns, x.stride(0), ROWS=_ROWS, TILE_R=_TILE_ROWS, TILE_C=_COLUMNS, num_warps=_WARPS
        )
    return add_up(partial)


def column_sums(x: Tensor) -> Tensor:
    """x [R, C], any float dtype, summed over its rows: float32 [C]."""
    eager = x.device.type == "cuda" and not torch.compiler.is_compiling()
    return launch(x) if eager else x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
