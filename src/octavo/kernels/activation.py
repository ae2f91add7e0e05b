"""Activations between the two products of an MLP, fused with the cast for the second product; and their gradients.

Apart, swiglu, its amax, its cast and its transpose read and write a hidden element in 16 bits several times; here each input is
read once and the layouts of the quantizer are written. Backward can recompute the result of forward from its input, which it
reads anyway: forward then stores no columnwise FP8 for the weight gradient. On a GPU both passes round alike. Sums over rows
are partial sums of the row tiles, added afterwards in a fixed order, so that they repeat bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.column_sum import add_up
from octavo.kernels.fast_math import LOG2_E, exp, exp2, reciprocal
from octavo.kernels.quantize.cast import larger, record_amax, store_layouts
from octavo.kernels.quantize.packed_transpose import groups_inside, load_fours, packed_row, store_packed
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor, Quantizer, allocate, quantize, without_elements

ACTIVATIONS = tuple(reference.ACTIVATIONS)

_BELL = tl.constexpr(-0.5 * LOG2_E.value)
_NORMAL = tl.constexpr(0.3989422804014327)  # 1 / √(2π)
_TWICE_SQRT = tl.constexpr(1.5957691216057308)  # 2 · √(2/π)


class Tiles(NamedTuple):
    """How a kernel cuts its work: rows and activation columns a program (powers of two), and warps."""

    rows: int
    columns: int
    warps: int


# Gated ones hold twice as many inputs and results a column in registers.
FORWARD, FORWARD_GATED, FORWARD_ROWS = Tiles(64, 128, 4), Tiles(64, 64, 4), Tiles(8, 512, 4)
BACKWARD, BACKWARD_GATED = Tiles(64, 64, 4), Tiles(64, 64, 8)
GROUPS, GROUP_COLUMNS, GROUP_WARPS = 32, 32, 4
"""Tile of `_backward_by_fours`: groups of four rows, columns, warps."""


def is_gated(name: str) -> bool:
    """Whether the activation takes gate and up, [R, 2F], rather than [R, F]."""
    return reference.ACTIVATIONS[name][1]


@triton.jit
def _normal_below(x, bell):
    """Φ(x), the share of a normal distribution below x; bell = exp(-x²/2).

    The library's erf alone holds a kernel below half of the copy's speed. Φ(-|x|) / bell is smooth, and a polynomial in
    t = 1 / (1 + 0.265 |x|), fitted to it for the least relative error, has one of 6.4e-7 in float64 for |x| up to 14.
    """
    t = reciprocal(tl.fma(tl.abs(x), 0.265, 1.0))
    tail = tl.fma(t, -0.06778905, 0.19527978)
    tail = tl.fma(tail, t, -0.06637155)
    tail = tl.fma(tail, t, 0.14249876)
    tail = tl.fma(tail, t, 0.08294492)
    tail = tl.fma(tail, t, 0.10783699)
    tail = tl.fma(tail, t, 0.10559983)
    tail = tail * t * bell
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def _value_and_slope(x, CURVE: tl.constexpr):
    """f(x) and its derivative, float32. Whatever is not used is not computed.

    Where f(x) has a sum of products it says which are fused, so that the same x gives the same f(x) in every kernel.
    """
    if CURVE == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)  # NaN passes
        value = positive * positive
        slope = 2.0 * positive
    elif CURVE == "silu":
        sigmoid = reciprocal(1.0 + exp(-x))
        value = x * sigmoid
        slope = tl.fma(value, 1.0 - sigmoid, sigmoid)
    elif CURVE == "gelu":
        bell = exp2((x * x) * _BELL)
        below = _normal_below(x, bell)
        value = x * below
        slope = tl.fma(x * _NORMAL, bell, below)
    else:
        tl.static_assert(CURVE == "gelu_tanh")
        # ½(1 + tanh z) is sigmoid(2z), which is 0 or 1 long before the bound: it keeps ∞ · 0 from finite elements.
        square = tl.minimum(x * x, 1e4)
        twice_z = x * _TWICE_SQRT * tl.fma(square, 0.044715, 1.0)
        sigmoid = reciprocal(1.0 + exp(-twice_z))
        value = x * sigmoid
        slope = tl.fma(value * (1.0 - sigmoid), tl.fma(square, 0.134145, 1.0) * _TWICE_SQRT, sigmoid)
    return value, slope


@triton.jit
def _gate_columns(c, BLOCK: tl.constexpr):
    """Where the gates of activation columns c stand; their ups stand BLOCK further on."""
    return (c // BLOCK) * (2 * BLOCK) + c % BLOCK


@triton.jit
def _load_gated(x_ptr, r, c, columns, stride, inside, BLOCK: tl.constexpr):
    """Gate and up of activation columns c, float32."""
    gates = x_ptr + r[:, None].to(tl.int64) * stride + _gate_columns(c, BLOCK)[None, :]
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    return gate, tl.load(gates + BLOCK, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scaled(y, scale_ptr, scale_inv_ptr, tile):
    """What is rounded and stored of a float32 tile: without a scale_inv to write, the tile itself."""
    if scale_inv_ptr is not None:
        scale = tl.load(scale_ptr)
        if tile == 0:
            tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
        y = y * scale
    return y


@triton.jit
def _finish(
    y, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    r, c, rows, columns, inside, one, tile,
):  # fmt: skip
    """Record and store a float32 tile [r, c]; a pointer that is None was not asked for."""
    if amax_ptr is not None:
        record_amax(amax_ptr, y)
    y = _scaled(y, scale_ptr, scale_inv_ptr, tile)
    ROWWISE: tl.constexpr = rowwise_ptr is not None
    COLUMNWISE: tl.constexpr = columnwise_ptr is not None
    store_layouts(y, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, ROWWISE, COLUMNWISE, ROWWISE and COLUMNWISE)


@triton.jit
def _finish_gated(
    gate, up, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    r, c, rows, columns, inside, one, tile, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_finish` for two float32 tiles whose columns are interleaved in blocks; `columns` counts those of one."""
    if amax_ptr is not None:
        record_amax(amax_ptr, larger(tl.abs(gate), up))
    gate = _scaled(gate, scale_ptr, scale_inv_ptr, tile)
    up = _scaled(up, scale_ptr, scale_inv_ptr, 1)
    ROWWISE: tl.constexpr = rowwise_ptr is not None
    COLUMNWISE: tl.constexpr = columnwise_ptr is not None
    TWICE: tl.constexpr = ROWWISE and COLUMNWISE
    c = _gate_columns(c, BLOCK)
    store_layouts(gate, rowwise_ptr, columnwise_ptr, r, c, rows, 2 * columns, inside, one, ROWWISE, COLUMNWISE, TWICE)
    store_layouts(up, rowwise_ptr, columnwise_ptr, r, c + BLOCK, rows, 2 * columns, inside, one, ROWWISE, COLUMNWISE, TWICE)


