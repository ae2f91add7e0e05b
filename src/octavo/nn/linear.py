"""Linear layers that multiply in FP8 under `octavo.fp8_autocast`, and as PyTorch's do outside of it.

Names and arguments are those of Transformer Engine's `Linear` and `LayerNormLinear`. Parameters may be kept in float32 as
master weights: a product runs in the dtype of its input (under `torch.autocast`, in that of the autocast), and the FP8 cast
reads the master weight itself.
"""

from __future__ import annotations

import math
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.fp8.autocast import current_recipe
from octavo.fp8.matmul import fp8_linear
from octavo.fp8.recipe import Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.nn import fused
from octavo.nn.fused import Norm, Rotation, Stream
from octavo.nn.norm import check_norm, normalize, reset_norm_
from octavo.nn.products import Products
from octavo.nn.te_arguments import Draws, Init, Tracker, check, init_with_, results


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a product of `x` runs in and returns: autocast's where that is on, else the input's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def recipe_of(state: ModuleState, device: torch.device) -> Recipe | None:
    """The recipe that a layer's products run by here; None for products in high precision.

    Raises:
        RuntimeError: the sharded weight is there in a form that this forward cannot use.
    """
    recipe = state.under(current_recipe(device))
    if state.gathered is not None and (recipe is None or recipe.casts[Operand.WEIGHT].granularity is not Granularity.TENSOR):
        raise RuntimeError(
            "weights that were gathered in FP8 for a forward are still there, and this one needs them in another form: run it "
            "after the backward of the other."
        )
    return recipe


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ModuleState,
    out_dtype: torch.dtype,
    is_first_microbatch: bool | None = None,
) -> Tensor:
    """x · weightᵀ + bias, in FP8 where an autocast says so, else in `out_dtype`. x [..., K], weight [N, K] → [..., N]."""
    recipe = recipe_of(state, x.device)
    if recipe is not None and not torch.compiler.is_compiling():
        return fused.linear(x, fused.Linear(weight, bias, Products(state, weight, recipe, out_dtype, is_first_microbatch)))
    if recipe is not None:
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

    A subclass of `nn.Linear`, so that code which looks for one finds it. With `return_bias` no bias is added, and the layer
    returns (y, bias). Arguments that only Transformer Engine has are in `octavo.nn.te_arguments`.
    """

    return_bias = False  # here too, for those that are made of an `nn.Linear`
    init_method: Init | None = None
    draws = Draws()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        return_bias: bool = False,
        init_method: Init | None = None,
        get_rng_state_tracker: Tracker | None = None,
        rng_tracker_name: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **te_arguments: Any,
    ) -> None:
        check("Linear", te_arguments, Linear.__init__)
        self.return_bias, self.init_method = return_bias, init_method
        self.draws = Draws(get_rng_state_tracker, rng_tracker_name)
        super().__init__(in_features, out_features, bias, device=device, dtype=params_dtype)
        self.fp8_state = ModuleState(self)

    def reset_parameters(self) -> None:
        """Initial values: PyTorch's, or those of `init_method` and zeros for the bias."""
        with self.draws():
            if self.init_method is None:
                super().reset_parameters()
            else:
                init_with_(self.init_method, self.weight, self.bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Linear:
        """Turn an `nn.Linear` into this class where it stands: parameters, ties, hooks and references to it stay valid."""
        linear.__class__ = cls
        new = cast(Linear, linear)
        new.fp8_state = ModuleState(new)
        return new

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """input [..., in_features] → [..., out_features]; `is_first_microbatch` as in `octavo.fp8.matmul.fp8_linear`."""
        bias = None if self.return_bias else self.bias
        y = product(input, self.weight, bias, self.fp8_state, compute_dtype(input), is_first_microbatch)
        return results(y, self.bias, None, return_bias=self.return_bias)


class LayerNormLinear(nn.Module):
    """y = norm(x) · weightᵀ + bias, where the FP8 cast reads the norm's float32 result.

    Parameters: layer_norm_weight [in_features], layer_norm_bias [in_features] (LayerNorm only), weight, bias. With
    `return_bias` no bias is added but returned behind y, and with `return_layernorm_output` so is norm(x), which is then made
    in the compute dtype and cast from there.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        init_method: Init | None = None,
        get_rng_state_tracker: Tracker | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **te_arguments: Any,
    ) -> None:
        super().__init__()
        check("LayerNormLinear", te_arguments, LayerNormLinear.__init__)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.init_method, self.draws = init_method, Draws(get_rng_state_tracker)
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
        with self.draws():
            if self.init_method is None:
                init_linear_(self.weight, self.bias)
            else:
                init_with_(self.init_method, self.weight, self.bias)

    @overload
    def forward(self, input: Tensor, is_first_microbatch: bool | None = ...) -> Tensor: ...

    @overload
    def forward(
        self, input: Stream, is_first_microbatch: bool | None = ..., rotation: Rotation | None = ...
    ) -> tuple[Tensor, ...]: ...

    def forward(
        self, input: Tensor | Stream, is_first_microbatch: bool | None = None, rotation: Rotation | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """input [..., in_features] → [..., out_features].

        Of a `Stream` the residual stream with nothing left to be added, and the product; with a rotation queries, keys and
        values instead of the product, as in `octavo.nn.fused.norm_linear`.
        """
        if not isinstance(input, Tensor):
            return self._of(*input, is_first_microbatch, rotation)
        normed = None
        if self.return_layernorm_output:
            normed = normalize(self.normalization, input, self.layer_norm_weight, self.layer_norm_bias, self.eps)
            normed, bias = normed.to(compute_dtype(input)), None if self.return_bias else self.bias
            y = product(normed, self.weight, bias, self.fp8_state, normed.dtype, is_first_microbatch)
        else:
            y = self._of(input, None, is_first_microbatch, None)[1]
        out: Tensor | tuple[Tensor, ...] = results(y, self.bias, normed, return_bias=self.return_bias)
        return out

    def _of(
        self, input: Tensor, pending: Tensor | None, is_first_microbatch: bool | None, rotation: Rotation | None
    ) -> tuple[Tensor, ...]:
        dtype, bias = compute_dtype(input), None if self.return_bias else self.bias
        if torch.compiler.is_compiling():
            h = input if pending is None else input + pending
            normed = normalize(self.normalization, h, self.layer_norm_weight, self.layer_norm_bias, self.eps)
            y = product(normed, self.weight, bias, self.fp8_state, dtype, is_first_microbatch)
            return (h, y) if rotation is None else (h, *rotation.apart(y))
        recipe = recipe_of(self.fp8_state, input.device)
        products = Products(self.fp8_state, self.weight, recipe, dtype, is_first_microbatch)
        norm = Norm(self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return fused.norm_linear(input, pending, norm, fused.Linear(self.weight, bias, products), rotation)

    def extra_repr(self) -> str:
        """Shape and norm, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, normalization={self.normalization}"
