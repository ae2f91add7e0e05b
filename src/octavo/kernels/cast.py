"""Delayed scaling's cast: one read of a tensor gives FP8 in both layouts, and the amax for the next scale.

A product sums over the last dimension of both its operands, so a tensor that enters two products is needed as it is and
transposed. Doing both in one pass costs 2 bytes read and 2 written an element, against 7 for amax, cast and transpose apart.
Bytes are slow to turn in shared memory, so four rows are packed into one word first, where their number allows.
On devices without FP8 conversions in Triton the reference runs, and the transpose is a view.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.packed_transpose import groups_inside, load_fours, packed_row, store_packed, turned

# Of the tiles tried at 16384 × 4096 on an H200 the fastest: 3.7 TB/s in groups of four rows, 2.7 with rows one by one.
_GROUPS, _GROUP_COLUMNS = 32, 64
_TILE_ROWS, _TILE_COLUMNS, _WARPS = 64, 128, 4
_TURN_TILE = (64, 32, 8)
"""Of `_transpose`: groups of four rows and of four columns, and warps."""


class Into(NamedTuple):
    """What a kernel makes of its float32 result, a matrix [R, C].

    Attributes:
        dtype: an FP8 dtype, or a wide one (bfloat16, float16, float32), to which `scale` and `fp8_max` do not apply.
        fp8_max: the largest value of an FP8 dtype.
        scale: float32 [], what the result is multiplied by before it is rounded to FP8.
        amax: float32 [], raised in place to the largest |result| before scaling; None records nothing.
        row: whether the result is wanted as it is. column: whether it is wanted transposed. Neither measures the amax alone.
    """

    dtype: torch.dtype
    fp8_max: float = 0.0
    scale: Tensor | None = None
    amax: Tensor | None = None
    row: bool = True
    column: bool = False


class Made(NamedTuple):
    """A matrix in the layouts that `Into` asked for: [R, C], [C, R], and float32 [] 1 / scale; None where not asked for."""

    row: Tensor | None
    column: Tensor | None
    scale_inv: Tensor | None


def make(x: Tensor, into: Into) -> Made:
    """`into` in plain PyTorch, from a float32 matrix [R, C]: the definition, and what devices without Triton run."""
    if into.amax is not None:
        into.amax.copy_(torch.maximum(into.amax, reference.amax(x)))
    if not (into.row or into.column):
        return Made(None, None, None)
    if into.scale is None:
        wide, scale_inv = x.to(into.dtype), None
    else:
        wide, scale_inv = reference.cast(x, into.scale, into.dtype, into.fp8_max), reference.divide(1.0, into.scale)
    return Made(wide if into.row else None, wide.t().contiguous() if into.column else None, scale_inv)


def outputs(into: Into, rows: int, columns: int, device: torch.device) -> Made:
    """Memory for what `into` asks for."""
    row = torch.empty(rows, columns, dtype=into.dtype, device=device) if into.row else None
    column = torch.empty(columns, rows, dtype=into.dtype, device=device) if into.column else None
    made = into.scale is not None and (into.row or into.column)
    return Made(row, column, torch.empty((), dtype=torch.float32, device=device) if made else None)


@triton.jit
def record_amax(amax_ptr, x):
    """Raise the float32 at `amax_ptr` to the largest |x| of a float32 tile, NaN ignored; masked elements must be 0."""
    raise_to(amax_ptr, larger(0.0, tl.max(tl.abs(x))))


@triton.jit
def raise_to(amax_ptr, largest):
    """Raise the float32 at `amax_ptr` to one that is not negative."""
    # Non-negative floats order as their bits do, and an integer maximum is one instruction.
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def larger(largest, x):
    """The larger of `largest` and |x|, float32: of a number and NaN a GPU's maximum is the number."""
    return tl.maximum(largest, tl.abs(x))


