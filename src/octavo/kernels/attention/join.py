"""Results of attention over two sets of keys as one, and sums of gradients: each in one pass over the memory, in float32.

Shapes: B batch, T queries, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.tiles import cdiv, next_power_of_2

_QUERIES, _WARPS = 64, 4
"""Queries of a program that joins a head's results, and its warps."""
_ELEMENTS = 4096
"""Most elements that a program adds up, 16 per thread."""
_TERMS = 4
"""Terms of one launch."""


@triton.jit
def _join_results(
    out_ptr, lse_ptr, other_ptr, other_lse_ptr, queries, heads, out_b, out_t, out_h, lse_b, lse_h, other_b, other_t, other_h,
    other_lse_b, other_lse_h, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    t = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    d = tl.arange(0, WIDTH)
    there = t < queries
    inside = there[:, None] & (d < D)[None, :]
    lse_ptr += b * lse_b + h * lse_h
    first = tl.load(lse_ptr + t, mask=there, other=0.0)
    second = tl.load(other_lse_ptr + b * other_lse_b + h * other_lse_h + t, mask=there, other=0.0)
    top = tl.maximum(first, second)
    base = tl.where(top == -float("inf"), 0.0, top)  # a query without keys so far gives 0, not NaN
    weight, other_weight = tl.exp(first - base), tl.exp(second - base)
    total = weight + other_weight
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    out_ptr += b * out_b + h * out_h + t[:, None].to(tl.int64) * out_t + d[None, :]
    other_ptr += b * other_b + h * other_h + t[:, None].to(tl.int64) * other_t + d[None, :]
    out = tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(other_ptr, mask=inside, other=0.0).to(tl.float32)
    joined = out * (weight * scale)[:, None] + other * (other_weight * scale)[:, None]
    tl.store(out_ptr, joined.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + t, base + tl.log(total), mask=there)


@triton.jit
def _add_terms(
    out_ptr, a_ptr, b_ptr, c_ptr, d_ptr, elements, inner, blocks, out_0, out_1, a_0, a_1, b_0, b_1, c_0, c_1, d_0, d_1,
    TERMS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks  # only a grid's first dimension may have more than 65,535 programs
    first, second = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    n = (tl.program_id(0) % blocks).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = n < elements
    summed = tl.load(a_ptr + first * a_0 + second * a_1 + n, mask=there, other=0.0).to(tl.float32)
    if TERMS > 1:
        summed += tl.load(b_ptr + first * b_0 + second * b_1 + n, mask=there, other=0.0).to(tl.float32)
    if TERMS > 2:
        summed += tl.load(c_ptr + first * c_0 + second * c_1 + n, mask=there, other=0.0).to(tl.float32)
    if TERMS > 3:
        summed += tl.load(d_ptr + first * d_0 + second * d_1 + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + first * out_0 + second * out_1 + n, summed.to(out_ptr.dtype.element_ty), mask=there)


def launch_join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Run the kernel, for tensors whose last dimension is adjacent; see `join_`."""
    batch, queries, heads, dim = out.shape
    if out.numel():
        _join_results[(cdiv(queries, _QUERIES), batch * heads)](
            out, lse, other, other_lse, queries, heads, *out.stride()[:3], *lse.stride()[:2], *other.stride()[:3],
            *other_lse.stride()[:2], D=dim, WIDTH=next_power_of_2(dim), QUERIES=_QUERIES, num_warps=_WARPS,
        )  # fmt: skip


def _in_order(x: Tensor) -> bool:
    """True if all dimensions after the first two are contiguous, as the kernel reads them."""
    return x.numel() == 0 or x[0, 0].is_contiguous()


def launch_add_up(out: Tensor, terms: Sequence[Tensor]) -> None:
    """Run the kernel, for tensors in order; see `add_up`."""
    if not out.numel():
        return
    elements, inner = out[0, 0].numel(), out.shape[1]
    block = min(_ELEMENTS, next_power_of_2(elements))
    blocks = cdiv(elements, block)
    left, target = list(terms), out
    while left:
        now, left = left[:_TERMS], left[_TERMS:]
        target = torch.empty(out.shape, dtype=torch.float32, device=out.device) if left else out
        operands = [now[min(number, len(now) - 1)] for number in range(_TERMS)]
        strides = [stride for term in (target, *operands) for stride in term.stride()[:2]]
        _add_terms[(out.shape[0] * inner * blocks,)](
            target, *operands, elements, inner, blocks, *strides, TERMS=len(now), ELEMENTS=block, num_warps=max(1, block // 512)
        )
        left = [target, *left] if left else left


def join_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Update out and lse to attention over both sets of keys, which are disjoint.

    Args:
        out, other: [B, T, H, D]; 0 for a query without a key.
        lse, other_lse: the log-sum-exp of each query's logits, [B, H, T]; −∞ without a key.
    """
    adjacent = all(x.stride(-1) == 1 for x in (out, lse, other, other_lse))  # as the kernel reads them
    if out.device.type == "cuda" and out.dtype != torch.float64 and adjacent:
        launch_join(out, lse, other, other_lse)
        return
    joined = torch.logaddexp(lse, other_lse)
    base = joined.masked_fill(joined == -torch.inf, 0.0)
    weight, other_weight = ((part - base).exp().transpose(1, 2)[..., None] for part in (lse, other_lse))
    out.copy_(out * weight + other * other_weight)
    lse.copy_(joined)


def add_up(out: Tensor, terms: Sequence[Tensor]) -> None:
    """Write the sum of the terms to out, rounded once from float32 (float64).

    out and terms have one shape [B, T, …] of three or more dimensions.
    """
    if out.device.type == "cuda" and out.dtype != torch.float64 and _in_order(out):
        launch_add_up(out, [term if _in_order(term) else term.contiguous() for term in terms])
        return
    wide = torch.promote_types(out.dtype, torch.float32)
    summed = terms[0].to(wide, copy=True)
    for term in terms[1:]:
        summed += term
    out.copy_(summed)


def add_(sums: Tensor, terms: Tensor) -> None:
    """Add terms to sums, of one shape as in `add_up`, in float32 (float64)."""
    if sums.device.type == "cuda":  # PyTorch adds to a part of a tensor at a fraction of the memory's speed
        add_up(sums, [sums, terms])
    else:
        sums += terms
