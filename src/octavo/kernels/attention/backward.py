"""Backward kernels of `octavo.kernels.attention.short`, with the pieces and tiles of the forward kernel.

`backward_queries` and `backward_keys` hold only tiles and compute seven products. Five suffice for a program with a whole head,
but that was slower: its gradients exceed the registers of a multiprocessor, so that no other program runs while it waits.

Shapes: B batch, T tokens, H query heads, G key-value heads of P = H/G query heads each, D head dimension.
"""

import triton
import triton.language as tl

from octavo.kernels.attention.forward import LN2, inner, load, outer, query_tile, row_sums, store, tile_of_program, zeros
from octavo.kernels.fast_math import LOG2_E


@triton.jit
def _add_keys(
    q1, q2, do1, do2, lse, delta, k_ptr, v_ptr, first, stride, dq1, dq2, scale,
    T: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, KEYS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Add the share of a tile of keys to the gradients of queries; `lse` in powers of two. Keys beyond T are 0."""
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
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, do_ptr, dq_ptr, first, stride, do_stride, scale,
    T: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
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
    if TAIL == 1:
        k1, k2 = load(k_ptr, END + tl.arange(0, 1), stride, T, D, D1, D2, True)
        v1, v2 = load(v_ptr, END + tl.arange(0, 1), stride, T, D, D1, D2, True)
        ds = tl.exp2(row_sums(q1, q2, k1, k2, D2) * scale - lse) * (row_sums(do1, do2, v1, v2, D2) - delta)
        dq1 += ds[:, None] * k1.to(tl.float32)
        dq2 += ds[:, None] * k2.to(tl.float32)
    elif TAIL:
        dq1, dq2 = _add_keys(
            q1, q2, do1, do2, lse, delta, k_ptr, v_ptr, END, stride, dq1, dq2, scale, T, D, D1, D2, TAIL, False
        )
    for start in tl.range(0, END, KEYS, num_stages=STAGES):
        dq1, dq2 = _add_keys(
            q1, q2, do1, do2, lse, delta, k_ptr, v_ptr, start, stride, dq1, dq2, scale, T, D, D1, D2, KEYS, True
        )
    scale *= LN2
    store(dq_ptr, m, WIDTH, dq1 * scale, dq2 * scale, T, D, D1, D2, FULL)


@triton.jit
def backward_queries(
    qkv_ptr, out_ptr, lse_ptr, rows_ptr, do_ptr, d_qkv_ptr, batch_stride, stride, do_batch_stride, do_stride, scale,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    QUERIES: tl.constexpr, LAST: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, BESIDE_FEW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries; lse in powers of two and the sum of dO · O into rows_ptr, float32 [B, H, 2, T]."""
    tile, head, batch, q_ptr, k_ptr, v_ptr = query_tile(qkv_ptr, batch_stride, T, H, G, D, QUERIES)
    P: tl.constexpr = H // G
    WIDTH: tl.constexpr = (H + 2 * G) * D
    out_ptr += batch * (T * H * D) + head * D
    lse_ptr += (batch * H + head) * T
    rows_ptr += (batch * H + head) * (2 * T)
    do_ptr += batch * do_batch_stride + head * D
    dq_ptr = d_qkv_ptr + batch * (T * WIDTH) + ((head // P) * (P + 2) + head % P) * D
    if LAST and LAST != QUERIES and tile == (T - 1) // QUERIES:
        _queries_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, do_ptr, dq_ptr, tile * QUERIES, stride, do_stride, scale,
            T, H, WIDTH, D, D1, D2, LAST, BESIDE_FEW, TAIL, STAGES, False,
        )  # fmt: skip
    else:
        _queries_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, do_ptr, dq_ptr, tile * QUERIES, stride, do_stride, scale,
            T, H, WIDTH, D, D1, D2, QUERIES, KEYS, TAIL, STAGES, LAST != QUERIES,
        )  # fmt: skip


@triton.jit
def _add_queries(
    k1, k2, v1, v2, q_ptr, do_ptr, rows_ptr, first, stride, do_stride, dk1, dk2, dv1, dv2, scale,
    T: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, QUERIES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Add the share of a tile of queries to the gradients of keys and values; everything is transposed."""
    m = first + tl.arange(0, QUERIES)
    q1, q2 = load(q_ptr, m, stride, T, D, D1, D2, FULL)
    do1, do2 = load(do_ptr, m, do_stride, T, D, D1, D2, FULL)
    lse = tl.load(rows_ptr + m) if FULL else tl.load(rows_ptr + m, mask=m < T, other=float("inf"))
    delta = tl.load(rows_ptr + T + m) if FULL else tl.load(rows_ptr + T + m, mask=m < T, other=0.0)
    p = tl.exp2(inner(k1, k2, q1, q2, D2) * scale - lse[None, :])
    ds = p * (inner(v1, v2, do1, do2, D2) - delta[None, :])  # before dv: fewer waits between products
    dv1, dv2 = outer(p.to(q1.dtype), do1, do2, dv1, dv2, D2)
    dk1, dk2 = outer(ds.to(q1.dtype), q1, q2, dk1, dk2, D2)
    return dk1, dk2, dv1, dv2


@triton.jit
def _keys_tile(
    q_ptr, rows_ptr, do_ptr, dk_ptr, first, stride, do_stride, scale,
    T: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
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
    store(dk_ptr, n, WIDTH, dk1 * scale, dk2 * scale, T, D, D1, D2, FULL)
    store(dk_ptr + D, n, WIDTH, dv1, dv2, T, D, D1, D2, FULL)


@triton.jit
def backward_keys(
    qkv_ptr, rows_ptr, do_ptr, d_qkv_ptr, batch_stride, stride, do_batch_stride, do_stride, scale,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    KEYS: tl.constexpr, LAST: tl.constexpr, QUERIES: tl.constexpr, TAIL: tl.constexpr, BESIDE_FEW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values, summed over the heads of their group; rows_ptr is of `backward_queries`."""
    tile, group, batch = tile_of_program(T, G, KEYS)
    P: tl.constexpr = H // G
    WIDTH: tl.constexpr = (H + 2 * G) * D
    q_ptr = qkv_ptr + batch * batch_stride + group * ((P + 2) * D)
    rows_ptr += (batch * H + group * P) * (2 * T)
    do_ptr += batch * do_batch_stride + group * (P * D)
    dk_ptr = d_qkv_ptr + batch * (T * WIDTH) + (group * (P + 2) + P) * D
    if LAST and LAST != KEYS and tile == (T - 1) // KEYS:
        _keys_tile(
            q_ptr, rows_ptr, do_ptr, dk_ptr, tile * KEYS, stride, do_stride, scale,
            T, P, WIDTH, D, D1, D2, LAST, BESIDE_FEW, TAIL, STAGES, False,
        )  # fmt: skip
    else:
        _keys_tile(
            q_ptr, rows_ptr, do_ptr, dk_ptr, tile * KEYS, stride, do_stride, scale,
            T, P, WIDTH, D, D1, D2, KEYS, QUERIES, TAIL, STAGES, LAST != KEYS,
        )  # fmt: skip
