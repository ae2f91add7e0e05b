"""Cross entropy of a chunk of logits and its gradient, written over the logits: at most two reads and one write of each.

The first pass keeps a running maximum and a running sum of exponentials (float32). The second writes the gradient in place, or
in FP8 for a head with FP8 gradient products: the values are probabilities, so their scale is known in advance. PyTorch needs a
float32 copy of the logits and four passes. A program has one row; rows exceed a multiprocessor's memory and the L2 cache. The
first columns of a long row stay in registers from pass to pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.fast_math import LOG2_E, exp2
from octavo.kernels.tiles import cdiv

_SCALE_BLOCK, _SCALE_WARPS, _PROGRAMS = 8192, 16, 1024


class Objective(NamedTuple):
    """Terms of the loss, as in `reference.cross_entropy`; `ignore_index` marks no target."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class Gradient(NamedTuple):
    """The gradient of a chunk [N, V]: in the dtype of its logits, or in FP8 with 1 / its scale."""

    high_precision: Tensor | None
    fp8: Tensor | None = None
    scale_inv: Tensor | None = None


class RowShape(NamedTuple):
    """Columns that a program reads at once, first columns that it keeps from pass to pass (0: none), and its warps."""

    block: int
    kept: int
    warps: int


# Measured on an H200 with 2,048 rows and FP8 gradients, a prototype of the long shape or the short one: 128,256 columns take
# 307 or 336 µs, 32,000 take 211 or 151. The bound lies between them; no size there is measured.
_LONG_ROW = 65536
SHORT, LONG = RowShape(8192, 0, 8), RowShape(8192, 16384, 32)


def row_shape(columns: int) -> RowShape:
    """The faster shape. It is that of losses without a gradient too, so that both sum in one order."""
    return LONG if columns >= _LONG_ROW else SHORT


@triton.jit
def _add_block(x, inside, top, total, summed, SMOOTH: tl.constexpr):
    """Maximum and sum of exponentials, in powers of two, and sum of the logits so far, with those of a block."""
    x = x.to(tl.float32)
    new_top = tl.maximum(top, tl.max(x) * LOG2_E)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # first blocks of nothing but -∞ add 0, not NaN
    total = total * exp2(top - base) + tl.sum(exp2(tl.fma(x, LOG2_E, -base)))
    if SMOOTH:
        summed += tl.sum(tl.where(inside, x, 0.0))
    return new_top, total, summed


@triton.jit
def _store_gradient(out, x, c, columns, log2_total, factor, even, SMOOTH: tl.constexpr, POLICY: tl.constexpr):
    """Store the gradient of a block, as if none of its columns were the target."""
    grad = exp2(tl.fma(x.to(tl.float32), LOG2_E, -log2_total)) * factor
    if SMOOTH:
        grad -= even
    # To FP8 the conversion saturates.
    tl.store(out + c, grad.to(out.dtype.element_ty), mask=c < columns, eviction_policy=POLICY)


