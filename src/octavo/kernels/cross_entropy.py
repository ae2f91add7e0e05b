"""Cross entropy of a chunk of logits and its gradient, written over the logits: two reads and one write of each.

The first pass sums exponentials in float32, the second writes the gradient in place, or in FP8 for a head with FP8 gradient
products: the values are probabilities, so their scale is known in advance. PyTorch needs a float32 copy of the logits and four
passes. A program has one row. Its first columns stay in registers from pass to pass; the rest of a long row stays in the L2
cache if few rows are processed at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.fast_math import LOG2_E, exp2
from octavo.kernels.tiles import cdiv

_ROUNDED = torch.tensor(LOG2_E.value, dtype=torch.float32, device="cpu").item()
LN_2 = tl.constexpr(torch.tensor(1 / _ROUNDED, dtype=torch.float32, device="cpu").item())
LN_2_REST = tl.constexpr(1 / _ROUNDED - LN_2.value)
"""The reciprocal of LOG2_E's float32 value, as the sum of two float32 numbers."""
LARGEST_SUM = tl.constexpr(2.0**64)
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
    """Columns that a program reads at once, the first of which stay in registers, and its warps."""

    block: int
    warps: int


_SHAPES = {16384: RowShape(4096, 8), 98303: RowShape(8192, 16)}
"""Longest row → shape; measured on an H100. Programs of 32 warps leave the L2 cache to few rows."""
_LONGEST = RowShape(16384, 32)


def row_shape(columns: int) -> RowShape:
    """The fastest shape with a gradient. A loss without a gradient uses the same shape, so that both sum in the same order."""
    return next((shape for longest, shape in _SHAPES.items() if columns <= longest), _LONGEST)


@triton.jit
def exponentials(x, base):
    """e to the logits, times 2 to the -base: a power of two is one instruction."""
    return exp2(tl.fma(x.to(tl.float32), LOG2_E, -base))


@triton.jit
def load_logits(start, c, columns, width, PADDED: tl.constexpr, EVICT: tl.constexpr):
    """Logits of the columns c, -∞ beyond `columns`. PADDED: the row has padding, `width` columns in all.

    Padding is read, and replaced: loads of 16 bytes need a mask that ends at a multiple of 16 bytes, as `width` does. A mask
    that ends at `columns` may load every logit separately.
    """
    x = tl.load(start + c, mask=c < width, other=-float("inf"), eviction_policy=EVICT)
    if PADDED:
        x = tl.where(c < columns, x.to(tl.float32), -float("inf"))
    return x


