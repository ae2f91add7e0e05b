"""Cast with a given scale: one read of a matrix gives FP8 rowwise and columnwise, and the amax for the next scale.

Both layouts in one pass read 2 bytes and write 2 an element; separate amax, cast and transpose move 7. Bytes are slow to
transpose in shared memory, so rows are packed in groups of four (`packed_transpose`) if their number is a multiple of four.
Devices without FP8 conversions in Triton run the reference, and their columnwise layout is a view.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm
from octavo.kernels.quantize.packed_transpose import load_row_groups, packed_row, store_packed, transpose_words
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer, allocate, of_one_scale, quantize, without_elements
from octavo.kernels.tiles import adjacent_columns, cdiv, load_tile, tile_of

# The fastest tiles of those measured at 16384 × 4096 on an H200: 3.7 TB/s in groups of four rows, 2.7 by single rows.
_GROUPS, _GROUP_COLUMNS = 32, 64
_TILE_ROWS, _TILE_COLUMNS, _WARPS = 64, 128, 4
_TRANSPOSE_GROUPS, _TRANSPOSE_WORDS, _TRANSPOSE_WARPS = 64, 32, 8


@triton.jit
def record_amax(amax_ptr, x):
    """Raise the float32 at `amax_ptr` to the largest |x| of a float32 tile, NaN ignored; masked elements must be 0."""
    raise_to(amax_ptr, larger(0.0, tl.max(tl.abs(x))))


@triton.jit
def raise_to(amax_ptr, largest):
    """Raise the float32 at `amax_ptr` to `largest`, which is not negative."""
    # Non-negative floats order as their bits do. An integer maximum is one instruction, in any order of the programs.
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def larger(largest, x):
    """The larger of `largest` and |x|, float32: of a number and NaN a GPU's maximum is the number."""
    return tl.maximum(largest, tl.abs(x))


@triton.jit
def load_scale(scale_ptr, scale_inv_ptr, first):
    """The scale, with its inverse stored by the `first` program; 1 for results without a scale (`scale_inv_ptr` is None)."""
    scale = 1.0
    if scale_inv_ptr is not None:
        scale = tl.load(scale_ptr)
        if first:
            tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    return scale


@triton.jit
def store_rounded(y, copy_ptr, at, inside):
    """Round y to the dtype of `copy_ptr` and store it there; rounded, in float32."""
    rounded = y.to(copy_ptr.dtype.element_ty)
    tl.store(copy_ptr + at, rounded, mask=inside)
    return rounded.to(tl.float32)


@triton.jit
def store_layouts(x, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, TWICE: tl.constexpr):
    """Convert a float32 tile [r, c] of a matrix [rows, columns] and store it in the layouts with a pointer; `one` is 1.0."""
    # The conversion to FP8 is one instruction that saturates: ±inf and numbers beyond the largest value become that, NaN stays.
    # The ptxas of CUDA 12.9, which Triton brings, loses bytes when one conversion from float32 feeds both stores. With TWICE
    # the factor `one`, whose value ptxas cannot know, gives the second store a separate conversion, at no measurable cost.
    if rowwise_ptr is not None:
        tl.store(rowwise_ptr + r[:, None].to(tl.int64) * columns + c[None, :], x.to(rowwise_ptr.dtype.element_ty), mask=inside)
    if columnwise_ptr is not None:
        if TWICE:
            x = x * one
        q = x.to(columnwise_ptr.dtype.element_ty)
        tl.store(columnwise_ptr + c[:, None].to(tl.int64) * rows + r[None, :], tl.trans(q), mask=tl.trans(inside))


@triton.jit
def store_quantized(
    x, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    r, c, rows, columns, inside, one, first, TWICE: tl.constexpr,
):  # fmt: skip
    """Record the amax of a float32 tile, scale it and store its layouts; a pointer that is None is skipped."""
    if amax_ptr is not None:
        record_amax(amax_ptr, x)
    # After the amax: the branch of `load_scale` between them would double a program's registers.
    if scale_inv_ptr is not None:
        x = x * load_scale(scale_ptr, scale_inv_ptr, first)
    store_layouts(x, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, TWICE)


