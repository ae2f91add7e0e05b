"""Attention of the short sequences of vision transformers, on the joint query/key/value product and its gradient in place.

A few hundred tokens leave kernels for long sequences half idle: 257 tokens fill three tiles of 128, a head of 80 columns is
padded to 128, and splitting the product and joining its gradients costs about as much as attention. Backward has no atomics and
repeats bit for bit. There are no masks, no dropout and no second derivative. The number of tokens is a constant of the compiled
kernel, which Triton caches on disk: many different lengths are better padded to a few.

A row of the joint product is G groups of H/G query heads, their key and their value.
Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.attention.backward import backward_keys, backward_queries
from octavo.kernels.attention.forward import attention_forward
from octavo.kernels.tiles import adjacent_columns, cdiv, next_power_of_2

LONGEST = 512
"""With more tokens than this, kernels for long sequences waste little."""
NARROWEST = 16
"""Rows or columns of the smallest tile of a matrix instruction."""


class Tiles(NamedTuple):
    """Tokens of a tile (powers of two), warps of a program and stages of its loop; beyond 2, tiles are loaded ahead.

    beside_few: a wider loop tile for a program with few rows, used if it leaves the same rest. lone: a single token beyond full
    tiles is handled without a tile; `backward_keys` always takes one.
    """

    queries: int
    keys: int
    warps: int
    stages: int = 2
    beside_few: int = 0
    lone: bool = False


FORWARD = Tiles(64, 64, warps=4)
QUERIES, KEYS = Tiles(64, 32, warps=4, beside_few=64), Tiles(32, 64, warps=4, stages=3)
"""Tiles of `backward_queries`, which loops over keys, and `backward_keys`, which loops over queries."""


def tiles_for(tokens: int, head_dim: int) -> tuple[Tiles, Tiles, Tiles]:
    """Tiles of the forward kernel and of the two backward ones."""
    # A narrow tile of one token and wide tiles do not pay if their registers reduce occupancy (128 a thread allow four programs
    # on a multiprocessor, 168 three; as compiled for Hopper). A loop of three tiles is unrolled, which takes more. Heads of
    # more than 64 columns have the registers for one token after four full tiles, and at 80 for wide tiles too.
    behind_four = tokens == 4 * FORWARD.queries + 1
    lone = head_dim <= 64 or (head_dim <= 80 and behind_four)
    forward = FORWARD._replace(lone=lone, beside_few=128 if head_dim == 64 or (head_dim == 80 and behind_four) else 0)
    keys = KEYS._replace(beside_few=64 if head_dim == 64 or (head_dim <= 80 and tokens // 64 != 3) else 0)
    return forward, QUERIES._replace(lone=head_dim <= 96), keys


def takes(dtype: torch.dtype, tokens: int, head_dim: int) -> bool:
    """True if the kernels support such heads: at most `LONGEST` tokens and 128 columns, no float32."""
    return dtype in (torch.bfloat16, torch.float16) and 0 < tokens <= LONGEST and head_dim <= 128 and head_dim % 8 == 0


def _width(count: int) -> int:
    """Width of the tile for `count` tokens or columns."""
    return max(next_power_of_2(count), NARROWEST)


def _pieces(head_dim: int) -> dict[str, int]:
    """A head as one or two powers of two, the second 0 where there is none."""
    first = max(1 << (head_dim.bit_length() - 1), NARROWEST)
    return {"D": head_dim, "D1": first, "D2": _width(head_dim - first) if head_dim > first else 0}


def _cut(tokens: int, tile: int) -> tuple[int, int]:
    """The tile, and the narrow one for tokens beyond full tiles (0: there are none)."""
    tile = min(tile, _width(tokens))
    return tile, _width(tokens % tile) if tokens % tile else 0


def _loop(tokens: int, tile: int, tiles: Tiles) -> tuple[int, int, int]:
    """Tiles of a loop over tokens: the full tile, the narrow one (1 for a single token), and the one for few rows."""
    tile, narrow = _cut(tokens, tile)
    wide = tiles.beside_few
    wider = tile < wide <= tokens and tokens % wide == tokens % tile and narrow <= NARROWEST
    return tile, 1 if tiles.lone and tokens % tile == 1 else narrow, wide if wider else tile


def _warps(tiles: Tiles, rows: int) -> int:
    """Warps of a program: fewer for few rows."""
    return min(tiles.warps, max(4, rows // 16))


def launch(qkv: Tensor, heads: int, groups: int, scale: float, *, tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel; see `forward`."""
    (batch, tokens, _), head_dim = qkv.shape, qkv.shape[-1] // (heads + 2 * groups)
    out = qkv.new_empty(batch, tokens, heads * head_dim)
    lse = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    if qkv.numel() == 0:
        return out, lse
    qkv, tiles = adjacent_columns(qkv), tiles or tiles_for(tokens, head_dim)[0]
    queries, last = _cut(tokens, tiles.queries)
    keys, tail, few = _loop(tokens, tiles.keys, tiles)
    attention_forward[(cdiv(tokens, queries) * heads * batch,)](
        qkv, out, lse, qkv.stride(0), qkv.stride(1), scale * math.log2(math.e),
        T=tokens, H=heads, G=groups, **_pieces(head_dim), QUERIES=queries, LAST=last,
        KEYS=keys, TAIL=tail, BESIDE_FEW=few, STAGES=tiles.stages, num_warps=_warps(tiles, queries),
    )  # fmt: skip
    return out, lse


def launch_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, groups: int, scale: float,
    *, queries: Tiles | None = None, keys: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Run the kernels; see `backward`."""
    (batch, tokens, _), head_dim = qkv.shape, qkv.shape[-1] // (heads + 2 * groups)
    d_qkv = qkv.new_empty(qkv.shape)
    if qkv.numel() == 0:
        return d_qkv
    qkv, d_out, out, lse = adjacent_columns(qkv), adjacent_columns(d_out), out.contiguous(), lse.contiguous()
    rows = lse.new_empty(batch, heads, 2, tokens)
    numbers = (qkv.stride(0), qkv.stride(1), d_out.stride(0), d_out.stride(1), scale * math.log2(math.e))
    shape = {"T": tokens, "H": heads, "G": groups} | _pieces(head_dim)
    _, usual_queries, usual_keys = tiles_for(tokens, head_dim)
    queries, keys = queries or usual_queries, keys or usual_keys
    tile, last = _cut(tokens, queries.queries)
    inner, tail, few = _loop(tokens, queries.keys, queries)
    backward_queries[(cdiv(tokens, tile) * heads * batch,)](
        qkv, out, lse, rows, d_out, d_qkv, *numbers, **shape, QUERIES=tile, LAST=last,
        KEYS=inner, TAIL=tail, BESIDE_FEW=few, STAGES=queries.stages, num_warps=_warps(queries, tile),
    )  # fmt: skip
    tile, last = _cut(tokens, keys.keys)
    inner, tail, few = _loop(tokens, keys.queries, keys._replace(lone=False))
    backward_keys[(cdiv(tokens, tile) * groups * batch,)](
        qkv, rows, d_out, d_qkv, *numbers, **shape, KEYS=tile, LAST=last,
        QUERIES=inner, TAIL=tail, BESIDE_FEW=few, STAGES=keys.stages, num_warps=_warps(keys, tile),
    )  # fmt: skip
    return d_qkv


def forward(qkv: Tensor, heads: int, groups: int, scale: float) -> tuple[Tensor, Tensor]:
    """`reference.attention`: softmax(q · kᵀ · scale) · v, every query with every key → out [B, T, H·D], lse [B, H, T].

    qkv: [B, T, (H + 2G)·D], rows with any stride; on a GPU within the limits of `takes`. scale: > 0.
    """
    if qkv.device.type == "cuda":
        return launch(qkv, heads, groups, scale)
    return reference.attention(qkv, heads, groups, scale)


def backward(d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, groups: int, scale: float) -> Tensor:
    """Gradient of qkv [B, T, (H + 2G)·D], contiguous; out and lse: the results of `forward`, d_out [B, T, H·D] like out."""
    if qkv.device.type == "cuda":
        return launch_backward(d_out, qkv, out, lse, heads, groups, scale)
    return reference.attention_backward(d_out, qkv, out, lse, heads, groups, scale)
