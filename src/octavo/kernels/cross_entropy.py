"""Cross entropy of a chunk of logits and its gradient, written over the logits: two reads and one write of each.

The first pass keeps a running maximum and a running sum of exponentials (float32), the second writes the gradient in place.
PyTorch needs a float32 copy of the logits and four passes. One program a row; the reference runs where Triton does not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference

_BLOCK, _WARPS = 8192, 16


@triton.jit
def _cross_entropy(
    logits_ptr, target_ptr, loss_ptr, grad_scale_ptr, columns, stride, ignore_index,
    GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    start = logits_ptr + row * stride
    top = -float("inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        c = first + tl.arange(0, BLOCK)
        x = tl.load(start + c, mask=c < columns, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top))
        top = new_top
    real = target != ignore_index
    picked = tl.load(start + tl.where(real, target, 0)).to(tl.float32)
    log_total = top + tl.log(total)
    tl.store(loss_ptr + row, tl.where(real, log_total - picked, 0.0))
    if GRAD:
        scale = tl.where(real, tl.load(grad_scale_ptr), 0.0)
        tl.debug_barrier()  # every warp has read its target's logit before any overwrites it
        for first in range(0, columns, BLOCK):
            c = first + tl.arange(0, BLOCK)
            x = tl.load(start + c, mask=c < columns, other=-float("inf")).to(tl.float32)
            grad = (tl.exp(x - log_total) - tl.where(c == target, 1.0, 0.0)) * scale
            tl.store(start + c, grad.to(logits_ptr.dtype.element_ty), mask=c < columns)


def launch(logits: Tensor, target: Tensor, grad_scale: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Run the kernel over a chunk; see `cross_entropy_`."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        scale = loss if grad_scale is None else grad_scale
        _cross_entropy[(logits.shape[0],)](
            logits, target, loss, scale, logits.shape[1], logits.stride(0), ignore_index,
            GRAD=grad_scale is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return loss.sum(), None if grad_scale is None else logits


def cross_entropy_(
    logits: Tensor, target: Tensor, grad_scale: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """Sum of the losses of a chunk, float32 []; and with `grad_scale` (float32 []) the gradient times it.

    logits: [N, V], row-major; overwritten on a GPU. target: int64 [N]. The gradient has the dtype of the logits.
    """
    if logits.device.type == "cuda":
        return launch(logits, target, grad_scale, ignore_index)
    scale = logits.new_zeros((), dtype=torch.float32) if grad_scale is None else grad_scale
    loss, grad = reference.cross_entropy(logits, target, ignore_index, scale)
    return loss, None if grad_scale is None else grad
