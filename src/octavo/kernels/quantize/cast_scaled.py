"""Casts that compute their scales, per row and per block: one or two reads of a matrix give FP8 in both layouts.

Current, rowwise and block scaling take a scale from the values that it scales: in plain PyTorch four passes or more over
float32 copies, for each layout. Here a tile of whole blocks is read once, and both layouts are written; scales for rows and for
columns need a second read, since no tile holds both. The scales are those of `reference.scale_from_amax`, bit for bit. An amax
reduced over ranks needs `amax` and `cast` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.gemm import is_opaque
from octavo.kernels.quantize.cast import larger, raise_to, store_layouts
from octavo.kernels.quantize.packed_transpose import load_row_groups, packed_row, store_packed
from octavo.kernels.tiles import adjacent_columns, cdiv, load_tile, next_power_of_2, tile_of

_BLOCK = reference.BLOCK
# Untuned: (rows, columns, warps) of tiles that are cast for rows and columns, of packed tiles as in `cast`, and of tiles that
# only measure; warps and registers of a packed block of 128 × 128.
_CAST_TILE, _PACKED_TILE, _AMAX_TILE = (64, 128, 4), (128, 64, 4), (64, 256, 8)
_BLOCK_WARPS, _BLOCK_REGISTERS = 8, 128
# Elements of the tile that holds whole rows, the longest row that it holds, and warps.
_ROW_TILE, _LONGEST_ROW, _ROW_WARPS = 8192, 16384, 8
# Rows and warps of the tiles of 128 columns: for only 1 × 128 pieces, and for 128 × 128.
_PIECES_TILE, _SQUARE_TILE = (32, 4), (_BLOCK, 8)
_AMAX_BLOCK, _AMAX_WARPS = 8192, 8
_EXPERT_ROWS = tl.constexpr(_BLOCK)
_FLOAT32_MAX = tl.constexpr(reference.FLOAT32_MAX)


class Scaled(NamedTuple):
    """FP8 data [R, C] with its scales and their inverses, float32 [R, 1] or [⌈R/rows⌉, ⌈C/128⌉].

    On a GPU the scales of 1 × 128 pieces lie column after column, strides (1, R), as the products read them.
    """

    data: Tensor
    scale_inv: Tensor
    scale: Tensor


Join = Callable[[Tensor], Tensor]
"""Raises amaxes, contiguous float32, in place to the largest of several ranks."""
Layouts = tuple[Scaled | None, Scaled | None]
"""Rowwise and columnwise; None for a layout that is not requested."""


@triton.jit
def _row_amaxes(x):
    """Row amaxes: the maximum of a row of NaN is NaN, which `larger` turns into 0."""
    return larger(0.0, tl.max(tl.abs(x.to(tl.float32)), axis=1))


@triton.jit
def choose_scale(amax, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`reference.scale_from_amax`, bit for bit."""
    good = (amax > 0) & (amax < float("inf"))
    if POWER_OF_TWO:
        # FP8_MAX / amax rounded down needs no division: the exponents' difference, 1 less where amax has the larger mantissa. A
        # quotient below 1 never rounds to 1. Nor is a scale subnormal, since FP8_MAX over the largest float is not.
        most = tl.full([], FP8_MAX, tl.float32).to(tl.int32, bitcast=True)
        of_amax = (amax.to(tl.int32, bitcast=True) + (0x7FFFFF - (most & 0x7FFFFF))) >> 23
        scale = (tl.minimum(127 + (most >> 23) - of_amax, 254) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.minimum(tl.div_rn(FP8_MAX, tl.where(good, amax, 1.0)), _FLOAT32_MAX)
    return tl.where(good, scale, 1.0)


@triton.jit
def _store_scale(scale, scale_ptr, scale_inv_ptr, index, inside, POWER_OF_TWO: tl.constexpr):
    # The inverse of a scale above 2^126 is subnormal, which Triton's float32 division may flush to 0.
    if POWER_OF_TWO:  # exponents sum to 254, and only 2^127 has a subnormal inverse
        inverse = tl.maximum(0x7F000000 - scale.to(tl.int32, bitcast=True), 0x00400000).to(tl.float32, bitcast=True)
    else:
        inverse = (1.0 / scale.to(tl.float64)).to(tl.float32)
    tl.store(scale_ptr + index, scale, mask=inside)
    tl.store(scale_inv_ptr + index, inverse, mask=inside)


@triton.jit
def _amax_of(x_ptr, amax_ptr, columns, stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + c, mask=c < columns, other=0.0).to(tl.float32)
    raise_to(amax_ptr, tl.max(larger(0.0, x)))


@triton.jit
def _scale_of(amax_ptr, scale_ptr, count, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < count, other=0.0)
    tl.store(scale_ptr + at, choose_scale(amax, FP8_MAX, POWER_OF_TWO), mask=at < count)


@triton.jit
def _cast_whole_rows(
    x_ptr, q_ptr, scale_ptr, scale_inv_ptr, rows, columns, stride,
    FP8_MAX: tl.constexpr, WHOLE: tl.constexpr, TILE_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program casts TILE_R rows; rows longer than BLOCK are read twice, the second time from the cache."""
    r = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    c = tl.arange(0, BLOCK)
    there = (r < rows)[:, None]
    if WHOLE:
        inside = there & (c < columns)[None, :]
        x = load_tile(x_ptr, r, c, stride, inside)
        scale = choose_scale(tl.max(larger(0.0, x), axis=1), FP8_MAX, False)
        store_layouts(x * scale[:, None], q_ptr, None, r, c, rows, columns, inside, 1.0, False)
    else:
        largest = tl.zeros([TILE_R, BLOCK], dtype=tl.float32)
        for first in range(0, columns, BLOCK):
            inside = there & (first + c < columns)[None, :]
            largest = tl.maximum(largest, larger(0.0, load_tile(x_ptr, r, first + c, stride, inside)))
        scale = choose_scale(tl.max(largest, axis=1), FP8_MAX, False)
        for first in range(0, columns, BLOCK):
            inside = there & (first + c < columns)[None, :]
            x = load_tile(x_ptr, r, first + c, stride, inside) * scale[:, None]
            store_layouts(x, q_ptr, None, r, first + c, rows, columns, inside, 1.0, False)
    _store_scale(scale, scale_ptr, scale_inv_ptr, r, r < rows, False)


@triton.jit
def _of_expert(column_ptr, experts_ptr, tile, columns, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Pointer to the columns' amaxes or scales: a tile's expert's, or all rows'."""
    if experts_ptr is not None:
        row = tile // tl.cdiv(columns, TILE_C) * TILE_R
        column_ptr += tl.load(experts_ptr + row // _EXPERT_ROWS).to(tl.int64) * columns
    return column_ptr


@triton.jit
def _row_column_amaxes(
    x_ptr, experts_ptr, row_amax_ptr, column_amax_ptr, rows, columns, stride, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):
    """Raise the amaxes of rows and columns, as int32 bits, by those of a tile."""
    r, c, inside = tile_of(tl.program_id(0), rows, columns, TILE_R, TILE_C)
    column_amax_ptr = _of_expert(column_amax_ptr, experts_ptr, tl.program_id(0), columns, TILE_R, TILE_C)
    magnitude = larger(0.0, load_tile(x_ptr, r, c, stride, inside))
    if row_amax_ptr is not None:
        tl.atomic_max(row_amax_ptr + r, tl.max(magnitude, axis=1).to(tl.int32, bitcast=True), mask=r < rows, sem="relaxed")
    tl.atomic_max(column_amax_ptr + c, tl.max(magnitude, axis=0).to(tl.int32, bitcast=True), mask=c < columns, sem="relaxed")


@triton.jit
def _cast_scales(
    row_amax_ptr, row_scale_ptr, row_inv_ptr, column_amax_ptr, column_scale_ptr, column_inv_ptr, rows, of_columns,
    FP8_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute scales separately: each tile of the cast would repeat the divisions, half of all its instructions."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if row_amax_ptr is not None:
        amax = tl.load(row_amax_ptr + at, mask=at < rows, other=0).to(tl.float32, bitcast=True)
        _store_scale(choose_scale(amax, FP8_MAX, False), row_scale_ptr, row_inv_ptr, at, at < rows, False)
    amax = tl.load(column_amax_ptr + at, mask=at < of_columns, other=0).to(tl.float32, bitcast=True)
    _store_scale(choose_scale(amax, FP8_MAX, False), column_scale_ptr, column_inv_ptr, at, at < of_columns, False)


@triton.jit
def _cast_rows_columns(
    x_ptr, rowwise_ptr, row_scale_ptr, columnwise_ptr, column_scale_ptr, rows, columns, stride, one,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    r, c, inside = tile_of(tl.program_id(0), rows, columns, TILE_R, TILE_C)
    x = load_tile(x_ptr, r, c, stride, inside)
    if rowwise_ptr is not None:
        y = x * tl.load(row_scale_ptr + r, mask=r < rows, other=0.0)[:, None]
        store_layouts(y, rowwise_ptr, None, r, c, rows, columns, inside, one, False)
    y = x * tl.load(column_scale_ptr + c, mask=c < columns, other=0.0)[None, :]
    store_layouts(y, None, columnwise_ptr, r, c, rows, columns, inside, one, rowwise_ptr is not None)


@triton.jit
def _cast_rows_columns_packed(
    x_ptr, experts_ptr, rowwise_ptr, row_scale_ptr, columnwise_ptr, column_scale_ptr, rows, columns, stride,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    # The last tile comes first: it is still in the L2 cache from the pass before.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    g, c, inside = tile_of(tile, rows // 4, columns, TILE_R // 4, TILE_C)
    xs = load_row_groups(x_ptr, g, c, stride, inside)
    column_scale_ptr = _of_expert(column_scale_ptr, experts_ptr, tile, columns, TILE_R, TILE_C)
    column_scale = tl.load(column_scale_ptr + c, mask=c < columns, other=0.0)[None, :]
    packed = tl.zeros([TILE_R // 4, TILE_C], tl.int32)
    before = tl.zeros([TILE_R // 4, TILE_C], tl.float32)
    for i in tl.static_range(4):
        r = g * 4 + i
        x = xs[i].to(tl.float32)
        if rowwise_ptr is not None:
            y = x * tl.load(row_scale_ptr + r, mask=g < rows // 4, other=0.0)[:, None]
            store_layouts(y, rowwise_ptr, None, r, c, rows, columns, inside, 1.0, False)
        x = x * column_scale
        packed = packed_row(packed, before, x, i, columnwise_ptr.dtype.element_ty)
        before = x
    store_packed(packed, columnwise_ptr, g, c, rows, inside)


@triton.jit
def _cast_blocks(
    x_ptr, rowwise_ptr, row_scale_ptr, row_inv_ptr, columnwise_ptr, column_scale_ptr, column_inv_ptr,
    rows, columns, stride, one, FP8_MAX: tl.constexpr, SQUARE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """A tile of 128 columns; it has 128 rows where one scale is for all of it (SQUARE) or for 128 elements of a column."""
    tiles_across = tl.cdiv(columns, TILE_C)
    tile_r, tile_c = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    r, c, inside = tile_of(tl.program_id(0), rows, columns, TILE_R, TILE_C)
    x = load_tile(x_ptr, r, c, stride, inside)
    magnitude = larger(0.0, x)
    if SQUARE:
        scale = choose_scale(tl.max(magnitude), FP8_MAX, True)
        if rowwise_ptr is not None:
            _store_scale(scale, row_scale_ptr, row_inv_ptr, tile_r * tiles_across + tile_c, True, True)
        if columnwise_ptr is not None:
            _store_scale(scale, column_scale_ptr, column_inv_ptr, tile_c * tl.cdiv(rows, TILE_R) + tile_r, True, True)
        store_layouts(x * scale, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, rowwise_ptr is not None)
    else:
        if rowwise_ptr is not None:
            scale = choose_scale(tl.max(magnitude, axis=1), FP8_MAX, True)
            _store_scale(scale, row_scale_ptr, row_inv_ptr, tile_c.to(tl.int64) * rows + r, r < rows, True)
            store_layouts(x * scale[:, None], rowwise_ptr, None, r, c, rows, columns, inside, one, False)
        if columnwise_ptr is not None:
            scale = choose_scale(tl.max(magnitude, axis=0), FP8_MAX, True)
            _store_scale(scale, column_scale_ptr, column_inv_ptr, tile_r.to(tl.int64) * columns + c, c < columns, True)
            y = x * scale[None, :]
            store_layouts(y, None, columnwise_ptr, r, c, rows, columns, inside, one, rowwise_ptr is not None)


@triton.jit
def _cast_blocks_packed(
    x_ptr, rowwise_ptr, row_scale_ptr, row_inv_ptr, columnwise_ptr, column_scale_ptr, column_inv_ptr,
    rows, columns, stride, FP8_MAX: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of 128 × 128 with its transpose, in 32 groups of four rows."""
    tiles_across = tl.cdiv(columns, BLOCK)
    tile_r, tile_c = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    g, c, inside = tile_of(tl.program_id(0), rows // 4, columns, BLOCK // 4, BLOCK)
    xs = load_row_groups(x_ptr, g, c, stride, inside)
    x_0, x_1, x_2, x_3 = xs
    largest = larger(larger(0.0, x_0.to(tl.float32)), x_1.to(tl.float32))
    largest = larger(larger(largest, x_2.to(tl.float32)), x_3.to(tl.float32))
    if SQUARE:
        column_scale = choose_scale(tl.max(largest), FP8_MAX, True)
        index = tile_c * tl.cdiv(rows, BLOCK) + tile_r
        _store_scale(column_scale, column_scale_ptr, column_inv_ptr, index, True, True)
        if rowwise_ptr is not None:
            _store_scale(column_scale, row_scale_ptr, row_inv_ptr, tl.program_id(0), True, True)
    else:
        scale = choose_scale(tl.max(largest, axis=0), FP8_MAX, True)
        _store_scale(scale, column_scale_ptr, column_inv_ptr, tile_r.to(tl.int64) * columns + c, c < columns, True)
        column_scale = scale[None, :]
        if rowwise_ptr is not None:
            amaxes = (_row_amaxes(x_0), _row_amaxes(x_1), _row_amaxes(x_2), _row_amaxes(x_3))
            # In the order of the rows, so that their scales are stored at once.
            amax = tl.reshape(tl.join(tl.join(amaxes[0], amaxes[2]), tl.join(amaxes[1], amaxes[3])), [BLOCK])
            r = tile_r * BLOCK + tl.arange(0, BLOCK)
            scale = choose_scale(amax, FP8_MAX, True)
            _store_scale(scale, row_scale_ptr, row_inv_ptr, tile_c.to(tl.int64) * rows + r, r < rows, True)
    packed = tl.zeros([BLOCK // 4, BLOCK], tl.int32)
    before = tl.zeros([BLOCK // 4, BLOCK], tl.float32)
    for i in tl.static_range(4):
        x = xs[i].to(tl.float32)
        y = x * column_scale
        if rowwise_ptr is not None:
            z = y if SQUARE else x * choose_scale(amaxes[i], FP8_MAX, True)[:, None]
            store_layouts(z, rowwise_ptr, None, g * 4 + i, c, rows, columns, inside, 1.0, False)
        packed = packed_row(packed, before, y, i, columnwise_ptr.dtype.element_ty)
        before = y
    store_packed(packed, columnwise_ptr, g, c, rows, inside)


def launch_amax(x: Tensor, *, block: int = _AMAX_BLOCK, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `amax`."""
    largest = torch.zeros((), dtype=torch.float32, device=x.device) if out is None else out
    if x.numel() == 0:
        return largest
    if x.dim() != 2 or x.stride(-1) != 1 or x.is_contiguous():
        x = x.contiguous().view(1, -1)
    grid = (x.shape[0] * cdiv(x.shape[1], block),)
    _amax_of[grid](x, largest, x.shape[1], x.stride(0), BLOCK=block, num_warps=_AMAX_WARPS)
    return largest


def launch_scale(largest: Tensor, fp8_max: float, power_of_two: bool = False) -> Tensor:
    """Run the kernel; see `scale_from_amax`."""
    largest = largest.contiguous()
    scale = torch.empty_like(largest)
    count = largest.numel()
    if count:
        block = min(next_power_of_2(count), 1024)
        _scale_of[(cdiv(count, block),)](largest, scale, count, fp8_max, power_of_two, BLOCK=block)
    return scale


def _allocate(x: Tensor, dtype: torch.dtype, scale_columns: int, scale_rows: int | None) -> Scaled:
    """Memory for an operand like x [R, C] and its scales; `scale_rows` None: one each row, column after column."""
    shape = (scale_columns, x.shape[0]) if scale_rows is None else (scale_rows, scale_columns)
    scale_inv, scale = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    return Scaled(data, scale_inv.t(), scale.t()) if scale_rows is None else Scaled(data, scale_inv, scale)


def _pointers(scaled: Scaled | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Data, scales and inverses."""
    return (None, None, None) if scaled is None else (scaled.data, scaled.scale, scaled.scale_inv)


def launch_rows(
    x: Tensor, dtype: torch.dtype, fp8_max: float, *, rowwise: bool, columnwise: bool,
    experts: Tensor | None = None, count: int = 0, row_tile: int = _ROW_TILE, longest_row: int = _LONGEST_ROW,
    join: Join | None = None,
) -> Layouts:  # fmt: skip
    """Run the kernels; see `rows`.

    experts: int32, the expert of each 128 rows, 0 to `count`. Then columns have scales [count, C, 1], each of its expert's
    rows; rows of `count` have no expert.
    """
    x = adjacent_columns(x)
    rows, columns = x.shape
    out = _allocate(x, dtype, 1, rows) if rowwise else None
    data, *scales = _pointers(out)
    if not columnwise:
        if rowwise:
            whole = next_power_of_2(columns) <= longest_row
            block = next_power_of_2(columns) if whole else row_tile
            tile_r = max(1, min(row_tile // block, 16))
            _cast_whole_rows[(cdiv(rows, tile_r),)](
                x, data, *scales, rows, columns, x.stride(0),
                FP8_MAX=fp8_max, WHOLE=whole, TILE_R=tile_r, BLOCK=block, num_warps=_ROW_WARPS,
            )  # fmt: skip
        return out, None
    out_t = _allocate(x.t(), dtype, 1, columns)
    if experts is not None:
        out_t = Scaled(out_t.data, *(x.new_empty(count + 1, columns, 1, dtype=torch.float32) for _ in range(2)))
    of_columns = out_t.scale.numel()
    largest = torch.zeros(rows + of_columns, dtype=torch.int32, device=x.device)
    row_amax, column_amax = largest[:rows] if rowwise else None, largest[rows:]
    tile_r, tile_c, warps = _AMAX_TILE
    _row_column_amaxes[(cdiv(rows, tile_r) * cdiv(columns, tile_c),)](
        x, experts, row_amax, column_amax, rows, columns, x.stride(0), TILE_R=tile_r, TILE_C=tile_c, num_warps=warps
    )
    if join is not None:
        join(column_amax.view(torch.float32))
    _cast_scales[(cdiv(max(rows, of_columns), 128),)](
        row_amax, *scales, column_amax, out_t.scale, out_t.scale_inv, rows, of_columns, FP8_MAX=fp8_max, BLOCK=128
    )
    packed = rows % 4 == 0
    run, more = (_cast_rows_columns_packed, {"experts_ptr": experts}) if packed else (_cast_rows_columns, {"one": 1.0})
    tile_r, tile_c, warps = _PACKED_TILE if packed else _CAST_TILE
    run[(cdiv(rows, tile_r) * cdiv(columns, tile_c),)](
        x_ptr=x, rowwise_ptr=data, row_scale_ptr=scales[0], columnwise_ptr=out_t.data, column_scale_ptr=out_t.scale,
        rows=rows, columns=columns, stride=x.stride(0), TILE_R=tile_r, TILE_C=tile_c, num_warps=warps, **more,
    )  # fmt: skip
    return out, out_t if experts is None else Scaled(out_t.data, out_t.scale_inv[:count], out_t.scale[:count])


def launch_blocks(x: Tensor, dtype: torch.dtype, fp8_max: float, rows: int, *, rowwise: bool, columnwise: bool) -> Layouts:
    """Run the kernel; see `blocks`."""
    x = adjacent_columns(x)
    block_rows, block_columns = (cdiv(size, _BLOCK) for size in x.shape)
    square = rows == _BLOCK
    out = _allocate(x, dtype, block_columns, block_rows if square else None) if rowwise else None
    out_t = _allocate(x.t(), dtype, block_rows, block_columns if square else None) if columnwise else None
    pointers = (x, *_pointers(out), *_pointers(out_t), *x.shape, x.stride(0))
    if columnwise and x.shape[0] % 4 == 0:
        _cast_blocks_packed[(block_rows * block_columns,)](
            *pointers, FP8_MAX=fp8_max, SQUARE=square, BLOCK=_BLOCK, num_warps=_BLOCK_WARPS, maxnreg=_BLOCK_REGISTERS
        )
    elif rowwise or columnwise:
        tile_r, warps = _SQUARE_TILE if square or columnwise else _PIECES_TILE
        _cast_blocks[(cdiv(x.shape[0], tile_r) * block_columns,)](
            *pointers, 1.0, FP8_MAX=fp8_max, SQUARE=square, TILE_R=tile_r, TILE_C=_BLOCK, num_warps=warps
        )
    return out, out_t


def amax(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Largest |x| in float32, NaN ignored, float32 []; x of any shape. One read on a GPU. out: receives the result; zeroed."""
    if x.device.type == "cuda" and not torch.compiler.is_compiling():
        return launch_amax(x, out=out)
    return reference.amax(x) if out is None else out.copy_(reference.amax(x))


def scale_from_amax(largest: Tensor, fp8_max: float, power_of_two: bool = False) -> Tensor:
    """`reference.scale_from_amax` as one launch on a GPU; float32 of any shape."""
    if largest.device.type == "cuda" and not torch.compiler.is_compiling():
        return launch_scale(largest, fp8_max, power_of_two)
    return reference.scale_from_amax(largest, fp8_max, power_of_two=power_of_two)


def _in_kernels(x: Tensor) -> bool:
    # A GPU's compiler fuses the passes of the reference.
    return not torch.compiler.is_compiling() and x.numel() > 0 and gemm.is_native(x.device)


Operators = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Data, inverses and scales of `Layouts`, rowwise and columnwise; empty tensors for a layout that is not requested."""


# Inductor's code for CPUs (torch 2.13) reads outside the blocks of a padded matrix: scales of 1e31 out of 289 rows.
@torch.library.custom_op("octavo::cast_parts", mutates_args=())
def _cast_parts(x: Tensor, dtype: torch.dtype, fp8_max: float, block: int, rowwise: bool, columnwise: bool) -> Operators:
    """`rows` (block 0) or `blocks` of `block` rows, as one operator to a compiler."""
    if block:
        scaled = blocks(x, dtype, fp8_max, block, rowwise=rowwise, columnwise=columnwise)
    else:
        scaled = rows(x, dtype, fp8_max, rowwise=rowwise, columnwise=columnwise)
    # An operator may not return views of its argument or of another result.
    parts = [x.new_empty(0) if part is None else part.clone(memory_format=torch.contiguous_format)
             for layout in scaled for part in (layout or (None, None, None))]  # fmt: skip
    return parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]


@_cast_parts.register_fake
def _(x: Tensor, dtype: torch.dtype, fp8_max: float, block: int, rowwise: bool, columnwise: bool) -> Operators:
    parts = []
    for asked, (height, width) in ((rowwise, x.shape), (columnwise, reversed(x.shape))):
        scales = (-(-height // block), -(-width // _BLOCK)) if block else (height, 1)
        for shape, kind in (((height, width), dtype), (scales, torch.float32), (scales, torch.float32)):
            parts.append(x.new_empty(shape, dtype=kind) if asked else x.new_empty(0))
    return parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]


def _by_operator(x: Tensor, dtype: torch.dtype, fp8_max: float, block: int, rowwise: bool, columnwise: bool) -> Layouts:
    """`rows` or `blocks` in compiled code for a CPU."""
    parts = _cast_parts(x, dtype, fp8_max, block, rowwise, columnwise)
    return Scaled(*parts[:3]) if rowwise else None, Scaled(*parts[3:]) if columnwise else None


@torch.library.custom_op("octavo::current_scale", mutates_args=())
def _current_scale(x: Tensor, fp8_max: float, power_of_two: bool) -> Tensor:
    return scale_from_amax(amax(x), fp8_max, power_of_two)


@_current_scale.register_fake
def _(x: Tensor, fp8_max: float, power_of_two: bool) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def current_scale(x: Tensor, fp8_max: float, power_of_two: bool) -> Tensor:
    """The scale of x from its amax, float32 []: in compiled code for a CPU one operator."""
    if is_opaque(x):
        return _current_scale(x, fp8_max, power_of_two)
    return scale_from_amax(amax(x), fp8_max, power_of_two)


def _scaled(scaled: tuple[Tensor, Tensor]) -> Scaled:
    q, scale = scaled
    return Scaled(q, reference.divide(1.0, scale), scale)


def rows(
    x: Tensor, dtype: torch.dtype, fp8_max: float, *, rowwise: bool, columnwise: bool, join: Join | None = None
) -> Layouts:
    """FP8 with one scale per row: of x [R, C] if `rowwise`, and of xᵀ [C, R], a scale for each column of x, if `columnwise`.

    Scales are [R, 1] and [C, 1]. On a GPU `rowwise` alone is one pass over x, otherwise two. join: joins the amaxes of columns
    with other ranks that hold more rows; not in compiled code.
    """
    if _in_kernels(x):
        return launch_rows(x, dtype, fp8_max, rowwise=rowwise, columnwise=columnwise, join=join)
    if is_opaque(x):
        return _by_operator(x, dtype, fp8_max, 0, rowwise, columnwise)
    out = _scaled(reference.cast_rows(x, dtype, fp8_max)) if rowwise else None
    return out, _scaled(reference.cast_rows(x.t(), dtype, fp8_max, join)) if columnwise else None


def blocks(x: Tensor, dtype: torch.dtype, fp8_max: float, rows: int, *, rowwise: bool, columnwise: bool) -> Layouts:
    """FP8 with power-of-two scales for blocks of `rows` × 128, rows 1 or 128: of x [R, C] if `rowwise`, of xᵀ if `columnwise`.

    Scales are [⌈R/rows⌉, ⌈C/128⌉] and [⌈C/rows⌉, ⌈R/128⌉]. Blocks of 128 × 128 are the same ones in both layouts.
    """
    if _in_kernels(x):
        return launch_blocks(x, dtype, fp8_max, rows, rowwise=rowwise, columnwise=columnwise)
    if is_opaque(x):
        return _by_operator(x, dtype, fp8_max, rows, rowwise, columnwise)
    out = _scaled(reference.cast_blocks(x, dtype, fp8_max, rows)) if rowwise or (columnwise and rows > 1) else None
    if rows == 1:
        return out, _scaled(reference.cast_blocks(x.t(), dtype, fp8_max, rows)) if columnwise else None
    out_t = Scaled(*map(reference.transposed, out)) if out is not None and columnwise else None
    return out if rowwise else None, out_t
