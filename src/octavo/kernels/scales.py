"""Delayed scaling's update of all tensors of a buffer, in place, and inverses: one kernel for a dozen small passes of PyTorch.

A step updates twice, and nothing else runs meanwhile. A program reads a block of rows before it writes the block, in ascending
order, so that histories roll in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.tiles import cdiv, next_power_of_2

_TENSORS, _SLOTS, _WARPS = 8, 1024, 8
"""Tensors per program (32 bytes of a row, the smallest memory transfer), history slots that it holds, and its warps."""


@triton.jit
def _update_scales(
    history_ptr, scale_ptr, fp8_max_ptr, saturated_ptr, length, tensors, stride, shrink, rounding,
    MOST_RECENT: tl.constexpr, SLOTS: tl.constexpr, TENSORS: tl.constexpr, LARGEST_FLOAT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    real = t < tensors
    last = tl.load(history_ptr + t, mask=real, other=0.0)
    scale = tl.load(scale_ptr + t, mask=real, other=1.0)
    fp8_max = tl.load(fp8_max_ptr + t, mask=real, other=1.0)
    moves = last != 0.0  # NaN too
    tl.store(saturated_ptr + t, (last * scale > fp8_max * rounding).to(tl.uint8), mask=real & moves)
    largest = last
    nan = last != last
    for first in range(0, length, SLOTS):
        i = first + tl.arange(0, SLOTS)
        at = history_ptr + i[:, None].to(tl.int64) * stride + t[None, :]
        x = tl.load(at + stride, mask=(i + 1 < length)[:, None] & real[None, :], other=0.0)
        if not MOST_RECENT:
            largest = tl.maximum(largest, tl.max(tl.where(x == x, x, 0.0), 0))
            nan = nan | (tl.max((x != x).to(tl.int32), 0) > 0)
        rolled = tl.where(i[:, None] == length - 1, last[None, :], x)
        rolled = tl.where(i[:, None] == 0, 0.0, rolled)
        tl.debug_barrier()  # other warps read the row that one overwrites
        tl.store(at, rolled, mask=(i < length)[:, None] & (real & moves)[None, :])
    usable = (largest > 0.0) & (largest <= LARGEST_FLOAT) & (nan == 0)
    candidate = tl.div_rn(fp8_max * shrink, tl.where(usable, largest, 1.0))
    candidate = tl.where(candidate > LARGEST_FLOAT, LARGEST_FLOAT, candidate)
    tl.store(scale_ptr + t, candidate, mask=real & moves & usable)


def launch(
    history: Tensor, scale: Tensor, fp8_max: Tensor, saturated: Tensor, *, algo: str, margin: int, rounding: float
) -> None:
    """Run the kernel; see `update_scales_`."""
    length, tensors = history.shape
    if history.numel() == 0:
        return
    _update_scales[(cdiv(tensors, _TENSORS),)](
        history, scale, fp8_max, saturated.view(torch.uint8), length, tensors, history.stride(0), 2.0**-margin, rounding,
        MOST_RECENT=algo == "most_recent", SLOTS=min(next_power_of_2(length), _SLOTS), TENSORS=_TENSORS,
        LARGEST_FLOAT=reference.FLOAT32_MAX, num_warps=_WARPS,
    )  # fmt: skip


def update_scales_(
    history: Tensor, scale: Tensor, fp8_max: Tensor, saturated: Tensor, *, algo: str, margin: int, rounding: float
) -> None:
    """`reference.update_scales` in place, bit for bit, and a flag for each tensor whose last cast saturated.

    history: float32 [L, n], rows in ascending addresses. scale, fp8_max: float32 [n]. saturated: bool [n], written where an
    amax was recorded (`history[0]` is not 0): amax · scale > `fp8_max` · `rounding`. algo: "max" or "most_recent".
    """
    if history.device.type == "cuda":
        launch(history, scale, fp8_max, saturated, algo=algo, margin=margin, rounding=rounding)
        return
    last = history[0]
    saturated.copy_(torch.where(last != 0, last * scale > fp8_max * rounding, saturated))
    new_history, new_scale = reference.update_scales(history, scale, fp8_max, algo=algo, margin=margin)
    history.copy_(new_history)
    scale.copy_(new_scale)


@triton.jit
def _inverses(scale_ptr, out_ptr, count, BLOCK: tl.constexpr):
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        scale = tl.load(scale_ptr + i, mask=i < count, other=1.0)
        tl.store(out_ptr + i, tl.div_rn(1.0, scale), mask=i < count)


def launch_inverse(scale: Tensor, out: Tensor) -> Tensor:
    """Run the kernel; see `inverse_`."""
    _inverses[(1,)](scale.contiguous(), out, scale.numel(), BLOCK=256, num_warps=1)
    return out


def inverse_(scale: Tensor, out: Tensor) -> Tensor:
    """`reference.divide(1, scale)` into `out`, float32 of the same shape and contiguous: one launch on a GPU."""
    return launch_inverse(scale, out) if scale.device.type == "cuda" else out.copy_(reference.divide(1.0, scale))
