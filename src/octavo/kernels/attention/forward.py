"""Forward kernel of `octavo.kernels.attention.short`, and loads, stores and products of heads in two pieces.

Matrix instructions take powers of two; two of them leave little padding. So a head of D columns is read as pieces of D1 and D2
columns (80 = 64 + 16; D2 may be 0), and tokens as full tiles after a narrow one (TAIL; 257 = 256 + 16). A single key (TAIL is
1) needs no tile, only a sum over the columns of a head. The last program of a head has LAST rows and runs concurrently with the
others, which read the same keys; it mostly waits, so its loop has wider tiles (BESIDE_FEW).
Logits are in powers of two: `scale` is the softmax's times log2(e).

Shapes: B batch, T tokens, H query heads, G key-value heads of P = H/G query heads each, D head dimension.
"""

import triton
import triton.language as tl

from octavo.kernels.fast_math import reciprocal

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_piece(at, c, n, T: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    at += c[None, :]
    return tl.load(at) if WHOLE else tl.load(at, mask=(n < T)[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def _store_piece(at, c, n, x, T: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(at + c[None, :], x)
    else:
        tl.store(at + c[None, :], x, mask=(n < T)[:, None] & (c < D)[None, :])


@triton.jit
def load(base, n, stride, T: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, FULL: tl.constexpr):
    """Rows n of a head in its two pieces, [n, D1] and [n, D2]; 0 beyond T (FULL: none is) and D. Without D2 the first twice."""
    at = base + n[:, None] * stride
    x1 = _load_piece(at, tl.arange(0, D1), n, T, D, FULL and D1 <= D)
    x2 = _load_piece(at, D1 + tl.arange(0, D2), n, T, D, FULL and D1 + D2 <= D) if D2 else x1
    return x1, x2


@triton.jit
def store(base, n, stride, x1, x2, T: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, FULL: tl.constexpr):
    """The inverse of `load`, rounded to the dtype of `base`."""
    at = base + n[:, None] * stride
    _store_piece(at, tl.arange(0, D1), n, x1.to(base.dtype.element_ty), T, D, FULL and D1 <= D)
    if D2:
        _store_piece(at, D1 + tl.arange(0, D2), n, x2.to(base.dtype.element_ty), T, D, FULL and D1 + D2 <= D)


@triton.jit
def tile_of_program(T: tl.constexpr, HEADS: tl.constexpr, EACH: tl.constexpr):
    """Tile of EACH tokens, head and batch of a program."""
    TILES: tl.constexpr = (T + EACH - 1) // EACH
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES % HEADS
    return tile, head, (tl.program_id(0) // (TILES * HEADS)).to(tl.int64)


@triton.jit
def query_tile(
    qkv_ptr, batch_stride, T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Tile, head and batch of a program, and its queries, keys and values."""
    tile, head, batch = tile_of_program(T, H, QUERIES)
    P: tl.constexpr = H // G
    group_ptr = qkv_ptr + batch * batch_stride + (head // P) * ((P + 2) * D)
    return tile, head, batch, group_ptr + (head % P) * D, group_ptr + P * D, group_ptr + (P + 1) * D


@triton.jit
def inner(a1, a2, b1, b2, D2: tl.constexpr):
    """a · bᵀ, summed over both pieces of a head."""
    s = tl.dot(a1, tl.trans(b1))
    return tl.dot(a2, tl.trans(b2), s) if D2 else s


@triton.jit
def outer(a, b1, b2, sum1, sum2, D2: tl.constexpr):
    """Both pieces of a · b, added to sums."""
    # The second piece first: the last product decides how warps are arranged, and for 16 rows each has to take columns of it.
    if D2:
        sum2 = tl.dot(a, b2, sum2)
    sum1 = tl.dot(a, b1, sum1)
    return sum1, sum2


@triton.jit
def zeros(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Sums of both pieces, float32."""
    return tl.zeros([ROWS, D1], tl.float32), tl.zeros([ROWS, D2 if D2 else D1], tl.float32)


@triton.jit
def row_sums(a1, a2, b1, b2, D2: tl.constexpr):
    """Sums of the rows of a · b, element by element, in float32."""
    total = tl.sum(a1.to(tl.float32) * b1.to(tl.float32), 1)
    if D2:
        total += tl.sum(a2.to(tl.float32) * b2.to(tl.float32), 1)
    return total


@triton.jit
def _attend(
    q1, q2, k_ptr, v_ptr, first, stride, top, total, sum1, sum2, scale,
    T: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    KEYS: tl.constexpr, FULL: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, perhaps the FIRST, to the running softmax of queries; `top` is the largest logit."""
    n = first + tl.arange(0, KEYS)
    k1, k2 = load(k_ptr, n, stride, T, D, D1, D2, FULL)
    v1, v2 = load(v_ptr, n, stride, T, D, D1, D2, FULL)
    s = inner(q1, q2, k1, k2, D2)
    if not FULL:
        s = tl.where((n < T)[None, :], s, -float("inf"))
    new_top = tl.max(s, 1) * scale
    if not FIRST:
        new_top = tl.maximum(top, new_top)
    p = tl.exp2(s * scale - new_top[:, None])
    if FIRST:
        total = tl.sum(p, 1)
    else:
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        sum1 = sum1 * shrink[:, None]
        if D2:
            sum2 = sum2 * shrink[:, None]
    sum1, sum2 = outer(p.to(v1.dtype), v1, v2, sum1, sum2, D2)
    return new_top, total, sum1, sum2


@triton.jit
def _forward_tile(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, first, stride, scale,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    m = first + tl.arange(0, QUERIES)
    q1, q2 = load(q_ptr, m, stride, T, D, D1, D2, FULL)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sum1, sum2 = zeros(QUERIES, D1, D2)
    END: tl.constexpr = T // KEYS * KEYS
    if TAIL == 1:  # the softmax of a single key is 1
        k1, k2 = load(k_ptr, END + tl.arange(0, 1), stride, T, D, D1, D2, True)
        v1, v2 = load(v_ptr, END + tl.arange(0, 1), stride, T, D, D1, D2, True)
        top = row_sums(q1, q2, k1, k2, D2) * scale
        total += 1.0
        sum1 += v1.to(tl.float32)
        sum2 += v2.to(tl.float32)
    elif TAIL:  # before the loop: these keys are loaded together with the queries
        top, total, sum1, sum2 = _attend(
            q1, q2, k_ptr, v_ptr, END, stride, top, total, sum1, sum2, scale, T, D, D1, D2, TAIL, False, True
        )
    for start in tl.range(0, END, KEYS, num_stages=STAGES):
        top, total, sum1, sum2 = _attend(
            q1, q2, k_ptr, v_ptr, start, stride, top, total, sum1, sum2, scale, T, D, D1, D2, KEYS, True, False
        )
    part = reciprocal(total)[:, None]
    store(out_ptr, m, H * D, sum1 * part, sum2 * part, T, D, D1, D2, FULL)
    tl.store(lse_ptr + m, (top + tl.log2(total)) * LN2, mask=m < T)


@triton.jit
def attention_forward(
    qkv_ptr, out_ptr, lse_ptr, batch_stride, stride, scale,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    QUERIES: tl.constexpr, LAST: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, BESIDE_FEW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head."""
    tile, head, batch, q_ptr, k_ptr, v_ptr = query_tile(qkv_ptr, batch_stride, T, H, G, D, QUERIES)
    out_ptr += batch * (T * H * D) + head * D
    lse_ptr += (batch * H + head) * T
    if LAST and LAST != QUERIES and tile == (T - 1) // QUERIES:
        _forward_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tile * QUERIES, stride, scale,
            T, H, D, D1, D2, LAST, BESIDE_FEW, TAIL, STAGES, False,
        )  # fmt: skip
    else:
        _forward_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tile * QUERIES, stride, scale,
            T, H, D, D1, D2, QUERIES, KEYS, TAIL, STAGES, LAST != QUERIES,
        )  # fmt: skip
