"""Vocab-parallel cross entropy, of logits whose columns are split over ranks: the kernels before and after the exchange.

`statistics` reads a rank's slice once. From the statistics of all slices `cross_entropy_of_statistics_` computes the loss of
every row, and rereads the slice to write its gradient in place, or in FP8. Numerics are those of
`octavo.kernels.cross_entropy`.

Rows of the statistics, float32 [3 or 4, N]: the base of a slice's exponentials, -∞ of a slice without a finite logit; their
sum, times 2 to the -base; the target's logit, 0 where another slice has it; with label smoothing the sum of the slice's logits.

Legend: N tokens, V words, S slices, W columns of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo.kernels import reference
from octavo.kernels.cross_entropy import (
    Gradient,
    Objective,
    RowShape,
    constants,
    exponentials,
    gradient_of_row,
    load_logits,
    loss_of_row,
    numbers,
    outputs,
    result,
    row_shape,
    scale_and_place,
    sum_exponentials,
)
from octavo.kernels.fast_math import LOG2_E


@dataclass(frozen=True)
class Slice:
    """The words of a slice of logits [N, W].

    Attributes:
        first, number: the words from `first` on, in the first columns; the others are padding.
        vocabulary: words of all slices.
    """

    first: int
    number: int
    vocabulary: int


@triton.jit
def _cross_entropy_statistics(
    logits_ptr, target_ptr, out_ptr, rows, columns, width, stride, first_word,
    PADDED: tl.constexpr, SMOOTH: tl.constexpr, REREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    EVICT: tl.constexpr = "evict_last" if REREAD else "evict_first"
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * stride
    cached_c = tl.arange(0, BLOCK)
    cached = load_logits(start, cached_c, columns, width, PADDED, EVICT)
    top, _, total, summed = sum_exponentials(start, cached, cached_c, columns, width, PADDED, SMOOTH, EVICT, BLOCK)
    at = tl.load(target_ptr + row) - first_word
    here = (at >= 0) & (at < columns)
    picked = tl.load(start + tl.where(here, at, 0), mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + rows + row, total)
    tl.store(out_ptr + 2 * rows + row, picked)
    if SMOOTH:
        tl.store(out_ptr + 3 * rows + row, summed)


@triton.jit
def _cross_entropy_of_slice(
    logits_ptr, target_ptr, of_slices_ptr, loss_ptr, grad_scale_ptr, fp8_ptr, rows, columns, width, stride, fp8_stride,
    first_word, vocabulary, ignore_index, smoothing, z_loss,
    SLICES: tl.constexpr, FP8_MAX: tl.constexpr, PADDED: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    STATISTICS: tl.constexpr = 4 if SMOOTH else 3
    base = -float("inf")
    for one in tl.static_range(SLICES):
        base = tl.maximum(base, tl.load(of_slices_ptr + one * STATISTICS * rows + row))
    base = tl.where(base == -float("inf"), 0.0, base)
    total = 0.0
    picked = 0.0
    summed = 0.0
    for one in tl.static_range(SLICES):
        of = of_slices_ptr + one * STATISTICS * rows + row
        slice_base = tl.load(of)
        # A slice without a finite logit has a sum of 0, and the factor 0; NaN stays NaN.
        total += tl.load(of + rows) * tl.exp2(slice_base - base)
        picked += tl.load(of + 2 * rows)
        if SMOOTH:
            summed += tl.load(of + 3 * rows)
    target = tl.load(target_ptr + row)
    real = target != ignore_index
    known = (target >= 0) & (target < vocabulary)
    loss, log_total, even = loss_of_row(base, total, picked, summed, vocabulary, smoothing, z_loss, SMOOTH)
    loss = tl.where(known, loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(real, loss, 0.0))
    if grad_scale_ptr is not None:
        start = logits_ptr + row * stride
        scale, out = scale_and_place(start, row, grad_scale_ptr, fp8_ptr, fp8_stride, real, known, FP8_MAX)
        factor, even, at_picked = gradient_of_row(base, total, picked, log_total, scale, even, smoothing, z_loss, SMOOTH)
        at = target - first_word
        for first in range(0, width, BLOCK):
            c = first + tl.arange(0, BLOCK)
            x = load_logits(start, c, columns, width, PADDED, "evict_first")
            grad = exponentials(x, base) * factor
            if SMOOTH:
                grad -= even
            grad = tl.where(c == at, at_picked, grad)
            if PADDED:
                grad = tl.where(c < columns, grad, 0.0)
            tl.store(out + c, grad.to(out.dtype.element_ty), mask=c < width, eviction_policy="evict_first")


def launch_statistics(
    logits: Tensor, target: Tensor, words: Slice, objective: Objective, *, reread: bool, shape: RowShape | None = None
) -> Tensor:
    """Run the kernel; see `statistics`. reread: the gradient will reread the logits."""
    rows, width = logits.shape
    of_kernel = constants(objective, shape or row_shape(width))
    out = torch.empty(3 + of_kernel["SMOOTH"], rows, dtype=torch.float32, device=logits.device)
    if rows:
        _cross_entropy_statistics[(rows,)](
            logits, target, out, rows, words.number, width, logits.stride(0), words.first,
            PADDED=words.number < width, REREAD=reread, **of_kernel,
        )  # fmt: skip
    return out


def launch_gradient(
    logits: Tensor, target: Tensor, of_slices: Tensor, grad_scale: Tensor | None, objective: Objective, words: Slice,
    fp8: Tensor | None = None, *, shape: RowShape | None = None,
) -> tuple[Tensor, Gradient | None]:  # fmt: skip
    """Run the kernel; see `cross_entropy_of_statistics_`."""
    rows, width = logits.shape
    out = outputs(logits, grad_scale, fp8)
    if rows:
        _cross_entropy_of_slice[(rows,)](
            logits, target, of_slices, out.losses, grad_scale, out.fp8, rows, words.number, width, logits.stride(0),
            out.stride, words.first, words.vocabulary, *numbers(objective),
            SLICES=len(of_slices), FP8_MAX=out.fp8_max, PADDED=words.number < width,
            **constants(objective, shape or row_shape(width)),
        )  # fmt: skip
    return result(out, logits, grad_scale)


def statistics(logits: Tensor, target: Tensor, words: Slice, objective: Objective, *, reread: bool = True) -> Tensor:
    """Statistics of a slice, float32 [3 or 4, N]; see the module's docstring for the rows.

    logits: [N, W], row-major. target: int64 [N], of all words. reread: the gradient will reread the logits.
    """
    if logits.device.type == "cuda":
        return launch_statistics(logits, target, words, objective, reread=reread)
    local = logits[:, : words.number].double()
    top = local.amax(-1) if words.number else local.new_full(local.shape[:1], -torch.inf)
    base = (top * LOG2_E.value).to(torch.promote_types(logits.dtype, torch.float32))
    sums = (local * LOG2_E.value - _finite(base)[:, None]).exp2().sum(-1)
    at, here = _local_targets(target, words)
    picked = functional.pad(local, (0, 1)).gather(1, torch.where(here, at, words.number)[:, None])[:, 0]
    rows = [base, sums, picked]
    return torch.stack([x.to(base.dtype) for x in ([*rows, local.sum(-1)] if objective.label_smoothing else rows)])


def cross_entropy_of_statistics_(
    logits: Tensor, target: Tensor, of_slices: Tensor, grad_scale: Tensor | None, objective: Objective, words: Slice,
    fp8: Tensor | None = None,
) -> tuple[Tensor, Gradient | None]:  # fmt: skip
    """`octavo.kernels.cross_entropy.cross_entropy_` for a slice [N, V / n]: the loss of all words, the gradient of these.

    of_slices: [S, 3 or 4, N], `statistics` of all slices in any order. The gradient of padding is 0.
    """
    if logits.device.type == "cuda":
        return launch_gradient(logits, target, of_slices, grad_scale, objective, words, fp8)
    bases, sums, picked, *summed = of_slices.double().unbind(1)
    base = _finite(bases.amax(0))
    sums = (sums * (bases - base).exp2()).sum(0)
    total = base / LOG2_E.value + sums.log()
    real = target != objective.ignore_index
    unknown = real & ((target < 0) | (target >= words.vocabulary))
    losses = (1 - objective.label_smoothing) * (total - picked.sum(0))
    even = objective.label_smoothing / words.vocabulary
    if summed:
        losses = losses + objective.label_smoothing * total - even * summed[0].sum(0)
    losses = (losses + objective.z_loss * total.square()).masked_fill(unknown, torch.nan)
    loss = torch.where(real, losses, 0.0).sum().to(of_slices.dtype)
    if grad_scale is None:
        return loss, None
    local = logits[:, : words.number].double()
    grad = (local - total[:, None]).exp_().mul_((1 + 2 * objective.z_loss * total)[:, None]).sub_(even)
    grad = functional.pad(grad.masked_fill_(unknown[:, None], torch.nan), (0, logits.shape[1] - words.number))
    at, here = _local_targets(target, words)
    change = here.double() * (objective.label_smoothing - 1.0)  # `torch.where` of two numbers would be float32
    grad = grad.scatter_add_(1, torch.where(here, at, 0)[:, None], change[:, None]).mul_(real[:, None]).to(of_slices.dtype)
    if fp8 is None:
        return loss, Gradient(logits.copy_(grad.mul_(grad_scale)))
    fp8_max = torch.finfo(fp8.dtype).max
    fp8.copy_(reference.cast(grad, grad.new_tensor(fp8_max), fp8.dtype, fp8_max))
    return loss, Gradient(None, fp8, grad_scale / fp8_max)


def _finite(base: Tensor) -> Tensor:
    return torch.where(base == -torch.inf, 0.0, base)


def _local_targets(target: Tensor, words: Slice) -> tuple[Tensor, Tensor]:
    """Targets counted from the slice's first word, and a mask of those in the slice."""
    at = target - words.first
    return at, (at >= 0) & (at < words.number)
