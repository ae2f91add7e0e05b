"""RMSNorm and LayerNorm, alone and before a linear layer.

The kernel adds the last layer's delta to the residual stream while it reads both, and stores the norm in float32, bf16 or FP8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octavo.collectives.tensor import TensorGroup
from octavo.errors import InputError
from octavo.fp8.quantizer import WithHighPrecision
from octavo.kernels import reference
from octavo.kernels.autograd import refuse_second_derivative, refuse_transforms
from octavo.kernels.norm import norm, norm_backward
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer
from octavo.nn.arguments import check

NORMS = ("LayerNorm", "RMSNorm")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the kernels' inputs."""
FLOATS_OF_PYTORCH = (*FLOATS, torch.float64)
"""Dtypes of the inputs of layers that run as PyTorch's outside of FP8."""


def _computes_in_float64(layer: nn.Module, x: Tensor) -> bool:
    """A layer of float64 parameters on a CPU: kernels have no float64."""
    return x.dtype == torch.float64 and not x.is_cuda and any(p.dtype == torch.float64 for p in layer.parameters())


def check_input(
    layer: nn.Module, *inputs: Tensor | None, size: int | None = None, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """Raise an InputError for an unsupported dtype, or inputs that are not [..., `size`].

    With `size` all inputs must have one shape: a kernel would read a smaller one out of bounds.
    """
    first: Tensor | None = None
    for x in inputs:
        if x is None:
            continue
        first = x if first is None else first
        if x.dtype not in dtypes and not _computes_in_float64(layer, x):
            raise InputError(
                f"{type(layer).__name__} got an input of {x.dtype}: use {', '.join(map(str, dtypes))}. Token ids go through an "
                "embedding; convert other numbers, as in x.to(torch.bfloat16)."
            )
        if size is not None and x.shape[-1] != size:
            name = type(layer).__name__
            raise InputError(f"{name} got an input of shape {tuple(x.shape)}: its last dimension must be {size}.")
        if size is not None and x.shape != first.shape:
            shapes = f"{tuple(first.shape)} and a delta of shape {tuple(x.shape)}"
            raise InputError(f"{type(layer).__name__} got an input of shape {shapes}: give both the same.")


class NormParameters(NamedTuple):
    """A normalisation: "RMSNorm" or "LayerNorm", its parameters [K] and its constant; zero_centered: 1 + weight for weight."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float
    zero_centered: bool = False

    @property
    def form(self) -> NormForm:
        """All but the parameters."""
        return NormForm(self.kind, self.eps, self.zero_centered)


class NormForm(NamedTuple):
    """A normalisation without its parameters, for autograd functions."""

    kind: str
    eps: float
    zero_centered: bool = False

    def of(self, weight: Tensor, bias: Tensor | None) -> NormParameters:
        """This form with parameters [K]."""
        return NormParameters(self.kind, weight, bias, self.eps, self.zero_centered)


def normalize(of: NormParameters, x: Tensor) -> Tensor:
    """The norm of `x` [..., K] over K, float32, in differentiable PyTorch."""
    return reference.norm(of.kind, x, of.weight, of.bias, of.eps, zero_centered=of.zero_centered)[0]


def reset_norm_(weight: Tensor, bias: Tensor | None, *, zero_centered: bool = False) -> None:
    """Reset weight and bias [K] to no effect: a factor of 1, a bias of 0."""
    nn.init.constant_(weight, 0.0 if zero_centered else 1.0)
    if bias is not None:
        nn.init.zeros_(bias)


def promoted(residual: Tensor, delta: Tensor | None) -> Tensor:
    """`residual` [..., K] in the dtype of `residual + delta`: a float32 stream stays float32 if a layer returns bfloat16."""
    return residual if delta is None else residual.to(torch.promote_types(residual.dtype, delta.dtype))


def flat(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x.reshape(-1, x.shape[-1])


def unflat(y: Tensor, shape: Sequence[int]) -> Tensor:
    """A kernel's result [M, K] in the shape [..., K], and not as a view, into which autograd allows no writes."""
    if len(shape) == 2:
        return y
    return torch.ops.aten._unsafe_view.default(y, shape)


class NormProducer:
    """The norm of residual + delta as producer of an operand. Run twice (amax, then cast) it adds the delta once.

    `sum` is residual + delta after the first run, [M, K], and `stats` the statistics for backward.
    """

    def __init__(self, residual: Tensor, delta: Tensor | None, of: NormParameters) -> None:
        self.sum, self.of = flat(residual), of
        self._delta = None if delta is None else flat(delta)
        self.stats: Tensor | None = None

    def __call__(self, quantizer: Quantizer, high_precision_out: Tensor | None = None) -> QuantizedTensor:
        """Run the kernel; high_precision_out: as in `octavo.kernels.norm.norm`."""
        of = self.of
        self.sum, self.stats, out = norm(
            of.kind, self.sum, self._delta, of.weight, of.bias, of.eps, quantizer,
            zero_centered=of.zero_centered, high_precision_out=high_precision_out,
        )  # fmt: skip
        self._delta = None
        return out

    def with_high_precision(self, dtype: torch.dtype) -> WithHighPrecision:
        """This producer, whose result is also stored in this dtype."""
        rows, columns = self.sum.shape
        return WithHighPrecision(self, (rows, columns), dtype, self.sum.device)


def statistics_bytes(kind: str) -> int:
    """Bytes of the statistics of a row: float32, two of LayerNorm."""
    return 8 if kind == "LayerNorm" else 4


def saved_by_norm(rows: int, columns: int, element: int, kind: str) -> list[int]:
    """Bytes of the sum [rows, columns] of residual and delta, `element` bytes per element, and of its statistics."""
    return [rows * columns * element, rows * statistics_bytes(kind)]


def backward_through_norm(
    ctx: Any, form: NormForm, d_normed: Tensor, h: Tensor, weight: Tensor, stats: Tensor, d_residual: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of residual, delta [..., K], weight and bias [K]: the first four inputs of the autograd function of `ctx`.

    d_normed: [M, K], of the norm's result. h: residual + delta [..., K]. d_residual: [..., K], of h by other paths.
    """
    _, want_delta, want_weight, want_bias = ctx.needs_input_grad[:4]
    refuse_second_derivative("norms")
    d_residual = None if d_residual is None else flat(d_residual)
    # Autograd would round the gradient of the weight in a separate kernel. That of a bias may have another dtype.
    dtype = torch.promote_types(weight.dtype, torch.float32) if want_bias else weight.dtype
    dx, d_weight, d_bias = norm_backward(
        form.kind, d_normed, flat(h), weight, stats, d_residual,
        want_weight=want_weight or want_bias, dtype=dtype, zero_centered=form.zero_centered,
    )  # fmt: skip
    dx = dx.view(ctx.shape)
    return dx, dx if want_delta else None, d_weight if want_weight else None, d_bias if want_bias else None


class _NormFunction(torch.autograd.Function):
    """The norm of residual + delta [..., K] → [..., K] in the residual's dtype. Saves the sum and its statistics."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, form: NormForm
    ) -> Tensor:
        producer = NormProducer(residual, delta, form.of(weight, bias))
        normed = producer(Quantizer(residual.dtype)).high_precision
        ctx.save_for_backward(producer.sum, producer.stats, weight)
        ctx.form, ctx.shape = form, residual.shape
        return unflat(normed, residual.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, stats, weight = ctx.saved_tensors
        return *backward_through_norm(ctx, ctx.form, flat(dy), h, weight, stats, None), None


class _ResidualNormFunction(torch.autograd.Function):
    """residual + delta [..., K], and its norm [..., K] in `dtype`. Saves the sum and its statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        form: NormForm,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        producer = NormProducer(residual, delta, form.of(weight, bias))
        normed = producer(Quantizer(dtype)).high_precision
        ctx.set_materialize_grads(False)
        h = residual if delta is None else unflat(producer.sum, residual.shape)
        ctx.save_for_backward(h, producer.stats, weight)
        ctx.form, ctx.shape = form, residual.shape
        return h, unflat(normed, residual.shape)

    @staticmethod
    def backward(ctx: Any, d_residual: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        h, stats, weight = ctx.saved_tensors
        if dy is None:
            return d_residual, d_residual if ctx.needs_input_grad[1] else None, *(None,) * 4
        return *backward_through_norm(ctx, ctx.form, flat(dy), h, weight, stats, d_residual), None, None


def residual_norm(residual: Tensor, delta: Tensor | None, of: NormParameters, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """residual + delta [..., K] in their promoted dtype, and its norm [..., K] in `dtype`."""
    if torch.compiler.is_compiling():
        h = residual if delta is None else residual + delta
        return h, normalize(of, h).to(dtype)
    return _ResidualNormFunction.apply(promoted(residual, delta), delta, of.weight, of.bias, of.form, dtype)


class ResidualLayer(nn.Module):
    """A layer of the residual stream. Its `forward` takes `delta` and `return_residual` for this method."""

    def forward_residual(self, residual: Tensor, delta: Tensor | None = None, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        """residual, delta [B, T, hidden] → residual, delta for the next layer, whose norm reads both and adds them.

        The other arguments are `forward`'s; hooks of the module run. The caller adds the last delta, usually by a norm.
        """
        return self(residual, *args, delta=delta, return_residual=True, **options)


def forward_residual(
    layer: nn.Module, residual: Tensor, delta: Tensor | None = None, *args: Any, **options: Any
) -> tuple[Tensor, Any]:
    """`ResidualLayer.forward_residual`, [B, T, hidden], of a layer or a wrapper: FSDP1 gathers its weights only in its call."""
    return layer(residual, *args, delta=delta, return_residual=True, **options)


class _Norm(nn.Module):
    """One of `NORMS`; only LayerNorm has a bias. The size may also be given as `hidden_size`, the dtype as `dtype`."""

    normalization: ClassVar[str]
    bias: nn.Parameter | None
    tensor: TensorGroup | None = None
    """Ranks that normalise other tokens or heads by the same parameters."""

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        nn.Module.__init__(self)
        check(self.normalization, others, _Norm.__init__)
        shape = normalized_shape if hidden_size is None else hidden_size
        size = [shape] if isinstance(shape, int) else list(shape or ())
        if len(size) != 1:
            raise InputError(
                f"{self.normalization} over the dimensions {size} is not supported: give one size, that of the last dimension."
            )
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(size, dtype=params_dtype or dtype, device=device))
        bias = nn.Parameter(torch.empty_like(self.weight)) if self.normalization == "LayerNorm" else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: 1, with `zero_centered_gamma` 0, and 0 for the bias."""
        reset_norm_(self.weight, self.bias, zero_centered=self.zero_centered_gamma)

    def forward(self, input: Tensor, delta: Tensor | None = None) -> Tensor:
        """input [..., hidden_size] → the same shape and dtype; with `delta` the norm of the sum."""
        check_input(self, input, delta, size=self.weight.shape[0])
        refuse_transforms("norms of octavo.nn")
        weight, bias = parameters = self.weight, self.bias
        if self.tensor is not None:
            weight, bias = map(self.tensor.replicated, parameters)  # type: ignore[assignment]
        of = NormParameters(self.normalization, weight, bias, self.eps, self.zero_centered_gamma)
        if torch.compiler.is_compiling():
            h = input if delta is None else input + delta
            return normalize(of, h).to(h.dtype)
        return _NormFunction.apply(promoted(input, delta), delta, weight, bias, of.form)


class RMSNorm(_Norm):
    """x / √(mean(x²) + eps) · weight. x, result: [..., hidden_size], in x's dtype; weight: [hidden_size].

    zero_centered_gamma: 1 + weight in place of weight, added in float32.
    """

    normalization = "RMSNorm"


class LayerNorm(_Norm, nn.LayerNorm):  # type: ignore[misc]
    """(x − mean) / √(variance + eps) · weight + bias. x, result: [..., hidden_size], in x's dtype; weight, bias: [hidden_size].

    A subclass of `nn.LayerNorm`, so that code which leaves its parameters out of weight decay finds them.

    zero_centered_gamma: 1 + weight in place of weight, added in float32.
    """

    normalization = "LayerNorm"
    elementwise_affine = True

    @property
    def normalized_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The size, as PyTorch's layer has it."""
        return tuple(self.weight.shape)

    def extra_repr(self) -> str:
        """Empty, as for `RMSNorm`."""
        return ""


NORM_LAYERS: dict[str, type[_Norm]] = {norm.normalization: norm for norm in (LayerNorm, RMSNorm)}
"""Name of a normalisation → its layer."""


class L2Normalization(nn.Module):
    """x / √(Σ x² + eps) over the last dimension, without parameters, in float32 (float64). The result has x's dtype."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → the same shape."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().sum(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)