@triton.jit
def cast_tiles(
    x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    rows, columns, stride, one, TWICE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Cast a tile of any number of rows."""
    tile = tl.program_id(0)
    r, c, inside = tile_of(tile, rows, columns, TILE_R, TILE_C)
    x = load_tile(x_ptr, r, c, stride, inside)
    store_quantized(
        x, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, r, c, rows, columns, inside, one, tile == 0, TWICE
    )  # fmt: skip


@triton.jit
def cast_packed_row(
    x, i: tl.constexpr, packed, before, largest, summed, scale, amax_ptr, partial_ptr, rowwise_ptr, columnwise_ptr,
    g, c, rows, columns, inside,
):  # fmt: skip
    """Row i of each group of four, float32: recorded and summed, scaled, stored rowwise, and packed after the row `before`.

    Returns the packed rows, this row for the next one, the largest values and the sums.
    """
    if amax_ptr is not None:
        largest = larger(largest, x)
    if partial_ptr is not None:
        summed += x
    x = x * scale
    store_layouts(x, rowwise_ptr, None, g * 4 + i, c, rows, columns, inside, 1.0, False)
    return packed_row(packed, before, x, i, columnwise_ptr.dtype.element_ty), x, largest, summed


@triton.jit
def cast_row_groups(
    xs, scale, amax_ptr, partial_ptr, rowwise_ptr, columnwise_ptr, g, c, rows, columns, inside,
    GROUPS: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """`cast_packed_row` of the four rows `xs` of each group; the packed rows, the largest values and the sums."""
    packed = tl.zeros([GROUPS, TILE_C], tl.int32)
    before = tl.zeros([GROUPS, TILE_C], tl.float32)
    largest = tl.zeros([GROUPS, TILE_C], tl.float32)
    summed = tl.zeros([GROUPS, TILE_C], tl.float32)
    for i in tl.static_range(4):
        packed, before, largest, summed = cast_packed_row(
            xs[i].to(tl.float32), i, packed, before, largest, summed, scale, amax_ptr, partial_ptr, rowwise_ptr, columnwise_ptr,
            g, c, rows, columns, inside,
        )  # fmt: skip
    return packed, largest, summed


@triton.jit
def cast_packed(
    x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
    rows, columns, stride, partial_ptr, GROUPS: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Cast a tile in groups of four rows, columnwise too."""
    tile = tl.program_id(0)
    g, c, inside = tile_of(tile, rows // 4, columns, GROUPS, TILE_C)
    xs = load_row_groups(x_ptr, g, c, stride, inside)
    scale = load_scale(scale_ptr, scale_inv_ptr, tile == 0)
    packed, largest, summed = cast_row_groups(
        xs, scale, amax_ptr, partial_ptr, rowwise_ptr, columnwise_ptr, g, c, rows, columns, inside, GROUPS, TILE_C
    )
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)
    store_packed(packed, columnwise_ptr, g, c, rows, inside)
    if partial_ptr is not None:
        partial = partial_ptr + (tile // tl.cdiv(columns, TILE_C)).to(tl.int64) * columns + c
        tl.store(partial, tl.sum(summed, 0), mask=c < columns)


def row_tiles(x: Tensor, columnwise: bool) -> int | None:
    """Number of row tiles in the column sums of a cast of x [R, C]; None if the cast computes no sums."""
    return cdiv(x.shape[0], 4 * _GROUPS) if columnwise and x.shape[0] % 4 == 0 and gemm.is_native(x.device) else None


def launch(x: Tensor, quantizer: Quantizer, partial: Tensor | None = None) -> QuantizedTensor:
    """Run the kernel; see `cast`."""
    x = adjacent_columns(x)
    rows, columns = x.shape
    out = allocate(quantizer, rows, columns, x.device)
    pointers = (x, quantizer.scale, quantizer.amax, out.rowwise_data, out.columnwise_data, out.scale_inv)
    if x.numel() == 0:
        without_elements(quantizer, out)
    elif quantizer.columnwise and rows % 4 == 0:
        cast_packed[(cdiv(rows, 4 * _GROUPS) * cdiv(columns, _GROUP_COLUMNS),)](
            *pointers, rows, columns, x.stride(0), partial, GROUPS=_GROUPS, TILE_C=_GROUP_COLUMNS, num_warps=_WARPS
        )
    else:
        cast_tiles[(cdiv(rows, _TILE_ROWS) * cdiv(columns, _TILE_COLUMNS),)](
            *pointers, rows, columns, x.stride(0), 1.0,
            TWICE=x.dtype == torch.float32, TILE_R=_TILE_ROWS, TILE_C=_TILE_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _transpose(q_ptr, out_ptr, rows, words, stride, out_stride, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """Transpose bytes [rows, 4 words], read as int32: squares of four rows and four columns in registers."""
    g, w, inside = tile_of(tl.program_id(0), rows // 4, words, GROUPS, WORDS)
    a, b, c, d = load_row_groups(q_ptr, g, w, stride, inside)
    columns = transpose_words(a, b, c, d)
    for i in tl.static_range(4):
        store_packed(columns[i], out_ptr, g, w * 4 + i, out_stride, inside)


def launch_transpose(q: Tensor, out: Tensor) -> Tensor:
    """Run the kernel; see `transpose`."""
    rows, words = q.shape[0], q.shape[1] // 4
    if q.numel():
        _transpose[(cdiv(rows, 4 * _TRANSPOSE_GROUPS) * cdiv(words, _TRANSPOSE_WORDS),)](
            q.view(torch.int32), out.view(torch.uint8), rows, words, q.stride(0) // 4, out.stride(0),
            GROUPS=_TRANSPOSE_GROUPS, WORDS=_TRANSPOSE_WORDS, num_warps=_TRANSPOSE_WARPS,
        )  # fmt: skip
    return out


def transpose(q: Tensor, out: Tensor | None = None) -> Tensor:
    """Transpose an FP8 matrix [R, C] to a new contiguous [C, R] or to `out`; rows of both with any stride."""
    out = q.new_empty(q.shape[1], q.shape[0]) if out is None else out
    in_words = not any(n % 4 for x in (q, out) for n in (*x.shape, x.stride(0), x.storage_offset()))
    if q.device.type == "cuda" and q.stride(1) == out.stride(1) == 1 and in_words:
        return launch_transpose(q, out)
    out.view(torch.uint8).copy_(q.view(torch.uint8).t())
    return out


def cast(x: Tensor, quantizer: Quantizer, partial: Tensor | None = None) -> QuantizedTensor:
    """Cast a matrix [R, C] of any float dtype to FP8 with a known scale, and record its amax.

    partial: float32 [`row_tiles`, C], filled with column sums of x over each tile of rows; None where `row_tiles` is None.
    """
    assert quantizer.scale is not None
    if gemm.is_native(x.device):
        return launch(x, quantizer, partial)
    data, scale_inv = quantize(x, quantizer._replace(rowwise=True, columnwise=False)).rowwise
    return of_one_scale(data if quantizer.rowwise else None, data.t() if quantizer.columnwise else None, scale_inv)


CastResults = tuple[Tensor, Tensor, Tensor]
"""FP8 [R, C], its transpose [C, R] or an empty tensor, and 1 / scale."""


@torch.library.custom_op("octavo::cast_scaled", mutates_args=())
def cast_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, columnwise: bool) -> CastResults:
    """`cast` of x [R, C] without an amax, as one operator to a compiler: FP8 [R, C], [C, R] or [0, R], inverse scale []."""
    return operator_results(cast(x, Quantizer(dtype, fp8_max, scale, columnwise=columnwise)))


@cast_scaled.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, columnwise: bool) -> CastResults:
    return fake_results(x, dtype, columnwise)


def operator_results(cast: QuantizedTensor) -> CastResults:
    """FP8 [R, C], FP8 [C, R] or [0, R], inverse scale []: in separate memory, as an operator may not return views."""
    (q, scale_inv), q_t = cast.rowwise, cast.columnwise_data
    if q_t is None:
        return q, q.new_empty(0, q.shape[0]), scale_inv
    # A transposed view of one row, or of none, is contiguous as well.
    if not q_t.is_contiguous() or q_t.untyped_storage().data_ptr() == q.untyped_storage().data_ptr():
        q_t = q_t.clone(memory_format=torch.contiguous_format)
    return q, q_t, scale_inv


def fake_results(x: Tensor, dtype: torch.dtype, columnwise: bool) -> CastResults:
    """Shapes and dtypes of `operator_results` for x [R, C], for a compiler."""
    rows, columns = x.shape
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(columns if columnwise else 0, rows, dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )
