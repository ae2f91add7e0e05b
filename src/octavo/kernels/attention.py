"""Attention of short sequences, as vision transformers have: straight from the joint query/key/value product, and back into it.

A few hundred tokens leave kernels for long sequences half idle: 257 of them fill three tiles of 128, a head of 80 columns is
padded to 128, and taking the product apart and joining its gradients costs about as much again. Here rows are read and written
where they are, and padded by little. Backward adds nothing up atomically and repeats bit for bit.

There are no masks, no dropout and no second derivative. The number of tokens is known when a kernel is compiled, so that each
other number is another compilation: for data of ever new lengths this is the wrong kernel.

A row of the joint product is G groups of H/G query heads, their key and their value.
Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.errors import InputError
from octavo.kernels import gemm, reference
from octavo.kernels.attention_backward import backward_keys, backward_queries
from octavo.kernels.attention_forward import attention_forward
from octavo.kernels.cast import Into, Made, make, outputs, transpose

LONGEST = 512
"""With more tokens than this, kernels for long sequences waste little."""
NARROWEST = 16
"""Rows or columns of the smallest tile that a matrix instruction takes."""


class Tiles(NamedTuple):
    """How work is cut.

    Attributes:
        queries, keys: tokens of a tile, powers of two.
        warps: of a program. stages: of a loop: with 2 it waits for each tile as it asks for it, beyond it asks earlier.
        registers: the most that a thread may use, of 255; None leaves it to the compiler.
    """

    queries: int
    keys: int
    warps: int
    stages: int = 2
    registers: int | None = None


FORWARD = Tiles(64, 64, warps=4)
QUERIES, KEYS = Tiles(64, 32, warps=4), Tiles(32, 64, warps=4, stages=3)
"""Tiles of the backward kernels: a program of QUERIES goes over keys, one of KEYS over queries."""
CAPPED_DIM, QUERIES_REGISTERS, KEYS_REGISTERS = 80, 128, 168
"""Where they write FP8, the widest head and the most registers of a thread with which as many programs fit beside each other as
where they write bf16. Without a limit the transposed stores, byte by byte and each to an address of its own, take 162 and 255
(257 tokens, 80 columns, Hopper); what the limit spills is spilt once a program, behind its loop."""
TURNED = False
"""Whether the transposed FP8 is made of the other by a kernel of its own, for 2 bytes an element more."""


def takes(dtype: torch.dtype, tokens: int, head_dim: int) -> bool:
    """Whether the kernels are made for such a head; what is longer, wider or float32 is for others."""
    return dtype in (torch.bfloat16, torch.float16) and 0 < tokens <= LONGEST and head_dim <= 128 and head_dim % 8 == 0


def _width(count: int) -> int:
    """The width of the tile that holds `count` tokens or columns."""
    return max(triton.next_power_of_2(count), NARROWEST)


def _pieces(head_dim: int) -> dict[str, int]:
    """A head as one or two powers of two, the second 0 where there is none."""
    first = max(1 << (head_dim.bit_length() - 1), NARROWEST)
    return {"D": head_dim, "D1": first, "D2": _width(head_dim - first) if head_dim > first else 0}


def _cut(tokens: int, tile: int) -> tuple[int, int]:
    """The tile that tokens are cut into, and the narrow one for those beyond full tiles (0: there are none)."""
    tile = min(tile, _width(tokens))
    return tile, _width(tokens % tile) if tokens % tile else 0


def _options(tiles: Tiles, rows: int) -> dict[str, Any]:
    """What a launch is told of a program besides its tiles; where it has fewer rows than usual, fewer warps share them."""
    options: dict[str, Any] = {"num_warps": min(tiles.warps, max(4, rows // 16))}
    return options if tiles.registers is None else options | {"maxnreg": tiles.registers}


def _share(tokens: int, tiles: Tiles, *, by_keys: bool = False) -> tuple[int, dict[str, Any]]:
    """How many programs share the tokens of a head, each with a tile of queries (or keys), and what they are told of tiles."""
    names, (outer, inner) = ("QUERIES", "KEYS"), tiles[:2]
    if by_keys:
        names, (inner, outer) = ("KEYS", "QUERIES"), tiles[:2]
    (tile, last), (step, tail) = _cut(tokens, outer), _cut(tokens, inner)
    told = {names[0]: tile, "LAST": last, names[1]: step, "TAIL": tail, "STAGES": tiles.stages}
    return triton.cdiv(tokens, tile), told | _options(tiles, tile)


def _read(x: Tensor) -> Tensor:
    """x where its rows are stored in one piece each, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def launch(
    qkv: Tensor, heads: int, groups: int, scale: float, *, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel; see `forward`."""
    (batch, tokens, _), head_dim = qkv.shape, qkv.shape[-1] // (heads + 2 * groups)
    out = qkv.new_empty(batch, tokens, heads * head_dim)
    lse = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    if qkv.numel() == 0:
        return out, lse
    qkv, (programs, told) = _read(qkv), _share(tokens, tiles or FORWARD)
    attention_forward[(programs * heads * batch,)](
        qkv, out, lse, qkv.stride(0), qkv.stride(1), scale * math.log2(math.e),
        T=tokens, H=heads, G=groups, **_pieces(head_dim), **told,
    )  # fmt: skip
    return out, lse


def launch_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, groups: int, scale: float,
    *, queries: Tiles | None = None, keys: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Run the kernels; see `backward`."""
    into = Into(qkv.dtype)
    made, _ = launch_backward_into(d_out, qkv, out, lse, heads, groups, scale, into, queries=queries, keys=keys)
    assert made.row is not None
    return made.row.view(qkv.shape)


def launch_backward_into(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, groups: int, scale: float, into: Into,
    *, bias: bool = False, turned: bool | None = None, queries: Tiles | None = None, keys: Tiles | None = None,
) -> tuple[Made, Tensor | None]:  # fmt: skip
    """Run the kernels; see `backward_into`. turned: as `TURNED`."""
    (batch, tokens, width), head_dim = qkv.shape, qkv.shape[-1] // (heads + 2 * groups)
    fp8 = into.scale is not None and (into.row or into.column)
    turned = fp8 and into.column and (TURNED if turned is None else turned)
    made = outputs(into._replace(row=True, column=False) if turned else into, batch * tokens, width, qkv.device)
    if qkv.numel() == 0:
        if made.scale_inv is not None and into.scale is not None:
            made.scale_inv.copy_(reference.divide(1.0, into.scale))
        return _turned(made, into) if turned else made, lse.new_zeros(width) if bias else None
    by_queries, by_keys = _backward_tiles(capped=fp8 and heads == groups and head_dim <= CAPPED_DIM)
    parts, told = _share(tokens, queries or by_queries)
    key_parts, told_keys = _share(tokens, keys or by_keys, by_keys=True)
    partial = None
    if bias:  # where one kernel has fewer tiles, what it leaves out is 0
        empty = torch.empty if parts == key_parts else torch.zeros
        partial = empty(batch * max(parts, key_parts), width, dtype=torch.float32, device=qkv.device)
    qkv, d_out, out, lse = _read(qkv), _read(d_out), out.contiguous(), lse.contiguous()
    rows = lse.new_empty(batch, heads, 2, tokens)
    numbers = (qkv.stride(0), qkv.stride(1), d_out.stride(0), d_out.stride(1), scale * math.log2(math.e))
    left = (made.row, made.column, into.scale if fp8 else None, made.scale_inv, into.amax, partial, batch * tokens, 1.0)
    shape = {"T": tokens, "H": heads, "G": groups, "PARTS": max(parts, key_parts)} | _pieces(head_dim)
    backward_queries[(parts * heads * batch,)](qkv, rows, d_out, out, lse, *numbers, *left, **shape, **told)
    backward_keys[(key_parts * groups * batch,)](qkv, rows, d_out, *numbers, *left, **shape, **told_keys)
    return _turned(made, into) if turned else made, None if partial is None else partial.sum(0)


def _backward_tiles(*, capped: bool) -> tuple[Tiles, Tiles]:
    """Of both backward kernels."""
    if not capped:
        return QUERIES, KEYS
    return QUERIES._replace(registers=QUERIES_REGISTERS), KEYS._replace(registers=KEYS_REGISTERS)


def _turned(made: Made, into: Into) -> Made:
    """What `into` asks for, of rows in FP8."""
    assert made.row is not None
    return Made(made.row if into.row else None, transpose(made.row), made.scale_inv)


def _heads(qkv: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, G, P, T, D], k and v [B, G, 1, T, D] in float32, P = H/G."""
    per_group = heads // groups
    parts = qkv.float().unflatten(-1, (groups, per_group + 2, -1)).permute(0, 2, 3, 1, 4)
    q, k, v = parts.split([per_group, 1, 1], 2)
    return q, k, v


def forward(qkv: Tensor, heads: int, groups: int, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q · kᵀ · scale) · v, every query with every key.

    qkv: [B, T, (H + 2G)·D], rows with a stride; on a GPU as `takes` says. scale: > 0.
    Returns the result [B, T, H·D] in its dtype, and the logarithm of each softmax's denominator, float32 [B, H, T].
    """
    if qkv.device.type == "cuda":
        return launch(qkv, heads, groups, scale)
    q, k, v = _heads(qkv, heads, groups)
    logits = q @ k.mT * scale
    lse = logits.logsumexp(-1)
    out = (logits - lse[..., None]).exp().to(qkv.dtype).float() @ v
    return out.flatten(1, 2).transpose(1, 2).flatten(2).to(qkv.dtype), lse.flatten(1, 2)


def _gradient(d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, groups: int, scale: float) -> Tensor:
    """The definition of `backward`, float32."""
    q, k, v = _heads(qkv, heads, groups)
    d_o, o = (x.float().unflatten(-1, (groups, heads // groups, -1)).permute(0, 2, 3, 1, 4) for x in (d_out, out))
    p = (q @ k.mT * scale - lse.unflatten(1, (groups, -1))[..., None]).exp()
    ds = (p * (d_o @ v.mT - (d_o * o).sum(-1, keepdim=True))).to(qkv.dtype).float()
    dv = (p.to(qkv.dtype).float().mT @ d_o).sum(2, keepdim=True)
    dk = (ds.mT @ q).sum(2, keepdim=True) * scale
    return torch.cat((ds @ k * scale, dk, dv), 2).permute(0, 3, 1, 2, 4).flatten(2)


def backward(d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, groups: int, scale: float) -> Tensor:
    """Gradient of `forward`: d_out like its result, qkv its argument, out and lse what it returned → contiguous, like qkv."""
    if qkv.device.type == "cuda":
        return launch_backward(d_out, qkv, out, lse, heads, groups, scale)
    return _gradient(d_out, qkv, out, lse, heads, groups, scale).to(qkv.dtype)


def backward_into(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, groups: int, scale: float, into: Into,
    *, bias: bool = False,
) -> tuple[Made, Tensor | None]:  # fmt: skip
    """`backward`'s gradient as a matrix [B·T, (H + 2G)·D], made as `into` asks without a rounding on the way.

    Returns that and, if `bias` asks for it, its float32 sum over rows before it is rounded, [(H + 2G)·D]. Who has to see the
    amax first should ask for the gradient in a wide dtype and cast that: each call computes attention's backward anew.
    """
    if qkv.device.type == "cuda" and (into.scale is None or gemm.is_native(qkv.device)):
        return launch_backward_into(d_out, qkv, out, lse, heads, groups, scale, into, bias=bias)
    matrix = _gradient(d_out, qkv, out, lse, heads, groups, scale).flatten(0, 1)
    return make(matrix, into), matrix.sum(0) if bias else None


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, groups: int, scale: float) -> Tensor:
        out, lse = forward(qkv, heads, groups, scale)
        ctx.save_for_backward(qkv, out, lse)
        ctx.call = heads, groups, scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("short attention has no second derivative: call backward without create_graph=True.")
        qkv, out, lse = ctx.saved_tensors
        return backward(d_out, qkv, out, lse, *ctx.call), None, None, None


def checked_scale(scale: float | None, head_dim: int) -> float:
    """The softmax's scale, by default D^-½. Raises InputError where it is not more than 0, which the kernels do not take."""
    scale = head_dim**-0.5 if scale is None else scale
    if scale <= 0:
        raise InputError(f"the scale of attention is {scale}, but has to be more than 0.")
    return scale


def short_attention(qkv: Tensor, heads: int, groups: int, scale: float | None = None) -> Tensor:
    """softmax(q · kᵀ · scale) · v, every query with every key, and differentiable once.

    qkv: [B, T, (H + 2G)·D], which stays as it is until backward has read it → [B, T, H·D]. scale: > 0, by default D^-½.
    Raises InputError for what the kernels do not take (see `takes`); a CPU takes any dtype and size.
    """
    head_dim = qkv.shape[-1] // (heads + 2 * groups)
    scale = checked_scale(scale, head_dim)
    if qkv.device.type == "cuda" and qkv.numel() and not takes(qkv.dtype, qkv.shape[1], head_dim):
        raise InputError(
            f"short attention takes bfloat16 or float16, at most {LONGEST} tokens and a head dimension of at most 128 in steps "
            f"of 8, not {qkv.dtype}, {qkv.shape[1]} tokens and {head_dim}: use scaled_dot_product_attention."
        )
    return _ShortAttention.apply(qkv, heads, groups, scale)
