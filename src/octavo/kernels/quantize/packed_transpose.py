"""FP8 transposed in words of four rows instead of single bytes.

Shared memory transposes bytes slowly and words fast. Of four rows the bytes of a column make one 32-bit word, so a columnwise
store takes words: rows come in groups g of four, [G], and a tile [G, C] of int32 holds 4 G rows. The interpreter has no
instructions of a GPU and computes the same in its own way.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def groups_inside(g, c, rows, columns):
    """Which of the tile [G, C] is inside a matrix whose rows four divides.

    In words, rather than rows: so the compiler sees that neighbours share their answer, and stores several words at once.
    """
    return (g < rows // 4)[:, None] & (c < columns)[None, :]


@triton.jit
def load_fours(x_ptr, g, c, stride, inside):
    """Rows 4 g, 4 g + 1, 4 g + 2 and 4 g + 3, a tile each: a compiler moves no load before a store, so all come first."""
    at = x_ptr + (g * 4)[:, None].to(tl.int64) * stride + c[None, :]
    step = tl.cast(stride, tl.int64)
    return (
        tl.load(at, mask=inside, other=0),
        tl.load(at + step, mask=inside, other=0),
        tl.load(at + 2 * step, mask=inside, other=0),
        tl.load(at + 3 * step, mask=inside, other=0),
    )


@triton.jit
def store_packed(packed, columnwise_ptr, g, c, rows, inside):
    """Store int32 [groups of four rows, columns], of a matrix of so many rows, transposed: column c is row c of the result."""
    at = columnwise_ptr.to(tl.pointer_type(tl.int32)) + c[:, None].to(tl.int64) * (rows // 4) + g[None, :]
    tl.store(at, tl.trans(packed), mask=tl.trans(inside))


if triton.knobs.runtime.interpret:

    @triton.jit
    def packed_row(packed, before, x, ROW: tl.constexpr, DTYPE: tl.constexpr):
        """Row ROW of four, a float32 tile, and the one before it as FP8 in int32 `packed`; on an even ROW nothing yet."""
        if ROW % 2:
            low = before.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
            high = x.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
            packed = packed | ((low | (high << 8)) << (8 * (ROW - 1)))
        return packed

    @triton.jit
    def _chosen(a, b, CHOICE: tl.constexpr):
        """The bytes of a (0 to 3) and b (4 to 7) that the digits of CHOICE name, the lowest first."""
        word = tl.zeros_like(a)
        for i in tl.static_range(4):
            digit: tl.constexpr = (CHOICE >> (4 * i)) & 7
            word |= (((a if digit < 4 else b) >> (8 * (digit % 4))) & 0xFF) << (8 * i)
        return word

else:

    @triton.jit
    def packed_row(packed, before, x, ROW: tl.constexpr, DTYPE: tl.constexpr):
        """Row ROW of four, a float32 tile, and the one before it as FP8 in int32 `packed`; on an even ROW nothing yet.

        Hopper converts two numbers at once and saturates: ±inf and what lies beyond the largest value become that, NaN stays.
        The two of a column are another pair than those of a row. That has a second use: the ptxas of CUDA 12.9 that Triton
        brings loses bytes when one conversion feeds the stores of both layouts.
        """
        if ROW % 2:
            FORMAT: tl.constexpr = "e4m3x2" if tl.float8e4nv == DTYPE else "e5m2x2"
            HALVES: tl.constexpr = "{low, pair}" if ROW == 3 else "{pair, high}"
            CODE: tl.constexpr = (
                "{ .reg .b16 pair, low, high; mov.b32 {low, high}, $1; cvt.rn.satfinite."
                + FORMAT
                + ".f32 pair, $3, $2; mov.b32 $0, "
                + HALVES
                + "; }"
            )
            packed = tl.inline_asm_elementwise(CODE, "=r,r,f,f", [packed, before, x], dtype=tl.int32, is_pure=True, pack=1)
        return packed

    @triton.jit
    def _chosen(a, b, CHOICE: tl.constexpr):
        """The bytes of a (0 to 3) and b (4 to 7) that the digits of CHOICE name, the lowest first."""
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", [a, b, CHOICE], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def turned(a, b, c, d):
    """Four rows of words, each four columns, as four columns of words, each four rows."""
    low_ab, high_ab = _chosen(a, b, 0x5140), _chosen(a, b, 0x7362)
    low_cd, high_cd = _chosen(c, d, 0x5140), _chosen(c, d, 0x7362)
    return (
        _chosen(low_ab, low_cd, 0x5410),
        _chosen(low_ab, low_cd, 0x7632),
        _chosen(high_ab, high_cd, 0x5410),
        _chosen(high_ab, high_cd, 0x7632),
    )