@triton.jit
def _forward(
    x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    rows, columns, stride, one,
    CURVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(columns, TILE_C)
    r = (tile // tiles_across) * TILE_R + tl.arange(0, TILE_R)
    c = (tile % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    if GATED:
        gate, up = _load_gated(x_ptr, r, c, columns, stride, inside, BLOCK)
        y, _ = _value_and_slope(gate, CURVE)
        y = y * up
    else:
        x = tl.load(x_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        y, _ = _value_and_slope(x, CURVE)
    _finish(
        y, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, r, c, rows, columns, inside, one, tile
    )  # fmt: skip


@triton.jit
def _backward(
    dy_ptr, x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    y_scale_ptr, y_amax_ptr, y_rowwise_ptr, y_columnwise_ptr, y_scale_inv_ptr, partial_ptr,
    rows, columns, dy_stride, x_stride, one,
    CURVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(columns, TILE_C)
    r = (tile // tiles_across) * TILE_R + tl.arange(0, TILE_R)
    c = (tile % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    dy = tl.load(dy_ptr + r[:, None].to(tl.int64) * dy_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    partial = partial_ptr
    if GATED:
        gate, up = _load_gated(x_ptr, r, c, columns, x_stride, inside, BLOCK)
        value, slope = _value_and_slope(gate, CURVE)
        y = value * up
        d_gate = dy * up * slope
        d_up = dy * value
        if partial_ptr is not None:
            partial = partial_ptr + (tile // tiles_across).to(tl.int64) * (2 * columns) + _gate_columns(c, BLOCK)
            tl.store(partial, tl.sum(d_gate, 0), mask=c < columns)
            tl.store(partial + BLOCK, tl.sum(d_up, 0), mask=c < columns)
        _finish_gated(
            d_gate, d_up, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
            r, c, rows, columns, inside, one, tile, BLOCK,
        )  # fmt: skip
    else:
        x = tl.load(x_ptr + r[:, None].to(tl.int64) * x_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        y, slope = _value_and_slope(x, CURVE)
        dx = dy * slope
        if partial_ptr is not None:
            partial = partial_ptr + (tile // tiles_across).to(tl.int64) * columns + c
            tl.store(partial, tl.sum(dx, 0), mask=c < columns)
        _finish(
            dx, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, r, c, rows, columns, inside, one, tile
        )  # fmt: skip
    if RECOMPUTE:
        _finish(
            y, y_scale_ptr, y_amax_ptr, y_rowwise_ptr, y_columnwise_ptr, y_scale_inv_ptr,
            r, c, rows, columns, inside, one, tile,
        )  # fmt: skip


@triton.jit
def _backward_by_fours(
    dy_ptr, x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    y_scale_ptr, y_amax_ptr, y_rowwise_ptr, y_columnwise_ptr, y_scale_inv_ptr, partial_ptr,
    rows, columns, dy_stride, x_stride,
    CURVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """`_backward` into FP8 in both layouts, four rows at a time: their bytes are packed before they are transposed."""
    GROUPS_R: tl.constexpr = TILE_R // 4
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(columns, TILE_C)
    g = (tile // tiles_across) * GROUPS_R + tl.arange(0, GROUPS_R)
    c = (tile % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = groups_inside(g, c, rows, columns)
    at = c
    width = columns
    if GATED:
        at = _gate_columns(c, BLOCK)
        width = 2 * columns
    dys = load_fours(dy_ptr, g, c, dy_stride, inside)
    xs = load_fours(x_ptr, g, at, x_stride, inside)
    if GATED:
        ups = load_fours(x_ptr, g, at + BLOCK, x_stride, inside)
    scale = tl.load(scale_ptr)
    if tile == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    if y_columnwise_ptr is not None:
        y_scale = tl.load(y_scale_ptr)
        if tile == 0:
            tl.store(y_scale_inv_ptr, tl.div_rn(1.0, y_scale))
    none = tl.zeros([GROUPS_R, TILE_C], tl.float32)
    before, before_up, before_y, largest, summed, summed_up = none, none, none, none, none, none
    empty = tl.zeros([GROUPS_R, TILE_C], tl.int32)
    packed, packed_up, packed_y = empty, empty, empty
    for i in tl.static_range(4):
        r = g * 4 + i
        rows_at = r[:, None].to(tl.int64)
        dy = dys[i].to(tl.float32)
        if GATED:
            gate, up = xs[i].to(tl.float32), ups[i].to(tl.float32)
            value, slope = _value_and_slope(gate, CURVE)
            y = value * up
            dx = dy * up * slope
            d_up = dy * value
            if amax_ptr is not None:
                largest = larger(largest, d_up)
            if partial_ptr is not None:
                summed_up += d_up
            d_up = d_up * scale
            tl.store(rowwise_ptr + rows_at * width + (at + BLOCK)[None, :], d_up.to(rowwise_ptr.dtype.element_ty), mask=inside)
            packed_up = packed_row(packed_up, before_up, d_up, i, columnwise_ptr.dtype.element_ty)
            before_up = d_up
        else:
            y, slope = _value_and_slope(xs[i].to(tl.float32), CURVE)
            dx = dy * slope
        if amax_ptr is not None:
            largest = larger(largest, dx)
        if partial_ptr is not None:
            summed += dx
        dx = dx * scale
        tl.store(rowwise_ptr + rows_at * width + at[None, :], dx.to(rowwise_ptr.dtype.element_ty), mask=inside)
        packed = packed_row(packed, before, dx, i, columnwise_ptr.dtype.element_ty)
        before = dx
        if y_columnwise_ptr is not None:
            y = y * y_scale
            packed_y = packed_row(packed_y, before_y, y, i, y_columnwise_ptr.dtype.element_ty)
            before_y = y
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)
    store_packed(packed, columnwise_ptr, g, at, rows, inside)
    if GATED:
        store_packed(packed_up, columnwise_ptr, g, at + BLOCK, rows, inside)
    if y_columnwise_ptr is not None:
        store_packed(packed_y, y_columnwise_ptr, g, c, rows, inside)
    if partial_ptr is not None:
        partial = partial_ptr + (tile // tiles_across).to(tl.int64) * width + at
        tl.store(partial, tl.sum(summed, 0), mask=c < columns)
        if GATED:
            tl.store(partial + BLOCK, tl.sum(summed_up, 0), mask=c < columns)


def _packs(quantizer: Quantizer, rowwise: bool = True) -> bool:
    """Whether `_backward_by_fours` can store this: FP8 in both layouts, or columnwise alone without an amax."""
    return (
        quantizer.scale is not None
        and quantizer.columnwise
        and quantizer.rowwise is rowwise
        and (rowwise or quantizer.amax is None)
    )


def launch(name: str, x: Tensor, block: int, quantizer: Quantizer, *, tiles: Tiles | None = None) -> QuantizedTensor:
    """Run the kernel; see `activation`."""
    curve, gated = reference.ACTIVATIONS[name]
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape[0], x.shape[1] // (2 if gated else 1)
    made = allocate(quantizer, rows, columns, x.device)
    if x.numel() == 0:
        return without_elements(quantizer, made)
    tiles = tiles or (FORWARD_ROWS if not quantizer.columnwise else FORWARD_GATED if gated else FORWARD)
    _forward[(triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns),)](
        x, quantizer.scale, quantizer.amax, made.rowwise_data, made.columnwise_data, made.scale_inv,
        rows, columns, x.stride(0), 1.0,
        CURVE=curve, GATED=gated, BLOCK=block, TILE_R=tiles.rows, TILE_C=tiles.columns, num_warps=tiles.warps,
    )  # fmt: skip
    return made


def launch_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    block: int,
    quantizer: Quantizer,
    *,
    recompute: Quantizer | None = None,
    bias: bool = False,
    tiles: Tiles | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor | None, Tensor | None]:
    """Run the kernel; see `activation_backward`. `tiles`: rows one by one, in tiles of that size."""
    curve, gated = reference.ACTIVATIONS[name]
    x = x if x.stride(-1) == 1 else x.contiguous()
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    (rows, columns), width = dy.shape, x.shape[1]
    made = allocate(quantizer, rows, width, x.device)
    made_y = None if recompute is None else allocate(recompute, rows, columns, x.device)
    by_fours = tiles is None and rows % 4 == 0 and _packs(quantizer) and (recompute is None or _packs(recompute, rowwise=False))
    tiles = Tiles(4 * GROUPS, GROUP_COLUMNS, GROUP_WARPS) if by_fours else tiles or (BACKWARD_GATED if gated else BACKWARD)
    row_tiles = triton.cdiv(rows, tiles.rows)
    partial = torch.empty(row_tiles, width, dtype=torch.float32, device=x.device) if bias else None
    if x.numel() == 0:
        without_elements(quantizer, made)
        if recompute is not None and made_y is not None:
            without_elements(recompute, made_y)
    else:
        y_quantizer, y = recompute or Quantizer(torch.float32), made_y or NOTHING
        pointers = (dy, x, quantizer.scale, quantizer.amax, made.rowwise_data, made.columnwise_data, made.scale_inv)
        y_pointers = (y_quantizer.scale, y_quantizer.amax, y.rowwise_data, y.columnwise_data, y.scale_inv)
        run, forms = (_backward_by_fours, {}) if by_fours else (_backward, {"one": 1.0, "RECOMPUTE": recompute is not None})
        run[(row_tiles * triton.cdiv(columns, tiles.columns),)](
            *pointers, *y_pointers, partial, rows, columns, dy.stride(0), x.stride(0),
            CURVE=curve, GATED=gated, BLOCK=block, TILE_R=tiles.rows, TILE_C=tiles.columns, num_warps=tiles.warps, **forms,
        )  # fmt: skip
    return made, made_y, None if partial is None else add_up(partial)


def activation(name: str, x: Tensor, block: int, quantizer: Quantizer) -> QuantizedTensor:
    """An activation, computed in float32 and stored as `quantizer` says.

    name: one of ACTIVATIONS. x: [R, F], or [R, 2F] for gated ones: gate and up interleaved in blocks of `block` columns (a
    power of two), gate first. The result is [R, F].
    """
    if gemm.is_native(x.device):
        return launch(name, x, block, quantizer)
    return quantize(reference.activation(name, x, block), quantizer)


def activation_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    block: int,
    quantizer: Quantizer,
    *,
    recompute: Quantizer | None = None,
    bias: bool = False,
) -> tuple[QuantizedTensor, QuantizedTensor | None, Tensor | None]:
    """The gradient of `activation`'s input, of the shape of `x`, computed in float32 and stored as `quantizer` says.

    dy: [R, F], the gradient of the result. Also on request: `recompute`, the result of forward from `x`, the same bits as
    forward's; `bias`, the float32 sum of the gradient over rows before it is rounded, [F] or [2F].
    """
    if gemm.is_native(x.device):
        return launch_backward(name, dy, x, block, quantizer, recompute=recompute, bias=bias)
    dx = reference.activation_backward(name, dy, x, block)
    made_y = None if recompute is None else quantize(reference.activation(name, x, block), recompute)
    return quantize(dx, quantizer), made_y, dx.sum(0) if bias else None
