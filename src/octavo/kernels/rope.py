"""Rotary embedding around attention: splits the joint query/key/value product and rotates; joins the gradients in backward.

One read and one write in each direction; separate slicing, rotation and copy would each be a pass. Backward converts
attention's gradients, with any strides or as FlashAttention-4's sums, directly to the joint gradient in FP8, rowwise and
columnwise.

A row of the joint product is G groups of H/G query heads, their key and their value. Column i rotates with column i + Dr/2, so
a tile holds two halves of a head. If Dr < D, the columns from Dr on are halved too, with the angle 0. A program rotates several
heads of its tokens: they share cosines and sines, each twice the bytes of a head.

Shapes: B batch, T tokens, N = B·T, H query heads, G key-value heads, D head dimension, Dr of it rotated.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.attention.accumulated import Accumulated, Gradient, column_offsets, token_offsets
from octavo.kernels.quantize.cast import load_scale, record_amax, store_layouts
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer, allocate, quantize, without_elements
from octavo.kernels.tiles import adjacent_columns, cdiv, next_power_of_2


class Tiles(NamedTuple):
    """Tokens and heads of a program, and its warps. Joined gradients are stored columnwise `tokens` elements at a time."""

    tokens: int
    heads: int
    warps: int


SPLIT, JOIN, JOIN_SUMS = Tiles(16, 8, 4), Tiles(32, 4, 4), Tiles(32, 2, 8)


@triton.jit
def _halves(D: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr):
    """Columns of the two halves of a head, [HALF] each, of which the first D // 2 are real."""
    i = tl.arange(0, HALF)
    first = i
    second = i + D // 2
    if ROTATED != D:
        # Columns are contiguous in runs of this power of two. It decides the width of loads, and `where` hides it.
        bits: tl.constexpr = (ROTATED // 2) | (D // 2) | 16
        run: tl.constexpr = bits & -bits
        first = tl.max_contiguous(tl.multiple_of(tl.where(i < ROTATED // 2, i, i + ROTATED // 2), run), run)
        second = tl.max_contiguous(tl.multiple_of(tl.where(i < ROTATED // 2, i + ROTATED // 2, i + D // 2), run), run)
    return first, second


@triton.jit
def _angles(cos_ptr, sin_ptr, angles_at, there, ROTATED: tl.constexpr, HALF: tl.constexpr, MIRRORED: tl.constexpr):
    """cos and sin of both halves for the tokens at `angles_at`, [tokens, HALF] each; 1 and 0 where nothing rotates."""
    i = tl.arange(0, HALF)
    at = angles_at[:, None] + i[None, :]
    inside = there[:, None] & (i < ROTATED // 2)[None, :]
    cos_1 = tl.load(cos_ptr + at, mask=inside, other=1.0)
    sin_1 = tl.load(sin_ptr + at, mask=inside, other=0.0)
    cos_2 = cos_1 if MIRRORED else tl.load(cos_ptr + at + ROTATED // 2, mask=inside, other=1.0)
    sin_2 = sin_1 if MIRRORED else tl.load(sin_ptr + at + ROTATED // 2, mask=inside, other=0.0)
    return cos_1, sin_1, cos_2, sin_2


@triton.jit
def _column(head, KIND: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """First column of a head in the joint product. KIND: 0 queries, 1 keys, 2 values."""
    # A group has H // G query heads, a key and a value: heads of a kind in it, and heads before these.
    PER_GROUP: tl.constexpr = H // G if KIND == 0 else 1
    BEFORE: tl.constexpr = 0 if KIND == 0 else H // G + KIND - 1
    return ((head // PER_GROUP) * (H // G + 2) + BEFORE + head % PER_GROUP) * D


@triton.jit
def _tokens_of_program(tokens, batch_stride, token_stride, TOKENS: tl.constexpr):
    """The tokens of a program, counted over all sequences, and where their angles begin."""
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    return n, (n // tokens).to(tl.int64) * batch_stride + (n % tokens).to(tl.int64) * token_stride


@triton.jit
def _split_heads(
    qkv_ptr, out_ptr, cos_ptr, sin_ptr, n, there, angles_at, stride, first_head, KIND: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr,
    MIRRORED: tl.constexpr, HEADS_EACH: tl.constexpr,
):  # fmt: skip
    """Some heads of queries, keys or values."""
    a, b = _halves(D, ROTATED if ROTATED else D, HALF)
    inside = there[:, None] & (tl.arange(0, HALF) < D // 2)[None, :]
    if ROTATED:
        cos_1, sin_1, cos_2, sin_2 = _angles(cos_ptr, sin_ptr, angles_at, there, ROTATED, HALF, MIRRORED)
    HEADS: tl.constexpr = G if KIND else H
    source = qkv_ptr + n[:, None].to(tl.int64) * stride
    target = out_ptr + n[:, None].to(tl.int64) * (HEADS * D)
    for i in range(tl.minimum(HEADS_EACH, HEADS - first_head)):
        head = first_head + i
        column = _column(head, KIND, H, G, D)
        x = tl.load(source + column + a[None, :], mask=inside, other=0.0)
        y = tl.load(source + column + b[None, :], mask=inside, other=0.0)
        if ROTATED:
            x_32 = x.to(tl.float32)
            y_32 = y.to(tl.float32)
            x = (x_32 * cos_1 - y_32 * sin_1).to(x.dtype)
            y = (y_32 * cos_2 + x_32 * sin_2).to(y.dtype)
        tl.store(target + head * D + a[None, :], x, mask=inside)
        tl.store(target + head * D + b[None, :], y, mask=inside)


@triton.jit
def _split_rotate(
    qkv_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, rows, tokens, stride, batch_stride, token_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr,
    MIRRORED: tl.constexpr, TOKENS: tl.constexpr, HEADS_EACH: tl.constexpr,
):  # fmt: skip
    n, angles_at = _tokens_of_program(tokens, batch_stride, token_stride, TOKENS)
    part = tl.program_id(1)
    queries: tl.constexpr = (H + HEADS_EACH - 1) // HEADS_EACH
    keys: tl.constexpr = (G + HEADS_EACH - 1) // HEADS_EACH
    if part < queries:
        _split_heads(
            qkv_ptr, q_ptr, cos_ptr, sin_ptr, n, n < rows, angles_at, stride,
            part * HEADS_EACH, 0, H, G, D, ROTATED, HALF, MIRRORED, HEADS_EACH,
        )  # fmt: skip
    elif part < queries + keys:
        _split_heads(
            qkv_ptr, k_ptr, cos_ptr, sin_ptr, n, n < rows, angles_at, stride,
            (part - queries) * HEADS_EACH, 1, H, G, D, ROTATED, HALF, MIRRORED, HEADS_EACH,
        )  # fmt: skip
    else:
        _split_heads(
            qkv_ptr, v_ptr, cos_ptr, sin_ptr, n, n < rows, angles_at, stride,
            (part - queries - keys) * HEADS_EACH, 2, H, G, D, 0, HALF, MIRRORED, HEADS_EACH,
        )  # fmt: skip


@triton.jit
def _join_heads(
    grad_ptr, cos_ptr, sin_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, amax_ptr, scale, n, there, angles_at, rows, tokens,
    grad_b, grad_t, grad_h, factor, one, first_head, KIND: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    ROTATED: tl.constexpr, HALF: tl.constexpr, MIRRORED: tl.constexpr, HEADS_EACH: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Some heads of one gradient. SUMS: it is `factor` times sums in the order of `Accumulated`."""
    a, b = _halves(D, ROTATED if ROTATED else D, HALF)
    inside = there[:, None] & (tl.arange(0, HALF) < D // 2)[None, :]
    HEADS: tl.constexpr = G if KIND else H
    WIDTH: tl.constexpr = (H + 2 * G) * D
    BOTH: tl.constexpr = rowwise_ptr is not None and columnwise_ptr is not None
    columns_a = a
    columns_b = b
    tokens_at = (n % tokens).to(tl.int64) * grad_t
    if SUMS:
        tokens_at = token_offsets(n % tokens, D).to(tl.int64)
        pairs: tl.constexpr = (D // 2) % 2 == 0 and (ROTATED // 2) % 2 == 0
        columns_a = column_offsets(a, pairs)
        columns_b = column_offsets(b, pairs)
    source = grad_ptr + ((n // tokens).to(tl.int64) * grad_b + tokens_at)[:, None]
    largest = tl.zeros([n.shape[0]], tl.float32)
    for i in range(tl.minimum(HEADS_EACH, HEADS - first_head)):
        head = first_head + i
        at = source + head.to(tl.int64) * grad_h
        x = tl.load(at + columns_a[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(at + columns_b[None, :], mask=inside, other=0.0).to(tl.float32)
        if SUMS:
            x = x * factor
            y = y * factor
        if ROTATED:  # its angles are loaded for each head, not held in registers
            cos_1, sin_1, cos_2, sin_2 = _angles(cos_ptr, sin_ptr, angles_at, there, ROTATED, HALF, MIRRORED)
            rotated = x * cos_1 + y * sin_2
            y = y * cos_2 - x * sin_1
            x = rotated
        if amax_ptr is not None:  # one atomic for all heads of the program
            larger = tl.maximum(tl.where(x == x, tl.abs(x), 0.0), tl.where(y == y, tl.abs(y), 0.0))
            largest = tl.maximum(largest, tl.max(larger, 1))
        if scale_inv_ptr is not None:
            x = x * scale
            y = y * scale
        column = _column(head, KIND, H, G, D)
        store_layouts(x, rowwise_ptr, columnwise_ptr, n, column + a, rows, WIDTH, inside, one, BOTH)
        store_layouts(y, rowwise_ptr, columnwise_ptr, n, column + b, rows, WIDTH, inside, one, BOTH)
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)


@triton.jit
def _join_rotated(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, rowwise_ptr, columnwise_ptr, scale_ptr, scale_inv_ptr, amax_ptr,
    rows, tokens, q_b, q_t, q_h, q_factor, k_b, k_t, k_h, k_factor, v_b, v_t, v_h, v_factor, batch_stride, token_stride, one,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr, MIRRORED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS_EACH: tl.constexpr, Q_SUMS: tl.constexpr, K_SUMS: tl.constexpr, V_SUMS: tl.constexpr,
):  # fmt: skip
    n, angles_at = _tokens_of_program(tokens, batch_stride, token_stride, TOKENS)
    part = tl.program_id(1)
    queries: tl.constexpr = (H + HEADS_EACH - 1) // HEADS_EACH
    keys: tl.constexpr = (G + HEADS_EACH - 1) // HEADS_EACH
    scale = load_scale(scale_ptr, scale_inv_ptr, (tl.program_id(0) == 0) & (part == 0))
    if part < queries:
        _join_heads(
            dq_ptr, cos_ptr, sin_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, amax_ptr, scale, n, n < rows, angles_at,
            rows, tokens, q_b, q_t, q_h, q_factor, one, part * HEADS_EACH, 0, H, G, D, ROTATED, HALF, MIRRORED,
            HEADS_EACH, Q_SUMS,
        )  # fmt: skip
    elif part < queries + keys:
        _join_heads(
            dk_ptr, cos_ptr, sin_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, amax_ptr, scale, n, n < rows, angles_at,
            rows, tokens, k_b, k_t, k_h, k_factor, one, (part - queries) * HEADS_EACH, 1, H, G, D, ROTATED, HALF, MIRRORED,
            HEADS_EACH, K_SUMS,
        )  # fmt: skip
    else:
        _join_heads(
            dv_ptr, cos_ptr, sin_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, amax_ptr, scale, n, n < rows, angles_at,
            rows, tokens, v_b, v_t, v_h, v_factor, one, (part - queries - keys) * HEADS_EACH, 2, H, G, D, 0, HALF, MIRRORED,
            HEADS_EACH, V_SUMS,
        )  # fmt: skip


def _programs(
    rows: int, heads: int, groups: int, head_dim: int, cos: Tensor | None, mirrored: bool, tiles: Tiles
) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants of a launch."""
    grid = cdiv(rows, tiles.tokens), cdiv(heads, tiles.heads) + 2 * cdiv(groups, tiles.heads)
    return grid, {
        "H": heads,
        "G": groups,
        "D": head_dim,
        "ROTATED": 0 if cos is None else cos.shape[-1],
        "HALF": next_power_of_2(head_dim // 2),
        "MIRRORED": mirrored,
        "TOKENS": tiles.tokens,
        "HEADS_EACH": tiles.heads,
        "num_warps": tiles.warps,
    }


def _strides(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Tables with contiguous rows and equal strides; the strides of a sequence (0: all share one) and of a token."""
    if cos is None or sin is None:
        return None, None, 0, 0
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)


def launch_split(
    qkv: Tensor, heads: int, groups: int, cos: Tensor | None, sin: Tensor | None,
    *, mirrored: bool = False, tiles: Tiles = SPLIT,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the kernel; see `split_rotate`."""
    (batch, length, width), head_dim = qkv.shape, qkv.shape[-1] // (heads + 2 * groups)
    q = qkv.new_empty(batch, length, heads, head_dim)
    k, v = qkv.new_empty(2, batch, length, groups, head_dim)  # one tensor, sent to other ranks in one message
    if qkv.numel() == 0:
        return q, k, v
    flat = adjacent_columns(qkv.reshape(-1, width))
    cos, sin, batch_stride, token_stride = _strides(cos, sin)
    grid, constants = _programs(len(flat), heads, groups, head_dim, cos, mirrored, tiles)
    _split_rotate[grid](flat, q, k, v, cos, sin, len(flat), length, flat.stride(0), batch_stride, token_stride, **constants)
    return q, k, v


def _found(gradient: Gradient) -> tuple[Tensor, tuple[int, int, int, float]]:
    """The tensor to read, its strides per sample, token and head, and its factor."""
    if isinstance(gradient, Accumulated):
        sums = gradient.sums
        return sums, (sums.stride(0), 0, sums.stride(1), gradient.scale)
    dense = adjacent_columns(gradient)
    return dense, (dense.stride(0), dense.stride(1), dense.stride(2), 1.0)


def launch_join(
    dq: Gradient, dk: Gradient, dv: Gradient, cos: Tensor | None, sin: Tensor | None, quantizer: Quantizer,
    *, mirrored: bool = False, tiles: Tiles | None = None,
) -> QuantizedTensor:  # fmt: skip
    """Run the kernel; see `join_rotated`."""
    tiles = tiles or (JOIN_SUMS if isinstance(dq, Accumulated) else JOIN)
    (batch, length, heads, head_dim), groups = dq.shape, dk.shape[2]
    rows = batch * length
    (q, of_q), (k, of_k), (v, of_v) = (_found(gradient) for gradient in (dq, dk, dv))
    out = allocate(quantizer, rows, (heads + 2 * groups) * head_dim, q.device)
    if rows == 0 or head_dim == 0:
        return without_elements(quantizer, out)
    cos, sin, batch_stride, token_stride = _strides(cos, sin)
    grid, constants = _programs(rows, heads, groups, head_dim, cos, mirrored, tiles)
    _join_rotated[grid](
        q, k, v, cos, sin, out.rowwise_data, out.columnwise_data, quantizer.scale, out.scale_inv, quantizer.amax,
        rows, length, *of_q, *of_k, *of_v, batch_stride, token_stride, 1.0, **constants,
        Q_SUMS=isinstance(dq, Accumulated), K_SUMS=isinstance(dk, Accumulated), V_SUMS=isinstance(dv, Accumulated),
    )  # fmt: skip
    return out


def split_rotate(
    qkv: Tensor, heads: int, groups: int, cos: Tensor | None, sin: Tensor | None, *, mirrored: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the joint product into heads, and rotate queries and keys in float32.

    qkv: [B, T, (H + 2G)·D], bfloat16, float16 or float32; D even. cos, sin: float32 [B or 1, T, Dr], with an even Dr ≤ D: only
    the first Dr columns of a head rotate; None: no column does. mirrored: a promise that the second halves of cos and sin
    repeat the first; they are then not read.
    Returns q [B, T, H, D], k and v [B, T, G, D], contiguous, in the dtype of `qkv`.
    """
    if qkv.device.type == "cuda":
        return launch_split(qkv, heads, groups, cos, sin, mirrored=mirrored)
    return reference.split_rotate(qkv, heads, groups, cos, sin)


def join_rotated(
    dq: Gradient, dk: Gradient, dv: Gradient, cos: Tensor | None, sin: Tensor | None, quantizer: Quantizer,
    *, mirrored: bool = False,
) -> QuantizedTensor:  # fmt: skip
    """The gradient of `split_rotate`'s argument, [N, (H + 2G)·D], stored by `quantizer` without intermediate rounding.

    dq: [B, T, H, D]; dk, dv: [B, T, G, D], with any strides. cos, sin, mirrored: the arguments of `split_rotate`.
    """
    if _found(dq)[0].device.type == "cuda":
        return launch_join(dq, dk, dv, cos, sin, quantizer, mirrored=mirrored)
    q, k, v = (x.dense() if isinstance(x, Accumulated) else x for x in (dq, dk, dv))
    return quantize(reference.join_rotated(q, k, v, cos, sin).flatten(0, 1), quantizer)