@triton.jit
def store_layouts(
    x, row_ptr, column_ptr, r, c, rows, columns, inside, one,
    ROW: tl.constexpr, COLUMN: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Convert a float32 tile [r, c] of a matrix [rows, columns] and store it, as it is and transposed.

    The conversion to FP8 is one instruction that saturates: ±inf and what lies beyond the largest value become that, NaN stays.

    `one` is 1.0, given at run time. The ptxas of CUDA 12.9 that Triton brings loses bytes when one conversion from float32 to
    FP8 feeds both stores: a factor that it cannot know to be 1 makes the second a conversion of its own, at no cost that shows.
    """
    if ROW:
        tl.store(row_ptr + r[:, None].to(tl.int64) * columns + c[None, :], x.to(row_ptr.dtype.element_ty), mask=inside)
    if COLUMN:
        if TWICE:
            x = x * one
        q = x.to(column_ptr.dtype.element_ty)
        tl.store(column_ptr + c[:, None].to(tl.int64) * rows + r[None, :], tl.trans(q), mask=tl.trans(inside))


@triton.jit
def _cast_one_by_one(
    x_ptr, scale_ptr, amax_ptr, row_ptr, column_ptr, scale_inv_ptr,
    rows, columns, stride, one,
    COLUMN: tl.constexpr, AMAX: tl.constexpr, TWICE: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(columns, TILE_C)
    r = (tile // tiles_across) * TILE_R + tl.arange(0, TILE_R)
    c = (tile % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    if tile == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    if AMAX:
        record_amax(amax_ptr, x)
    store_layouts(x * scale, row_ptr, column_ptr, r, c, rows, columns, inside, one, True, COLUMN, TWICE)


@triton.jit
def _cast_by_fours(
    x_ptr, scale_ptr, amax_ptr, row_ptr, column_ptr, scale_inv_ptr,
    rows, columns, stride, partial_ptr,
    AMAX: tl.constexpr, ROW: tl.constexpr, GROUPS: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(columns, TILE_C)
    g = (tile // tiles_across) * GROUPS + tl.arange(0, GROUPS)
    c = (tile % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = groups_inside(g, c, rows, columns)
    fours = load_fours(x_ptr, g, c, stride, inside)
    scale = tl.load(scale_ptr)
    if tile == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    packed = tl.zeros([GROUPS, TILE_C], tl.int32)
    before = tl.zeros([GROUPS, TILE_C], tl.float32)
    largest = tl.zeros([GROUPS, TILE_C], tl.float32)
    summed = tl.zeros([GROUPS, TILE_C], tl.float32)
    for i in tl.static_range(4):
        r = (g * 4 + i)[:, None].to(tl.int64)
        x = fours[i].to(tl.float32)
        if AMAX:
            largest = larger(largest, x)
        if partial_ptr is not None:
            summed += x
        x = x * scale
        if ROW:
            tl.store(row_ptr + r * columns + c[None, :], x.to(row_ptr.dtype.element_ty), mask=inside)
        packed = packed_row(packed, before, x, i, column_ptr.dtype.element_ty)
        before = x
    if AMAX:
        record_amax(amax_ptr, largest)
    store_packed(packed, column_ptr, g, c, rows, inside)
    if partial_ptr is not None:
        partial = partial_ptr + (tile // tiles_across).to(tl.int64) * columns + c
        tl.store(partial, tl.sum(summed, 0), mask=c < columns)


def row_tiles(x: Tensor, column: bool) -> int | None:
    """How many partial sums of each column a cast of this matrix can leave; None: it leaves none."""
    return triton.cdiv(x.shape[0], 4 * _GROUPS) if column and x.shape[0] % 4 == 0 and gemm.is_native(x.device) else None


def launch(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    dtype: torch.dtype,
    column: bool,
    *,
    row: bool = True,
    partial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel; arguments and results as in `cast`, but an empty tensor for a layout that was not asked for."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    by_fours = column and rows % 4 == 0
    q = torch.empty(rows if row or not by_fours else 0, columns, dtype=dtype, device=x.device)
    q_t = torch.empty(columns if column else 0, rows, dtype=dtype, device=x.device)
    scale_inv = torch.empty((), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return q, q_t, scale_inv.copy_(reference.divide(1.0, scale))
    pointers = (x, scale, amax, q, q_t, scale_inv, rows, columns, x.stride(0))
    if by_fours:
        grid = (triton.cdiv(rows, 4 * _GROUPS) * triton.cdiv(columns, _GROUP_COLUMNS),)
        _cast_by_fours[grid](
            *pointers, partial, AMAX=amax is not None, ROW=row, GROUPS=_GROUPS, TILE_C=_GROUP_COLUMNS, num_warps=_WARPS
        )
        return q, q_t, scale_inv
    _cast_one_by_one[(triton.cdiv(rows, _TILE_ROWS) * triton.cdiv(columns, _TILE_COLUMNS),)](
        *pointers, 1.0, COLUMN=column, AMAX=amax is not None, TWICE=x.dtype == torch.float32,
        TILE_R=_TILE_ROWS, TILE_C=_TILE_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return q, q_t, scale_inv


@triton.jit
def _transpose(q_ptr, out_ptr, rows, words, stride, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """Bytes [rows, 4 words], read as int32, of which a square of four rows and four columns is turned in registers."""
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(words, WORDS)
    g = (tile // tiles_across) * GROUPS + tl.arange(0, GROUPS)
    w = (tile % tiles_across) * WORDS + tl.arange(0, WORDS)
    inside = groups_inside(g, w, rows, words)
    a, b, c, d = load_fours(q_ptr, g, w, stride, inside)
    columns = turned(a, b, c, d)
    for i in tl.static_range(4):
        store_packed(columns[i], out_ptr, g, w * 4 + i, rows, inside)


def launch_transpose(q: Tensor, out: Tensor, *, tile: tuple[int, int, int] = _TURN_TILE) -> Tensor:
    """Run the kernel; see `transpose`. tile: groups of four rows, of four columns, and warps a program."""
    rows, words = q.shape[0], q.shape[1] // 4
    groups, group_words, warps = tile
    if q.numel():
        _transpose[(triton.cdiv(rows, 4 * groups) * triton.cdiv(words, group_words),)](
            q.view(torch.int32), out.view(torch.uint8), rows, words, q.stride(0) // 4,
            GROUPS=groups, WORDS=group_words, num_warps=warps,
        )  # fmt: skip
    return out


def transpose(q: Tensor, out: Tensor | None = None) -> Tensor:
    """An FP8 matrix [R, C], whose rows may stand apart, as [C, R]: in memory of its own, or in `out`, which is contiguous."""
    if out is None:
        out = torch.empty(q.shape[1], q.shape[0], dtype=q.dtype, device=q.device)
    in_words = not any(n % 4 for n in (*q.shape, q.stride(0), q.storage_offset(), out.storage_offset()))
    if q.device.type == "cuda" and q.stride(1) == 1 and in_words:
        return launch_transpose(q, out)
    out.view(torch.uint8).copy_(q.view(torch.uint8).t())
    return out


def cast(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    column: bool,
    *,
    row: bool = True,
    partial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast with a known scale, and record the amax.

    x: [R, C]. scale: float32 []. amax: float32 [], raised to the largest |x| in place; None records nothing. partial: float32
    [`row_tiles`, C], which is filled with sums of the columns of x over tiles of rows; where that is None it must be too.
    Returns FP8 [R, C], its transpose [C, R] if `column` asks for it (else an empty tensor), and 1 / scale. Without `row` the
    first may be empty.
    """
    if gemm.is_native(x.device):
        return launch(x, scale, amax, dtype, column, row=row, partial=partial)
    if amax is not None:
        amax.copy_(torch.maximum(amax, reference.amax(x)))
    q = reference.cast(x, scale, dtype, fp8_max)
    return q, q.t() if column else q.new_empty(0, x.shape[0]), reference.divide(1.0, scale)


@torch.library.custom_op("octavo::cast_scaled", mutates_args=())
def cast_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, column: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`cast` without an amax, as one operator to a compiler."""
    return apart(cast(x, scale, None, dtype, fp8_max, column))


@cast_scaled.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, column: bool) -> tuple[Tensor, Tensor, Tensor]:
    return like_cast(x, dtype, column)


def apart(results: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `cast` in memory of their own: an operator may not return views of one tensor."""
    q, q_t, scale_inv = results
    # A transposed view of one row, or of none, is contiguous as well.
    if not q_t.is_contiguous() or q_t.untyped_storage().data_ptr() == q.untyped_storage().data_ptr():
        q_t = q_t.clone(memory_format=torch.contiguous_format)
    return q, q_t, scale_inv


def like_cast(x: Tensor, dtype: torch.dtype, column: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the results of `cast`, for a compiler."""
    rows, columns = x.shape
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(columns if column else 0, rows, dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )
