"""`GroupedLinear`: one linear layer an expert, each applied to its own rows of one input.

Experts share nothing but the call: each operand of each expert is cast with scales of its own, so the numbers are those of as
many `Linear` layers, bit for bit where their products run one by one. On Hopper the products of all experts are one launch
where PyTorch has a kernel for it: bfloat16, and the rowwise recipe's output and input gradient. Weight gradients, and other
recipes, are one product an expert. The splits are read on the host, since shapes follow from them: a tensor on a GPU is
waited for.

Shapes: M rows of all experts, Mᵢ of one, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8 import autocast
from octavo.fp8.matmul import observe, quantize, weight_operand
from octavo.fp8.recipe import Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels import gemm
from octavo.nn.linear import compute_dtype, init_linear_, product, recipe_of
from octavo.nn.te_arguments import Draws, Init, Tracker, check, init_with_


class GroupedLinear(nn.Module):
    """yᵢ = xᵢ · weightᵢᵀ + biasᵢ for each expert i.

    Parameters: weight0 … weight{n-1} [out_features, in_features]; bias0 … [out_features]. Names and arguments are Transformer
    Engine's; those without a meaning here are in `octavo.nn.te_arguments`. With `return_bias` no bias is added, and the layer
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
        **te_arguments: Any,
    ) -> None:
        super().__init__()
        check("GroupedLinear", te_arguments, GroupedLinear.__init__)
        self.num_gemms, self.in_features, self.out_features, self.return_bias = (
            num_gemms,
            in_features,
            out_features,
            return_bias,
        )
        self.init_method = init_method
        self.draws = Draws(get_rng_state_tracker, rng_tracker_name)
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(out_features, in_features, **make)))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.empty(out_features, **make)) if bias else None)
            setattr(self, f"weight{i}_fp8_state", ModuleState(self, f"weight{i}"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values as of as many `Linear` layers."""
        with self.draws():
            for weight, bias in zip(self.weights, self.biases, strict=True):
                if self.init_method is None:
                    init_linear_(weight, bias)
                else:
                    init_with_(self.init_method, weight, bias)

    @property
    def weights(self) -> list[Tensor]:
        """The matrix of each expert, [N, K]."""
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    @property
    def biases(self) -> list[Tensor | None]:
        """The bias of each expert, [N], or None."""
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)]

    def forward(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None, **te_arguments: Any
    ) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        """inp [M, in_features], the rows of expert 0 first → [M, out_features].

        Args:
            inp: the rows of all experts; leading dimensions are joined to rows.
            m_splits: rows of each expert, 0 allowed; a tensor is best on the CPU.
            is_first_microbatch: as in `octavo.fp8.matmul.fp8_linear`.
            te_arguments: `out` and `dgrad_out`, which have to be None.

        Raises:
            InputError: the splits are not `num_gemms` numbers that add up to the rows.
        """
        if te_arguments:
            check("GroupedLinear.forward", te_arguments, GroupedLinear.forward)
        x = inp.reshape(-1, self.in_features)
        splits = self._splits(m_splits, x.shape[0])
        biases: list[Tensor | None] = [None] * self.num_gemms if self.return_bias else self.biases
        y: Tensor = self._experts(x, splits, biases, compute_dtype(inp), is_first_microbatch)
        y = y.view(*inp.shape[:-1], self.out_features)
        return (y, [None if bias is None else bias.to(y.dtype) for bias in self.biases]) if self.return_bias else y

    # A compiler would compile anew for every split, and experts without rows are not what it expects.
    @torch.compiler.disable
    def _experts(
        self, x: Tensor, splits: list[int], biases: list[Tensor | None], dtype: torch.dtype, first: bool | None
    ) -> Tensor:
        weights = self.weights
        states: list[ModuleState] = [getattr(self, f"weight{i}_fp8_state") for i in range(self.num_gemms)]
        recipes = [recipe_of(state, x.device) for state in states]
        recipe, alike = recipes[0], all(one == recipes[0] for one in recipes)
        if alike:
            if recipe is None and gemm.takes_wide_groups(x.device, dtype, weights):
                return _Wide.apply(x.to(dtype), splits, *weights, *biases)
            if recipe is not None and all(how.granularity is Granularity.ROW for how in recipe.casts.values()):
                first = autocast.first_microbatch() if first is None else first
                call = _Call(splits, states, recipe, dtype, x.dtype, first, torch.is_grad_enabled())
                for state in states:
                    state.recipe = recipe
                return _Rows.apply(x, call, *weights, *biases)
        experts = zip(x.split(splits), weights, biases, states, strict=True)
        return torch.cat([product(*expert, dtype, first) for expert in experts])

    def _splits(self, m_splits: Sequence[int] | Tensor, rows: int) -> list[int]:
        splits = m_splits.tolist() if isinstance(m_splits, Tensor) else [int(count) for count in m_splits]
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


class _Call(NamedTuple):
    splits: list[int]
    states: list[ModuleState]
    recipe: Recipe
    out_dtype: torch.dtype
    x_dtype: torch.dtype
    first: bool | None
    grads: bool


class _Rows(torch.autograd.Function):
    """All experts with a scale a row of each operand; casts and weight gradients one expert after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *parameters: Tensor | None) -> Tensor:
        n = len(call.splits)
        weights, biases = parameters[:n], parameters[n:]
        want_x, want_w = ctx.needs_input_grad[0], ctx.needs_input_grad[2 : 2 + n]
        xs, ws, kept = [], [], []
        with autocast.unannounced():
            for part, weight, state, want in zip(x.split(call.splits), weights, call.states, want_w, strict=True):
                assert weight is not None
                row, column, scale = quantize(part, call.recipe.casts[Operand.INPUT], column=call.grads and want)
                observe(state, Operand.INPUT, scale)
                w_row, w_column = weight_operand(weight, state, call.recipe, call.grads, call.first)
                assert row is not None
                xs.append(row)
                ws.append(w_row)
                # As in `octavo.fp8.matmul`: what the gradient of a frozen operand would need is not kept.
                kept += [*(column or (None, None)), *(w_column if want_x and w_column is not None else (None, None))]
        ctx.call = call
        ctx.parameter_dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        ctx.save_for_backward(*kept)
        return gemm.grouped_scaled_mm(xs, ws, out_dtype=call.out_dtype, biases=biases)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("FP8 layers have no second derivative: call backward without create_graph=True.")
        call: _Call = ctx.call
        n = len(call.splits)
        want_x, want_w, want_b = ctx.needs_input_grad[0], ctx.needs_input_grad[2 : 2 + n], ctx.needs_input_grad[2 + n :]
        dtypes, saved = ctx.parameter_dtypes, ctx.saved_tensors
        dys, ws = [], []
        dw: list[Tensor | None] = [None] * n
        db: list[Tensor | None] = [None] * n
        for i, (part, state) in enumerate(zip(dy.split(call.splits), call.states, strict=True)):
            x_column, x_scale, w_column, w_scale = saved[4 * i : 4 * i + 4]
            if want_x or want_w[i]:
                row, column, scale = quantize(part, call.recipe.casts[Operand.GRAD_OUTPUT], row=want_x, column=want_w[i])
                observe(state, Operand.GRAD_OUTPUT, scale)
                if row is not None:
                    dys.append(row)
                    ws.append((w_column, w_scale))
                if column is not None:
                    dw[i] = gemm.scaled_mm(*column, x_column, x_scale, out_dtype=dtypes[i], precise=True, recurring=False)
            if want_b[i]:
                db[i] = part.sum(0, dtype=torch.float32).to(dtypes[n + i])
        dx = gemm.grouped_scaled_mm(dys, ws, out_dtype=call.out_dtype, precise=True).to(call.x_dtype) if want_x else None
        return dx, None, *dw, *db


class _Wide(torch.autograd.Function):
    """All experts in bfloat16; the matrices are put side by side anew in backward rather than kept twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], *parameters: Tensor | None) -> Tensor:
        n = len(splits)
        weights, biases = parameters[:n], parameters[n:]
        ctx.splits = splits
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.save_for_backward(x, *weights)
        y = gemm.grouped_mm(x, splits, _stacked(weights, x.dtype).transpose(1, 2))
        for part, bias in zip(y.split(splits), biases, strict=True):
            if bias is not None:
                part.add_(bias.to(part.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("GroupedLinear has no second derivative: call backward without create_graph=True.")
        x, *weights = ctx.saved_tensors
        n = len(ctx.splits)
        want_w, want_b = ctx.needs_input_grad[2 : 2 + n], ctx.needs_input_grad[2 + n :]
        dy = dy.contiguous()
        dx = gemm.grouped_mm(dy, ctx.splits, _stacked(weights, x.dtype)) if ctx.needs_input_grad[0] else None
        parts = list(zip(dy.split(ctx.splits), x.split(ctx.splits), weights, want_w, strict=True))
        dw = [
            None
            if not want
            else gemm.wide_mm(dy_i.t(), x_i, weight.dtype, recurring=False)
            if len(x_i)
            else torch.zeros_like(weight)
            for dy_i, x_i, weight, want in parts
        ]
        biases = zip(dy.split(ctx.splits), ctx.bias_dtypes, want_b, strict=True)
        db = [part.sum(0, dtype=torch.float32).to(dtype) if want else None for part, dtype, want in biases]
        return dx, None, *dw, *db


def _stacked(weights: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    return torch.stack([weight.to(dtype) for weight in weights if weight is not None])
