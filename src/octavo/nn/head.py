"""The output head with its loss, in chunks of tokens: the whole logits never exist.

Loss and gradients are computed together in forward, chunk by chunk, so that only one chunk of logits is alive: 1 GiB instead
of 12 for 16,384 tokens and 128,256 words. The price is that the head's gradients exist from forward on. Products run in the
dtype of the hidden states, statistics in float32, and the gradient of the weight is summed in float32.

float16 has no room for a gradient that is divided by the targets of a step, nor for the factor of a scaled loss: there forward
keeps the gradient of the sum, and backward multiplies in float32 by what is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.kernels.cross_entropy import cross_entropy_

CHUNK_BYTES = 1 << 30
"""Logits of one chunk: large enough that the products run at full speed."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, num_items: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """Sum over real targets of −log softmax(hidden · weightᵀ)[target], divided by `num_items`: float32 [].

    hidden: [N, K]. weight: [V, K], any float dtype. target: int64 [N], `ignore_index` where nothing is predicted.
    num_items: float32 [], the number of targets of the whole step.
    """
    return _LinearCrossEntropy.apply(hidden, weight, target, num_items, ignore_index, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, num_items: Tensor, ignore_index: int, grads: bool
    ) -> Tensor:
        want_hidden, want_weight = (grads and need for need in ctx.needs_input_grad[:2])
        w = weight.to(hidden.dtype)
        loss = hidden.new_zeros((), dtype=torch.float32)
        late = hidden.dtype == torch.float16
        factor = num_items.float().reciprocal()
        grad_scale = (torch.ones_like(factor) if late else factor) if want_hidden or want_weight else None
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        rows = max(1, CHUNK_BYTES // (w.shape[0] * w.element_size()))
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = hidden[part] @ w.t()
            chunk_loss, grad = cross_entropy_(logits, target[part], grad_scale, ignore_index)
            loss += chunk_loss
            if grad is not None and d_hidden is not None:
                torch.mm(grad, w, out=d_hidden[part])
            if grad is not None and d_weight is not None:
                _add_product_(d_weight, grad, hidden[part])
        if d_weight is not None and not late:
            d_weight = d_weight.to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight, factor if late else None)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss / num_items

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, factor = ctx.saved_tensors
        if factor is None:
            scaled = [None if d is None else d * grad_loss.to(d.dtype) for d in gradients]
        else:
            by = factor * grad_loss
            scaled = [None if d is None else (d.float() * by).to(t) for d, t in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None, None, None


def _add_product_(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total += gradᵀ · hidden, float32 [V, K], without rounding the product to the operands' dtype on a GPU."""
    if grad.device.type == "cuda" and grad.dtype != torch.float32:
        torch.addmm(total, grad.t(), hidden, out_dtype=torch.float32, out=total)
    elif grad.dtype == torch.float16:
        total += grad.t().float() @ hidden.float()  # a frequent token's sum ends beyond float16
    else:
        total += grad.t() @ hidden
