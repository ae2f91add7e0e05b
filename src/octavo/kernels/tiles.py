"""Tiles of a row-major matrix in Triton: their number, indices and loads, strides that kernels accept, a GPU's processors."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tile_of(tile, rows, columns, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Rows [TILE_R], columns [TILE_C] and mask of a tile; tiles are numbered row by row."""
    tiles_across = tl.cdiv(columns, TILE_C)
    r = (tile // tiles_across) * TILE_R + tl.arange(0, TILE_R)
    c = (tile % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    return r, c, (r < rows)[:, None] & (c < columns)[None, :]


@triton.jit
def load_tile(x_ptr, r, c, stride, inside):
    """The tile [r, c] in float32, 0 outside."""
    return tl.load(x_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 for Triton's interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def adjacent_columns(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def cdiv(size: int, tile: int) -> int:
    """Number of tiles that cover a size. `triton.cdiv` and `triton.next_power_of_2` would add microseconds to a launch."""
    return -(-size // tile)


def next_power_of_2(size: int) -> int:
    """The smallest power of two ≥ x; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()
