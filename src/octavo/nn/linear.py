"""Linear layers that multiply in FP8 under `octavo.fp8_autocast`, and as PyTorch's do outside of it.

Names and arguments are those of Transformer Engine's `Linear` and `LayerNormLinear`. Parameters may be kept in float32 as
master weights: a product runs in the dtype of its input (under `torch.autocast`, in that of the autocast), and the FP8 cast
reads the master weight itself.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.fp8.autocast import current_recipe
from octavo.fp8.matmul import fp8_linear
from octavo.fp8.recipe import Granularity, Operand
from octavo.fp8.scaling import ModuleState
from octavo.nn.norm import check_norm, normalize, reset_norm_


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a product of `x` runs in and returns: autocast's where that is on, else the input's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ModuleState,
    out_dtype: torch.dtype,
    is_first_microbatch: bool | None = None,
) -> Tensor:
    """x · weightᵀ + bias, in FP8 where an autocast says so, else in `out_dtype`. x [..., K], weight [N, K] → [..., N]."""
    recipe = current_recipe(x.device)
    if state.gathered is not None and (recipe is None or recipe.casts[Operand.WEIGHT].granularity is not Granularity.TENSOR):
        raise RuntimeError(
            "weights that were gathered in FP8 for a forward are still there, and this one needs them in another form: run it "
            "after the backward of the other."
        )
    if recipe is not None and not state.skipped:
        return fp8_linear(x, weight, bias, state, recipe, out_dtype=out_dtype, is_first_microbatch=is_first_microbatch)
    bias = None if bias is None else bias.to(out_dtype)
    return functional.linear(x.to(out_dtype), weight.to(out_dtype), bias)


def init_linear_(weight: Tensor, bias: Tensor | None) -> None:
    """PyTorch's own initialisation of `nn.Linear`: uniform within ±1/√fan_in."""
    bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0.0
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)


class Linear(nn.Linear):
    """y = x · weightᵀ + bias. weight: [out_features, in_features]; bias: [out_features].

    A subclass of `nn.Linear`, so that code which looks for one finds it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=params_dtype)
        self.fp8_state = ModuleState(self)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Linear:
        """Turn an `nn.Linear` into this class where it stands: parameters, ties, hooks and references to it stay valid."""
        linear.__class__ = cls
        new = cast(Linear, linear)
        new.fp8_state = ModuleState(new)
        return new

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """input [..., in_features] → [..., out_features]; `is_first_microbatch` as in `octavo.fp8.matmul.fp8_linear`."""
        return product(input, self.weight, self.bias, self.fp8_state, compute_dtype(input), is_first_microbatch)


class LayerNormLinear(nn.Module):
    """y = norm(x) · weightᵀ + bias, where the FP8 cast reads the norm's float32 result.

    Parameters: layer_norm_weight [in_features], layer_norm_bias [in_features] (LayerNorm only), weight, bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.eps, self.normalization = in_features, out_features, eps, normalization
        check_norm(normalization)
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, **make))
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features, **make)) if normalization == "LayerNorm" else None
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **make))
        self.bias = nn.Parameter(torch.empty(out_features, **make)) if bias else None
        self.fp8_state = ModuleState(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: a norm that changes nothing, and PyTorch's for the matrix."""
        reset_norm_(self.layer_norm_weight, self.layer_norm_bias)
        init_linear_(self.weight, self.bias)

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """input [..., in_features] → [..., out_features]."""
        normed = normalize(self.normalization, input, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return product(normed, self.weight, self.bias, self.fp8_state, compute_dtype(input), is_first_microbatch)

    def extra_repr(self) -> str:
        """Shape and norm, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, normalization={self.normalization}"
