"""Casts that choose their own scales, per row and per block: one or two reads of a matrix give FP8 in both layouts.

Current, rowwise and block scaling take a scale from the very values that it scales. In plain PyTorch that is four passes or
more over float32 copies, for each layout again. Here a tile that holds whole blocks is read once, its scales are chosen and
both layouts written; a scale for each row and each column takes a second read, since no tile holds both. The scales are those
of `reference.scale_from_amax`, bit for bit. An amax joined over ranks takes `amax` and `cast` instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.quantize.cast import larger, store_layouts
from octavo.kernels.quantize.packed_transpose import groups_inside, load_fours, packed_row, store_packed

_BLOCK = reference.BLOCK
# Untuned: (rows, columns, warps) of the tiles that are cast for rows and columns, and those that only measure them.
_CAST_TILE, _AMAX_TILE = (64, 128, 4), (64, 256, 8)
# Also untuned, for rows packed by fours as in `cast`: the first of these tiles; and warps and registers for 128 × 128.
_GROUP_TILE, _GROUP_BLOCK = (128, 64, 4), (8, 128)
# Elements of the tile that holds whole rows, the longest row that it holds, and warps.
_ROW_TILE, _LONGEST_ROW, _ROW_WARPS = 8192, 16384, 8
# Rows and warps of the tiles of 128 columns: when only 1 × 128 pieces are wanted, and when 128 × 128 is needed.
_PIECES_TILE, _SQUARE_WARPS = (32, 4), 8
_AMAX_BLOCK, _AMAX_WARPS = 8192, 8
_FLOAT32_MAX = tl.constexpr(reference.FLOAT32_MAX)


class Scaled(NamedTuple):
    """FP8 data [R, C] with its scales and their inverses, float32 [R, 1] or [⌈R/rows⌉, ⌈C/128⌉].

    On a GPU the scales of 1 × 128 pieces lie column after column, strides (1, R), as the products read them.
    """

    data: Tensor
    scale_inv: Tensor
    scale: Tensor


Both = tuple[Scaled | None, Scaled | None]


@triton.jit
def _amaxes(x):
    """Amaxes of rows; the maximum of nothing but NaN is NaN."""
    return larger(0.0, tl.max(tl.abs(x.to(tl.float32)), axis=1))


@triton.jit
def _choose_scale(amax, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
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
    if POWER_OF_TWO:  # exponents sum to 254, and 2^127 alone has a subnormal inverse
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
    # Non-negative floats order as their bits do, and an integer maximum does not depend on the order of the programs.
    largest = tl.max(larger(0.0, x)).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), largest, sem="relaxed")


@triton.jit
def _scale_of(amax_ptr, scale_ptr, count, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < count, other=0.0)
    tl.store(scale_ptr + at, _choose_scale(amax, FP8_MAX, POWER_OF_TWO), mask=at < count)


@triton.jit
def _cast_whole_rows(
    x_ptr, q_ptr, scale_ptr, scale_inv_ptr, rows, columns, stride,
    FP8_MAX: tl.constexpr, WHOLE: tl.constexpr, TILE_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program casts TILE_R rows; rows longer than BLOCK are read twice, the second time from the cache."""
    r = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    c = tl.arange(0, BLOCK)
    from_x = x_ptr + r[:, None].to(tl.int64) * stride
    into_q = q_ptr + r[:, None].to(tl.int64) * columns
    here = (r < rows)[:, None]
    if WHOLE:
        inside = here & (c < columns)[None, :]
        x = tl.load(from_x + c[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = _choose_scale(tl.max(larger(0.0, x), axis=1), FP8_MAX, False)
        q = (x * scale[:, None]).to(q_ptr.dtype.element_ty)
        tl.store(into_q + c[None, :], q, mask=inside)
    else:
        largest = tl.zeros([TILE_R, BLOCK], dtype=tl.float32)
        for first in range(0, columns, BLOCK):
            at = first + c[None, :]
            x = tl.load(from_x + at, mask=here & (at < columns), other=0.0).to(tl.float32)
            largest = tl.maximum(largest, larger(0.0, x))
        scale = _choose_scale(tl.max(largest, axis=1), FP8_MAX, False)
        for first in range(0, columns, BLOCK):
            at = first + c[None, :]
            x = tl.load(from_x + at, mask=here & (at < columns), other=0.0).to(tl.float32)
            q = (x * scale[:, None]).to(q_ptr.dtype.element_ty)
            tl.store(into_q + at, q, mask=here & (at < columns))
    _store_scale(scale, scale_ptr, scale_inv_ptr, r, r < rows, False)


@triton.jit
def _row_column_amaxes(
    x_ptr, row_amax_ptr, column_amax_ptr, rows, columns, stride,
    ROWWISE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes of rows and columns, as int32 bits, by those of a tile."""
    tiles_across = tl.cdiv(columns, TILE_C)
    r = (tl.program_id(0) // tiles_across) * TILE_R + tl.arange(0, TILE_R)
    c = (tl.program_id(0) % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    magnitude = larger(0.0, x)
    if ROWWISE:
        tl.atomic_max(row_amax_ptr + r, tl.max(magnitude, axis=1).to(tl.int32, bitcast=True), mask=r < rows, sem="relaxed")
    tl.atomic_max(column_amax_ptr + c, tl.max(magnitude, axis=0).to(tl.int32, bitcast=True), mask=c < columns, sem="relaxed")


@triton.jit
def _cast_scales(
    row_amax_ptr, column_amax_ptr, row_scale_ptr, row_inv_ptr, column_scale_ptr, column_inv_ptr, rows, columns,
    FP8_MAX: tl.constexpr, ROWWISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apart from the cast, whose tiles would divide for their rows and columns anew: half of all their instructions."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if ROWWISE:
        amax = tl.load(row_amax_ptr + at, mask=at < rows, other=0).to(tl.float32, bitcast=True)
        _store_scale(_choose_scale(amax, FP8_MAX, False), row_scale_ptr, row_inv_ptr, at, at < rows, False)
    amax = tl.load(column_amax_ptr + at, mask=at < columns, other=0).to(tl.float32, bitcast=True)
    _store_scale(_choose_scale(amax, FP8_MAX, False), column_scale_ptr, column_inv_ptr, at, at < columns, False)


@triton.jit
def _cast_rows_columns(
    x_ptr, rowwise_ptr, row_scale_ptr, columnwise_ptr, column_scale_ptr, rows, columns, stride, one,
    ROWWISE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tiles_across = tl.cdiv(columns, TILE_C)
    r = (tl.program_id(0) // tiles_across) * TILE_R + tl.arange(0, TILE_R)
    c = (tl.program_id(0) % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROWWISE:
        y = x * tl.load(row_scale_ptr + r, mask=r < rows, other=0.0)[:, None]
        store_layouts(y, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, True, False, False)
    y = x * tl.load(column_scale_ptr + c, mask=c < columns, other=0.0)[None, :]
    store_layouts(y, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, False, True, ROWWISE)


@triton.jit
def _cast_rows_columns_by_fours(
    x_ptr, rowwise_ptr, row_scale_ptr, columnwise_ptr, column_scale_ptr, rows, columns, stride,
    ROWWISE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    # What the pass before read last is still in the L2 cache, so the last tile comes first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_across = tl.cdiv(columns, TILE_C)
    g = (tile // tiles_across) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    c = (tile % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = groups_inside(g, c, rows, columns)
    fours = load_fours(x_ptr, g, c, stride, inside)
    column_scale = tl.load(column_scale_ptr + c, mask=c < columns, other=0.0)[None, :]
    packed = tl.zeros([TILE_R // 4, TILE_C], tl.int32)
    before = tl.zeros([TILE_R // 4, TILE_C], tl.float32)
    for i in tl.static_range(4):
        r = g * 4 + i
        x = fours[i].to(tl.float32)
        if ROWWISE:
            y = x * tl.load(row_scale_ptr + r, mask=g < rows // 4, other=0.0)[:, None]
            at = rowwise_ptr + r[:, None].to(tl.int64) * columns + c[None, :]
            tl.store(at, y.to(rowwise_ptr.dtype.element_ty), mask=inside)
        x = x * column_scale
        packed = packed_row(packed, before, x, i, columnwise_ptr.dtype.element_ty)
        before = x
    store_packed(packed, columnwise_ptr, g, c, rows, inside)


@triton.jit
def _cast_blocks(
    x_ptr, rowwise_ptr, row_scale_ptr, row_inv_ptr, columnwise_ptr, column_scale_ptr, column_inv_ptr,
    rows, columns, stride, one,
    FP8_MAX: tl.constexpr, SQUARE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """A tile of 128 columns; it has 128 rows where one scale is for all of it (SQUARE) or for 128 elements of a column."""
    tiles_across = tl.cdiv(columns, TILE_C)
    tile_r, tile_c = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    r = tile_r * TILE_R + tl.arange(0, TILE_R)
    c = tile_c * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    magnitude = larger(0.0, x)
    if SQUARE:
        scale = _choose_scale(tl.max(magnitude), FP8_MAX, True)
        if ROWWISE:
            _store_scale(scale, row_scale_ptr, row_inv_ptr, tile_r * tiles_across + tile_c, True, True)
        if COLUMNWISE:
            _store_scale(scale, column_scale_ptr, column_inv_ptr, tile_c * tl.cdiv(rows, TILE_R) + tile_r, True, True)
        y = x * scale
        store_layouts(y, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, ROWWISE, COLUMNWISE, ROWWISE)
    else:
        if ROWWISE:
            scale = _choose_scale(tl.max(magnitude, axis=1), FP8_MAX, True)
            _store_scale(scale, row_scale_ptr, row_inv_ptr, tile_c.to(tl.int64) * rows + r, r < rows, True)
            y = x * scale[:, None]
            store_layouts(y, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, True, False, False)
        if COLUMNWISE:
            scale = _choose_scale(tl.max(magnitude, axis=0), FP8_MAX, True)
            _store_scale(scale, column_scale_ptr, column_inv_ptr, tile_r.to(tl.int64) * columns + c, c < columns, True)
            y = x * scale[None, :]
            store_layouts(y, rowwise_ptr, columnwise_ptr, r, c, rows, columns, inside, one, False, True, ROWWISE)


@triton.jit
def _cast_blocks_by_fours(
    x_ptr, rowwise_ptr, row_scale_ptr, row_inv_ptr, columnwise_ptr, column_scale_ptr, column_inv_ptr,
    rows, columns, stride,
    FP8_MAX: tl.constexpr, SQUARE: tl.constexpr, ROWWISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of 128 × 128 with its transpose, in 32 groups of four rows."""
    tiles_across = tl.cdiv(columns, BLOCK)
    tile_r, tile_c = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    g = tile_r * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    c = tile_c * BLOCK + tl.arange(0, BLOCK)
    inside = groups_inside(g, c, rows, columns)
    fours = load_fours(x_ptr, g, c, stride, inside)
    x_0, x_1, x_2, x_3 = fours
    largest = larger(larger(0.0, x_0.to(tl.float32)), x_1.to(tl.float32))
    largest = larger(larger(largest, x_2.to(tl.float32)), x_3.to(tl.float32))
    if SQUARE:
        column_scale = _choose_scale(tl.max(largest), FP8_MAX, True)
        index = tile_c * tl.cdiv(rows, BLOCK) + tile_r
        _store_scale(column_scale, column_scale_ptr, column_inv_ptr, index, True, True)
        if ROWWISE:
            _store_scale(column_scale, row_scale_ptr, row_inv_ptr, tl.program_id(0), True, True)
    else:
        scale = _choose_scale(tl.max(largest, axis=0), FP8_MAX, True)
        _store_scale(scale, column_scale_ptr, column_inv_ptr, tile_r.to(tl.int64) * columns + c, c < columns, True)
        column_scale = scale[None, :]
        if ROWWISE:
            amaxes = (_amaxes(x_0), _amaxes(x_1), _amaxes(x_2), _amaxes(x_3))
            # In the order of the rows, so that their scales are stored at once.
            amax = tl.reshape(tl.join(tl.join(amaxes[0], amaxes[2]), tl.join(amaxes[1], amaxes[3])), [BLOCK])
            r = tile_r * BLOCK + tl.arange(0, BLOCK)
            scale = _choose_scale(amax, FP8_MAX, True)
            _store_scale(scale, row_scale_ptr, row_inv_ptr, tile_c.to(tl.int64) * rows + r, r < rows, True)
    packed = tl.zeros([BLOCK // 4, BLOCK], tl.int32)
    before = tl.zeros([BLOCK // 4, BLOCK], tl.float32)
    for i in tl.static_range(4):
        x = fours[i].to(tl.float32)
        y = x * column_scale
        if ROWWISE:
            z = y
            if not SQUARE:
                z = x * _choose_scale(amaxes[i], FP8_MAX, True)[:, None]
            at = rowwise_ptr + (g * 4 + i)[:, None].to(tl.int64) * columns + c[None, :]
            tl.store(at, z.to(rowwise_ptr.dtype.element_ty), mask=inside)
        packed = packed_row(packed, before, y, i, columnwise_ptr.dtype.element_ty)
        before = y
    store_packed(packed, columnwise_ptr, g, c, rows, inside)


def launch_amax(x: Tensor, *, block: int = _AMAX_BLOCK, warps: int = _AMAX_WARPS) -> Tensor:
    """Run the kernel; see `amax`."""
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return largest
    if x.dim() != 2 or x.stride(-1) != 1 or x.is_contiguous():
        x = x.contiguous().view(1, -1)
    grid = (x.shape[0] * triton.cdiv(x.shape[1], block),)
    _amax_of[grid](x, largest, x.shape[1], x.stride(0), BLOCK=block, num_warps=warps)
    return largest


def launch_scale(largest: Tensor, fp8_max: float, power_of_two: bool = False) -> Tensor:
    """Run the kernel; see `scale_from_amax`."""
    largest = largest.contiguous()
    scale = torch.empty_like(largest)
    count = largest.numel()
    if count:
        block = min(triton.next_power_of_2(count), 1024)
        _scale_of[(triton.cdiv(count, block),)](largest, scale, count, fp8_max, power_of_two, BLOCK=block)
    return scale


def _memory(x: Tensor, dtype: torch.dtype, pieces: int, rows: int | None) -> Scaled:
    """Memory for an operand like x [R, C] and its scales [rows, pieces]; without `rows`, [R, pieces] column after column."""
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    if rows is None:
        scale_inv, scale = (torch.empty(pieces, x.shape[0], dtype=torch.float32, device=x.device).t() for _ in range(2))
    else:
        scale_inv, scale = (torch.empty(rows, pieces, dtype=torch.float32, device=x.device) for _ in range(2))
    return Scaled(data, scale_inv, scale)


def _pointers(made: Scaled | None, otherwise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pointers to data, scales and inverses; `otherwise`, which no kernel touches, for a layout that is not wanted."""
    return (otherwise,) * 3 if made is None else (made.data, made.scale, made.scale_inv)


def launch_rows(
    x: Tensor, dtype: torch.dtype, fp8_max: float, *, rowwise: bool, columnwise: bool,
    tile: tuple[int, int, int] = _CAST_TILE, group_tile: tuple[int, int, int] = _GROUP_TILE,
    amax_tile: tuple[int, int, int] = _AMAX_TILE,
    row_tile: int = _ROW_TILE, longest_row: int = _LONGEST_ROW, row_warps: int = _ROW_WARPS,
) -> Both:  # fmt: skip
    """Run the kernels; see `rows`. Tiles are (rows, columns, warps), `group_tile` where four divides the rows; the rest is for
    whole rows, which need no second tile.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    along = _memory(x, dtype, 1, rows) if rowwise else None
    if not columnwise:
        if along is not None:
            whole = triton.next_power_of_2(columns) <= longest_row
            block = triton.next_power_of_2(columns) if whole else row_tile
            tile_r = max(1, min(row_tile // block, 16))
            _cast_whole_rows[(triton.cdiv(rows, tile_r),)](
                x, *_pointers(along, x), rows, columns, x.stride(0),
                FP8_MAX=fp8_max, WHOLE=whole, TILE_R=tile_r, BLOCK=block, num_warps=row_warps,
            )  # fmt: skip
        return along, None
    across = _memory(x.t(), dtype, 1, columns)
    largest = torch.zeros(rows + columns, dtype=torch.int32, device=x.device)
    row_amax, column_amax = largest[:rows], largest[rows:]
    tile_r, tile_c, warps = amax_tile
    _row_column_amaxes[(triton.cdiv(rows, tile_r) * triton.cdiv(columns, tile_c),)](
        x, row_amax, column_amax, rows, columns, x.stride(0), ROWWISE=rowwise, TILE_R=tile_r, TILE_C=tile_c, num_warps=warps
    )
    data, *scales = _pointers(along, x)
    _cast_scales[(triton.cdiv(max(rows, columns), 128),)](
        row_amax, column_amax, *scales, across.scale, across.scale_inv, rows, columns,
        FP8_MAX=fp8_max, ROWWISE=rowwise, BLOCK=128,
    )  # fmt: skip
    by_fours = rows % 4 == 0
    run, forms = (_cast_rows_columns_by_fours, {}) if by_fours else (_cast_rows_columns, {"one": 1.0})
    tile_r, tile_c, warps = group_tile if by_fours else tile
    run[(triton.cdiv(rows, tile_r) * triton.cdiv(columns, tile_c),)](
        x, data, scales[0], across.data, across.scale, rows, columns, x.stride(0),
        ROWWISE=rowwise, TILE_R=tile_r, TILE_C=tile_c, num_warps=warps, **forms,
    )  # fmt: skip
    return along, across


def launch_blocks(
    x: Tensor, dtype: torch.dtype, fp8_max: float, rows: int, *, rowwise: bool, columnwise: bool,
    pieces_tile: tuple[int, int] = _PIECES_TILE, square_warps: int = _SQUARE_WARPS, group_block: tuple[int, int] = _GROUP_BLOCK,
) -> Both:  # fmt: skip
    """Run the kernel; see `blocks`. pieces_tile: (rows, warps) of a tile that gives 1 × 128 pieces of the row layout only;
    group_block: (warps, registers of a thread) of one that is transposed, where four divides the rows.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    high, wide = (triton.cdiv(size, _BLOCK) for size in x.shape)
    square = rows == _BLOCK
    along = _memory(x, dtype, wide, high if square else None) if rowwise else None
    across = _memory(x.t(), dtype, high, wide if square else None) if columnwise else None
    pointers = (x, *_pointers(along, x), *_pointers(across, x), *x.shape, x.stride(0))
    if columnwise and x.shape[0] % 4 == 0:
        warps, registers = group_block
        _cast_blocks_by_fours[(high * wide,)](
            *pointers, FP8_MAX=fp8_max, SQUARE=square, ROWWISE=rowwise, BLOCK=_BLOCK, num_warps=warps, maxnreg=registers
        )
    elif rowwise or columnwise:
        tile_r, warps = (_BLOCK, square_warps) if square or columnwise else pieces_tile
        _cast_blocks[(triton.cdiv(x.shape[0], tile_r) * wide,)](
            *pointers, 1.0, FP8_MAX=fp8_max, SQUARE=square, ROWWISE=rowwise, COLUMNWISE=columnwise,
            TILE_R=tile_r, TILE_C=_BLOCK, num_warps=warps,
        )  # fmt: skip
    return along, across


def amax(x: Tensor) -> Tensor:
    """Largest |x| in float32, NaN ignored, float32 []; x of any shape. One read on a GPU."""
    if x.device.type == "cuda" and not torch.compiler.is_compiling():
        return launch_amax(x)
    return reference.amax(x)


def scale_from_amax(largest: Tensor, fp8_max: float, power_of_two: bool = False) -> Tensor:
    """`reference.scale_from_amax` as one launch on a GPU; float32 of any shape."""
    if largest.device.type == "cuda" and not torch.compiler.is_compiling():
        return launch_scale(largest, fp8_max, power_of_two)
    return reference.scale_from_amax(largest, fp8_max, power_of_two=power_of_two)


def _in_kernels(x: Tensor) -> bool:
    # A compiler fuses the reference's own passes.
    return not torch.compiler.is_compiling() and x.numel() > 0 and gemm.is_native(x.device)


def _scaled(made: tuple[Tensor, Tensor]) -> Scaled:
    q, scale = made
    return Scaled(q, reference.divide(1.0, scale), scale)


def rows(x: Tensor, dtype: torch.dtype, fp8_max: float, *, rowwise: bool, columnwise: bool) -> Both:
    """FP8 with one scale a row: of x [R, C] if `rowwise`, and of xᵀ [C, R], a scale for each column of x, if `columnwise`.

    Scales are [R, 1] and [C, 1]. On a GPU `rowwise` alone is one pass over x, otherwise two.
    """
    if _in_kernels(x):
        return launch_rows(x, dtype, fp8_max, rowwise=rowwise, columnwise=columnwise)
    along = _scaled(reference.cast_rows(x, dtype, fp8_max)) if rowwise else None
    return along, _scaled(reference.cast_rows(x.t(), dtype, fp8_max)) if columnwise else None


def blocks(x: Tensor, dtype: torch.dtype, fp8_max: float, rows: int, *, rowwise: bool, columnwise: bool) -> Both:
    """FP8 with power-of-two scales for blocks of `rows` × 128, rows 1 or 128: of x [R, C] if `rowwise`, of xᵀ if `columnwise`.

    Scales are [⌈R/rows⌉, ⌈C/128⌉] and [⌈C/rows⌉, ⌈R/128⌉]. Blocks of 128 × 128 are the same ones in both layouts.
    """
    if _in_kernels(x):
        return launch_blocks(x, dtype, fp8_max, rows, rowwise=rowwise, columnwise=columnwise)
    along = _scaled(reference.cast_blocks(x, dtype, fp8_max, rows)) if rowwise or (columnwise and rows > 1) else None
    if rows == 1:
        return along, _scaled(reference.cast_blocks(x.t(), dtype, fp8_max, rows)) if columnwise else None
    across = Scaled(*map(reference.transposed, along)) if along is not None and columnwise else None
    return along if rowwise else None, across
