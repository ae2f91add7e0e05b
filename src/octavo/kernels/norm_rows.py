"""Kernels of `octavo.kernels.norm` for rows that fit into registers, and how many programs and warps they take.

Registers come in powers of two, rows do not: one of 1,280 in a block of 2,048 leaves most of a program's threads idle. So a row
is taken as two blocks one after the other, where that leaves fewer idle: 1,024 and 256.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from octavo.kernels.quantize.cast import raise_to


class RowBlocks(NamedTuple):
    """How a row is held: in two blocks of columns, `block` and `rest` (0: one block), by `warps`.

    programs: of each multiprocessor, which stride over the rows; None: one program a row.
    """

    block: int
    rest: int
    warps: int
    programs: int | None

    def grid(self, rows: int, processors: int) -> int:
        """Number of programs for so many rows."""
        return rows if self.programs is None else min(rows, processors * self.programs)


# Measured on an H200, widest row → warps. A row of few warps waits less for its sums, one of a single warp never; but its
# threads need more registers, and backward, which sums gradients of the weight beside, has none to spare.
_FORWARD_WARPS = {1280: 1, 2048: 2, 6144: 4, 8192: 8, 16384: 16}
_BACKWARD_WARPS = {1280: 1, 2048: 2, 4096: 4, 6144: 8, 16384: 16}
_CENTRED_BACKWARD_WARPS = {1280: 1, 2048: 4, 4096: 8, 16384: 16}
WIDEST_ROW = 16384


def _warps(columns: int, table: dict[int, int]) -> int:
    return next(warps for widest, warps in table.items() if columns <= widest)


def _blocks(columns: int) -> tuple[int, int]:
    whole = triton.next_power_of_2(columns)
    first = whole // 2
    rest = triton.next_power_of_2(columns - first) if columns > first else 0
    return (first, rest) if 0 < rest < first else (whole, 0)


def forward_shape(columns: int) -> RowBlocks:
    """For `norm_rows`."""
    warps = _warps(columns, _FORWARD_WARPS)
    return RowBlocks(*_blocks(columns), warps, 64 if warps == 1 else None)


def backward_shape(columns: int, *, centred: bool) -> RowBlocks:
    """For `backward_rows`: as many programs as registers allow at once, so that none waits for the end of another."""
    warps = _warps(columns, _CENTRED_BACKWARD_WARPS if centred else _BACKWARD_WARPS)
    if warps == 1:
        at_once = (12 if columns <= 768 else 8) if centred else (16 if columns <= 1024 else 12)
        return RowBlocks(*_blocks(columns), 1, at_once)
    # Four sums over two blocks each cost more than idle threads do.
    block, rest = (triton.next_power_of_2(columns), 0) if centred else _blocks(columns)
    return RowBlocks(block, rest, warps, 16 // warps)


@triton.jit
def stream(x_ptr, delta_ptr, h_ptr, x_at, delta_at, h_at, inside, ADD: tl.constexpr):
    """x, or x + delta as it is after rounding to h's dtype and stored there; in float32."""
    if ADD:
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
    """|x|; 0 for NaN and what is outside."""
    return tl.where(inside & (x == x), tl.abs(x), 0.0)


@triton.jit
def load_scale(scale_ptr, scale_inv_ptr, SCALED: tl.constexpr):
    """The scale, whose inverse the first program stores; 1 where the result is not scaled."""
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr)
        if tl.program_id(0) == 0:
            tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    return scale


@triton.jit
def _load(ptr, at, inside):
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_block(y, scale, rowwise_ptr, c, inside, SCALED: tl.constexpr, AMAX: tl.constexpr, ROWWISE: tl.constexpr):
    """Store a block of a row, float32, scaled and rounded; the largest before scaling."""
    largest = 0.0
    if AMAX:
        largest = tl.max(magnitude(y, inside))
    if SCALED:
        y = y * scale
    if ROWWISE:
        tl.store(rowwise_ptr + c, y.to(rowwise_ptr.dtype.element_ty), mask=inside)
    return largest


@triton.jit
def _store_normed(
    h, rstd, weight_ptr, bias_ptr, scale, rowwise_ptr, c, inside,
    BIAS: tl.constexpr, SCALED: tl.constexpr, AMAX: tl.constexpr, ROWWISE: tl.constexpr,
):  # fmt: skip
    """What the forward kernel makes of a block of a row; the largest before scaling."""
    y = h * rstd * _load(weight_ptr, c, inside)  # late: held since before the sums, it would keep other rows out
    if BIAS:
        y += _load(bias_ptr, c, inside)
    return _store_block(y, scale, rowwise_ptr, c, inside, SCALED, AMAX, ROWWISE)


