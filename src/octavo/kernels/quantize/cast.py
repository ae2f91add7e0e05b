"""Delayed scaling's cast: one read of a matrix gives FP8 rowwise and columnwise, and the amax for the next scale.

One pass for both layouts reads 2 bytes and writes 2 an element, against 7 for amax, cast and transpose apart. Bytes are slow to
transpose in shared memory, so four rows are packed into one word first, where four divides the rows.
On devices without FP8 conversions in Triton the reference runs, and the transpose is a view.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.quantize.packed_transpose import groups_inside, load_fours, packed_row, store_packed, turned
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer, of_one_scale

# Of the tiles tried at 16384 × 4096 on an H200 the fastest: 3.7 TB/s in groups of four rows, 2.7 with rows one by one.
_GROUPS, _GROUP_COLUMNS = 32, 64
_TILE_ROWS, _TILE_COLUMNS, _WARPS = 64, 128, 4
_TURN_TILE = (64, 32, 8)
"""Tile of `_transpose`: groups of four rows, groups of four columns, warps."""


@triton.jit
def record_amax(amax_ptr, x):
    """Raise the float32 at `amax_ptr` to the largest |x| of a float32 tile, NaN ignored; masked elements must be 0."""
    raise_to(amax_ptr, larger(0.0, tl.max(tl.abs(x))))


@triton.jit
def raise_to(amax_ptr, largest):
    """Raise the float32 at `amax_ptr` to `largest`, which is not negative."""
    # Non-negative floats order as their bits do, and an integer maximum is one instruction.
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def larger(largest, x):
    """The larger of `largest` and |x|, float32: of a number and NaN a GPU's maximum is the number."""
    return tl.maximum(largest, tl.abs(x))


