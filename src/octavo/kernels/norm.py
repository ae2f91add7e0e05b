"""RMSNorm and LayerNorm of residual + delta in one kernel, stored in FP8 or in high precision; and their gradients.

Apart, the addition, the norm and the cast read 8 bytes and write 6 an element of bf16; here they read 5 and write 4. A program
keeps a row in registers (`octavo.kernels.norm_rows`), and a second kernel transposes the FP8 rows: a kernel that reads a tile
of rows twice, to store both layouts at once, moves a byte less and took nearly twice as long. Rows that do not fit into
registers are read twice, in tiles.
Gradients of weight and bias are summed in a fixed order, so they repeat bit for bit on the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

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
    load_scale,
    magnitude,
    norm_rows,
    stream,
)
from octavo.kernels.quantize.cast import record_amax, transpose
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer, allocate, of_one_scale, quantize, without_elements

_CENTRED = {"RMSNorm": False, "LayerNorm": True}


class Tile(NamedTuple):
    """How the kernels that take tiles are run: `programs` of them a multiprocessor, loads `stages` − 1 tiles ahead."""

    rows: int
    columns: int
    warps: int = 16
    programs: int = 1
    stages: int = 1


_TILE = Tile(16, 512)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _norm_tiles(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, h_ptr, stats_ptr, scale_ptr, amax_ptr, rowwise_ptr, scale_inv_ptr,
    rows, columns, x_stride, delta_stride, h_stride, eps,
    CENTRE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    AMAX: tl.constexpr, ROWWISE: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    scale = load_scale(scale_ptr, scale_inv_ptr, SCALED)
    largest = tl.zeros([TILE_R], tl.float32)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(rows, TILE_R), tl.num_programs(0)):
        r = tile * TILE_R + tl.arange(0, TILE_R)
        there = r < rows
        mean = tl.zeros([TILE_R], tl.float32)
        squares = tl.zeros([TILE_R], tl.float32)
        for first in tl.range(0, columns, TILE_C, num_stages=STAGES):
            c = first + tl.arange(0, TILE_C)
            inside = there[:, None] & (c < columns)[None, :]
            h = stream(
                x_ptr, delta_ptr, h_ptr, r[:, None] * x_stride + c[None, :], r[:, None] * delta_stride + c[None, :],
                r[:, None] * h_stride + c[None, :], inside, ADD,
            )  # fmt: skip
            if CENTRE:
                # Mean and squared deviations of the tile, joined to those of the columns before it: no sum of squares of
                # large numbers is ever taken from another.
                share = tl.minimum(columns - first, TILE_C) * 1.0
                own = tl.sum(h, 1) / share
                h = tl.where(inside, h - own[:, None], 0.0)
                step = own - mean
                share = share / tl.minimum(columns, first + TILE_C)
                mean += step * share
                squares += step * step * (share * first)
            squares += tl.sum(h * h, 1)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(squares / columns + eps))
        if CENTRE:
            tl.store(stats_ptr + r, mean, mask=there)
            tl.store(stats_ptr + rows + r, rstd, mask=there)
        else:
            tl.store(stats_ptr + r, rstd, mask=there)
        if ADD:
            tl.debug_barrier()  # what one thread stored of h another reads
        for first in tl.range(0, columns, TILE_C, num_stages=STAGES):
            c = first + tl.arange(0, TILE_C)
            within = c < columns
            inside = there[:, None] & within[None, :]
            h = tl.load(h_ptr + r[:, None] * h_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
            if CENTRE:
                h -= mean[:, None]
            y = h * rstd[:, None] * tl.load(weight_ptr + c, mask=within, other=0.0).to(tl.float32)[None, :]
            if BIAS:
                y += tl.load(bias_ptr + c, mask=within, other=0.0).to(tl.float32)[None, :]
            if AMAX:
                largest = tl.maximum(largest, tl.max(magnitude(y, inside), 1))
            if SCALED:
                y = y * scale
            if ROWWISE:
                tl.store(rowwise_ptr + r[:, None] * columns + c[None, :], y.to(rowwise_ptr.dtype.element_ty), mask=inside)
    if AMAX:
        record_amax(amax_ptr, largest)


@triton.jit
def _backward_tiles(
    dy_ptr, h_ptr, weight_ptr, stats_ptr, residual_ptr, dh_ptr, dweight_ptr, dbias_ptr,
    rows, columns, dy_stride, h_stride, residual_stride,
    CENTRE: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(rows, TILE_R), tl.num_programs(0)):
        r = tile * TILE_R + tl.arange(0, TILE_R)
        there = r < rows
        mean = tl.zeros([TILE_R], tl.float32)
        if CENTRE:
            mean = tl.load(stats_ptr + r, mask=there, other=0.0)
            rstd = tl.load(stats_ptr + rows + r, mask=there, other=0.0)
        else:
            rstd = tl.load(stats_ptr + r, mask=there, other=0.0)
        along = tl.zeros([TILE_R], tl.float32)
        level = tl.zeros([TILE_R], tl.float32)
        for first in tl.range(0, columns, TILE_C, num_stages=STAGES):
            c = first + tl.arange(0, TILE_C)
            within = c < columns
            inside = there[:, None] & within[None, :]
            dy = tl.load(dy_ptr + r[:, None] * dy_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
            h = tl.load(h_ptr + r[:, None] * h_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
            normed = tl.where(inside, (h - mean[:, None]) * rstd[:, None], 0.0)
            grad = dy * tl.load(weight_ptr + c, mask=within, other=0.0).to(tl.float32)[None, :]
            along += tl.sum(grad * normed, 1)
            if CENTRE:
                level += tl.sum(grad, 1)
            if WEIGHT:
                tl.store(dweight_ptr + tile * columns + c, tl.sum(dy * normed, 0), mask=within)
                if CENTRE:
                    tl.store(dbias_ptr + tile * columns + c, tl.sum(dy, 0), mask=within)
        along /= columns
        level /= columns
        for first in tl.range(0, columns, TILE_C, num_stages=STAGES):
            c = first + tl.arange(0, TILE_C)
            within = c < columns
            inside = there[:, None] & within[None, :]
            dy = tl.load(dy_ptr + r[:, None] * dy_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
            h = tl.load(h_ptr + r[:, None] * h_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
            normed = (h - mean[:, None]) * rstd[:, None]
            grad = dy * tl.load(weight_ptr + c, mask=within, other=0.0).to(tl.float32)[None, :]
            dh = (grad - level[:, None] - normed * along[:, None]) * rstd[:, None]
            if RESIDUAL:
                at = residual_ptr + r[:, None] * residual_stride + c[None, :]
                dh += tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            tl.store(dh_ptr + r[:, None] * columns + c[None, :], dh.to(dh_ptr.dtype.element_ty), mask=inside)


def _rows_adjacent(x: Tensor) -> Tensor:
    """x where its rows are stored in one piece each, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _flags(quantizer: Quantizer, made: QuantizedTensor) -> dict[str, Any]:
    """The constants by which the kernels are compiled for `quantizer`."""
    return {"SCALED": made.scale_inv is not None, "AMAX": quantizer.amax is not None, "ROWWISE": quantizer.rowwise}


