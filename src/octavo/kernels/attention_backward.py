"""Triton's side of `octavo.kernels.attention`: the gradients, cut and padded as the forward kernel does it.

`backward_queries`, then `backward_keys` hold tiles only, and make seven products. Five suffice where one program holds all of a
head, but that was slower: it has more gradients than a multiprocessor has registers, and nothing runs beside it while it waits.
What they leave of the gradient [B·T, W] of the joint product is what a product takes: FP8 made of the float32 sums, as it is
and transposed, with its amax and sums of its columns. A pointer that is None asks for nothing.

Shapes: B batch, T tokens, H query heads, G key-value heads of P = H/G query heads each, D head dimension, W = (H + 2G)·D.
"""

import triton
import triton.language as tl

from octavo.kernels.attention_forward import LN2, inner, load, outer, row_sums, store, zeros
from octavo.kernels.cast import larger, record_amax
from octavo.kernels.fast_math import LOG2_E


@triton.jit
def _store_column(
    base, n, rows, x1, x2, T: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """`store` into the transposed matrix, whose rows are `rows` elements: a column of the head stands in a row of it."""
    c = tl.arange(0, D1)
    at = base + c[:, None].to(tl.int64) * rows + n[None, :]
    if FULL and D1 <= D:
        tl.store(at, tl.trans(x1.to(base.dtype.element_ty)))
    else:
        tl.store(at, tl.trans(x1.to(base.dtype.element_ty)), mask=(c < D)[:, None] & (n < T)[None, :])
    if D2:
        c2 = D1 + tl.arange(0, D2)
        at = base + c2[:, None].to(tl.int64) * rows + n[None, :]
        if FULL and D1 + D2 <= D:
            tl.store(at, tl.trans(x2.to(base.dtype.element_ty)))
        else:
            tl.store(at, tl.trans(x2.to(base.dtype.element_ty)), mask=(c2 < D)[:, None] & (n < T)[None, :])


@triton.jit
def _store_sums(partial_ptr, x1, x2, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Sums of a head's columns over the rows of a tile, for the gradient of a bias."""
    c = tl.arange(0, D1)
    tl.store(partial_ptr + c, tl.sum(x1, 0), mask=c < D)
    if D2:
        c2 = D1 + tl.arange(0, D2)
        tl.store(partial_ptr + c2, tl.sum(x2, 0), mask=c2 < D)


@triton.jit
def _leave(
    x1, x2, row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column, n,
    T: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What is asked for of the gradients of a head's tokens n; the head's columns begin at `column`.

    part: which row of the partial sums [·, W] is this tile's. fp8_scale, one: as in `octavo.kernels.cast.store_layouts`.
    """
    if not FULL:  # keys beyond T have probabilities, and gradients that are nobody's
        x1 = tl.where((n < T)[:, None], x1, 0.0)
        x2 = tl.where((n < T)[:, None], x2, 0.0)
    if amax_ptr is not None:
        largest = tl.max(larger(0.0, x1), 1)
        if D2:
            largest = tl.maximum(largest, tl.max(larger(0.0, x2), 1))
        record_amax(amax_ptr, largest)
    if partial_ptr is not None:
        _store_sums(partial_ptr + part * W + column, x1, x2, D, D1, D2)
    x1 = x1 * fp8_scale
    x2 = x2 * fp8_scale
    if row_ptr is not None:
        store(row_ptr + batch * (T * W) + column, n, W, x1, x2, T, D, D1, D2, FULL)
        x1 = x1 * one
        x2 = x2 * one
    if column_ptr is not None:
        _store_column(column_ptr + column.to(tl.int64) * rows + batch * T, n, rows, x1, x2, T, D, D1, D2, FULL)


@triton.jit
def _add_keys(
    q1, q2, do1, do2, lse, delta, k_ptr, v_ptr, first, stride, dq1, dq2, scale,
    T: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, KEYS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What a tile of keys gives to the gradients of queries; `lse` in powers of two. Keys beyond T are 0 and give nothing."""
    n = first + tl.arange(0, KEYS)
    k1, k2 = load(k_ptr, n, stride, T, D, D1, D2, FULL)
    v1, v2 = load(v_ptr, n, stride, T, D, D1, D2, FULL)
    p = tl.exp2(inner(q1, q2, k1, k2, D2) * scale - lse[:, None])
    if not FULL:
        p = tl.where((n < T)[None, :], p, 0.0)
    ds = p * (inner(do1, do2, v1, v2, D2) - delta[:, None])
    return outer(ds.to(q1.dtype), k1, k2, dq1, dq2, D2)


@triton.jit
def _queries_tile(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, do_ptr, first, stride, do_stride, scale,
    row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column,
    T: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    m = first + tl.arange(0, QUERIES)
    q1, q2 = load(q_ptr, m, stride, T, D, D1, D2, FULL)
    do1, do2 = load(do_ptr, m, do_stride, T, D, D1, D2, FULL)
    o1, o2 = load(out_ptr, m, H * D, T, D, D1, D2, FULL)
    lse = tl.load(lse_ptr + m, mask=m < T, other=float("inf")) * LOG2_E  # probabilities beyond T are 0
    delta = row_sums(do1, do2, o1, o2, D2)
    tl.store(rows_ptr + m, lse, mask=m < T)
    tl.store(rows_ptr + T + m, delta, mask=m < T)
    dq1, dq2 = zeros(QUERIES, D1, D2)
    END: tl.constexpr = T // KEYS * KEYS
    if TAIL:
        dq1, dq2 = _add_keys(
            q1, q2, do1, do2, lse, delta, k_ptr, v_ptr, END, stride, dq1, dq2, scale, T, D, D1, D2, TAIL, False
        )
    for start in tl.range(0, END, KEYS, num_stages=STAGES):
        dq1, dq2 = _add_keys(
            q1, q2, do1, do2, lse, delta, k_ptr, v_ptr, start, stride, dq1, dq2, scale, T, D, D1, D2, KEYS, True
        )
    scale *= LN2
    _leave(
        dq1 * scale, dq2 * scale, row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column, m,
        T, W, D, D1, D2, FULL,
    )  # fmt: skip


@triton.jit
def backward_queries(
    qkv_ptr, rows_ptr, do_ptr, out_ptr, lse_ptr, batch_stride, stride, do_batch_stride, do_stride, scale,
    row_ptr, column_ptr, scale_ptr, scale_inv_ptr, amax_ptr, partial_ptr, rows, one,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    QUERIES: tl.constexpr, LAST: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries.

    rows_ptr: float32 [B, H, 2, T] for what the other kernel needs of each: lse in powers of two, and the sum of dO · O.
    rows: B·T. partial_ptr: float32 [B, PARTS, W].
    """
    TILES: tl.constexpr = (T + QUERIES - 1) // QUERIES
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES % H
    batch = (tl.program_id(0) // (TILES * H)).to(tl.int64)
    P: tl.constexpr = H // G
    W: tl.constexpr = (H + 2 * G) * D
    fp8_scale = 1.0
    if scale_ptr is not None:
        fp8_scale = tl.load(scale_ptr)
        if tl.program_id(0) == 0:
            tl.store(scale_inv_ptr, tl.div_rn(1.0, fp8_scale))
    group_ptr = qkv_ptr + batch * batch_stride + (head // P) * ((P + 2) * D)
    q_ptr = group_ptr + (head % P) * D
    k_ptr = group_ptr + P * D
    v_ptr = group_ptr + (P + 1) * D
    out_ptr += batch * (T * H * D) + head * D
    lse_ptr += (batch * H + head) * T
    rows_ptr += (batch * H + head) * (2 * T)
    do_ptr += batch * do_batch_stride + head * D
    column = ((head // P) * (P + 2) + head % P) * D
    part = batch * PARTS + tile
    if LAST == 0 or LAST == QUERIES:
        _queries_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, do_ptr, tile * QUERIES, stride, do_stride, scale,
            row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column,
            T, H, W, D, D1, D2, QUERIES, KEYS, TAIL, STAGES, LAST == 0,
        )  # fmt: skip
    else:
        if tile == TILES - 1:
            _queries_tile(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, do_ptr, tile * QUERIES, stride, do_stride, scale,
                row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column,
                T, H, W, D, D1, D2, LAST, KEYS, TAIL, STAGES, False,
            )  # fmt: skip
        else:
            _queries_tile(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, do_ptr, tile * QUERIES, stride, do_stride, scale,
                row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column,
                T, H, W, D, D1, D2, QUERIES, KEYS, TAIL, STAGES, True,
            )  # fmt: skip


@triton.jit
def _add_queries(
    k1, k2, v1, v2, q_ptr, do_ptr, rows_ptr, first, stride, do_stride, dk1, dk2, dv1, dv2, scale,
    T: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, QUERIES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What a tile of queries gives to the gradients of keys and values; everything is transposed."""
    m = first + tl.arange(0, QUERIES)
    q1, q2 = load(q_ptr, m, stride, T, D, D1, D2, FULL)
    do1, do2 = load(do_ptr, m, do_stride, T, D, D1, D2, FULL)
    if FULL:
        lse = tl.load(rows_ptr + m)
        delta = tl.load(rows_ptr + T + m)
    else:
        lse = tl.load(rows_ptr + m, mask=m < T, other=float("inf"))
        delta = tl.load(rows_ptr + T + m, mask=m < T, other=0.0)
    p = tl.exp2(inner(k1, k2, q1, q2, D2) * scale - lse[None, :])
    ds = p * (inner(v1, v2, do1, do2, D2) - delta[None, :])  # before dv: fewer waits between products
    dv1, dv2 = outer(p.to(q1.dtype), do1, do2, dv1, dv2, D2)
    dk1, dk2 = outer(ds.to(q1.dtype), q1, q2, dk1, dk2, D2)
    return dk1, dk2, dv1, dv2


@triton.jit
def _keys_tile(
    q_ptr, rows_ptr, do_ptr, first, stride, do_stride, scale,
    row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column,
    T: tl.constexpr, P: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    n = first + tl.arange(0, KEYS)
    k1, k2 = load(q_ptr + P * D, n, stride, T, D, D1, D2, FULL)
    v1, v2 = load(q_ptr + (P + 1) * D, n, stride, T, D, D1, D2, FULL)
    dk1, dk2 = zeros(KEYS, D1, D2)
    dv1, dv2 = zeros(KEYS, D1, D2)
    END: tl.constexpr = T // QUERIES * QUERIES
    for i in range(P):
        if TAIL:
            dk1, dk2, dv1, dv2 = _add_queries(
                k1, k2, v1, v2, q_ptr + i * D, do_ptr + i * D, rows_ptr + i * (2 * T), END, stride, do_stride,
                dk1, dk2, dv1, dv2, scale, T, D, D1, D2, TAIL, False,
            )  # fmt: skip
        for start in tl.range(0, END, QUERIES, num_stages=STAGES):
            dk1, dk2, dv1, dv2 = _add_queries(
                k1, k2, v1, v2, q_ptr + i * D, do_ptr + i * D, rows_ptr + i * (2 * T), start, stride, do_stride,
                dk1, dk2, dv1, dv2, scale, T, D, D1, D2, QUERIES, True,
            )  # fmt: skip
    scale *= LN2
    _leave(
        dk1 * scale, dk2 * scale, row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column, n,
        T, W, D, D1, D2, FULL,
    )  # fmt: skip
    _leave(
        dv1, dv2, row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column + D, n,
        T, W, D, D1, D2, FULL,
    )  # fmt: skip


@triton.jit
def backward_keys(
    qkv_ptr, rows_ptr, do_ptr, batch_stride, stride, do_batch_stride, do_stride, scale,
    row_ptr, column_ptr, scale_ptr, scale_inv_ptr, amax_ptr, partial_ptr, rows, one,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    KEYS: tl.constexpr, LAST: tl.constexpr, QUERIES: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values, summed over the heads of their group; rows_ptr is what the other left."""
    TILES: tl.constexpr = (T + KEYS - 1) // KEYS
    tile = tl.program_id(0) % TILES
    group = tl.program_id(0) // TILES % G
    batch = (tl.program_id(0) // (TILES * G)).to(tl.int64)
    P: tl.constexpr = H // G
    W: tl.constexpr = (H + 2 * G) * D
    fp8_scale = 1.0
    if scale_ptr is not None:
        fp8_scale = tl.load(scale_ptr)
    q_ptr = qkv_ptr + batch * batch_stride + group * ((P + 2) * D)
    rows_ptr += (batch * H + group * P) * (2 * T)
    do_ptr += batch * do_batch_stride + group * (P * D)
    column = (group * (P + 2) + P) * D
    part = batch * PARTS + tile
    if LAST == 0 or LAST == KEYS:
        _keys_tile(
            q_ptr, rows_ptr, do_ptr, tile * KEYS, stride, do_stride, scale,
            row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column,
            T, P, W, D, D1, D2, KEYS, QUERIES, TAIL, STAGES, LAST == 0,
        )  # fmt: skip
    else:
        if tile == TILES - 1:
            _keys_tile(
                q_ptr, rows_ptr, do_ptr, tile * KEYS, stride, do_stride, scale,
                row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column,
                T, P, W, D, D1, D2, LAST, QUERIES, TAIL, STAGES, False,
            )  # fmt: skip
        else:
            _keys_tile(
                q_ptr, rows_ptr, do_ptr, tile * KEYS, stride, do_stride, scale,
                row_ptr, column_ptr, amax_ptr, partial_ptr, fp8_scale, one, batch, rows, part, column,
                T, P, W, D, D1, D2, KEYS, QUERIES, TAIL, STAGES, True,
            )  # fmt: skip
