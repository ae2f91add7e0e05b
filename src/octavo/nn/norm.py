"""RMSNorm and LayerNorm with float32 statistics, as modules and as the front of fused layers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.errors import unknown
from octavo.kernels import reference

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


class _Norm(nn.Module):
    """One of `NORMS`; LayerNorm alone has a bias."""

    normalization: ClassVar[str]
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=params_dtype, device=device))
        bias = nn.Parameter(torch.empty_like(self.weight)) if self.normalization == "LayerNorm" else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: 1, and 0 for the bias."""
        reset_norm_(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., hidden_size] → the same shape and dtype."""
        return normalize(self.normalization, input, self.weight, self.bias, self.eps).to(input.dtype)


class RMSNorm(_Norm):
    """x / √(mean(x²) + eps) · weight; weight: [hidden_size]. The result has x's dtype."""

    normalization = "RMSNorm"


class LayerNorm(_Norm):
    """(x − mean) / √(variance + eps) · weight + bias; weight, bias: [hidden_size]. The result has x's dtype."""

    normalization = "LayerNorm"