def _rowwise_first(quantizer: Quantizer) -> tuple[Quantizer, Callable[[QuantizedTensor], QuantizedTensor]]:
    """The rowwise quantizer of a kernel that holds whole rows, and the function that adds the columnwise layout afterwards.

    A columnwise store and a sum over a row want opposite tiles. Transposing FP8 bytes afterwards moves 2 bytes an element, less
    than a second read of the rows in tiles.
    """
    if not quantizer.columnwise:
        return quantizer, lambda made: made

    def turned(made: QuantizedTensor) -> QuantizedTensor:
        assert made.rowwise_data is not None
        columnwise = made.rowwise_data.t().contiguous() if quantizer.scale is None else transpose(made.rowwise_data)
        return of_one_scale(made.rowwise_data if quantizer.rowwise else None, columnwise, made.scale_inv)

    return quantizer._replace(rowwise=True, columnwise=False), turned


def launch(
    kind: str, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, quantizer: Quantizer,
    *, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, QuantizedTensor]:  # fmt: skip
    """Run the forward kernel; see `norm`. `tile` takes tiles also where nothing is transposed."""
    (rows, columns), centre, device = x.shape, _CENTRED[kind], x.device
    stats = torch.empty((2, rows) if centre else rows, dtype=torch.float32, device=device)
    quantizer, turned = _rowwise_first(quantizer)
    made = allocate(quantizer, rows, columns, device)
    if x.numel() == 0:
        return x if delta is None else x + delta, stats, turned(without_elements(quantizer, made))
    read = _rows_adjacent(x)
    added = None if delta is None else _rows_adjacent(delta)
    h = read if delta is None else torch.empty(rows, columns, dtype=x.dtype, device=device)
    flags = _flags(quantizer, made) | {"CENTRE": centre, "ADD": delta is not None, "BIAS": bias is not None}
    pointers = (
        read,
        added,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        h,
        stats,
        quantizer.scale,
        quantizer.amax,
    )
    strides = (read.stride(0), 0 if added is None else added.stride(0))
    processors = _processors(device)
    if tile is None and columns <= WIDEST_ROW:
        shape = forward_shape(columns)
        norm_rows[(shape.grid(rows, processors),)](
            *pointers, made.rowwise_data, made.scale_inv, rows, columns, *strides, eps,
            BLOCK=shape.block, REST=shape.rest, num_warps=shape.warps, **flags,
        )  # fmt: skip
    else:
        tile = tile or _TILE
        _norm_tiles[(min(triton.cdiv(rows, tile.rows), processors * tile.programs),)](
            *pointers, made.rowwise_data, made.scale_inv, rows, columns, *strides, h.stride(0), eps,
            TILE_R=tile.rows, TILE_C=tile.columns, STAGES=tile.stages, num_warps=tile.warps, **flags,
        )  # fmt: skip
    return x if delta is None else h, stats, turned(made)


def launch_backward(
    kind: str, dy: Tensor, h: Tensor, weight: Tensor, stats: Tensor, d_residual: Tensor | None,
    *, want_weight: bool = True, tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Run the backward kernel; see `norm_backward`. `tile` takes tiles also where nothing is transposed."""
    (rows, columns), centre, device = h.shape, _CENTRED[kind], h.device
    dh = torch.empty(rows, columns, dtype=h.dtype, device=device)
    processors = _processors(device)
    if tile is None and columns <= WIDEST_ROW:
        shape = backward_shape(columns, centred=centre)
        parts = grid = shape.grid(rows, processors)
    else:
        tile = tile or _TILE
        parts = triton.cdiv(rows, tile.rows)
        grid = min(parts, processors * tile.programs)
    partial = torch.empty(1 + centre, parts, columns, dtype=torch.float32, device=device) if want_weight else None
    dweight, dbias = (None, None) if partial is None else (partial[0], partial[1] if centre else None)
    if h.numel():
        dy, read = _rows_adjacent(dy), _rows_adjacent(h)
        residual = None if d_residual is None else _rows_adjacent(d_residual)
        flags = {"CENTRE": centre, "RESIDUAL": residual is not None, "WEIGHT": want_weight}
        pointers = (dy, read, weight.contiguous(), stats, residual, dh, dweight, dbias)
        sizes = (rows, columns, dy.stride(0), read.stride(0), 0 if residual is None else residual.stride(0))
        if tile is None:
            backward_rows[(grid,)](
                *pointers, *sizes,
                BLOCK=shape.block, REST=shape.rest, num_warps=shape.warps, **flags,
            )  # fmt: skip
        else:
            _backward_tiles[(grid,)](
                *pointers, *sizes,
                TILE_R=tile.rows, TILE_C=tile.columns, STAGES=tile.stages, num_warps=tile.warps, **flags,
            )  # fmt: skip
    summed = None if partial is None else add_up(partial)
    d_weight, d_bias = (None, None) if summed is None else (summed[0], summed[1] if centre else None)
    return dh, d_weight, d_bias


def norm(
    kind: str, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, quantizer: Quantizer
) -> tuple[Tensor, Tensor, QuantizedTensor]:
    """Add to the residual stream, and normalise it.

    kind: "RMSNorm" or "LayerNorm". x: [R, C]. delta: like x. weight, bias: [C]. The norm is of h = x + delta, which is rounded
    to x's dtype (without a delta, h is x itself), and stays in float32 until `quantizer` converts it.
    Returns h, the statistics that backward needs (float32: 1/σ [R] of an RMSNorm, mean and 1/σ [2, R] of a LayerNorm), and
    the normed result as `quantizer` says.
    """
    # A conversion to FP8 needs a GPU that has it.
    if x.device.type == "cuda" and (quantizer.scale is None or gemm.is_native(x.device)):
        return launch(kind, x, delta, weight, bias, eps, quantizer)
    h = x if delta is None else x + delta
    normed, stats = reference.norm(kind, h, weight, bias, eps)
    return h, stats, quantize(normed, quantizer)


def norm_backward(
    kind: str, dy: Tensor, h: Tensor, weight: Tensor, stats: Tensor, d_residual: Tensor | None,
    *, want_weight: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of `norm`.

    dy: [R, C], of the normed result. h, stats: what `norm` returned. d_residual: [R, C], what reaches h by other paths.
    Returns the gradient of h, [R, C] in its dtype, and those of weight and bias, float32 [C] (None: not wanted, or an
    RMSNorm's bias).
    """
    if h.device.type == "cuda":
        return launch_backward(kind, dy, h, weight, stats, d_residual, want_weight=want_weight)
    dh, d_weight, d_bias = reference.norm_backward(kind, dy, h, weight, stats, d_residual)
    return dh.to(h.dtype), d_weight if want_weight else None, d_bias if want_weight else None
