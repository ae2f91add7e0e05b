"""The float32 product of a router, and its gradients.

A GPU multiplies bf16 exactly and accumulates in float32. So a float32 operand is split into three pieces of bf16 that sum to
it: the tokens, by far the largest operand, are read in bf16 and never copied to float32.

Legend: T tokens, E experts, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference import wide


def _in_pieces(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and not torch.compiler.is_compiling()


def _pieces(x: Tensor) -> list[Tensor]:
    """bfloat16 tensors that sum to `x`, the largest first: three for float32, and x itself for bfloat16."""
    if x.dtype == torch.bfloat16:
        return [x]
    high = x.bfloat16()
    rest = x - high
    middle = rest.bfloat16()
    return [high, middle, (rest - middle).bfloat16()]


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H] · weight [E, H]ᵀ: float32 (float64) [T, E]."""
    if _in_pieces(x) and weight.dtype == torch.float32:
        parts = torch.cat(_pieces(weight))
        return torch.mm(x, parts.t(), out_dtype=torch.float32).unflatten(1, (-1, len(weight))).sum(1)
    if x.device.type == "cuda" and x.dtype == weight.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return wide(x) @ wide(weight).t()


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, *, want_x: bool = True, want_weight: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """dx + grad · weight, rounded once to x's dtype, [T, H], and gradᵀ · x in float32, then in the weight's dtype, [E, H].

    grad: float32 [T, E]. dx: the gradient of x by other paths, of its dtype. None for a gradient that is not needed.
    """
    d_weight = None
    if _in_pieces(x):
        parts, others = _pieces(grad), _pieces(weight) if weight.dtype in (torch.bfloat16, torch.float32) else []
        joined = torch.cat(parts, 1)
        if want_weight:
            product = torch.mm(joined.t(), x, out_dtype=torch.float32)
            d_weight = product.unflatten(0, (len(parts), -1)).sum(0).to(weight.dtype)
        if want_x and dx is not None and others:
            # Products below float32's last place are left out.
            pairs = [(one, other) for i, one in enumerate(parts) for j, other in enumerate(others) if i + j < len(parts)]
            left = joined if len(others) == 1 else torch.cat([one for one, _ in pairs], 1)
            return torch.addmm(dx, left, torch.cat([other for _, other in pairs])), d_weight
    elif want_weight:
        d_weight = (grad.t() @ wide(x)).to(weight.dtype)
    if not want_x:
        return None, d_weight
    product = grad @ wide(weight)
    return (product if dx is None else product + dx).to(x.dtype), d_weight
