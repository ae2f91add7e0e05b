"""Products of experts' rows and stacked matrices, in one launch on Hopper and without waiting for their sizes.

PyTorch's grouped FP8 product supports only E4M3 with a scale per row. Here a persistent Triton kernel supports every pair of
formats and every kind of scale; the sizes of groups stay on the device. bfloat16 uses PyTorch's grouped product. On other
devices there is one product per expert.

`octavo.nn.GroupedLinear`, whose matrices are separate and whose sizes the host knows, uses the same code.

    output            y  [R, N]    = x  [R, K] · w[expert] [N, K]ᵀ
    weight gradient   dw [E, N, K] = dy [R, N]ᵀ · x [R, K], over each expert's rows
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels import gemm, reference
from octavo.kernels.experts.routes import TILE, Routes, on_device
from octavo.kernels.tiles import processors


class Tiles(NamedTuple):
    """Columns and summed elements of a tile of 128 rows, its warps, and the stages of its pipeline."""

    columns: int
    depth: int
    warps: int
    stages: int


TILES, TILES_OF_BLOCKS = Tiles(256, 128, 8, 3), Tiles(128, 128, 8, 3)
# 256 columns of a float32 result and the pipeline take 272 KiB of shared memory, of which Hopper has 227.
TILES_OF_FLOAT32 = Tiles(128, 128, 8, 4)
_ROW_TILES_TOGETHER = 8
# Products that Hopper's units add in 14 bits before the sum goes to a float32: 512 lose 0.006% of a sum, where 128 lose 0.004%
# and all 4,096 of an expert 0.015%; bf16's rounding is 0.17%.
_EXACT_SUMS = 512

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

Operand = tuple[Tensor, Tensor | None]
"""FP8 with the inverses of its scales, as in `octavo.kernels.experts.cast`; or a matrix in high precision and None."""


@triton.jit
def _products_of_rows(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, experts_ptr, ends_ptr, rows, n, k, experts, programs,
    SCALES: tl.constexpr, SUMS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    TOGETHER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Persistent: each program computes tiles of 128 rows, which have one expert; several row tiles share columns in L2.

    SUMS: products of a partial sum, a multiple of TILE_K; None for all.
    """
    row_tiles = tl.load(ends_ptr + experts - 1) // TILE_M
    column_tiles = tl.cdiv(n, TILE_N)
    depth = tl.cdiv(k, TILE_K)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, programs):
        band = tile // (TOGETHER * column_tiles)
        first = band * TOGETHER
        height = tl.minimum(row_tiles - first, TOGETHER)
        inside = tile - band * TOGETHER * column_tiles
        row_tile = first + inside % height
        column = (inside // height) * TILE_N
        expert = tl.load(experts_ptr + row_tile)
        row = row_tile * TILE_M
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        partial = tl.zeros([TILE_M, TILE_N], tl.float32)
        r = row + tl.arange(0, TILE_M)
        c = column + tl.arange(0, TILE_N)
        for i in range(depth):
            a = a_desc.load([row, i * TILE_K])
            b = b_desc.load([expert * n + column, i * TILE_K])
            if SCALES == "block":
                # Rows of 1 × 128 pieces lie column after column, 128 × 128 blocks row after row.
                a_scale = tl.load(a_scale_ptr + i * rows + r)
                b_at = (expert * tl.cdiv(n, 128) + tl.minimum(c, n - 1) // 128) * depth + i
                b_scale = tl.load(b_scale_ptr + b_at)
                total += tl.dot(a, b.T) * a_scale[:, None] * b_scale[None, :]
            else:
                partial = tl.dot(a, b.T, partial)
                if SUMS is not None:  # noqa: SIM102 - of constants and of numbers: the kernel has no branch without SUMS
                    if (i * TILE_K) % SUMS == SUMS - TILE_K:
                        total += partial
                        partial = tl.zeros([TILE_M, TILE_N], tl.float32)
        if SCALES != "block":
            total += partial
        if SCALES == "tensor":
            total = total * (tl.load(a_scale_ptr + expert) * tl.load(b_scale_ptr + expert))
        if SCALES == "row":
            b_scale = tl.load(b_scale_ptr + expert * n + c, mask=c < n, other=0.0)
            total = total * tl.load(a_scale_ptr + r)[:, None] * b_scale[None, :]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + expert * n + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
        out_desc.store([row, column], total.to(DTYPE))


@triton.jit
def _products_of_weights(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, ends_ptr, rows, n, k, experts, programs,
    SCALES: tl.constexpr, SUMS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    TOGETHER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Persistent: tiles of the gradients [E, N, K] of all matrices, each a sum over the rows of its expert.

    SUMS: products of a partial sum, a multiple of TILE_K; None for all.
    """
    down, across = tl.cdiv(n, TILE_M), tl.cdiv(k, TILE_N)
    for tile in tl.range(tl.program_id(0), experts * down * across, programs):
        expert = tile // (down * across)
        inside = tile % (down * across)
        first = inside // (TOGETHER * across) * TOGETHER
        height = tl.minimum(down - first, TOGETHER)
        inside -= first * across
        high, wide = (first + inside % height) * TILE_M, (inside // height) * TILE_N
        begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
        r, c = high + tl.arange(0, TILE_M), wide + tl.arange(0, TILE_N)
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        partial = tl.zeros([TILE_M, TILE_N], tl.float32)
        for at in range(begin, end, TILE_K):
            a = a_desc.load([high, at])
            b = b_desc.load([wide, at])
            if SCALES == "block":
                piece = at // 128
                a_scale = tl.load(a_scale_ptr + piece * n + r, mask=r < n, other=0.0)
                b_scale = tl.load(b_scale_ptr + piece * k + c, mask=c < k, other=0.0)
                total += tl.dot(a, b.T) * a_scale[:, None] * b_scale[None, :]
            else:
                partial = tl.dot(a, b.T, partial)
                if SUMS is not None:  # noqa: SIM102 - of constants and of numbers: the kernel has no branch without SUMS
                    if (at - begin) % SUMS == SUMS - TILE_K:
                        total += partial
                        partial = tl.zeros([TILE_M, TILE_N], tl.float32)
        if SCALES != "block":
            total += partial
        if SCALES == "tensor":
            total = total * (tl.load(a_scale_ptr + expert) * tl.load(b_scale_ptr + expert))
        if SCALES == "row":
            a_scale = tl.load(a_scale_ptr + expert * n + r, mask=r < n, other=0.0)
            b_scale = tl.load(b_scale_ptr + expert * k + c, mask=c < k, other=0.0)
            total = total * a_scale[:, None] * b_scale[None, :]
        out_desc.store([expert, high, wide], total.to(DTYPE)[None, :, :])


def _kind_of_weight(w: Tensor, scale_inv: Tensor) -> str:
    if scale_inv.dim() == 1:
        return "tensor"
    return "row" if scale_inv.shape[1] == w.shape[1] else "block"


def _kind_of_columns(scale_inv: Tensor) -> str:
    return {1: "tensor", 2: "block", 3: "row"}[scale_inv.dim()]


def _tiles(kind: str, out_dtype: torch.dtype) -> Tiles:
    if kind == "block":
        return TILES_OF_BLOCKS
    return TILES_OF_FLOAT32 if out_dtype == torch.float32 else TILES


def _descriptor(x: Tensor, *tile: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(tile))


def launch_rows(
    a: Operand, b: Operand, routes: Routes, out_dtype: torch.dtype, kind: str, *, precise: bool, bias: Tensor | None = None
) -> Tensor:
    """Run the kernel; see `grouped_mm`. kind: "tensor", "row" or "block"."""
    (x, x_scale), (w, w_scale) = a, b
    assert x_scale is not None
    (rows, k), (experts, n, _) = x.shape, w.shape
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    tiles = _tiles(kind, out_dtype)
    if kind == "block" and x_scale.stride(0) != 1:
        x_scale = x_scale.t().contiguous().t()
    programs = processors(x.device)
    _products_of_rows[(programs,)](
        _descriptor(x, TILE, tiles.depth), _descriptor(w.reshape(-1, k), tiles.columns, tiles.depth),
        _descriptor(out, TILE, tiles.columns), x_scale, w_scale, bias, routes.experts, routes.ends, rows, n, k, experts,
        programs,
        SCALES=kind, SUMS=_EXACT_SUMS if precise else None, TILE_M=TILE, TILE_N=tiles.columns, TILE_K=tiles.depth,
        TOGETHER=_ROW_TILES_TOGETHER, DTYPE=_DTYPES[out_dtype],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def launch_weights(a: Operand, b: Operand, routes: Routes, out_dtype: torch.dtype, kind: str, *, precise: bool) -> Tensor:
    """Run the kernel; see `grouped_weight_mm`."""
    (dy, dy_scale), (x, x_scale) = a, b
    assert dy_scale is not None
    assert x_scale is not None
    (n, rows), k, experts = dy.shape, x.shape[0], len(routes.ends)
    out = torch.empty(experts, n, k, dtype=out_dtype, device=x.device)
    tiles = _tiles(kind, out_dtype)
    if kind == "block":
        dy_scale, x_scale = (scale if scale.stride(0) == 1 else scale.t().contiguous().t() for scale in (dy_scale, x_scale))
    programs = processors(x.device)
    _products_of_weights[(programs,)](
        _descriptor(dy, TILE, tiles.depth), _descriptor(x, tiles.columns, tiles.depth),
        _descriptor(out, 1, TILE, tiles.columns), dy_scale, x_scale, routes.ends, rows, n, k, experts, programs,
        SCALES=kind, SUMS=_EXACT_SUMS if precise else None, TILE_M=TILE, TILE_N=tiles.columns, TILE_K=tiles.depth,
        TOGETHER=_ROW_TILES_TOGETHER, DTYPE=_DTYPES[out_dtype],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _takes(routes: Routes, *sizes: int) -> bool:
    """True if the kernels support these operands: rows in tiles, and sizes whose rows begin at multiples of 16 bytes."""
    return routes.tile == TILE and all(size % gemm.ALIGNMENT == 0 for size in sizes)


def _of_pytorch(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """PyTorch's grouped product, bfloat16; groups are rows of a or, for two matrices, ranges of the summed dimension."""
    if a.shape[0] == 0:
        return a.new_zeros(0, b.shape[-1])
    return torch._grouped_mm(a, b, offs=ends)


def grouped_mm(
    a: Operand, b: Operand, routes: Routes, out_dtype: torch.dtype, *, precise: bool = False, bias: Tensor | None = None
) -> Tensor:
    """a [R, C] times the matrix [N, C] of each row's expert, of b [E, N, C]: [R, N]; rows after the last expert's are
    undefined.

    bias: [E, N], added before the result is rounded; only to FP8 products.
    """
    (x, x_scale), (w, w_scale) = a, b
    if x_scale is None and _takes(routes, *w.shape[1:]) and x.dtype == out_dtype == torch.bfloat16:
        return _of_pytorch(x, w.transpose(1, 2), routes.ends)
    if w_scale is not None and _takes(routes, *w.shape[1:]):
        return launch_rows(a, b, routes, out_dtype, _kind_of_weight(w, w_scale), precise=precise, bias=bias)
    if not x.shape[0]:
        return x.new_zeros(0, w.shape[1], dtype=out_dtype)
    bounds = _bounds(routes)
    if x_scale is None or w_scale is None:
        pairs = zip(bounds, w, strict=True)
        parts = [
            gemm.high_precision_mm(x[begin:end], one.t(), out_dtype, recurring=False, unrounded=True)
            for (begin, end), one in pairs
        ]
    else:
        scales = x_scale if x_scale.dim() == 1 else [x_scale[begin:end] for begin, end in bounds]
        rows = [(x[begin:end], _aligned(scale)) for (begin, end), scale in zip(bounds, scales, strict=True)]
        matrices = [(one, _aligned(scale)) for one, scale in zip(w, w_scale, strict=True)]
        biases = [None] * len(rows) if bias is None else [*bias]
        parts = [
            gemm.scaled_mm(*part, *matrix, out_dtype=out_dtype, precise=precise, bias=one, recurring=False)
            for part, matrix, one in zip(rows, matrices, biases, strict=True)
        ]
    behind = x.shape[0] - sum(len(part) for part in parts)
    return torch.cat([*parts, x.new_zeros(behind, w.shape[1], dtype=out_dtype)])


def grouped_weight_mm(a: Operand, b: Operand, routes: Routes, out_dtype: torch.dtype, *, precise: bool = False) -> Tensor:
    """aᵀ · b over each expert's rows: [E, N, C], zeros for an expert without rows.

    FP8 operands are columnwise, [N, R] and [C, R]; those in high precision are [R, N] and [R, C].
    """
    (dy, dy_scale), (x, x_scale) = a, b
    if dy_scale is None or x_scale is None:
        if _takes(routes, dy.shape[1], x.shape[1]) and dy.dtype == torch.bfloat16:
            out = _of_pytorch(dy.t(), x, routes.ends)
            return out if out.dtype == out_dtype else out.to(out_dtype)
        rows = [(dy[begin:end].t(), x[begin:end]) for begin, end in _bounds(routes)]
        return torch.stack([gemm.high_precision_mm(*pair, out_dtype, recurring=False) for pair in rows])
    kind = _kind_of_columns(dy_scale)
    if _takes(routes, dy.shape[0], x.shape[0]):
        return launch_weights(a, b, routes, out_dtype, kind, precise=precise)
    parts, piece = [], 0
    for expert, (begin, end) in enumerate(_bounds(routes)):
        pieces = -(-(end - begin) // reference.BLOCK)
        one = [
            (data[:, begin:end], _aligned(scale[expert] if kind != "block" else scale[:, piece : piece + pieces]))
            for data, scale in ((dy, dy_scale), (x, x_scale))
        ]
        parts.append(gemm.scaled_mm(*one[0], *one[1], out_dtype=out_dtype, precise=precise, recurring=False))
        piece += pieces
    return torch.stack(parts)


def _aligned(scale: Tensor) -> Tensor:
    """Scales in separate memory: cuBLAS requires alignment to 16 bytes."""
    return scale.clone(memory_format=torch.contiguous_format)


def _bounds(routes: Routes) -> list[tuple[int, int]]:
    """First row and end of each expert; the host waits for a GPU."""
    if routes.splits is not None:
        return routes.bounds
    ends = routes.ends.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def takes_groups(device: torch.device, dtype: torch.dtype, b: Sequence[Tensor]) -> bool:
    """True if `grouped_mm_of_splits` of matrices b, each [N, K], is one launch: bfloat16 on Hopper, rows of whole 16 bytes."""
    grouped = len(b) > 1 and gemm.has_grouped_products(device)
    return grouped and dtype == torch.bfloat16 and all(n % 8 == 0 for n in b[0].shape)


def grouped_mm_of_splits(a: Tensor, splits: Sequence[int], b: Tensor) -> Tensor:
    """a [M, C], of which `splits` rows belong to each matrix of b [G, C, N], in bfloat16: [M, N], in one launch."""
    ends = on_device(list(itertools.accumulate(splits)), a.device, torch.int32)
    return _of_pytorch(a.contiguous(), b, ends)
