"""Transposes FP8 in words of four rows instead of single bytes.

Shared memory transposes bytes slowly and words fast. The bytes of a column in four rows make one 32-bit word, and a columnwise
store takes words: a tile [G, C] of int32 holds G groups of four rows. The interpreter, without a GPU's instructions, computes
the same with shifts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.fast_math import INTERPRETED


@triton.jit
def load_row_groups(x_ptr, g, c, stride, inside):
    """Rows 4 g, 4 g + 1, 4 g + 2 and 4 g + 3, a tile each. Loads come first: compilers move no load before a store."""
    at = x_ptr + (g * 4)[:, None].to(tl.int64) * stride + c[None, :]
    step = tl.cast(stride, tl.int64)
    return (
        tl.load(at, mask=inside, other=0),
        tl.load(at + step, mask=inside, other=0),
        tl.load(at + 2 * step, mask=inside, other=0),
        tl.load(at + 3 * step, mask=inside, other=0),
    )


@triton.jit
def store_packed(packed, columnwise_ptr, g, c, stride, inside):
    """Store words [G, C] of a transposed matrix: column c is row c of the result, whose rows are `stride` bytes apart.

    inside: by groups, not rows, so that the compiler sees equal masks of neighbours and stores several words at once.
    """
    at = columnwise_ptr.to(tl.pointer_type(tl.int32)) + c[:, None].to(tl.int64) * (stride // 4) + g[None, :]
    tl.store(at, tl.trans(packed), mask=tl.trans(inside))


@triton.jit
def packed_row(packed, before, x, ROW: tl.constexpr, DTYPE: tl.constexpr):
    """Write an odd ROW of four and the row before it, float32 tiles, as FP8 into the int32 tile `packed`."""
    if ROW % 2:
        if INTERPRETED:
            low = before.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
            high = x.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
            packed = packed | ((low | (high << 8)) << (8 * (ROW - 1)))
        else:
            # Hopper converts two numbers at once and saturates: ±inf and numbers beyond the largest value become that, NaN
            # stays. A column's pairs differ from a row's, so each layout has a separate conversion: the ptxas
            # of CUDA 12.9, which Triton brings, loses bytes when one conversion feeds the stores of both layouts.
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
def _select_bytes(a, b, CHOICE: tl.constexpr):
    """The bytes of a (0 to 3) and b (4 to 7) given by the hexadecimal digits of CHOICE, the lowest first."""
    if INTERPRETED:
        word = tl.zeros_like(a)
        for i in tl.static_range(4):
            digit: tl.constexpr = (CHOICE >> (4 * i)) & 7
            word |= (((a if digit < 4 else b) >> (8 * (digit % 4))) & 0xFF) << (8 * i)
    else:
        CODE: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
        word = tl.inline_asm_elementwise(CODE, "=r,r,r,n", [a, b, CHOICE], dtype=tl.int32, is_pure=True, pack=1)
    return word


@triton.jit
def transpose_words(a, b, c, d):
    """Four rows of words, each four columns, as four columns of words, each four rows."""
    low_ab, high_ab = _select_bytes(a, b, 0x5140), _select_bytes(a, b, 0x7362)
    low_cd, high_cd = _select_bytes(c, d, 0x5140), _select_bytes(c, d, 0x7362)
    return (
        _select_bytes(low_ab, low_cd, 0x5410),
        _select_bytes(low_ab, low_cd, 0x7632),
        _select_bytes(high_ab, high_cd, 0x5410),
        _select_bytes(high_ab, high_cd, 0x7632),
    )
