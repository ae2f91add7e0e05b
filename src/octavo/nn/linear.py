"""Linear layers with FP8 products under `octavo.fp8_autocast`, and PyTorch's products outside of it.

Parameters may be float32 master weights: a product runs in the dtype of its input (under `torch.autocast`, in that of the
autocast), and the FP8 cast reads the master weight. Saved for backward: FP8 operands, and the residual stream before a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.collectives.tensor import TensorGroup
from octavo.errors import InputError, unknown
from octavo.fp8 import autocast, calibration
from octavo.fp8.linear import LinearGemms, saved_input_bytes
from octavo.fp8.quantizer import DenseOperand, Producer, WeightUse, active_recipe, saved_weight_bytes
from octavo.fp8.recipe import Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.fp8.tensor_parallel import ColumnParallelGemms, RowParallelGemms
from octavo.kernels import gemm
from octavo.kernels.autograd import SavedBytes, refuse_second_derivative, refuse_transforms
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer
from octavo.nn.arguments import Draws, Init, Tracker, check, results
from octavo.nn.lora import Adapters, Joint, added
from octavo.nn.norm import (
    FLOATS,
    FLOATS_OF_PYTORCH,
    NORMS,
    NormForm,
    NormParameters,
    NormProducer,
    ResidualLayer,
    backward_through_norm,
    check_input,
    flat,
    normalize,
    promoted,
    reset_norm_,
    residual_norm,
    saved_by_norm,
    unflat,
)
from octavo.nn.rotary import Rotation


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a product of `x` and of its result: that of torch.autocast if it is on, else the input's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def high_precision(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of operands of one dtype, fast in bf16 on any CPU: x [..., K], weight [N, K] → [..., N]."""
    if gemm.widens(x):
        return _WideLinear.apply(x, weight, bias)
    return functional.linear(x, weight, bias)


class _WideLinear(torch.autograd.Function):
    """x [..., K] · weight [N, K]ᵀ + bias [N] → [..., N], in float32 with results in the operands' dtype, as `gemm.widens` says.

    It saves the operands themselves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return unflat(gemm.high_precision_mm(flat(x), weight.t(), x.dtype, bias), (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = flat(grad)
        d_x = gemm.high_precision_mm(rows, weight, x.dtype).view_as(x) if needs_x else None
        d_weight = gemm.high_precision_mm(rows.t(), flat(x), weight.dtype) if needs_weight else None
        d_bias = rows.float().sum(0).to(rows.dtype) if ctx.has_bias and needs_bias else None
        return d_x, d_weight, d_bias


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: ModuleState, out_dtype: torch.dtype, first: bool | None,
    *, skip_output: bool = False, tensor: TensorGroup | None = None,
) -> Tensor:  # fmt: skip
    """x · weightᵀ + bias, in FP8 under an FP8 autocast, else in `out_dtype`. x [..., K], weight [N, K] → [..., N].

    skip_output: as `Linear.skip_output`. tensor: as `Linear.tensor`.
    """
    recipe = active_recipe(state, x.device)
    if recipe is None and tensor is None:
        bias, x = None if bias is None else bias.to(out_dtype), x.to(out_dtype)
        calibration.observe(state, Operand.INPUT, x)
        if state.stored is not None:
            weight = state.stored.values(state, out_dtype)
        calibration.observe(state, Operand.WEIGHT, weight)
        return high_precision(x, weight.to(out_dtype), bias)
    kind = weight.dtype if state.stored is None else state.stored.dtype
    if x.dtype == torch.float64 and recipe is not None and (x.is_cuda or kind != torch.float64):
        raise InputError(
            f"an FP8 layer got an input of torch.float64: use {', '.join(map(str, FLOATS))}, or run it outside FP8."
        )
    how = state, weight, recipe, out_dtype, first
    gemms = LinearGemms(*how) if tensor is None else RowParallelGemms(tensor, *how)
    gemms.want(x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    # The casts are outside the autograd function: a compiler allows no writes to a layer's FP8 state inside it.
    with torch.no_grad(), autocast.scales_of_forward():
        x_q = gemms.input(DenseOperand(flat(x)), rowwise=not skip_output)
        w_q = gemms.weight(weight, rowwise=not skip_output)
    if torch.compiler.is_compiling():  # torch 2.11 loses the gradient of a result that the function itself has reshaped
        casts = *_without_repetition(x_q), *_without_repetition(w_q)
        y = _LinearFunction.apply(flat(x), weight, bias, *casts, gemms.grad_output_slot(), gemms, skip_output)
        return y.view(*x.shape[:-1], weight.shape[0])
    return _LinearFunction.apply(x, weight, bias, *x_q, *w_q, None, gemms, skip_output)


def saved_by_linear(rows: int, shape: tuple[int, int], recipe: Recipe | None, use: WeightUse, *, runs: int = 1) -> SavedBytes:
    """Bytes that `product` of [rows, K] and a weight of shape [N, K] saves for backward; outside FP8 of the input itself.

    runs: as in `saved_input_bytes`.
    """
    x = saved_input_bytes(rows, shape[1], recipe, use.compute_bytes, runs=runs)
    if recipe is not None:
        return SavedBytes(x, saved_weight_bytes(*shape, recipe, use))
    copies = [math.prod(shape) * use.compute_bytes] if use.parameter_bytes != use.compute_bytes else []
    return SavedBytes(x, copies)


def _without_repetition(q: QuantizedTensor) -> QuantizedTensor:
    """`q` with a scale of both layouts given once: a compiler refuses to pass one tensor to a function twice."""
    return q._replace(columnwise_scale_inv=None) if q.columnwise_scale_inv is q.rowwise_scale_inv else q


def _with_repetition(*tensors: Tensor | None) -> QuantizedTensor:
    """The inverse of `_without_repetition`."""
    q = QuantizedTensor(*tensors)
    shared = q.columnwise_data is not None and q.columnwise_scale_inv is None
    return q._replace(columnwise_scale_inv=q.rowwise_scale_inv) if shared else q


class _LinearFunction(torch.autograd.Function):
    """FP8 products of operands that are already cast: x [..., K], weight [N, K], bias [N] → y [..., N].

    In eager and in compiled code. x_… and w_…: the fields of both operands' `QuantizedTensor`, of x as [M, K].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
        x_row: Tensor | None, x_row_scale: Tensor | None, x_column: Tensor | None, x_column_scale: Tensor | None,
        w_row: Tensor | None, w_row_scale: Tensor | None, w_column: Tensor | None, w_column_scale: Tensor | None,
        slot: Tensor | None, gemms: LinearGemms, skip_output: bool,
    ) -> Tensor:  # fmt: skip
        whole = _with_repetition if torch.compiler.is_compiling() else QuantizedTensor
        x_q = whole(x_row, x_row_scale, x_column, x_column_scale)
        w_q = whole(w_row, w_row_scale, w_column, w_column_scale)
        ctx.save_for_backward(*gemms.saved(x_q, w_q, weight), slot)
        ctx.gemms, ctx.shape = gemms, x.shape
        shape = *gemms.output_shape(x.shape[:-1]), weight.shape[0]
        return x.new_empty(shape, dtype=gemms.out_dtype) if skip_output else unflat(gemms.output(x_q, w_q, bias), shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gemms: LinearGemms = ctx.gemms
        refuse_second_derivative("these layers")
        *saved, slot = ctx.saved_tensors
        dx, dw, db = gemms.gradients(DenseOperand(flat(dy), column_sum=gemms.wants_bias), saved, slot_index=slot)
        return None if dx is None else unflat(dx, ctx.shape), dw, db, *(None,) * 11


class _NormLinearFunction(torch.autograd.Function):
    """h = residual + delta [..., K], and norm(h) · weight [N, K]ᵀ + bias [N] → [..., N], or its heads by `Rotation.split`.

    With `return_input` also the norm's output [..., K] in the compute dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None,
        weight: Tensor, bias: Tensor | None, form: NormForm, gemms: LinearGemms, rotation: Rotation | None,
        return_input: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        gemms.want(any(ctx.needs_input_grad[:4]), *ctx.needs_input_grad[4:6])
        producer = NormProducer(residual, delta, form.of(norm_weight, norm_bias))
        normed = producer.with_high_precision(gemms.out_dtype) if return_input else None
        x, w = gemms.input(normed or producer), gemms.weight(weight)
        y = unflat(gemms.output(x, w, bias), (*gemms.output_shape(residual.shape[:-1]), weight.shape[0]))
        ctx.set_materialize_grads(False)
        h = residual if delta is None else unflat(producer.sum, residual.shape)
        tables = (None, None) if rotation is None else (rotation.cos, rotation.sin)
        ctx.save_for_backward(h, producer.stats, norm_weight, *gemms.saved(x, w, weight), *tables)
        ctx.form, ctx.gemms, ctx.shape, ctx.return_input = form, gemms, residual.shape, return_input
        ctx.rotation = None if rotation is None else rotation._replace(cos=None, sin=None)
        if rotation is not None and rotation.handover is not None:
            rotation.handover.expected = True
        outputs = (h, y) if rotation is None else (h, *rotation.split(y))
        return outputs if normed is None else (*outputs, unflat(cast(Tensor, normed.matrix), residual.shape))

    @staticmethod
    def backward(ctx: Any, d_residual: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gemms: LinearGemms = ctx.gemms
        rotation: Rotation | None = ctx.rotation
        refuse_second_derivative("these layers")
        h, stats, norm_weight, *saved, cos, sin = ctx.saved_tensors
        d_input: Tensor | None = None
        if ctx.return_input:
            grads, d_input = grads[:-1], grads[-1]
        if all(grad is None for grad in grads):
            if d_input is None:
                return d_residual, d_residual if ctx.needs_input_grad[1] else None, *(None,) * 8
            through = backward_through_norm(ctx, ctx.form, flat(d_input), h, norm_weight, stats, d_residual)
            return *through, *(None,) * 6
        producer: Producer
        if rotation is None:
            (dy,) = grads
            assert dy is not None
            producer = DenseOperand(flat(dy), column_sum=gemms.wants_bias)
        else:
            producer = rotation._replace(cos=cos, sin=sin).join(grads)
            if gemms.wants_bias:
                producer = DenseOperand(producer(Quantizer(gemms.out_dtype)).high_precision, column_sum=True)
        d_normed, dw, db = gemms.gradients(producer, saved)
        if d_normed is None:
            return *(None,) * 4, dw, db, *(None,) * 4
        if d_input is not None:
            d_normed += flat(d_input)
        through = backward_through_norm(ctx, ctx.form, d_normed, h, norm_weight, stats, d_residual)
        return *through, dw, db, *(None,) * 4


class _AdaptedLinearFunction(torch.autograd.Function):
    """x [..., K] · (weight [N, K] with its adapters)ᵀ + bias [N] → [..., N]; weight and bias are frozen.

    trained: the adapters' matrices, A [r, K] and B [n, r] in turn.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gemms: LinearGemms, skip_output: bool, adapters: Adapters,
        *trained: Tensor,
    ) -> Tensor:  # fmt: skip
        gemms.want(ctx.needs_input_grad[0], False)
        matrix = flat(x).to(gemms.out_dtype)
        x_q, w = gemms.input(DenseOperand(matrix), rowwise=not skip_output), gemms.weight(weight, rowwise=not skip_output)
        joint = adapters.joint(trained, gemms.out_dtype)
        reduced = joint.reduced(matrix)
        if skip_output:
            y = matrix.new_empty(matrix.shape[0], weight.shape[0])
        else:
            y = gemms.output(x_q, w, bias)
            joint.add_(y, reduced)
        ctx.save_for_backward(matrix, reduced, *joint, *gemms.saved(x_q, w, weight))
        ctx.call = gemms, adapters, x.dtype, x.shape
        return unflat(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gemms, adapters, dtype, shape = ctx.call
        refuse_second_derivative("these layers")
        matrix, reduced, a, b, *saved = ctx.saved_tensors
        rows, joint = flat(dy), Joint(a, b)
        dx, _, _ = gemms.gradients(DenseOperand(rows), saved)
        d_reduced, d_a, d_b = joint.gradients(rows, matrix, reduced)
        if dx is not None:
            gemm.add_mm_(dx, d_reduced, a)
            dx = unflat(dx.to(dtype), shape)
        return dx, *(None,) * 5, *adapters.split(d_a, d_b)


class _AdaptedNormLinearFunction(torch.autograd.Function):
    """`_NormLinearFunction` with adapters of a frozen weight and bias: h [..., K], and [..., N] or its heads.

    trained: as in `_AdaptedLinearFunction`.
    """

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None,
        weight: Tensor, bias: Tensor | None, form: NormForm, gemms: LinearGemms, rotation: Rotation | None,
        adapters: Adapters, *trained: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        gemms.want(any(ctx.needs_input_grad[:4]), False)
        producer = NormProducer(residual, delta, form.of(norm_weight, norm_bias))
        normed = producer.with_high_precision(gemms.out_dtype)
        x, w = gemms.input(normed), gemms.weight(weight)
        matrix, joint = cast(Tensor, normed.matrix), adapters.joint(trained, gemms.out_dtype)
        reduced = joint.reduced(matrix)
        y = gemms.output(x, w, bias)
        joint.add_(y, reduced)
        y = unflat(y, (*residual.shape[:-1], weight.shape[0]))
        ctx.set_materialize_grads(False)
        h = residual if delta is None else unflat(producer.sum, residual.shape)
        pass_on(ctx, h)
        tables = (None, None) if rotation is None else (rotation.cos, rotation.sin)
        ctx.save_for_backward(h, producer.stats, norm_weight, matrix, reduced, *joint, *tables, *gemms.saved(x, w, weight))
        ctx.call, ctx.shape = (form, gemms, adapters, len(trained)), residual.shape
        ctx.rotation = None if rotation is None else rotation._replace(cos=None, sin=None)
        if rotation is not None and rotation.handover is not None:
            rotation.handover.expected = True
        return (h, y) if rotation is None else (h, *rotation.split(y))

    @staticmethod
    def backward(ctx: Any, d_residual: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        form, gemms, adapters, count = ctx.call
        rotation: Rotation | None = ctx.rotation
        refuse_second_derivative("these layers")
        h, stats, norm_weight, matrix, reduced, a, b, cos, sin, *saved = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return d_residual, d_residual if ctx.needs_input_grad[1] else None, *(None,) * (8 + count)
        if rotation is None:
            dy = flat(cast(Tensor, grads[0]))
        else:
            joined = rotation._replace(cos=cos, sin=sin).join(grads)
            dy = joined(Quantizer(gemms.out_dtype)).high_precision
        d_normed, _, _ = gemms.gradients(DenseOperand(dy), saved)
        d_reduced, d_a, d_b = Joint(a, b).gradients(dy, matrix, reduced)
        through: tuple[Tensor | None, ...] = (None,) * 4
        if d_normed is not None:
            gemm.add_mm_(d_normed, d_reduced, a)
            through = backward_through_norm(ctx, form, d_normed, h, norm_weight, stats, d_residual)
        return *through, *(None,) * 6, *adapters.split(d_a, d_b)


def pass_on(ctx: Any, h: Tensor) -> None:
    """Mark the residual stream h, the sum of the first two inputs, as without a gradient where neither has one.

    Trained adapters are inputs too, and would give it one: an MLP beside attention would compute the gradient of its input for
    nothing, and record an amax that tensor-parallel ranks, whose adapters are in other functions, do not.
    """
    if not any(ctx.needs_input_grad[:2]):
        ctx.mark_non_differentiable(h)


def norm_linear(
    residual: Tensor, delta: Tensor | None, norm: NormParameters, weight: Tensor, bias: Tensor | None, gemms: LinearGemms
) -> tuple[Tensor, Tensor, Tensor]:
    """residual + delta [..., K], the product of its norm with weight [N, K], [..., N], and the norm's output [..., K].

    The latter is in the compute dtype; all are computed by one autograd function.
    """
    h, y, normed = _NormLinearFunction.apply(
        residual, delta, norm.weight, norm.bias, weight, bias, norm.form, gemms, None, True
    )
    return h, y, normed


def saved_by_norm_linear(rows: int, shape: tuple[int, int], recipe: Recipe | None, use: WeightUse, kind: str) -> SavedBytes:
    """Bytes that `LayerNormLinear` saves: of the residual stream [rows, K], statistics and operands; weight [N, K].

    kind: a name in `NORMS`. Rotary tables, which all layers share, are left out.
    """
    norm = saved_by_norm(rows, shape[1], use.compute_bytes, kind)
    x = saved_input_bytes(rows, shape[1], recipe, use.compute_bytes)
    return SavedBytes([*norm, *x], saved_weight_bytes(*shape, recipe, use))


def init_linear_(weight: Tensor, bias: Tensor | None, init_method: Init | None) -> None:
    """Initial values of weight [N, K] and bias [N], in place: PyTorch's, uniform within ±1/√K; or `init_method`'s and zeros."""
    if init_method is None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0.0
        nn.init.uniform_(weight, -bound, bound)
        if bias is not None:
            nn.init.uniform_(bias, -bound, bound)
        return
    with torch.no_grad():
        init_method(weight)
    if bias is not None:
        nn.init.zeros_(bias)


class Linear(nn.Linear):
    """y = x · weightᵀ + bias. x: [..., in_features]; y: [..., out_features]; weight: [out_features, in_features]; bias:
    [out_features].

    A subclass of `nn.Linear`, so that code which looks for one finds it. With `return_bias` no bias is added, and the layer
    returns (y, bias). Arguments that only Transformer Engine has are in `octavo.nn.arguments`.
    """

    skip_output = False
    """Set in a recomputation whose result is unused: the FP8 product does not run, and the result is uninitialised."""
    tensor: TensorGroup | None = None
    """The ranks with other columns of the weight: inputs are this rank's columns of all tokens, outputs this rank's tokens."""
    return_bias = False  # defaults of the class serve `from_linear`
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
        **others: Any,
    ) -> None:
        check("Linear", others, Linear.__init__)
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
                init_linear_(self.weight, self.bias, self.init_method)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Linear:
        """Turn an `nn.Linear` into this class in place: parameters, ties, hooks and references to it stay valid."""
        linear.__class__ = cls
        new = cast(Linear, linear)
        new.fp8_state = ModuleState(new)
        return new

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None, *, return_input: bool = False) -> Any:
        """input [..., in_features] → [..., out_features]; is_first_microbatch: `first` of `LinearQuantizer`.

        return_input: also return, last, the product's input before its cast to FP8, which here is `input` itself.
        """
        check_input(self, input, size=self.weight.shape[1], dtypes=FLOATS_OF_PYTORCH)
        bias: Tensor | None = None if self.return_bias else self.bias
        if self.tensor is not None:
            refuse_inputs(self.tensor, return_input)
            bias = self.tensor.replicated(bias)
        how = (compute_dtype(input), is_first_microbatch)
        one_rank = "lora" in self._modules and self.tensor is None
        if one_rank and (adapters := joined(self, self.weight, bias)) is not None:
            gemms = LinearGemms(self.fp8_state, self.weight, active_recipe(self.fp8_state, input.device), *how)
            with autocast.scales_of_forward():
                more = self.skip_output, adapters, *adapters.trained
                y = _AdaptedLinearFunction.apply(input, self.weight, bias, gemms, *more)
        else:
            y = product(input, self.weight, bias, self.fp8_state, *how, skip_output=self.skip_output, tensor=self.tensor)
            y = added(y, self, input.to(y.dtype)) if "lora" in self._modules else y
        return results(y, self.bias, *([input] if return_input else []), return_bias=self.return_bias)


def joined(layer: nn.Module, weight: Tensor, bias: Tensor | None, name: str = "lora") -> Adapters | None:
    """The layer's adapters of this name, if they are computed as one pair on a frozen weight and bias."""
    adapters = layer._modules.get(name)
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not isinstance(adapters, Adapters) or trains or not adapters.joins():
        return None
    return adapters


def refuse_inputs(tensor: TensorGroup | None, asked: object) -> None:
    """Raise an InputError if a caller requests the input of a product that is split over ranks."""
    if tensor is not None and asked:
        raise InputError(
            f"return_input, return_inputs with tensor_parallel_degree = {tensor.size}: inputs of products are parts on each "
            "rank. Leave it out, or set tensor_parallel_degree = 1."
        )


class NormedCall(NamedTuple):
    """A call of a layer that begins with a norm: the norm of x + delta, each [..., K], is the input of its first product.

    first: `first` of `LinearQuantizer`. bias: that of the last product, if it is added.
    """

    x: Tensor
    delta: Tensor | None
    norm: NormParameters
    dtype: torch.dtype
    first: bool | None
    bias: Tensor | None


class NormedLayer(ResidualLayer):
    """Base of the layers that begin with a norm: its parameters, initial values, and how its products run."""

    _matrices: Callable[[], list[tuple[Tensor, Tensor | None, Init | None]]]
    """Weight, bias and `init_method` of each product."""
    _products: Callable[..., tuple[Tensor, ...]]
    """The products of a norm's result as separate autograd functions, for compiled code."""
    _fused: Callable[..., tuple[Tensor, ...]]
    """Norm and products as one autograd function; returns the residual stream first."""
    _with_adapters: Callable[..., tuple[Tensor, ...]]
    """`_fused` for a layer with adapters, whose inputs the kernels store; not in compiled code."""

    adapted = False
    """True if a weight of this layer has adapters."""
    return_bias: bool
    return_layernorm_output: bool
    draws: Draws
    zero_centered_gamma = False
    tensor: TensorGroup | None = None
    """The ranks with the other rows of the first weight; inputs have this rank's tokens."""
    streams_norm = False
    """`forward_residual` returns the norm's output in the compute dtype as the residual stream, not the norm's input."""

    def __init__(self, size: int, eps: float, normalization: str, zero_centered_gamma: bool, make: dict[str, Any]) -> None:
        super().__init__()
        if normalization not in NORMS:
            raise unknown("normalization", normalization, NORMS)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.layer_norm_weight = nn.Parameter(torch.empty(size, **make))
        self.layer_norm_bias = nn.Parameter(torch.empty(size, **make)) if normalization == "LayerNorm" else None

    def reset_parameters(self) -> None:
        """Initial values: a norm with factors of 1, and each matrix by `init_linear_`."""
        reset_norm_(self.layer_norm_weight, self.layer_norm_bias, zero_centered=self.zero_centered_gamma)
        with self.draws():
            for matrix in self._matrices():
                init_linear_(*matrix)

    def _with_norm(self, call: NormedCall, **options: Any) -> tuple[Tensor, ...]:
        """The norm's output, rounded to the input's `dtype` before the product reads it, and the result of `_products`."""
        normed = residual_norm(call.x, call.delta, call.norm, call.dtype)[1]
        return normed, *self._products(normed, call, **options)

    def _run(
        self, x: Tensor, delta: Tensor | None, first: bool | None, return_residual: bool, bias: Tensor | None,
        *, return_input: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """`forward`; bias: of the last product, which is not added with `return_bias`. return_input: the norm's output too."""
        if return_input and return_residual:
            raise InputError(
                f"{type(self).__name__} does not return inputs of products (return_input, return_inputs) together with the "
                "residual stream (return_residual): leave one out. In place of the stream, add the delta to the input yourself."
            )
        weight: Any = self.layer_norm_weight
        shift: Any = self.layer_norm_bias
        check_input(self, x, delta, size=weight.shape[0])
        refuse_transforms("layers that begin with a norm")
        added = None if self.return_bias else bias
        if self.tensor is not None:
            refuse_inputs(self.tensor, return_input or options.get("inputs"))
            weight, shift = map(self.tensor.replicated, (weight, shift))
        norm = NormParameters(self.normalization, weight, shift, self.eps, self.zero_centered_gamma)
        compiling = torch.compiler.is_compiling()
        call = NormedCall(x if compiling else promoted(x, delta), delta, norm, compute_dtype(x), first, added)
        if self.adapted:
            with autocast.scales_of_forward():
                outputs = self._with_adapters(call, **options)
            return outputs if return_residual else results(outputs[1], bias, return_bias=self.return_bias)
        if self.streams_norm if return_residual else self.return_layernorm_output or return_input:
            outputs = self._with_norm(call, **options)
            if return_residual:
                return outputs
            normed, y, *inputs = outputs
            return results(y, bias, normed, *inputs, return_bias=self.return_bias)
        if compiling:
            h = x if delta is None else x + delta
            outputs = h, *self._products(normalize(norm, h), call, **options)
        else:
            with autocast.scales_of_forward():
                outputs = self._fused(call, **options)
        return outputs if return_residual else results(outputs[1], bias, return_bias=self.return_bias)


class LayerNormLinear(NormedLayer):
    """y = norm(x) · weightᵀ + bias, where the FP8 cast reads the norm's float32 result. x: [..., in_features]; y: [...,
    out_features].

    Parameters: layer_norm_weight [in_features], layer_norm_bias [in_features] (LayerNorm only), weight [out_features,
    features], bias. With `return_bias` the bias is returned after y instead of being added. With `return_layernorm_output`
    norm(x) is returned too: its kernel then rounds it to the compute dtype, and casts the rounded values to FP8.
    """

    shared_rows = 0
    """Last rows of the weight that other ranks of the tensor group hold too."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        init_method: Init | None = None,
        get_rng_state_tracker: Tracker | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        check("LayerNormLinear", others, LayerNormLinear.__init__)
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        super().__init__(in_features, eps, normalization, zero_centered_gamma, make)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.init_method, self.draws = init_method, Draws(get_rng_state_tracker)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **make))
        self.bias = nn.Parameter(torch.empty(out_features, **make)) if bias else None
        self.fp8_state = ModuleState(self)
        self.reset_parameters()

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        delta: Tensor | None = None,
        rotation: Rotation | None = None,
        return_residual: bool = False,
        return_input: bool = False,
    ) -> Any:
        """input [..., in_features] → [..., out_features].

        delta, rotation and return_residual are for `forward_residual`, which with a rotation returns queries, keys and values
        in place of the product. return_input: as `return_layernorm_output`, for this call.

        Raises:
            InputError: `return_input` with `return_residual`.
        """
        what = (input, delta, is_first_microbatch, return_residual, self.bias)
        return self._run(*what, return_input=return_input, rotation=rotation)

    def _matrices(self) -> list[tuple[Tensor, Tensor | None, Init | None]]:
        return [(self.weight, self.bias, self.init_method)]

    def _products(self, normed: Tensor, call: NormedCall, rotation: Rotation | None) -> tuple[Tensor, ...]:
        y = product(normed, self.weight, call.bias, self.fp8_state, call.dtype, call.first)
        return (y,) if rotation is None else rotation.composed(y)

    def _with_norm(self, call: NormedCall, *, rotation: Rotation | None = None, **options: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling() or active_recipe(self.fp8_state, call.x.device) is None:
            return super()._with_norm(call, rotation=rotation, **options)
        with autocast.scales_of_forward():
            _, y, normed = self._fused(call, rotation=None, return_input=True)
        return normed, *((y,) if rotation is None else rotation.composed(y))

    def _fused(self, call: NormedCall, *, rotation: Rotation | None, return_input: bool = False) -> tuple[Tensor, ...]:
        how = self.fp8_state, self.weight, active_recipe(self.fp8_state, call.x.device), call.dtype, call.first
        gemms = LinearGemms(*how) if self.tensor is None else ColumnParallelGemms(self.tensor, *how, shared=self.shared_rows)
        norm = call.norm
        return _NormLinearFunction.apply(
            call.x, call.delta, norm.weight, norm.bias, self.weight, call.bias, norm.form, gemms, rotation, return_input
        )

    def _with_adapters(self, call: NormedCall, *, rotation: Rotation | None) -> tuple[Tensor, ...]:
        if (adapters := joined(self, self.weight, call.bias)) is not None:
            recipe, norm = active_recipe(self.fp8_state, call.x.device), call.norm
            outputs: tuple[Tensor, ...] = _AdaptedNormLinearFunction.apply(
                call.x, call.delta, norm.weight, norm.bias, self.weight, call.bias, norm.form,
                LinearGemms(self.fp8_state, self.weight, recipe, call.dtype, call.first), rotation, adapters, *adapters.trained,
            )  # fmt: skip
            return outputs
        h, y, normed = self._fused(call, rotation=None, return_input=True)
        y = added(y, self, normed)
        return h, *((y,) if rotation is None else rotation.composed(y))

    def extra_repr(self) -> str:
        """Shape and norm, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, normalization={self.normalization}"
