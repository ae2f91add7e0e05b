"""Kernels of `octavo.kernels.norm` for rows that fit into registers, with their numbers of programs and warps.

Blocks are powers of two, rows are not: 1,280 columns in a block of 2,048 leave threads idle. Two blocks one after the other
hold such a row with fewer idle threads: 1,024 and 256.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from octavo.kernels.quantize.cast import load_scale, raise_to, store_rounded
from octavo.kernels.tiles import next_power_of_2


class RowBlocks(NamedTuple):
    """A row in two blocks of columns, `block` and `rest` (0: one block), by `warps`.

    programs: for each multiprocessor, striding over the rows; None: one program a row.
    """

    block: int
    rest: int
    warps: int
    programs: int | None

    def grid(self, rows: int, processors: int) -> int:
        """Number of programs."""
        return rows if self.programs is None else min(rows, processors * self.programs)


# Measured on an H200, widest row → warps. Few warps wait less for the sums of a row, and a single one never, but their threads
# need more registers. Backward, which also sums gradients of the weight, has none to spare.
_FORWARD_WARPS = {1280: 1, 2048: 2, 6144: 4, 8192: 8, 16384: 16}
_BACKWARD_WARPS = {1280: 1, 2048: 2, 4096: 4, 6144: 8, 16384: 16}
_CENTRED_BACKWARD_WARPS = {1280: 1, 2048: 4, 4096: 8, 16384: 16}
WIDEST_ROW = 16384


def _warps(columns: int, table: dict[int, int]) -> int:
    return next(warps for widest, warps in table.items() if columns <= widest)


def _blocks(columns: int) -> tuple[int, int]:
    whole = next_power_of_2(columns)
    first = whole // 2
    rest = next_power_of_2(columns - first) if columns > first else 0
    return (first, rest) if 0 < rest < first else (whole, 0)


@functools.cache
def forward_shape(columns: int) -> RowBlocks:
    """Blocks of `norm_rows`."""
    warps = _warps(columns, _FORWARD_WARPS)
    return RowBlocks(*_blocks(columns), warps, 64 if warps == 1 else None)


@functools.cache
def backward_shape(columns: int, *, centred: bool) -> RowBlocks:
    """Blocks of `backward_rows`, with as many programs as registers allow at once: none waits for the end of another."""
    warps = _warps(columns, _CENTRED_BACKWARD_WARPS if centred else _BACKWARD_WARPS)
    if warps == 1:
        at_once = (12 if columns <= 768 else 8) if centred else (16 if columns <= 1024 else 12)
        return RowBlocks(*_blocks(columns), 1, at_once)
    # Four sums over two blocks each cost more than idle threads.
    block, rest = (next_power_of_2(columns), 0) if centred else _blocks(columns)
    return RowBlocks(block, rest, warps, 16 // warps)


@triton.jit
def residual_sum(x_ptr, delta_ptr, h_ptr, x_at, delta_at, h_at, inside):
    """x, or x + delta rounded to h's dtype and stored there; in float32."""
    if delta_ptr is not None:
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        delta = tl.load(delta_ptr + delta_at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        rounded = (x + delta).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + h_at, rounded, mask=inside)
        h = rounded.to(tl.float32)
    else:
        h = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    return h


@triton.jit
def magnitude(x, inside):
    """|x|; 0 for NaN and outside."""
    return tl.where(inside & (x == x), tl.abs(x), 0.0)


@triton.jit
def load_float32(ptr, at, inside):
    """Elements in float32, 0 outside."""
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_gain(weight_ptr, at, inside, ONE_PLUS: tl.constexpr):
    """The factors of normed elements, float32: weights, or 1 + weights, which 16 bits could not hold."""
    weight = load_float32(weight_ptr, at, inside)
    return weight + 1.0 if ONE_PLUS else weight


@triton.jit
def _store_normed(
    h,
    rstd,
    weight_ptr,
    bias_ptr,
    scale,
    scale_inv_ptr,
    amax_ptr,
    rowwise_ptr,
    copy_ptr,
    c,
    inside,
    ONE_PLUS: tl.constexpr,
):
    """Store the result of a block of a row; its amax."""
    y = h * rstd * load_gain(weight_ptr, c, inside, ONE_PLUS)  # late: held since before the sums, it would keep other rows out
    if bias_ptr is not None:
        y += load_float32(bias_ptr, c, inside)
    if copy_ptr is not None:
        y = store_rounded(y, copy_ptr, c, inside)
    largest = 0.0
    if amax_ptr is not None:
        largest = tl.max(magnitude(y, inside))
    if scale_inv_ptr is not None:
        y = y * scale
    if rowwise_ptr is not None:
        tl.store(rowwise_ptr + c, y.to(rowwise_ptr.dtype.element_ty), mask=inside)
    return largest


