"""Activations of an MLP and their gradients, fused with the cast for the next product.

Each input is read once, and the quantizer's layouts are written in the same pass; separate kernels for swiglu, amax, cast and
transpose would read and write each element several times in 16 bits. Backward can recompute the result of forward bit for bit
from the input that it reads anyway: forward then stores no columnwise FP8 for the weight gradient. Sums over rows are partial
sums of the row tiles, added afterwards in a fixed order, so that they repeat bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.column_sum import add_up
from octavo.kernels.fast_math import LOG2_E, exp, exp2, reciprocal
from octavo.kernels.quantize.cast import (
    cast_packed_row,
    larger,
    load_scale,
    record_amax,
    store_layouts,
    store_quantized,
    store_rounded,
)
from octavo.kernels.quantize.packed_transpose import load_row_groups, packed_row, store_packed
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer, allocate, quantize, without_elements
from octavo.kernels.tiles import adjacent_columns, cdiv, load_tile, tile_of

_BELL = tl.constexpr(-0.5 * LOG2_E.value)
_NORMAL = tl.constexpr(0.3989422804014327)  # 1 / √(2π)
_TWICE_SQRT = tl.constexpr(1.5957691216057308)  # 2 · √(2/π)


class Tiles(NamedTuple):
    """Rows and activation columns of a program (powers of two), and its warps."""

    rows: int
    columns: int
    warps: int


# Gated activations hold twice as many inputs and results a column in registers.
FORWARD, FORWARD_GATED, FORWARD_ROWS = Tiles(64, 128, 4), Tiles(64, 64, 4), Tiles(8, 512, 4)
BACKWARD, BACKWARD_GATED, PACKED = Tiles(64, 64, 4), Tiles(64, 64, 8), Tiles(128, 32, 4)
_REGISTERS_RECOMPUTING = 96
"""Register limit of the packed kernel that recomputes, without a gate: five programs fit on a multiprocessor, with 128 four."""


def is_gated(name: str) -> bool:
    """True if the activation has inputs of gate and up, [R, 2F], instead of [R, F]."""
    return reference.activation_named(name).gated


def constants(name: str) -> dict[str, Any]:
    """Compile-time constants of the kernels for an activation."""
    curve, gated, clamp = reference.activation_named(name)
    of_curve: dict[str, Any] = {"CURVE": curve, "GATED": gated}
    return of_curve if clamp is None else of_curve | {"LIMIT": clamp.limit, "ALPHA": clamp.alpha, "OFFSET": clamp.offset}


@triton.jit
def _normal_below(x, bell):
    """Φ(x), the share of a normal distribution below x; bell = exp(-x²/2)."""
    # The library's erf alone limits a kernel to less than half of the copy's speed. A polynomial in t = 1 / (1 + 0.265 |x|),
    # fitted to the smooth Φ(-|x|) / bell, has a relative error of 6.4e-7 in float64 for |x| up to 14.
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
def _value_and_slope(x, CURVE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """f(x) and its derivative, float32; an unused result is not computed. With a LIMIT, at min(x, LIMIT).

    Explicit `tl.fma` in sums of products: the same x gives the same f(x) in every kernel.
    """
    if LIMIT is not None:
        x = tl.where(x > LIMIT, LIMIT, x)  # NaN passes
    if CURVE == "relu":
        value = tl.where(x < 0.0, 0.0, x)
        slope = tl.where(x > 0.0, 1.0, tl.where(x <= 0.0, 0.0, x))
    elif CURVE == "sigmoid":
        value = reciprocal(1.0 + exp(-x))
        slope = value * (1.0 - value)
    elif CURVE == "quick_gelu":
        sigmoid = reciprocal(1.0 + exp(-(x * ALPHA)))
        value = x * sigmoid
        slope = tl.fma(value * (1.0 - sigmoid), ALPHA, sigmoid)
    elif CURVE == "relu2":
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
        # ½(1 + tanh z) is sigmoid(2z), which is 0 or 1 long before the bound, so that finite elements never give ∞ · 0.
        square = tl.minimum(x * x, 1e4)
        twice_z = x * _TWICE_SQRT * tl.fma(square, 0.044715, 1.0)
        sigmoid = reciprocal(1.0 + exp(-twice_z))
        value = x * sigmoid
        slope = tl.fma(value * (1.0 - sigmoid), tl.fma(square, 0.134145, 1.0) * _TWICE_SQRT, sigmoid)
    return value, slope


@triton.jit
def _factor(up, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """The factor of a gate's value: up, or with a LIMIT clamp(up, ±LIMIT) + OFFSET."""
    if LIMIT is not None:  # no early return: the compiler reads the code after it too
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + OFFSET
    return up