@triton.jit
def _cross_entropy(
    logits_ptr, target_ptr, loss_ptr, grad_scale_ptr, fp8_ptr, columns, stride, fp8_stride, ignore_index, smoothing, z_loss,
    FP8_MAX: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    # Few long rows are under way at once: the L2 cache is for what is read again.
    ONCE: tl.constexpr = "evict_first" if KEPT else ""
    AGAIN: tl.constexpr = "evict_last" if KEPT and grad_scale_ptr is not None else ""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    start = logits_ptr + row * stride
    # In powers of two, whose exponential is one instruction.
    top = -float("inf")
    total = 0.0
    summed = 0.0
    if KEPT:
        kept_c = tl.arange(0, KEPT)
        kept = tl.load(start + kept_c, mask=kept_c < columns, other=-float("inf"), eviction_policy=ONCE)
        top, total, summed = _add_block(kept, kept_c < columns, top, total, summed, SMOOTH)
    for first in range(KEPT, columns, BLOCK):
        c = first + tl.arange(0, BLOCK)
        x = tl.load(start + c, mask=c < columns, other=-float("inf"), eviction_policy=AGAIN)
        top, total, summed = _add_block(x, c < columns, top, total, summed, SMOOTH)
    real = target != ignore_index
    known = (target >= 0) & (target < columns)
    at_target = tl.where(known, target, 0)  # never outside the row
    picked = tl.load(start + at_target).to(tl.float32)
    log2_total = top + tl.log2(total)
    log_total = log2_total / LOG2_E
    loss = log_total - (1.0 - smoothing) * picked + z_loss * log_total * log_total
    even = 0.0
    if SMOOTH:
        even = smoothing / columns
        loss -= even * summed
    loss = tl.where(known, loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(real, loss, 0.0))
    if grad_scale_ptr is not None:
        if fp8_ptr is not None:
            scale = FP8_MAX
            out = fp8_ptr + row * fp8_stride
        else:
            scale = tl.load(grad_scale_ptr)
            out = start
        scale = tl.where(real, tl.where(known, scale, float("nan")), 0.0)
        factor = (1.0 + 2.0 * z_loss * log_total) * scale
        even = even * scale
        tl.debug_barrier()  # every warp has read its target's logit before any overwrites it
        for first in range(KEPT, columns, BLOCK):
            c = first + tl.arange(0, BLOCK)
            x = tl.load(start + c, mask=c < columns, other=-float("inf"), eviction_policy=ONCE)
            _store_gradient(out, x, c, columns, log2_total, factor, even, SMOOTH, ONCE)
        if KEPT:
            _store_gradient(out, kept, kept_c, columns, log2_total, factor, even, SMOOTH, ONCE)
        tl.debug_barrier()  # the target's gradient is stored twice, and the second is right
        grad = exp2(tl.fma(picked, LOG2_E, -log2_total)) * factor - even - (1.0 - smoothing) * scale
        tl.store(out + at_target, grad.to(out.dtype.element_ty))


def launch(
    logits: Tensor, target: Tensor, grad_scale: Tensor | None, objective: Objective, fp8: Tensor | None = None,
    *, shape: RowShape | None = None,
) -> tuple[Tensor, Gradient | None]:  # fmt: skip
    """Run the kernel; see `cross_entropy_`. shape: another than `row_shape`'s."""
    rows, columns = logits.shape
    shape = shape or row_shape(columns)
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    q = None if grad_scale is None else fp8
    fp8_max = 1.0 if q is None else torch.finfo(q.dtype).max
    if rows:
        _cross_entropy[(rows,)](
            logits, target, loss, grad_scale, q, columns, logits.stride(0), 0 if q is None else q.stride(0),
            objective.ignore_index, float(objective.label_smoothing), float(objective.z_loss),
            FP8_MAX=fp8_max, SMOOTH=objective.label_smoothing != 0, BLOCK=shape.block, KEPT=shape.kept, num_warps=shape.warps,
        )  # fmt: skip
    if grad_scale is None:
        return loss.sum(), None
    return loss.sum(), Gradient(logits) if q is None else Gradient(None, q, grad_scale / fp8_max)


def cross_entropy_(
    logits: Tensor, target: Tensor, grad_scale: Tensor | None, objective: Objective, fp8: Tensor | None = None
) -> tuple[Tensor, Gradient | None]:
    """Sum of the losses of a chunk, float32 []; and with `grad_scale` (float32 []) the gradient times it.

    logits: [N, V], row-major; a gradient in their dtype overwrites them on a GPU. target: int64 [N]. fp8: FP8 [N, V] with rows
    in any stride, receives the gradient instead: 1 becomes the largest value of the format (a z-loss beyond it saturates).
    """
    if logits.device.type == "cuda":
        return launch(logits, target, grad_scale, objective, fp8)
    one = logits.new_ones((), dtype=torch.float32)
    if fp8 is None or grad_scale is None:
        loss, grad = reference.cross_entropy(logits, target, one if grad_scale is None else grad_scale, *objective)
        return loss, None if grad_scale is None else Gradient(grad)
    fp8_max = torch.finfo(fp8.dtype).max
    loss, grad = reference.cross_entropy(logits.float(), target, one, *objective)
    fp8.copy_(reference.cast(grad, grad.new_tensor(fp8_max), fp8.dtype, fp8_max))
    return loss, Gradient(None, fp8, grad_scale / fp8_max)


@triton.jit
def _cross_entropy_scale(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
            tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=at < count)


def launch_scale(x: Tensor, factor: Tensor) -> Tensor:
    """Run the kernel; see `scale_`."""
    if x.numel():
        _cross_entropy_scale[(min(cdiv(x.numel(), _SCALE_BLOCK), _PROGRAMS),)](
            x, factor, x.numel(), BLOCK=_SCALE_BLOCK, num_warps=_SCALE_WARPS
        )
    return x


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor (float32 []) in place, free for a factor of 1; contiguous, any float dtype."""
    return launch_scale(x, factor) if x.device.type == "cuda" else x.mul_(factor)