@triton.jit
def norm_rows(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, h_ptr, stats_ptr, scale_ptr, amax_ptr, rowwise_ptr, scale_inv_ptr, copy_ptr,
    rows, columns, x_stride, delta_stride, eps, CENTRE: tl.constexpr, ONE_PLUS: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Normalise every so many-th row."""
    c = tl.arange(0, BLOCK)
    inside = c < columns
    if REST:
        c_rest = BLOCK + tl.arange(0, REST)
        inside_rest = c_rest < columns
    scale = load_scale(scale_ptr, scale_inv_ptr, tl.program_id(0) == 0)
    largest = 0.0
    for r in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        x_at, delta_at, h_at, y_at, copy_at = x_ptr + r * x_stride, delta_ptr, h_ptr, rowwise_ptr, copy_ptr
        if delta_ptr is not None:
            delta_at, h_at = delta_ptr + r * delta_stride, h_ptr + r * columns
        h = residual_sum(x_at, delta_at, h_at, c, c, c, inside)
        if REST:
            h_rest = residual_sum(x_at, delta_at, h_at, c_rest, c_rest, c_rest, inside_rest)
        if CENTRE:
            total = tl.sum(h)
            if REST:
                total += tl.sum(h_rest)
            mean = total / columns
            tl.store(stats_ptr + r, mean)
            h = tl.where(inside, h - mean, 0.0)
            if REST:
                h_rest = tl.where(inside_rest, h_rest - mean, 0.0)
        squares = tl.sum(h * h)
        if REST:
            squares += tl.sum(h_rest * h_rest)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(squares / columns + eps))
        tl.store(stats_ptr + (rows if CENTRE else 0) + r, rstd)
        if rowwise_ptr is not None:
            y_at = rowwise_ptr + r * columns
        if copy_ptr is not None:
            copy_at = copy_ptr + r * columns
        block_largest = _store_normed(
            h, rstd, weight_ptr, bias_ptr, scale, scale_inv_ptr, amax_ptr, y_at, copy_at, c, inside, ONE_PLUS
        )
        largest = tl.maximum(largest, block_largest)
        if REST:
            block_largest = _store_normed(
                h_rest, rstd, weight_ptr, bias_ptr, scale, scale_inv_ptr, amax_ptr, y_at, copy_at, c_rest, inside_rest,
                ONE_PLUS,
            )  # fmt: skip
            largest = tl.maximum(largest, block_largest)
    if amax_ptr is not None:
        raise_to(amax_ptr, largest)


@triton.jit
def _load_gradients(
    dy_ptr, h_ptr, weight_ptr, residual_ptr, mean, rstd, c, inside, CENTRE: tl.constexpr, ONE_PLUS: tl.constexpr
):
    """dy, the normed values, their gradient and the residual's gradient of a block of a row."""
    dy = load_float32(dy_ptr, c, inside)
    h = load_float32(h_ptr, c, inside)
    residual = 0.0
    if residual_ptr is not None:  # loaded before the sums: no load is moved across their barriers
        residual = load_float32(residual_ptr, c, inside)
    normed = h * rstd
    if CENTRE:
        normed = tl.where(inside, (h - mean) * rstd, 0.0)
    return dy, normed, dy * load_gain(weight_ptr, c, inside, ONE_PLUS), residual


@triton.jit
def _store_gradients(grad, normed, residual, along, level, rstd, dh_ptr, residual_ptr, c, inside):
    """Store the gradient of a block of a row."""
    dh = (grad - level - normed * along) * rstd
    if residual_ptr is not None:
        dh += residual
    tl.store(dh_ptr + c, dh.to(dh_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_rows(
    dy_ptr, h_ptr, weight_ptr, stats_ptr, residual_ptr, dh_ptr, dweight_ptr, dbias_ptr,
    rows, columns, dy_stride, h_stride, residual_stride, CENTRE: tl.constexpr, ONE_PLUS: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Gradients of every so many-th row, and the program's sum of the gradients of weight and bias."""
    program = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < columns
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    if REST:
        c_rest = BLOCK + tl.arange(0, REST)
        inside_rest = c_rest < columns
        dweight_rest = tl.zeros([REST], tl.float32)
        dbias_rest = tl.zeros([REST], tl.float32)
    for r in range(program, rows, tl.num_programs(0)):
        mean, level = 0.0, 0.0
        if CENTRE:
            mean = tl.load(stats_ptr + r)
        rstd = tl.load(stats_ptr + (rows if CENTRE else 0) + r)
        dy_at, h_at, residual_at = dy_ptr + r * dy_stride, h_ptr + r * h_stride, residual_ptr
        if residual_ptr is not None:
            residual_at = residual_ptr + r * residual_stride
        dy, normed, grad, residual = _load_gradients(
            dy_at, h_at, weight_ptr, residual_at, mean, rstd, c, inside, CENTRE, ONE_PLUS
        )
        if REST:
            dy_rest, normed_rest, grad_rest, residual_rest = _load_gradients(
                dy_at, h_at, weight_ptr, residual_at, mean, rstd, c_rest, inside_rest, CENTRE, ONE_PLUS
            )
        along = tl.sum(grad * normed)
        if CENTRE:
            level = tl.sum(grad)
        if REST:
            along += tl.sum(grad_rest * normed_rest)
            if CENTRE:
                level += tl.sum(grad_rest)
        along /= columns
        level /= columns
        if dweight_ptr is not None:
            dweight += dy * normed
            if CENTRE:
                dbias += dy
            if REST:
                dweight_rest += dy_rest * normed_rest
                if CENTRE:
                    dbias_rest += dy_rest
        dh_at = dh_ptr + r * columns
        _store_gradients(grad, normed, residual, along, level, rstd, dh_at, residual_ptr, c, inside)
        if REST:
            _store_gradients(
                grad_rest, normed_rest, residual_rest, along, level, rstd, dh_at, residual_ptr, c_rest, inside_rest
            )  # fmt: skip
    if dweight_ptr is not None:
        tl.store(dweight_ptr + program * columns + c, dweight, mask=inside)
        if CENTRE:
            tl.store(dbias_ptr + program * columns + c, dbias, mask=inside)
        if REST:
            tl.store(dweight_ptr + program * columns + c_rest, dweight_rest, mask=inside_rest)
            if CENTRE:
                tl.store(dbias_ptr + program * columns + c_rest, dbias_rest, mask=inside_rest)