@triton.jit
def sum_exponentials(
    start, cached, cached_c, columns, width,
    PADDED: tl.constexpr, SMOOTH: tl.constexpr, EVICT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(top, base, total, summed) of a row: maximum in base 2, base of the exponentials, sum of the exponentials, of the logits.

    top: of the row's first logits, or of all if those would overflow the sum; -∞ without a finite logit, where base is 0.
    cached: the row's first logits, of the columns cached_c, held in registers. summed: 0 without SMOOTH.
    EVICT: the L2 cache policy for the others.
    """
    top = tl.max(cached.to(tl.float32)) * LOG2_E
    # Each lane sums separately, starting at the maximum of the logits in registers: no reduction, and no barrier, per block.
    base = tl.where(top == -float("inf"), 0.0, top)
    sums = exponentials(cached, base)
    summed = 0.0
    if SMOOTH:
        summed = tl.sum(tl.where(cached_c < columns, cached.to(tl.float32), 0.0))
    for first in range(BLOCK, columns, BLOCK):
        c = first + tl.arange(0, BLOCK)
        x = load_logits(start, c, columns, width, PADDED, EVICT)
        sums += exponentials(x, base)
        if SMOOTH:
            summed += tl.sum(tl.where(c < columns, x.to(tl.float32), 0.0))
    total = tl.sum(sums)
    # A logit 44 above those in registers makes the sum so large that the gradient's scale over it is too small for float32, one
    # 88 above makes it ∞; if all in registers are -∞, there is no maximum to start from.
    if (top == -float("inf")) | ~(total < LARGEST_SUM):
        tops = cached.to(tl.float32)
        for first in range(BLOCK, columns, BLOCK):
            c = first + tl.arange(0, BLOCK)
            tops = tl.maximum(tops, load_logits(start, c, columns, width, PADDED, "").to(tl.float32))
        top = tl.max(tops) * LOG2_E
        base = tl.where(top == -float("inf"), 0.0, top)
        sums = exponentials(cached, base)
        for first in range(BLOCK, columns, BLOCK):
            c = first + tl.arange(0, BLOCK)
            sums += exponentials(load_logits(start, c, columns, width, PADDED, ""), base)
        total = tl.sum(sums)
    return top, base, total, summed


@triton.jit
def loss_of_row(base, total, picked, summed, words, smoothing, z_loss, SMOOTH: tl.constexpr):
    """(loss, log of Σexp(logits), the label-smoothing term per word, for `words` words). picked: the target's logit."""
    # `base` is rounded, at a logit of 500 by 3e-5. The exponentials and their sum have this factor in common: probabilities are
    # quotients of the two, and the loss adds `base` to the precision of a float32 sum of two.
    above = tl.log2(total) * LN_2
    log_total = base * LN_2 + above
    loss = (1.0 - smoothing) * (tl.fma(base, LN_2, -picked) + (base * LN_2_REST + above)) + z_loss * log_total * log_total
    if SMOOTH:
        loss += smoothing * log_total
    even = 0.0
    if SMOOTH:
        even = smoothing / words
        loss -= even * summed
    return loss, log_total, even


@triton.jit
def gradient_of_row(base, total, picked, log_total, scale, even, smoothing, z_loss, SMOOTH: tl.constexpr):
    """(factor, even, at_picked): exponentials · factor - even is the gradient times `scale`; at_picked is the target's."""
    raised = 2.0 * (z_loss * log_total)
    factor = (1.0 + raised) * scale / total
    # (p - 1) · (1 + raised) + raised + smoothing; as a difference from the sum, p - 1 is exact where p is near 1.
    at_picked = (exponentials(picked, base) - total) * factor + raised * scale
    if SMOOTH:
        even = even * scale
        at_picked += smoothing * scale - even
    return factor, even, at_picked


@triton.jit
def scale_and_place(start, row, grad_scale_ptr, fp8_ptr, fp8_stride, real, known, FP8_MAX: tl.constexpr):
    """The factor of a row's gradient, 0 for an ignored target and NaN for an unknown one; and where the gradient is stored."""
    if fp8_ptr is not None:
        scale = FP8_MAX
        out = fp8_ptr + row * fp8_stride
    else:
        scale = tl.load(grad_scale_ptr)
        out = start
    return tl.where(real, tl.where(known, scale, float("nan")), 0.0), out


@triton.jit
def _store_gradient(out, x, c, columns, base, factor, even, SMOOTH: tl.constexpr):
    """Store the gradient of a block, as if none of its columns were the target. factor: its scale over their sum."""
    grad = exponentials(x, base) * factor
    if SMOOTH:
        grad -= even
    # To FP8 the conversion saturates.
    tl.store(out + c, grad.to(out.dtype.element_ty), mask=c < columns, eviction_policy="evict_first")


@triton.jit
def _cross_entropy(
    logits_ptr, target_ptr, loss_ptr, grad_scale_ptr, fp8_ptr, columns, stride, fp8_stride, ignore_index, smoothing, z_loss,
    FP8_MAX: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Few long rows are processed at once: the L2 cache is for columns that are reread.
    EVICT: tl.constexpr = "evict_last" if grad_scale_ptr is not None else "evict_first"
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    start = logits_ptr + row * stride
    cached_c = tl.arange(0, BLOCK)
    cached = tl.load(start + cached_c, mask=cached_c < columns, other=-float("inf"), eviction_policy="evict_first")
    _, base, total, summed = sum_exponentials(start, cached, cached_c, columns, columns, False, SMOOTH, EVICT, BLOCK)
    real = target != ignore_index
    known = (target >= 0) & (target < columns)
    at_target = tl.where(known, target, 0)  # never outside the row
    picked = tl.load(start + at_target).to(tl.float32)
    loss, log_total, even = loss_of_row(base, total, picked, summed, columns, smoothing, z_loss, SMOOTH)
    loss = tl.where(known, loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(real, loss, 0.0))
    if grad_scale_ptr is not None:
        scale, out = scale_and_place(start, row, grad_scale_ptr, fp8_ptr, fp8_stride, real, known, FP8_MAX)
        factor, even, at_picked = gradient_of_row(base, total, picked, log_total, scale, even, smoothing, z_loss, SMOOTH)
        tl.debug_barrier()  # every warp has read its target's logit before any overwrites it
        for first in range(BLOCK, columns, BLOCK):
            c = first + tl.arange(0, BLOCK)
            x = tl.load(start + c, mask=c < columns, other=-float("inf"), eviction_policy="evict_first")
            _store_gradient(out, x, c, columns, base, factor, even, SMOOTH)
        _store_gradient(out, cached, cached_c, columns, base, factor, even, SMOOTH)
        tl.debug_barrier()  # the target's gradient is stored twice, and the second is right
        tl.store(out + at_target, at_picked.to(out.dtype.element_ty))


def launch(
    logits: Tensor, target: Tensor, grad_scale: Tensor | None, objective: Objective, fp8: Tensor | None = None,
    *, shape: RowShape | None = None,
) -> tuple[Tensor, Gradient | None]:  # fmt: skip
    """Run the kernel; see `cross_entropy_`. shape: another than `row_shape`'s."""
    rows, columns = logits.shape
    out = outputs(logits, grad_scale, fp8)
    if rows:
        _cross_entropy[(rows,)](
            logits, target, out.losses, grad_scale, out.fp8, columns, logits.stride(0), out.stride, *numbers(objective),
            FP8_MAX=out.fp8_max, **constants(objective, shape or row_shape(columns)),
        )  # fmt: skip
    return result(out, logits, grad_scale)


def numbers(objective: Objective) -> tuple[int, float, float]:
    """The loss's terms as kernel arguments."""
    return objective.ignore_index, float(objective.label_smoothing), float(objective.z_loss)


def constants(objective: Objective, shape: RowShape) -> dict[str, Any]:
    """The kernel's compile-time constants."""
    return {"SMOOTH": objective.label_smoothing != 0, "BLOCK": shape.block, "num_warps": shape.warps}


class Outputs(NamedTuple):
    """Outputs of a kernel: the rows' losses, float32 [N], the FP8 gradient if there is one, its stride and largest value."""

    losses: Tensor
    fp8: Tensor | None = None
    stride: int = 0
    fp8_max: float = 1.0


def outputs(logits: Tensor, grad_scale: Tensor | None, fp8: Tensor | None) -> Outputs:
    """Memory for a kernel's losses [N] and its FP8 gradient; a gradient in high precision overwrites the logits [N, V]."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if grad_scale is None or fp8 is None:
        return Outputs(losses)
    return Outputs(losses, fp8, fp8.stride(0), torch.finfo(fp8.dtype).max)


def result(out: Outputs, logits: Tensor, grad_scale: Tensor | None) -> tuple[Tensor, Gradient | None]:
    """The sum of the rows' losses, float32 [], and the gradient [N, V] that a kernel has written over the logits, or in FP8."""
    if grad_scale is None:
        return out.losses.sum(), None
    if out.fp8 is None:
        return out.losses.sum(), Gradient(logits)
    return out.losses.sum(), Gradient(None, out.fp8, grad_scale / out.fp8_max)


def cross_entropy_(
    logits: Tensor, target: Tensor, grad_scale: Tensor | None, objective: Objective, fp8: Tensor | None = None
) -> tuple[Tensor, Gradient | None]:
    """Sum of the losses of a chunk, float32 []; and with `grad_scale` (float32 []) the gradient times it.

    logits: [N, V], row-major; a gradient in their dtype overwrites them on a GPU. target: int64 [N]. fp8: FP8 [N, V] with rows
    in any stride, receives the gradient instead: 1 becomes the largest value of the format (a z-loss beyond it saturates).
    """
    if logits.device.type == "cuda":
        return launch(logits, target, grad_scale, objective, fp8)
    one = logits.new_ones((), dtype=torch.promote_types(logits.dtype, torch.float32))
    if fp8 is None or grad_scale is None:
        loss, grad = reference.cross_entropy(logits, target, one if grad_scale is None else grad_scale, *objective)
        return loss, None if grad_scale is None else Gradient(grad)
    fp8_max = torch.finfo(fp8.dtype).max
    loss, grad = reference.cross_entropy(reference.wide(logits), target, one, *objective)
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
