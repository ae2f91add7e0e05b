"""Linear layers that multiply in FP8 under `octavo.fp8_autocast`, and as PyTorch's do outside of it.

Names and arguments are those of Transformer Engine's `Linear` and `LayerNormLinear`. Parameters may be kept in float32 as
master weights: a product runs in the dtype of its input (under `torch.autocast`, in that of the autocast), and the FP8 cast
reads the master weight itself. Backward saves FP8 operands, and of a norm the residual stream.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.fp8 import autocast
from octavo.fp8.linear import LinearGemms, saved_input
from octavo.fp8.quantizer import DenseOperand, Producer, active_recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor, Quantizer
from octavo.nn.norm import (
    NormParameters,
    NormProducer,
    backward_through_norm,
    check_norm,
    flat,
    normalize,
    promoted,
    reset_norm_,
    unflat,
)
from octavo.nn.rotary import Rotation
from octavo.nn.te_arguments import Draws, Init, Tracker, check, init_with_, results


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
    recipe = active_recipe(state, x.device)
    if recipe is None:
        bias = None if bias is None else bias.to(out_dtype)
        return functional.linear(x.to(out_dtype), weight.to(out_dtype), bias)
    gemms = LinearGemms(state, weight, recipe, out_dtype, is_first_microbatch)
    quantizer = gemms.quantizer
    # The casts stand outside of the autograd function: a compiler allows no writes to a layer's FP8 state inside of it.
    with torch.no_grad(), autocast.scales_of_forward():
        x_q = quantizer.input(DenseOperand(flat(x)), columnwise=weight.requires_grad)
        w_q = quantizer.weight(weight)
    casts = *_without_repetition(x_q), *_without_repetition(w_q)
    if torch.compiler.is_compiling():  # torch 2.11 loses the gradient of a result that the function itself has reshaped
        y = _LinearFunction.apply(flat(x), weight, bias, *casts, quantizer.grad_output_slot(), gemms)
        return y.view(*x.shape[:-1], weight.shape[0])
    return _LinearFunction.apply(x, weight, bias, *casts, None, gemms)


def _without_repetition(q: QuantizedTensor) -> QuantizedTensor:
    """`q` with a scale of both layouts given once: a compiler refuses to pass one tensor to a function twice."""
    return q._replace(columnwise_scale_inv=None) if q.columnwise_scale_inv is q.rowwise_scale_inv else q


def _with_repetition(*tensors: Tensor | None) -> QuantizedTensor:
    """The inverse of `_without_repetition`."""
    q = QuantizedTensor(*tensors)
    shared = q.columnwise_data is not None and q.columnwise_scale_inv is None
    return q._replace(columnwise_scale_inv=q.rowwise_scale_inv) if shared else q


class _LinearFunction(torch.autograd.Function):
    """FP8 products of operands that are cast already; run eagerly, and read by a compiler."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
        x_row: Tensor, x_row_scale: Tensor, x_column: Tensor | None, x_column_scale: Tensor | None,
        w_row: Tensor, w_row_scale: Tensor, w_column: Tensor | None, w_column_scale: Tensor | None,
        slot: Tensor | None, gemms: LinearGemms,
    ) -> Tensor:  # fmt: skip
        x_q = _with_repetition(x_row, x_row_scale, x_column, x_column_scale)
        w_q = _with_repetition(w_row, w_row_scale, w_column, w_column_scale)
        # The gradient of an operand takes the other one: what a frozen one would need is not saved.
        want_x, want_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *saved_input(x_q, want_weight),
            *(gemms.quantizer.saved_weight(w_q, weight) if want_x else NOTHING),
            slot,
        )
        ctx.gemms, ctx.shape, ctx.dtype, ctx.bias_dtype = gemms, x.shape, x.dtype, None if bias is None else bias.dtype
        return unflat(gemms.output(x_q, w_q, bias), (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gemms: LinearGemms = ctx.gemms
        quantizer = gemms.quantizer
        quantizer.begin_backward()
        want_x, want_weight, want_bias = ctx.needs_input_grad[:3]
        *saved, slot = ctx.saved_tensors
        x, w = QuantizedTensor(*saved[:4]), QuantizedTensor(*saved[4:])
        operand = DenseOperand(flat(dy), column_sum=want_bias)
        dy_q = quantizer.grad_output(operand, rowwise=want_x, columnwise=want_weight, slot_index=slot)
        dx = dw = db = None
        if want_weight:
            dw = gemms.grad_weight(dy_q, x)
        if want_x:
            dx = gemms.grad_input(dy_q, quantizer.restored_weight(w)).to(ctx.dtype)
            dx = dx if len(ctx.shape) == 2 else dx.view(ctx.shape)
        if want_bias:
            db = operand.column_sum().to(ctx.bias_dtype)
        return dx, dw, db, *(None,) * 10


class Projection(NamedTuple):
    """A matrix [N, K] with its bias [N] and its products, which may be in high precision."""

    weight: Tensor
    bias: Tensor | None
    gemms: LinearGemms


def norm_linear(
    residual: Tensor, delta: Tensor | None, norm: NormParameters, linear: Projection, rotation: Rotation | None = None
) -> tuple[Tensor, ...]:
    """h = residual + delta, then norm(h) · weightᵀ + bias.

    residual, delta: [..., K]. Returns h and the product [..., N]; with a rotation (residual: [B, T, K]) h and q [B, T, H, D],
    k and v [B, T, G, D], queries and keys rotated.
    """
    cos, sin = (None, None) if rotation is None else (rotation.cos, rotation.sin)
    call = _NormLinearCall(
        norm.kind, norm.eps, linear.gemms, None if rotation is None else rotation._replace(cos=None, sin=None)
    )
    parameters = (norm.weight, norm.bias, linear.weight, linear.bias)
    with autocast.scales_of_forward():
        return _NormLinearFunction.apply(promoted(residual, delta), delta, *parameters, cos, sin, call)


class _NormLinearCall(NamedTuple):
    kind: str
    eps: float
    gemms: LinearGemms
    rotation: Rotation | None  # without its tables, which are saved as tensors


class _NormLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None,
        weight: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, call: _NormLinearCall,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        gemms, quantizer = call.gemms, call.gemms.quantizer
        want_x, want_weight = any(ctx.needs_input_grad[:4]), ctx.needs_input_grad[4]
        producer = NormProducer(residual, delta, NormParameters(call.kind, norm_weight, norm_bias, call.eps))
        x = quantizer.input(producer, columnwise=want_weight)
        w = quantizer.weight(weight)
        y = gemms.output(x, w, bias)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.shape = call, residual.shape
        h = residual if delta is None else unflat(producer.sum, residual.shape)
        saved_weight = quantizer.saved_weight(w, weight) if want_x else NOTHING
        ctx.save_for_backward(h, producer.stats, norm_weight, *saved_input(x, want_weight), *saved_weight, cos, sin)
        y = unflat(y, (*residual.shape[:-1], weight.shape[0]))
        if call.rotation is None:
            return h, y
        return h, *call.rotation._replace(cos=cos, sin=sin).split(y)

    @staticmethod
    def backward(ctx: Any, d_residual: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _NormLinearCall = ctx.call
        gemms, quantizer = call.gemms, call.gemms.quantizer
        quantizer.begin_backward()
        h, stats, norm_weight, *saved, cos, sin = ctx.saved_tensors
        x, w = QuantizedTensor(*saved[:4]), QuantizedTensor(*saved[4:])
        want_x, (want_weight, want_bias) = any(ctx.needs_input_grad[:4]), ctx.needs_input_grad[4:6]
        if all(grad is None for grad in grads):
            return d_residual, d_residual if ctx.needs_input_grad[1] else None, *(None,) * 7
        producer: Producer
        if call.rotation is None:
            (dy,) = grads
            assert dy is not None
            producer = DenseOperand(flat(dy), column_sum=want_bias)
        else:
            producer = call.rotation._replace(cos=cos, sin=sin).join(grads)
            if want_bias:
                producer = DenseOperand(producer(Quantizer(gemms.out_dtype)).high_precision, column_sum=True)
        dy_q = quantizer.grad_output(producer, rowwise=want_x, columnwise=want_weight)
        d_bias = producer.column_sum() if want_bias and isinstance(producer, DenseOperand) else None
        dw = gemms.grad_weight(dy_q, x) if want_weight else None
        through: tuple[Tensor | None, ...] = (None,) * 4
        if want_x:
            d_normed = gemms.grad_input(dy_q, quantizer.restored_weight(w))
            through = backward_through_norm(ctx, call.kind, d_normed, h, norm_weight, stats, d_residual)
        return *through, dw, d_bias, None, None, None


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
        """input [..., in_features] → [..., out_features]; is_first_microbatch: `first` of `LinearQuantizer`."""
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

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        delta: Tensor | None = None,
        rotation: Rotation | None = None,
        return_residual: bool = False,
    ) -> Any:
        """input [..., in_features] → [..., out_features]; delta, rotation and return_residual are for `forward_residual`."""
        normed = None
        if return_residual:
            return self._norm_linear(input, delta, is_first_microbatch, rotation)
        if self.return_layernorm_output:
            normed = normalize(self._norm(), input).to(compute_dtype(input))
            bias = None if self.return_bias else self.bias
            y = product(normed, self.weight, bias, self.fp8_state, normed.dtype, is_first_microbatch)
        else:
            y = self._norm_linear(input, None, is_first_microbatch, None)[1]
        return results(y, self.bias, normed, return_bias=self.return_bias)

    def forward_residual(
        self,
        residual: Tensor,
        delta: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, ...]:
        """residual, delta [..., in_features] → their sum, and the product of its norm; hooks of the module run.

        With a rotation queries, keys and values instead of the product, as in `norm_linear`.
        """
        out: tuple[Tensor, ...] = self(residual, is_first_microbatch, delta=delta, rotation=rotation, return_residual=True)
        return out

    def _norm(self) -> NormParameters:
        return NormParameters(self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps)

    def _norm_linear(
        self, residual: Tensor, delta: Tensor | None, is_first_microbatch: bool | None, rotation: Rotation | None
    ) -> tuple[Tensor, ...]:
        dtype, bias = compute_dtype(residual), None if self.return_bias else self.bias
        if torch.compiler.is_compiling():
            h = residual if delta is None else residual + delta
            y = product(normalize(self._norm(), h), self.weight, bias, self.fp8_state, dtype, is_first_microbatch)
            return (h, y) if rotation is None else (h, *rotation.composed(y))
        recipe = active_recipe(self.fp8_state, residual.device)
        gemms = LinearGemms(self.fp8_state, self.weight, recipe, dtype, is_first_microbatch)
        return norm_linear(residual, delta, self._norm(), Projection(self.weight, bias, gemms), rotation)

    def extra_repr(self) -> str:
        """Shape and norm, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, normalization={self.normalization}"
