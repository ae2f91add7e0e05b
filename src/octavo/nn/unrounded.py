"""Products of tensor-parallel ranks that are summands of a float16 result: float32, and rounded once behind the sum.

A rank's summand may be beyond float16 where the sum over the ranks is not. Saved for backward are the operands in float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.kernels import gemm
from octavo.kernels.autograd import refuse_second_derivative
from octavo.nn.norm import flat, unflat


def unrounded_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., K] · weight [N, K]ᵀ in `dtype`: that of the weight, or float32 that is not rounded to it.

    x: of the weight's dtype, or float32 with its values; then the gradient of x is not rounded to it.
    """
    out: Tensor = _UnroundedLinear.apply(x, weight, dtype)
    return out


class _UnroundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        rows = flat(x).to(weight.dtype)
        ctx.save_for_backward(rows, weight)
        ctx.dtype, ctx.shape = x.dtype, x.shape
        y = gemm.high_precision_mm(rows, weight.t(), dtype, recurring=False, unrounded=True)
        return unflat(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivative("products of tensor-parallel ranks in float16")
        rows, weight = ctx.saved_tensors
        d_y, (needs_x, needs_weight, _) = flat(grad).to(weight.dtype), ctx.needs_input_grad
        d_x = d_weight = None
        if needs_x:
            d_x = unflat(gemm.high_precision_mm(d_y, weight, ctx.dtype, recurring=False, unrounded=True), ctx.shape)
        if needs_weight:
            d_weight = gemm.high_precision_mm(d_y.t(), rows, weight.dtype, recurring=False)
        return d_x, d_weight, None
