"""RMSNorm and LayerNorm with float32 statistics, as modules and as the front of fused layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.errors import InputError, unknown
from octavo.kernels import reference
from octavo.nn import fused
from octavo.nn.te_arguments import check

NORMS = ("LayerNorm", "RMSNorm")


def check_norm(name: str) -> None:
    """Raise an InputError unless `name` is a normalisation."""
    if name not in NORMS:
        raise unknown("normalization", name, NORMS)


def normalize(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The named norm of `x` over its last dimension, in float32."""
    if name == "RMSNorm":
        return reference.rms_norm(x, weight, eps)
    return reference.layer_norm(x, weight, bias, eps)


def reset_norm_(weight: Tensor, bias: Tensor | None) -> None:
    """The norm that only normalises."""
    nn.init.ones_(weight)
    if bias is not None:
        nn.init.zeros_(bias)


def _size(name: str, shape: int | Iterable[int] | None) -> int:
    sizes = [shape] if isinstance(shape, int) else list(shape or ())
    if len(sizes) != 1:
        raise InputError(f"{name} over the dimensions {sizes} is not supported: give one size, that of the last dimension.")
    return sizes[0]


class _Norm(nn.Module):
    """One of `NORMS`; LayerNorm alone has a bias. The size may also be given as `hidden_size`, the dtype as `dtype`."""

    normalization: ClassVar[str]
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        *,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **te_arguments: Any,
    ) -> None:
        super().__init__()
        check(self.normalization, te_arguments, _Norm.__init__)
        self.eps = eps
        size = _size(self.normalization, normalized_shape if hidden_size is None else hidden_size)
        self.weight = nn.Parameter(torch.empty(size, dtype=params_dtype or dtype, device=device))
        bias = nn.Parameter(torch.empty_like(self.weight)) if self.normalization == "LayerNorm" else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: 1, and 0 for the bias."""
        reset_norm_(self.weight, self.bias)

    def forward(self, input: Tensor, pending: Tensor | None = None) -> Tensor:
        """input [..., hidden_size] → the same shape and dtype; with `pending` the norm of the sum."""
        if torch.compiler.is_compiling():
            h = input if pending is None else input + pending
            return normalize(self.normalization, h, self.weight, self.bias, self.eps).to(h.dtype)
        return fused.norm_alone(input, pending, fused.Norm(self.normalization, self.weight, self.bias, self.eps))


class RMSNorm(_Norm):
    """x / √(mean(x²) + eps) · weight; weight: [hidden_size]. The result has x's dtype."""

    normalization = "RMSNorm"


class LayerNorm(_Norm):
    """(x − mean) / √(variance + eps) · weight + bias; weight, bias: [hidden_size]. The result has x's dtype."""

    normalization = "LayerNorm"