@triton.jit
def _through_gate(grad, gate, LIMIT: tl.constexpr):
    """The gradient of a gate from that of min(gate, LIMIT): 0 beyond the limit, whatever arrives there, NaN too."""
    if LIMIT is not None:
        grad = tl.where(gate > LIMIT, 0.0, grad)
    return grad


@triton.jit
def _through_factor(grad, up, LIMIT: tl.constexpr):
    """The gradient of up from that of its factor."""
    if LIMIT is not None:
        grad = tl.where(tl.abs(up) > LIMIT, 0.0, grad)
    return grad


@triton.jit
def _gate_columns(c, BLOCK: tl.constexpr):
    """Columns of the gates for activation columns c, in blocks of BLOCK; 0: all gates come before all ups."""
    if BLOCK == 0:
        return c
    return (c // BLOCK) * (2 * BLOCK) + c % BLOCK


@triton.jit
def _to_up(columns, BLOCK: tl.constexpr):
    """Columns from a gate to its up."""
    if BLOCK == 0:
        return columns
    return BLOCK


@triton.jit
def _expert_of(tile, columns, experts_ptr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile; each expert has tiles of `ROWS` rows in sequence."""
    return tl.load(experts_ptr + (tile // tl.cdiv(columns, TILE_C)) * TILE_R // ROWS)


@triton.jit
def _load_gated(x_ptr, r, c, stride, columns, inside, BLOCK: tl.constexpr):
    """Gate and up of activation columns c, float32."""
    gates = x_ptr + r[:, None].to(tl.int64) * stride + _gate_columns(c, BLOCK)[None, :]
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    return gate, tl.load(gates + _to_up(columns, BLOCK), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_gated(
    gate, up, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    r, c, rows, columns, inside, one, first, BLOCK: tl.constexpr,
):  # fmt: skip
    """`store_quantized` for two float32 tiles whose columns are interleaved in blocks; `columns` counts those of one."""
    if amax_ptr is not None:
        record_amax(amax_ptr, larger(tl.abs(gate), up))
    if scale_inv_ptr is not None:
        scale = load_scale(scale_ptr, scale_inv_ptr, first)
        gate = gate * scale
        up = up * scale
    BOTH: tl.constexpr = rowwise_ptr is not None and columnwise_ptr is not None
    c = _gate_columns(c, BLOCK)
    store_layouts(gate, rowwise_ptr, columnwise_ptr, r, c, rows, 2 * columns, inside, one, BOTH)
    store_layouts(up, rowwise_ptr, columnwise_ptr, r, c + _to_up(columns, BLOCK), rows, 2 * columns, inside, one, BOTH)


@triton.jit
def activation_tiles(
    x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, rows, columns, stride, one,
    CURVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    weights_ptr=None, experts_ptr=None, experts=0, EXPERT_ROWS: tl.constexpr = 1,
    LIMIT: tl.constexpr = None, ALPHA: tl.constexpr = 1.702, OFFSET: tl.constexpr = 0.0, copy_ptr=None,
):  # fmt: skip
    """An activation of a tile; `weights_ptr` and `experts_ptr` are those of `octavo.kernels.experts`."""
    tile = tl.program_id(0)
    first = tile == 0
    if experts_ptr is not None:
        expert = _expert_of(tile, columns, experts_ptr, TILE_R, TILE_C, EXPERT_ROWS)
        if expert >= experts:
            return
        first = False
        if scale_ptr is not None:
            scale_ptr += expert
        if amax_ptr is not None:
            amax_ptr += expert
    r, c, inside = tile_of(tile, rows, columns, TILE_R, TILE_C)
    if GATED:
        gate, up = _load_gated(x_ptr, r, c, stride, columns, inside, BLOCK)
        y, _ = _value_and_slope(gate, CURVE, LIMIT, ALPHA)
        y = y * _factor(up, LIMIT, OFFSET)
    else:
        y, _ = _value_and_slope(load_tile(x_ptr, r, c, stride, inside), CURVE, LIMIT, ALPHA)
    if weights_ptr is not None:
        y = y * tl.load(weights_ptr + r, mask=r < rows, other=0.0)[:, None]
    if copy_ptr is not None:
        y = store_rounded(y, copy_ptr, r[:, None].to(tl.int64) * columns + c[None, :], inside)
    store_quantized(
        y, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, r, c, rows, columns, inside, one, first,
        rowwise_ptr is not None and columnwise_ptr is not None,
    )  # fmt: skip


@triton.jit
def _weighted(y, dy, r, rows, tile, columns, weights_ptr, d_weights_ptr, TILE_C: tl.constexpr):
    """The result and its gradient times the rows' weights; stores this tile's part of the weights' gradients."""
    if weights_ptr is not None:  # no early return: the compiler reads the code after it too
        across = tl.cdiv(columns, TILE_C)
        weight = tl.load(weights_ptr + r, mask=r < rows, other=0.0)[:, None]
        if d_weights_ptr is not None:
            at = d_weights_ptr + (tile % across).to(tl.int64) * rows + r  # rows side by side, as they are stored
            tl.store(at, tl.sum(dy * y, 1), mask=r < rows)
        y, dy = y * weight, dy * weight
    return y, dy


@triton.jit
def activation_backward_tiles(
    dy_ptr, x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    y_scale_ptr, y_amax_ptr, y_rowwise_ptr, y_columnwise_ptr, y_scale_inv_ptr, partial_ptr,
    rows, columns, dy_stride, x_stride, one,
    CURVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    weights_ptr=None, d_weights_ptr=None, experts_ptr=None, experts=0, EXPERT_ROWS: tl.constexpr = 1,
    LIMIT: tl.constexpr = None, ALPHA: tl.constexpr = 1.702, OFFSET: tl.constexpr = 0.0, copy_ptr=None,
):  # fmt: skip
    """The gradient of a tile, and the recomputed result; see `activation_tiles`."""
    tile = tl.program_id(0)
    row_tile = tile // tl.cdiv(columns, TILE_C)
    first = tile == 0
    if experts_ptr is not None:
        expert = _expert_of(tile, columns, experts_ptr, TILE_R, TILE_C, EXPERT_ROWS)
        if expert >= experts:
            return
        first = False
        if scale_ptr is not None:
            scale_ptr += expert
        if amax_ptr is not None:
            amax_ptr += expert
        if y_scale_ptr is not None:
            y_scale_ptr += expert
        if y_amax_ptr is not None:
            y_amax_ptr += expert
    r, c, inside = tile_of(tile, rows, columns, TILE_R, TILE_C)
    dy = load_tile(dy_ptr, r, c, dy_stride, inside)
    if GATED:
        gate, up = _load_gated(x_ptr, r, c, x_stride, columns, inside, BLOCK)
        value, slope = _value_and_slope(gate, CURVE, LIMIT, ALPHA)
        factor = _factor(up, LIMIT, OFFSET)
        y = value * factor
        y, dy = _weighted(y, dy, r, rows, tile, columns, weights_ptr, d_weights_ptr, TILE_C)
        d_gate = _through_gate(dy * factor * slope, gate, LIMIT)
        d_up = _through_factor(dy * value, up, LIMIT)
        if partial_ptr is not None:
            partial = partial_ptr + row_tile.to(tl.int64) * (2 * columns) + _gate_columns(c, BLOCK)
            tl.store(partial, tl.sum(d_gate, 0), mask=c < columns)
            tl.store(partial + _to_up(columns, BLOCK), tl.sum(d_up, 0), mask=c < columns)
        if copy_ptr is not None:
            at = r[:, None].to(tl.int64) * (2 * columns) + _gate_columns(c, BLOCK)[None, :]
            d_gate = store_rounded(d_gate, copy_ptr, at, inside)
            d_up = store_rounded(d_up, copy_ptr, at + _to_up(columns, BLOCK), inside)
        _store_gated(
            d_gate, d_up, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
            r, c, rows, columns, inside, one, first, BLOCK,
        )  # fmt: skip
    else:
        y, slope = _value_and_slope(load_tile(x_ptr, r, c, x_stride, inside), CURVE, LIMIT, ALPHA)
        y, dy = _weighted(y, dy, r, rows, tile, columns, weights_ptr, d_weights_ptr, TILE_C)
        dx = dy * slope
        if partial_ptr is not None:
            tl.store(partial_ptr + row_tile.to(tl.int64) * columns + c, tl.sum(dx, 0), mask=c < columns)
        if copy_ptr is not None:
            dx = store_rounded(dx, copy_ptr, r[:, None].to(tl.int64) * columns + c[None, :], inside)
        store_quantized(
            dx, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, r, c, rows, columns, inside, one, first,
            rowwise_ptr is not None and columnwise_ptr is not None,
        )  # fmt: skip
    store_quantized(
        y, y_scale_ptr, y_amax_ptr, y_rowwise_ptr, y_columnwise_ptr, y_scale_inv_ptr,
        r, c, rows, columns, inside, one, first, y_rowwise_ptr is not None and y_columnwise_ptr is not None,
    )  # fmt: skip


@triton.jit
def activation_backward_packed(
    dy_ptr, x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    y_scale_ptr, y_amax_ptr, y_rowwise_ptr, y_columnwise_ptr, y_scale_inv_ptr, partial_ptr,
    rows, columns, dy_stride, x_stride,
    CURVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    weights_ptr=None, d_weights_ptr=None, experts_ptr=None, experts=0, EXPERT_ROWS: tl.constexpr = 1,
    LIMIT: tl.constexpr = None, ALPHA: tl.constexpr = 1.702, OFFSET: tl.constexpr = 0.0,
):  # fmt: skip
    """`activation_backward_tiles` into FP8 in both layouts: bytes of four rows are packed before they are transposed."""
    GROUPS_R: tl.constexpr = TILE_R // 4
    tile = tl.program_id(0)
    first = tile == 0
    if experts_ptr is not None:
        expert = _expert_of(tile, columns, experts_ptr, TILE_R, TILE_C, EXPERT_ROWS)
        if expert >= experts:
            return
        first = False
        scale_ptr += expert
        if amax_ptr is not None:
            amax_ptr += expert
        if y_scale_ptr is not None:
            y_scale_ptr += expert
    g, c, inside = tile_of(tile, rows // 4, columns, GROUPS_R, TILE_C)
    at = _gate_columns(c, BLOCK) if GATED else c
    width = 2 * columns if GATED else columns
    dys = load_row_groups(dy_ptr, g, c, dy_stride, inside)
    xs = load_row_groups(x_ptr, g, at, x_stride, inside)
    if GATED:
        to_up = _to_up(columns, BLOCK)
        ups = load_row_groups(x_ptr, g, at + to_up, x_stride, inside)
    scale = load_scale(scale_ptr, scale_inv_ptr, first)
    y_scale = load_scale(y_scale_ptr, y_scale_inv_ptr, first)
    none = tl.zeros([GROUPS_R, TILE_C], tl.float32)
    before, before_up, before_y, largest, summed, summed_up = none, none, none, none, none, none
    empty = tl.zeros([GROUPS_R, TILE_C], tl.int32)
    packed, packed_up, packed_y = empty, empty, empty
    for i in tl.static_range(4):
        dy = dys[i].to(tl.float32)
        if GATED:
            gate, up = xs[i].to(tl.float32), ups[i].to(tl.float32)
            value, slope = _value_and_slope(gate, CURVE, LIMIT, ALPHA)
            factor = _factor(up, LIMIT, OFFSET)
            y = value * factor
            y, dy = _weighted(y, dy, g * 4 + i, rows, tile, columns, weights_ptr, d_weights_ptr, TILE_C)
            dx = _through_gate(dy * factor * slope, gate, LIMIT)
            d_up = _through_factor(dy * value, up, LIMIT)
            packed_up, before_up, largest, summed_up = cast_packed_row(
                d_up, i, packed_up, before_up, largest, summed_up, scale, amax_ptr, partial_ptr, rowwise_ptr, columnwise_ptr,
                g, at + to_up, rows, width, inside,
            )  # fmt: skip
        else:
            y, slope = _value_and_slope(xs[i].to(tl.float32), CURVE, LIMIT, ALPHA)
            y, dy = _weighted(y, dy, g * 4 + i, rows, tile, columns, weights_ptr, d_weights_ptr, TILE_C)
            dx = dy * slope
        packed, before, largest, summed = cast_packed_row(
            dx, i, packed, before, largest, summed, scale, amax_ptr, partial_ptr, rowwise_ptr, columnwise_ptr,
            g, at, rows, width, inside,
        )  # fmt: skip
        if y_columnwise_ptr is not None:
            y = y * y_scale
            packed_y = packed_row(packed_y, before_y, y, i, y_columnwise_ptr.dtype.element_ty)
            before_y = y
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)
    store_packed(packed, columnwise_ptr, g, at, rows, inside)
    if GATED:
        store_packed(packed_up, columnwise_ptr, g, at + to_up, rows, inside)
    if y_columnwise_ptr is not None:
        store_packed(packed_y, y_columnwise_ptr, g, c, rows, inside)
    if partial_ptr is not None:
        partial = partial_ptr + (tile // tl.cdiv(columns, TILE_C)).to(tl.int64) * width + at
        tl.store(partial, tl.sum(summed, 0), mask=c < columns)
        if GATED:
            tl.store(partial + to_up, tl.sum(summed_up, 0), mask=c < columns)


def packs(quantizer: Quantizer, recompute: Quantizer | None) -> bool:
    """True if `activation_backward_packed` can store this: both layouts of the gradient, only the columnwise result, no
    amax."""
    if recompute is not None and (recompute.scale is None or recompute.amax is not None or recompute.rowwise):
        return False
    return quantizer.scale is not None and quantizer.rowwise and quantizer.columnwise


def launch(
    name: str,
    x: Tensor,
    block: int,
    quantizer: Quantizer,
    *,
    high_precision_out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> QuantizedTensor:
    """Run the kernel; see `activation`."""
    gated = is_gated(name)
    x = adjacent_columns(x)
    rows, columns = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = allocate(quantizer, rows, columns, x.device)
    block = 0 if block == columns else block
    if x.numel() == 0:
        return without_elements(quantizer, out)
    tiles = tiles or (FORWARD_ROWS if not quantizer.columnwise else FORWARD_GATED if gated else FORWARD)
    activation_tiles[(cdiv(rows, tiles.rows) * cdiv(columns, tiles.columns),)](
        x, quantizer.scale, quantizer.amax, out.rowwise_data, out.columnwise_data, out.scale_inv,
        rows, columns, x.stride(0), 1.0, copy_ptr=high_precision_out,
        BLOCK=block, TILE_R=tiles.rows, TILE_C=tiles.columns, num_warps=tiles.warps, **constants(name),
    )  # fmt: skip
    return out


def launch_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    block: int,
    quantizer: Quantizer,
    *,
    recompute: Quantizer | None = None,
    bias: bool = False,
    high_precision_out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor | None, Tensor | None]:
    """Run the kernel; see `activation_backward`. `tiles`: for the kernel without packing."""
    gated = is_gated(name)
    x, dy = adjacent_columns(x), adjacent_columns(dy)
    (rows, columns), width = dy.shape, x.shape[1]
    block = 0 if block == columns else block
    y_quantizer = recompute or Quantizer(torch.float32, rowwise=False)
    dx = allocate(quantizer, rows, width, x.device)
    y = allocate(y_quantizer, rows, columns, x.device)
    packed = tiles is None and high_precision_out is None and rows % 4 == 0 and packs(quantizer, recompute)
    tiles = PACKED if packed else tiles or (BACKWARD_GATED if gated else BACKWARD)
    row_tiles = cdiv(rows, tiles.rows)
    partial = torch.empty(row_tiles, width, dtype=torch.float32, device=x.device) if bias else None
    if x.numel() == 0:
        without_elements(quantizer, dx)
        without_elements(y_quantizer, y)
    else:
        run, options = (
            (activation_backward_packed, {})
            if packed
            else (activation_backward_tiles, {"one": 1.0, "copy_ptr": high_precision_out})
        )
        registers = _REGISTERS_RECOMPUTING if packed and not gated and recompute is not None else None
        run[(row_tiles * cdiv(columns, tiles.columns),)](
            dy, x, quantizer.scale, quantizer.amax, dx.rowwise_data, dx.columnwise_data, dx.scale_inv,
            y_quantizer.scale, y_quantizer.amax, y.rowwise_data, y.columnwise_data, y.scale_inv,
            partial, rows, columns, dy.stride(0), x.stride(0),
            BLOCK=block, TILE_R=tiles.rows, TILE_C=tiles.columns, num_warps=tiles.warps, maxnreg=registers,
            **constants(name), **options,
        )  # fmt: skip
    return dx, None if recompute is None else y, None if partial is None else add_up(partial)


def activation(
    name: str, x: Tensor, block: int, quantizer: Quantizer, *, high_precision_out: Tensor | None = None
) -> QuantizedTensor:
    """An activation [R, F], computed in float32 and stored by `quantizer`.

    name: an activation of `reference.activation_named`. x: [R, F], or for gated ones [R, 2F]: gate and up interleaved in blocks
    of `block` columns (a power of two, or F for all gates before all ups), gate first. high_precision_out: contiguous [R, F],
    receives the result in its dtype; `quantizer` then converts that rounded result.
    """
    if gemm.is_native(x.device):
        return launch(name, x, block, quantizer, high_precision_out=high_precision_out)
    y = reference.activation(name, x, block)
    if high_precision_out is not None:
        y = high_precision_out.copy_(y).float()
    return quantize(y, quantizer)


def activation_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    block: int,
    quantizer: Quantizer,
    *,
    recompute: Quantizer | None = None,
    bias: bool = False,
    high_precision_out: Tensor | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor | None, Tensor | None]:
    """The gradient of `activation`'s input x, computed in float32 and stored by `quantizer`.

    dy: [R, F]. recompute: also the result of forward, with its bits, stored by this quantizer. bias: also the float32 sum
    of the gradient over rows before rounding, [F] or [2F]. high_precision_out: contiguous, of x's shape, receives the
    gradient in its dtype; `quantizer` then converts that rounded result.
    """
    if gemm.is_native(x.device):
        return launch_backward(
            name, dy, x, block, quantizer, recompute=recompute, bias=bias, high_precision_out=high_precision_out
        )
    dx = reference.activation_backward(name, dy, x, block)
    total = dx.sum(0) if bias else None
    if high_precision_out is not None:
        dx = high_precision_out.copy_(dx).float()
    y = None if recompute is None else quantize(reference.activation(name, x, block), recompute)
    return quantize(dx, quantizer), y, total
