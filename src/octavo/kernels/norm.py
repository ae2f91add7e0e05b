"""RMSNorm and LayerNorm of residual + delta in one kernel, stored in FP8 or in high precision; and their gradients.

Separate addition, norm and cast read 8 bytes and write 6 an element of bf16; this kernel reads 5 and writes 4. A program holds
a row in registers (`norm_rows`), and a second kernel transposes the FP8 rows: one kernel for both layouts, which reads tiles of
rows twice, took nearly twice as long. Rows beyond the registers are read twice, in tiles. Gradients of weight and bias are
summed in a fixed order, so they repeat bit for bit on the same GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.column_sum import add_up
from octavo.kernels.norm_rows import (
    WIDEST_ROW,
    backward_rows,
    backward_shape,
    forward_shape,
    load_float32,
    load_gain,
    magnitude,
    norm_rows,
    residual_sum,
)
from octavo.kernels.quantize.cast import load_scale, record_amax, store_layouts, store_rounded, transpose
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer, allocate, of_one_scale, quantize, without_elements
from octavo.kernels.tiles import adjacent_columns, cdiv, load_tile, processors

_CENTRED = {"RMSNorm": False, "LayerNorm": True}


class Tile(NamedTuple):
    """Rows and columns that a program of the kernels for long rows reads at once, and its warps."""

    rows: int
    columns: int
    warps: int = 16


_TILE = Tile(16, 512)


@triton.jit
def _norm_tiles(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, h_ptr, stats_ptr, scale_ptr, amax_ptr, rowwise_ptr, scale_inv_ptr, copy_ptr,
    rows, columns, x_stride, delta_stride, eps, h_stride,
    CENTRE: tl.constexpr, ONE_PLUS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    scale = load_scale(scale_ptr, scale_inv_ptr, tl.program_id(0) == 0)
    largest = tl.zeros([TILE_R], tl.float32)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(rows, TILE_R), tl.num_programs(0)):
        r = tile * TILE_R + tl.arange(0, TILE_R)
        there = r < rows
        mean = tl.zeros([TILE_R], tl.float32)
        squares = tl.zeros([TILE_R], tl.float32)
        for first in tl.range(0, columns, TILE_C, num_stages=1):
            c = first + tl.arange(0, TILE_C)
            inside = there[:, None] & (c < columns)[None, :]
            h = residual_sum(
                x_ptr, delta_ptr, h_ptr, r[:, None] * x_stride + c[None, :], r[:, None] * delta_stride + c[None, :],
                r[:, None] * h_stride + c[None, :], inside,
            )  # fmt: skip
            if CENTRE:
                # Mean and squared deviations of the tile, joined to those of the columns before it: no sum of squares of
                # large numbers is ever taken from another.
                share = tl.minimum(columns - first, TILE_C) * 1.0
                tile_mean = tl.sum(h, 1) / share
                h = tl.where(inside, h - tile_mean[:, None], 0.0)
                step = tile_mean - mean
                share = share / tl.minimum(columns, first + TILE_C)
                mean += step * share
                squares += step * step * (share * first)
            squares += tl.sum(h * h, 1)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(squares / columns + eps))
        if CENTRE:
            tl.store(stats_ptr + r, mean, mask=there)
        tl.store(stats_ptr + (rows if CENTRE else 0) + r, rstd, mask=there)
        if delta_ptr is not None:
            tl.debug_barrier()  # other threads read the stored h
        for first in tl.range(0, columns, TILE_C, num_stages=1):
            c = first + tl.arange(0, TILE_C)
            inside = there[:, None] & (c < columns)[None, :]
            h = load_tile(h_ptr, r, c, h_stride, inside)
            if CENTRE:
                h -= mean[:, None]
            y = h * rstd[:, None] * load_gain(weight_ptr, c, c < columns, ONE_PLUS)[None, :]
            if bias_ptr is not None:
                y += load_float32(bias_ptr, c, c < columns)[None, :]
            if copy_ptr is not None:
                y = store_rounded(y, copy_ptr, r[:, None] * columns + c[None, :], inside)
            if amax_ptr is not None:
                largest = tl.maximum(largest, tl.max(magnitude(y, inside), 1))
            if scale_inv_ptr is not None:
                y = y * scale
            store_layouts(y, rowwise_ptr, None, r, c, rows, columns, inside, 1.0, False)
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)


@triton.jit
def _backward_tiles(
    dy_ptr, h_ptr, weight_ptr, stats_ptr, residual_ptr, dh_ptr, dweight_ptr, dbias_ptr,
    rows, columns, dy_stride, h_stride, residual_stride,
    CENTRE: tl.constexpr, ONE_PLUS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(rows, TILE_R), tl.num_programs(0)):
        r = tile * TILE_R + tl.arange(0, TILE_R)
        there = r < rows
        mean = tl.zeros([TILE_R], tl.float32)
        if CENTRE:
            mean = tl.load(stats_ptr + r, mask=there, other=0.0)
        rstd = tl.load(stats_ptr + (rows if CENTRE else 0) + r, mask=there, other=0.0)
        along = tl.zeros([TILE_R], tl.float32)
        level = tl.zeros([TILE_R], tl.float32)
        for first in tl.range(0, columns, TILE_C, num_stages=1):
            c = first + tl.arange(0, TILE_C)
            inside = there[:, None] & (c < columns)[None, :]
            dy = load_tile(dy_ptr, r, c, dy_stride, inside)
            h = load_tile(h_ptr, r, c, h_stride, inside)
            normed = tl.where(inside, (h - mean[:, None]) * rstd[:, None], 0.0)
            grad = dy * load_gain(weight_ptr, c, c < columns, ONE_PLUS)[None, :]
            along += tl.sum(grad * normed, 1)
            if CENTRE:
                level += tl.sum(grad, 1)
            if dweight_ptr is not None:
                tl.store(dweight_ptr + tile * columns + c, tl.sum(dy * normed, 0), mask=c < columns)
                if CENTRE:
                    tl.store(dbias_ptr + tile * columns + c, tl.sum(dy, 0), mask=c < columns)
        along /= columns
        level /= columns
        for first in tl.range(0, columns, TILE_C, num_stages=1):
            c = first + tl.arange(0, TILE_C)
            inside = there[:, None] & (c < columns)[None, :]
            dy = load_tile(dy_ptr, r, c, dy_stride, inside)
            h = load_tile(h_ptr, r, c, h_stride, inside)
            normed = (h - mean[:, None]) * rstd[:, None]
            grad = dy * load_gain(weight_ptr, c, c < columns, ONE_PLUS)[None, :]
            dh = (grad - level[:, None] - normed * along[:, None]) * rstd[:, None]
            if residual_ptr is not None:
                at = residual_ptr + r[:, None] * residual_stride + c[None, :]
                dh += tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            store_layouts(dh, dh_ptr, None, r, c, rows, columns, inside, 1.0, False)


def launch(
    kind: str, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, quantizer: Quantizer,
    *, zero_centered: bool = False, high_precision_out: Tensor | None = None, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, QuantizedTensor]:  # fmt: skip
    """Run the forward kernel; see `norm`. tile: use the kernel for long rows."""
    (rows, columns), centre, device = x.shape, _CENTRED[kind], x.device
    stats = torch.empty((2, rows) if centre else rows, dtype=torch.float32, device=device)
    # A columnwise store and a sum over a row want opposite tiles. A transpose of FP8 bytes afterwards moves 2 bytes an element,
    # less than a second read of the rows in tiles.
    rowwise = quantizer._replace(rowwise=True, columnwise=False) if quantizer.columnwise else quantizer
    out = allocate(rowwise, rows, columns, device)
    added = None if delta is None else adjacent_columns(delta)
    read = adjacent_columns(x)
    h = read if delta is None else torch.empty(rows, columns, dtype=x.dtype, device=device)
    if x.numel() == 0:
        without_elements(quantizer, out)
    else:
        arguments = (
            read, added, weight.contiguous(), None if bias is None else bias.contiguous(), h, stats,
            quantizer.scale, quantizer.amax, out.rowwise_data, out.scale_inv, high_precision_out,
            rows, columns, read.stride(0), 0 if added is None else added.stride(0), eps,
        )  # fmt: skip
        if tile is None and columns <= WIDEST_ROW:
            shape = forward_shape(columns)
            norm_rows[(shape.grid(rows, processors(device)),)](
                *arguments, CENTRE=centre, ONE_PLUS=zero_centered, BLOCK=shape.block, REST=shape.rest, num_warps=shape.warps
            )
        else:
            tile = tile or _TILE
            _norm_tiles[(min(cdiv(rows, tile.rows), processors(device)),)](
                *arguments, h.stride(0),
                CENTRE=centre, ONE_PLUS=zero_centered, TILE_R=tile.rows, TILE_C=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
    if quantizer.columnwise:
        assert out.rowwise_data is not None
        columnwise = out.rowwise_data.t().contiguous() if quantizer.scale is None else transpose(out.rowwise_data)
        out = of_one_scale(out.rowwise_data if quantizer.rowwise else None, columnwise, out.scale_inv)
    return x if delta is None else h, stats, out


def launch_backward(
    kind: str, dy: Tensor, h: Tensor, weight: Tensor, stats: Tensor, d_residual: Tensor | None,
    *, want_weight: bool = True, dtype: torch.dtype = torch.float32, zero_centered: bool = False, tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Run the backward kernel; see `norm_backward`. tile: use the kernel for long rows."""
    (rows, columns), centre, device = h.shape, _CENTRED[kind], h.device
    dh = torch.empty(rows, columns, dtype=h.dtype, device=device)
    shape = backward_shape(columns, centred=centre) if tile is None and columns <= WIDEST_ROW else None
    tile = tile or _TILE
    parts = cdiv(rows, tile.rows) if shape is None else shape.grid(rows, processors(device))
    partial = torch.empty(1 + centre, parts, columns, dtype=torch.float32, device=device) if want_weight else None
    if h.numel():
        dy, read = adjacent_columns(dy), adjacent_columns(h)
        residual = None if d_residual is None else adjacent_columns(d_residual)
        dweight, dbias = (None, None) if partial is None else (partial[0], partial[1] if centre else None)
        arguments = (
            dy, read, weight.contiguous(), stats, residual, dh, dweight, dbias,
            rows, columns, dy.stride(0), read.stride(0), 0 if residual is None else residual.stride(0),
        )  # fmt: skip
        if shape is not None:
            backward_rows[(parts,)](
                *arguments, CENTRE=centre, ONE_PLUS=zero_centered, BLOCK=shape.block, REST=shape.rest, num_warps=shape.warps
            )
        else:
            _backward_tiles[(min(parts, processors(device)),)](
                *arguments,
                CENTRE=centre, ONE_PLUS=zero_centered, TILE_R=tile.rows, TILE_C=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
    if partial is None:
        return dh, None, None
    summed = add_up(partial, dtype)
    return dh, summed[0], summed[1] if centre else None


def norm(
    kind: str, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, quantizer: Quantizer,
    *, zero_centered: bool = False, high_precision_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, QuantizedTensor]:  # fmt: skip
    """The norm of h = x + delta, rounded to x's dtype (without a delta, h is x), in float32 until `quantizer` converts it.

    kind: "RMSNorm" or "LayerNorm". x, delta: [R, C]. weight, bias: [C]. zero_centered: 1 + weight, in float32, instead of
    weight. high_precision_out: contiguous [R, C], receives the normed result in its dtype; `quantizer` then converts that
    rounded result. Returns h, the statistics for backward as in `reference.norm`, and the normed result in `quantizer`'s
    layouts.
    """
    # A conversion to FP8 needs a GPU that has it.
    if x.device.type == "cuda" and (quantizer.scale is None or gemm.is_native(x.device)):
        return launch(
            kind, x, delta, weight, bias, eps, quantizer, zero_centered=zero_centered, high_precision_out=high_precision_out
        )
    h = x if delta is None else x + delta
    normed, stats = reference.norm(kind, h, weight, bias, eps, zero_centered=zero_centered)
    if high_precision_out is not None:
        normed = reference.wide(high_precision_out.copy_(normed))
    return h, stats, quantize(normed, quantizer)


def norm_backward(
    kind: str, dy: Tensor, h: Tensor, weight: Tensor, stats: Tensor, d_residual: Tensor | None,
    *, want_weight: bool = True, dtype: torch.dtype = torch.float32, zero_centered: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of `norm`'s h, [R, C] in its dtype, weight and bias, [C] in `dtype` (None: not wanted, or an RMSNorm's bias).

    dy: [R, C], of the normed result. h, stats: from `norm`. d_residual: [R, C], the gradient of h by other paths.
    """
    if h.device.type == "cuda":
        return launch_backward(
            kind, dy, h, weight, stats, d_residual, want_weight=want_weight, dtype=dtype, zero_centered=zero_centered
        )
    dh, d_weight, d_bias = reference.norm_backward(kind, dy, h, weight, stats, d_residual, zero_centered=zero_centered)
    if not want_weight:
        return dh.to(h.dtype), None, None
    return dh.to(h.dtype), d_weight.to(dtype), None if d_bias is None else d_bias.to(dtype)