@triton.jit
def norm_rows(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, h_ptr, stats_ptr, scale_ptr, amax_ptr, rowwise_ptr, scale_inv_ptr,
    rows, columns, x_stride, delta_stride, eps,
    CENTRE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    AMAX: tl.constexpr, ROWWISE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """A program normalises every so many-th row."""
    c = tl.arange(0, BLOCK)
    inside = c < columns
    if REST:
        c_rest = BLOCK + tl.arange(0, REST)
        inside_rest = c_rest < columns
    scale = load_scale(scale_ptr, scale_inv_ptr, SCALED)
    largest = 0.0
    for r in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        x_at, delta_at, at = x_ptr + r * x_stride, delta_ptr, h_ptr
        if ADD:
            delta_at, at = delta_ptr + r * delta_stride, h_ptr + r * columns
        h = stream(x_at, delta_at, at, c, c, c, inside, ADD)
        if REST:
            h_rest = stream(x_at, delta_at, at, c_rest, c_rest, c_rest, inside_rest, ADD)
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
        row_at = rowwise_ptr
        if ROWWISE:
            row_at = rowwise_ptr + r * columns
        found = _store_normed(h, rstd, weight_ptr, bias_ptr, scale, row_at, c, inside, BIAS, SCALED, AMAX, ROWWISE)
        largest = tl.maximum(largest, found)
        if REST:
            found = _store_normed(
                h_rest, rstd, weight_ptr, bias_ptr, scale, row_at, c_rest, inside_rest, BIAS, SCALED, AMAX, ROWWISE
            )
            largest = tl.maximum(largest, found)
    if AMAX:
        raise_to(amax_ptr, largest)


@triton.jit
def _read_gradients(
    dy_ptr, h_ptr, weight_ptr, residual_ptr, mean, rstd, c, inside, CENTRE: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """Of a block of a row: dy, the normed values, their gradient, and the residual's."""
    dy = _load(dy_ptr, c, inside)
    h = _load(h_ptr, c, inside)
    residual = 0.0
    if RESIDUAL:  # asked for before the sums, whose barriers no load is moved across
        residual = _load(residual_ptr, c, inside)
    normed = h * rstd
    if CENTRE:
        normed = tl.where(inside, (h - mean) * rstd, 0.0)
    return dy, normed, dy * _load(weight_ptr, c, inside), residual


@triton.jit
def _store_gradients(
    grad, normed, residual, along, level, rstd, dh_ptr, c, inside, RESIDUAL: tl.constexpr
):  # fmt: skip
    """Store the gradient of a block of a row."""
    dh = (grad - level - normed * along) * rstd
    if RESIDUAL:
        dh += residual
    tl.store(dh_ptr + c, dh.to(dh_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_rows(
    dy_ptr, h_ptr, weight_ptr, stats_ptr, residual_ptr, dh_ptr, dweight_ptr, dbias_ptr,
    rows, columns, dy_stride, h_stride, residual_stride,
    CENTRE: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """A program takes every so many-th row, and leaves its sum of the gradients of weight and bias."""
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
        if RESIDUAL:
            residual_at = residual_ptr + r * residual_stride
        dy, normed, grad, residual = _read_gradients(
            dy_at, h_at, weight_ptr, residual_at, mean, rstd, c, inside, CENTRE, RESIDUAL
        )
        if REST:
            dy_rest, normed_rest, grad_rest, residual_rest = _read_gradients(
                dy_at, h_at, weight_ptr, residual_at, mean, rstd, c_rest, inside_rest, CENTRE, RESIDUAL
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
        if WEIGHT:
            dweight += dy * normed
            if CENTRE:
                dbias += dy
            if REST:
                dweight_rest += dy_rest * normed_rest
                if CENTRE:
                    dbias_rest += dy_rest
        dh_at = dh_ptr + r * columns
        _store_gradients(grad, normed, residual, along, level, rstd, dh_at, c, inside, RESIDUAL)
        if REST:
            _store_gradients(grad_rest, normed_rest, residual_rest, along, level, rstd, dh_at, c_rest, inside_rest, RESIDUAL)
    if WEIGHT:
        tl.store(dweight_ptr + program * columns + c, dweight, mask=inside)
        if CENTRE:
            tl.store(dbias_ptr + program * columns + c, dbias, mask=inside)
        if REST:
            tl.store(dweight_ptr + program * columns + c_rest, dweight_rest, mask=inside_rest)
            if CENTRE:
                tl.store(dbias_ptr + program * columns + c_rest, dbias_rest, mask=inside_rest)