@triton.jit
def store_layouts(
    x, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Convert a float32 tile [r, c] of a matrix [rows, columns] and store it, as it is and transposed.

    The conversion to FP8 is one instruction that saturates: ±inf and what lies beyond the largest value become that, NaN stays.

    `one` is 1.0, given at run time. The ptxas of CUDA 12.9 that Triton brings loses bytes when one conversion from float32 to
    FP8 feeds both stores: a factor that it cannot know to be 1 makes the second a conversion of its own, at no cost that shows.
    """
    if ROWWISE:
        tl.store(rowwise_ptr + r[:, None].to(tl.int64) * columns + c[None, :], x.to(rowwise_ptr.dtype.element_ty), mask=inside)
    if COLUMNWISE:
        if TWICE:
            x = x * one
        q = x.to(columnwise_ptr.dtype.element_ty)
        tl.store(columnwise_ptr + c[:, None].to(tl.int64) * rows + r[None, :], tl.trans(q), mask=tl.trans(inside))


@triton.jit
def _cast_one_by_one(
    x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    rows, columns, stride, one,
    COLUMNWISE: tl.constexpr, AMAX: tl.constexpr, TWICE: tl.constexpr,
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
    store_layouts(x * scale, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, True, COLUMNWISE, TWICE)


@triton.jit
def _cast_by_fours(
    x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    rows, columns, stride, partial_ptr,
    AMAX: tl.constexpr, ROWWISE: tl.constexpr, GROUPS: tl.constexpr, TILE_C: tl.constexpr,
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
        if ROWWISE:
            tl.store(rowwise_ptr + r * columns + c[None, :], x.to(rowwise_ptr.dtype.element_ty), mask=inside)
        packed = packed_row(packed, before, x, i, columnwise_ptr.dtype.element_ty)
        before = x
    if AMAX:
        record_amax(amax_ptr, largest)
    store_packed(packed, columnwise_ptr, g, c, rows, inside)
    if partial_ptr is not None:
        partial = partial_ptr + (tile // tiles_across).to(tl.int64) * columns + c
        tl.store(partial, tl.sum(summed, 0), mask=c < columns)


def row_tiles(x: Tensor, columnwise: bool) -> int | None:
    """Number of row tiles whose column sums a cast of this matrix can leave; None: it leaves no sums."""
    return triton.cdiv(x.shape[0], 4 * _GROUPS) if columnwise and x.shape[0] % 4 == 0 and gemm.is_native(x.device) else None


def launch(x: Tensor, quantizer: Quantizer, partial: Tensor | None = None) -> QuantizedTensor:
    """Run the kernel; see `cast`."""
    scale, amax, columnwise = quantizer.scale, quantizer.amax, quantizer.columnwise
    assert scale is not None
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    by_fours = columnwise and rows % 4 == 0
    q = torch.empty(rows if quantizer.rowwise or not by_fours else 0, columns, dtype=quantizer.dtype, device=x.device)
    q_t = torch.empty(columns if columnwise else 0, rows, dtype=quantizer.dtype, device=x.device)
    scale_inv = torch.empty((), dtype=torch.float32, device=x.device)
    pointers = (x, scale, amax, q, q_t, scale_inv, rows, columns, x.stride(0))
    if x.numel() == 0:
        scale_inv.copy_(reference.divide(1.0, scale))
    elif by_fours:
        _cast_by_fours[(triton.cdiv(rows, 4 * _GROUPS) * triton.cdiv(columns, _GROUP_COLUMNS),)](
            *pointers, partial, AMAX=amax is not None, ROWWISE=quantizer.rowwise, GROUPS=_GROUPS, TILE_C=_GROUP_COLUMNS,
            num_warps=_WARPS,
        )  # fmt: skip
    else:
        _cast_one_by_one[(triton.cdiv(rows, _TILE_ROWS) * triton.cdiv(columns, _TILE_COLUMNS),)](
            *pointers, 1.0, COLUMNWISE=columnwise, AMAX=amax is not None, TWICE=x.dtype == torch.float32,
            TILE_R=_TILE_ROWS, TILE_C=_TILE_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
    return of_one_scale(q if quantizer.rowwise else None, q_t if columnwise else None, scale_inv)


@triton.jit
def _transpose(q_ptr, out_ptr, rows, words, stride, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """Transpose bytes [rows, 4 words], read as int32: squares of four rows and four columns in registers."""
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
    """Transpose an FP8 matrix [R, C], its rows in any stride, to a new contiguous [C, R] or to `out`."""
    if out is None:
        out = torch.empty(q.shape[1], q.shape[0], dtype=q.dtype, device=q.device)
    in_words = not any(n % 4 for n in (*q.shape, q.stride(0), q.storage_offset(), out.storage_offset()))
    if q.device.type == "cuda" and q.stride(1) == 1 and in_words:
        return launch_transpose(q, out)
    out.view(torch.uint8).copy_(q.view(torch.uint8).t())
    return out


def cast(x: Tensor, quantizer: Quantizer, partial: Tensor | None = None) -> QuantizedTensor:
    """Cast a matrix [R, C] of any float dtype to FP8 with a known scale, and record its amax.

    partial: float32 [`row_tiles`, C], filled with column sums of x over each tile of rows; None where `row_tiles` is None.
    """
    if gemm.is_native(x.device):
        return launch(x, quantizer, partial)
    if quantizer.amax is not None:
        quantizer.amax.copy_(torch.maximum(quantizer.amax, reference.amax(x)))
    assert quantizer.scale is not None
    q = reference.cast(x, quantizer.scale, quantizer.dtype, quantizer.fp8_max)
    scale_inv = reference.divide(1.0, quantizer.scale)
    return of_one_scale(q if quantizer.rowwise else None, q.t() if quantizer.columnwise else None, scale_inv)


CastResults = tuple[Tensor, Tensor, Tensor]
"""What an operator of a compiler returns for a cast: FP8 [R, C], its transpose [C, R] or an empty tensor, and 1 / scale."""


@torch.library.custom_op("octavo::cast_scaled", mutates_args=())
def cast_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, columnwise: bool) -> CastResults:
    """`cast` without an amax, as one operator to a compiler."""
    return operator_results(cast(x, Quantizer(dtype, fp8_max, scale, columnwise=columnwise)))


@cast_scaled.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, columnwise: bool) -> CastResults:
    return fake_results(x, dtype, columnwise)


def operator_results(cast: QuantizedTensor) -> CastResults:
    """The results of `cast` in memory of their own: an operator may not return views of one tensor."""
    (q, scale_inv), q_t = cast.rowwise, cast.columnwise_data
    if q_t is None:
        return q, q.new_empty(0, q.shape[0]), scale_inv
    # A transposed view of one row, or of none, is contiguous as well.
    if not q_t.is_contiguous() or q_t.untyped_storage().data_ptr() == q.untyped_storage().data_ptr():
        q_t = q_t.clone(memory_format=torch.contiguous_format)
    return q, q_t, scale_inv


def fake_results(x: Tensor, dtype: torch.dtype, columnwise: bool) -> CastResults:
    """Shapes and dtypes of `operator_results`, for a compiler."""
    rows, columns = x.shape
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(columns if columnwise else 0, rows, dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )
