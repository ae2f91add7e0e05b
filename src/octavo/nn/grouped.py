"""`GroupedLinear`: one linear layer per expert, each applied to its rows of one input.

Each operand of each expert has separate scales: results equal those of one `Linear` per expert, bit for bit if products run one
by one. On Hopper each cast and each product of all experts is one launch, unless the experts are large. The splits are read on
the host, since shapes follow from them: the host waits for a tensor on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8 import autocast
from octavo.fp8.experts import GroupedGemms
from octavo.fp8.quantizer import active_recipe
from octavo.fp8.recipe import Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels import gemm
from octavo.kernels.autograd import refuse_second_derivative
from octavo.kernels.experts.gemm import grouped_mm_of_splits, takes_groups
from octavo.kernels.experts.routes import routes_of_splits
from octavo.nn.arguments import Draws, Init, Tracker, check
from octavo.nn.linear import compute_dtype, init_linear_, product
from octavo.nn.norm import check_input

_LARGE = 0.7e12
"""Operations of an expert's three products from which each takes longer than its launch. cuBLAS's single products are then
faster than grouped ones, except with scales of rows, and need no stack of the weights."""


class GroupedLinear(nn.Module):
    """yᵢ = xᵢ · weightᵢᵀ + biasᵢ for each expert i. x: [rows, in_features], split by rows into xᵢ; y: [rows, out_features].

    Parameters: weight0 … weight{n-1} [out_features, in_features]; bias0 … [out_features]. Names and arguments are Transformer
    Engine's; `octavo.nn.arguments` lists those that are not supported. With `return_bias` no bias is added, and the layer
    returns (output, [bias0, …]).
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Init | None = None,
        get_rng_state_tracker: Tracker | None = None,
        rng_tracker_name: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check("GroupedLinear", others, GroupedLinear.__init__)
        if num_gemms < 1:
            raise InputError(f"GroupedLinear: num_gemms = {num_gemms}, but a layer has 1 expert or more.")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.return_bias, self.init_method = return_bias, init_method
        self.draws = Draws(get_rng_state_tracker, rng_tracker_name)
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(out_features, in_features, **make)))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.empty(out_features, **make)) if bias else None)
            setattr(self, f"weight{i}_fp8_state", ModuleState(self, f"weight{i}"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values, as of one `Linear` per expert."""
        with self.draws():
            for weight, bias in zip(self.weights, self.biases, strict=True):
                init_linear_(weight, bias, self.init_method)

    @property
    def weights(self) -> list[Tensor]:
        """The matrix of each expert, [N, K]."""
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    @property
    def biases(self) -> list[Tensor | None]:
        """The bias of each expert, [N], or None."""
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)]

    def forward(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None, **others: Any
    ) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        """inp [M, in_features], the rows of expert 0 first → [M, out_features]; leading dimensions are joined to rows.

        m_splits: rows of each expert, 0 allowed; a tensor is best on the CPU. is_first_microbatch: `first` of
        `LinearQuantizer`.

        Raises:
            InputError: the splits are not `num_gemms` numbers that add up to the rows.
        """
        if others:
            check("GroupedLinear.forward", others, GroupedLinear.forward)
        check_input(self, inp, size=self.in_features)
        x = inp.reshape(-1, self.in_features)
        splits = self._splits(m_splits, x.shape[0])
        biases: list[Tensor | None] = [None] * self.num_gemms if self.return_bias else self.biases
        y: Tensor = self._experts(x, splits, biases, compute_dtype(inp), is_first_microbatch)
        y = y.view(*inp.shape[:-1], self.out_features)
        return (y, [None if bias is None else bias.to(y.dtype) for bias in self.biases]) if self.return_bias else y

    # A compiler would compile anew for every split, and does not expect experts without rows.
    @torch.compiler.disable
    def _experts(
        self, x: Tensor, splits: list[int], biases: list[Tensor | None], dtype: torch.dtype, first: bool | None
    ) -> Tensor:
        weights = self.weights
        states: list[ModuleState] = [getattr(self, f"weight{i}_fp8_state") for i in range(self.num_gemms)]
        recipes = [active_recipe(state, x.device) for state in states]
        recipe = recipes[0]
        # A CUDA graph would copy splits and addresses again, from memory that the host has reused.
        recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
        together = x.shape[0] > 0 and not recorded and all(other == recipe for other in recipes)
        if together and recipe is None and takes_groups(x.device, dtype, weights) and autocast.measured() is None:
            return _GroupedInBf16.apply(x.to(dtype), splits, *weights, *biases)
        if together and recipe is not None and _run_together(x, weights, biases, states, recipe):
            routes = routes_of_splits(splits, x.device)
            gemms = GroupedGemms(states, weights, splits, routes, recipe, dtype, first)
            return _GroupedLinearFunction.apply(x, splits, gemms, *weights, *biases)
        parts = zip(x.split(splits), weights, biases, states, strict=True)
        return torch.cat([product(*expert, dtype, first) for expert in parts])

    def _splits(self, m_splits: Sequence[int] | Tensor, rows: int) -> list[int]:
        counts = m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits
        try:
            splits = [operator.index(count) for count in counts]
        except TypeError:
            raise InputError(f"m_splits = {counts!r}: give a list of whole numbers, the rows of each expert.") from None
        if len(splits) != self.num_gemms or sum(splits) != rows or min(splits, default=0) < 0:
            raise InputError(
                f"m_splits = {splits} adds up to {sum(splits)} rows for {len(splits)} experts, but the input has {rows} rows "
                f"and the layer {self.num_gemms} experts: give one count of rows, 0 or more, for each expert."
            )
        return splits

    def extra_repr(self) -> str:
        """Experts and shape, for `print(model)`."""
        bias = self.num_gemms > 0 and self.biases[0] is not None
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


def _run_together(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], states: Sequence[ModuleState], recipe: Recipe
) -> bool:
    """True if one launch casts or multiplies for all experts in FP8: on Hopper, and in plain PyTorch on a CPU."""
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) > 1 or torch.float64 in (x.dtype, *dtypes) or len({bias is None for bias in biases}) > 1:
        return False
    # The output's gradient of a frozen expert is cast, and recorded, for the input's gradient alone.
    if not x.requires_grad and len({weight.requires_grad for weight in weights}) > 1:
        return False
    if any(state.gathered is not None or state.stored is not None for state in states):  # cast already
        return False
    if x.is_cuda and not (gemm.has_grouped_products(x.device) and all(n % gemm.ALIGNMENT == 0 for n in weights[0].shape)):
        return False
    return not _are_large(x, weights) or recipe.casts[Operand.WEIGHT].granularity is Granularity.ROW


def _are_large(rows: Tensor, matrices: Sequence[Tensor]) -> bool:
    """True if a single product takes longer than its launch."""
    return 6 * len(rows) * matrices[0].numel() / len(matrices) >= _LARGE


class _GroupedLinearFunction(torch.autograd.Function):
    """All experts in FP8: x [M, K], weights [N, K] and then biases [N] of each → [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], gemms: GroupedGemms, *parameters: Tensor | None) -> Tensor:
        weights = [weight for weight in parameters[: len(splits)] if weight is not None]
        biases = [bias for bias in parameters[len(splits) :] if bias is not None]
        want_x, _, _, *wanted = ctx.needs_input_grad
        gemms.want(want_x, any(wanted[: len(splits)]))
        with autocast.scales_of_forward():
            x_q, w_q = gemms.inputs(x), gemms.weights(weights)
        ctx.splits, ctx.gemms = splits, gemms
        ctx.save_for_backward(*gemms.saved_by_all(x_q, w_q, weights))
        return gemms.outputs(x_q, w_q, biases)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("these layers")
        dx, dw = ctx.gemms.gradients_of_all(dy, ctx.saved_tensors)
        wanted = ctx.needs_input_grad[3 : 3 + len(dw)]
        of_weights = [one if want else None for one, want in zip(dw, wanted, strict=True)]
        return dx, None, None, *of_weights, *_bias_gradients(ctx, 3, dy)


class _GroupedInBf16(torch.autograd.Function):
    """All experts in bfloat16: x [M, K], weights [N, K] and then biases [N] of each → [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], *parameters: Tensor | None) -> Tensor:
        weights, biases = parameters[: len(splits)], parameters[len(splits) :]
        ctx.splits = splits
        ctx.save_for_backward(x, *weights)
        y = _products(x, splits, weights, transposed=True)
        for part, bias in zip(y.split(splits), biases, strict=True):
            if bias is not None:
                part.add_(bias.to(part.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("these layers")
        x, *weights = ctx.saved_tensors
        dy, n = dy.contiguous(), len(weights)
        parts = zip(dy.split(ctx.splits), x.split(ctx.splits), weights, ctx.needs_input_grad[2 : 2 + n], strict=True)
        dw = [
            gemm.high_precision_mm(rows.t(), part, weight.dtype, recurring=False) if wanted else None
            for rows, part, weight, wanted in parts
        ]
        dx = _products(dy, ctx.splits, weights) if ctx.needs_input_grad[0] else None
        return dx, None, *dw, *_bias_gradients(ctx, 2, dy)


def _products(rows: Tensor, splits: list[int], weights: Sequence[Tensor | None], *, transposed: bool = False) -> Tensor:
    """The rows [M, C] of each expert times its weight [C, N], or if transposed its weight [N, C]: [M, N], in their dtype."""
    matrices = [weight.to(rows.dtype) for weight in weights if weight is not None]
    if not _are_large(rows, matrices):
        stacked = torch.stack(matrices)
        return grouped_mm_of_splits(rows, splits, stacked.transpose(1, 2) if transposed else stacked)
    matrices = [matrix.t() for matrix in matrices] if transposed else matrices
    out = rows.new_empty(len(rows), matrices[0].shape[1])
    for part, matrix, result in zip(rows.split(splits), matrices, out.split(splits), strict=True):
        if len(part):
            gemm.high_precision_mm(part, matrix, out.dtype, recurring=False, out=result)
    return out


def _bias_gradients(ctx: Any, others: int, dy: Tensor) -> list[Tensor | None]:
    """The gradient of each bias, float32 [N], None where not wanted; others: arguments before the parameters."""
    wanted = ctx.needs_input_grad[others + len(ctx.splits) :]
    return [part.sum(0, dtype=torch.float32) if want else None for part, want in zip(dy.split(ctx.splits), wanted, strict=True)]
