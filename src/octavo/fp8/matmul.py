"""A linear layer's three products of FP8 operands as one autograd function that a compiler can read.

Eagerly the same casts and products run in the fused layers (`octavo.nn.fused`).

    output          y  [M, N] = x  [M, K] · w [N, K]ᵀ      fast accumulation
    input gradient  dx [M, K] = dy [M, N] · w [N, K]       precise, unless the recipe says otherwise
    weight gradient dw [N, K] = dy [M, N]ᵀ · x [M, K]      the same

Each operand is cast once and kept in the layouts of the products that read it: `row` as it is, `column` transposed, both with
the summed dimension last. For backward only FP8 is saved. What a cast is (granularity, history) is the recipe's; nothing here
depends on it but `quantize`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.fp8 import autocast, scaling
from octavo.fp8.recipe import Cast, Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.fp8.tensor import Quantized
from octavo.kernels import gemm, reference
from octavo.kernels.cast import cast, cast_scaled
from octavo.kernels.cast_scaled import Scaled, amax, blocks, rows, scale_from_amax


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ModuleState,
    recipe: Recipe,
    *,
    out_dtype: torch.dtype,
    is_first_microbatch: bool | None = None,
) -> Tensor:
    """x · weightᵀ + bias with FP8 products.

    Args:
        x: [..., K], any float dtype; a fused producer hands over its float32 result.
        weight: [N, K], bias: [N] or None; in any float dtype (float32 master weights are cast to FP8 directly).
        state: the module's slots and weight cache.
        recipe: how each operand is cast.
        out_dtype: of the output and of the gradient with respect to `x`.
        is_first_microbatch: False reuses the FP8 weight that a call with True kept; None casts it anew.

    Returns:
        [..., N] in `out_dtype`.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    grads = torch.is_grad_enabled()
    if is_first_microbatch is None:
        is_first_microbatch = autocast.first_microbatch()
    state.recipe = recipe
    # The casts stand outside of the autograd function: what they keep between calls would be a side effect inside of it.
    with torch.no_grad(), autocast.unannounced():
        x_row, x_column = _operand(x_MK, Operand.INPUT, state, recipe, record=grads, column=grads and weight.requires_grad)
        w_row, w_column = state.gathered or weight_operand(weight, state, recipe, grads, is_first_microbatch)
    how = recipe.casts[Operand.GRAD_OUTPUT]
    call = _Call(how, state, recipe, out_dtype, weight.dtype, x.dtype, None if bias is None else bias.dtype)
    place = state.slot(Operand.GRAD_OUTPUT, recipe, x.device).place if how.delayed else None
    y = _Fp8Linear.apply(x_MK, weight, bias, *_apart(x_row, x_column), *_apart(w_row, w_column), place, call)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Call(NamedTuple):
    """What backward needs to know beside its tensors."""

    how: Cast
    state: ModuleState
    recipe: Recipe
    out_dtype: torch.dtype
    weight_dtype: torch.dtype
    x_dtype: torch.dtype
    bias_dtype: torch.dtype | None


def _apart(row: Quantized, column: Quantized | None) -> tuple[Tensor | None, ...]:
    """Data and scales of both layouts; a scale that they share is given once, since a compiler takes no tensor twice."""
    if column is None:
        return *row, None, None
    return *row, column.data, None if column.scale_inv is row.scale_inv else column.scale_inv


def _operand(
    x: Tensor, operand: Operand, state: ModuleState, recipe: Recipe, *, record: bool, column: bool
) -> tuple[Quantized, Quantized | None]:
    how = recipe.casts[operand]
    place = state.slot(operand, recipe, x.device).place if how.delayed else None
    row, out, scale = quantize(x, how, place=place, record=record, column=column)
    observe(state, operand, scale)
    assert row is not None
    return row, out


def weight_operand(
    weight: Tensor, state: ModuleState, recipe: Recipe, grads: bool, first: bool | None
) -> tuple[Quantized, Quantized | None]:
    """The FP8 weight as it is and, with `grads`, transposed; one that an earlier micro-batch kept unless `first`."""
    cached = state.weight_cache
    if first is False and cached is not None and (cached[1] is not None or not grads):
        return cached
    row, column = _operand(weight, Operand.WEIGHT, state, recipe, record=grads, column=grads)
    if first is not None:
        state.weight_cache = (row, column)
    elif cached is not None:
        state.weight_cache = None
    return row, column


def observe(state: ModuleState, operand: Operand, scale: Tensor | None) -> None:
    """Remember the last scales for `inspect` where no slot has them; compiled code does not look."""
    if scale is not None and not torch.compiler.is_compiling():
        state.observed[operand] = scale


def quantize(
    x: Tensor, how: Cast, *, place: Tensor | None = None, record: bool = False, row: bool = True, column: bool = True
) -> tuple[Quantized | None, Quantized | None, Tensor | None]:
    """Cast a matrix for the products that read it.

    x: [R, C]. place: of the slot of delayed scaling. row: wanted as [R, C], summed over C. column: as [C, R], summed over R.
    Returns the two and the scale that was chosen here, if it was.
    """
    dtype, fp8_max = how.format.dtype, how.format.max
    if how.granularity is Granularity.TENSOR:
        scale = None
        if place is not None:
            q, q_t, scale_inv = scaling.cast_delayed(x, place, dtype, fp8_max, record=record, column=column)
        else:
            scale = scale_from_amax(amax(x), fp8_max, how.power_of_two)
            chosen = cast_scaled if torch.compiler.is_compiling() else _cast
            q, q_t, scale_inv = chosen(x, scale, dtype, fp8_max, column)
        return Quantized(q, scale_inv), Quantized(q_t, scale_inv) if column else None, scale
    if how.granularity is Granularity.ROW:
        along, across = rows(x, dtype, fp8_max, row=row, column=column)
    else:
        high = reference.BLOCK if how.granularity is Granularity.BLOCK_128X128 else 1
        along, across = blocks(x, dtype, fp8_max, high, row=row, column=column)
    return _quantized(along), _quantized(across), next((made.scale for made in (along, across) if made is not None), None)


def _quantized(made: Scaled | None) -> Quantized | None:
    return None if made is None else Quantized(made.data, made.scale_inv)


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, column: bool) -> tuple[Tensor, Tensor, Tensor]:
    return cast(x, scale, None, dtype, fp8_max, column)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_row: Tensor,
        x_row_scale: Tensor,
        x_column: Tensor | None,
        x_column_scale: Tensor | None,
        w_row: Tensor,
        w_row_scale: Tensor,
        w_column: Tensor | None,
        w_column_scale: Tensor | None,
        place: Tensor | None,
        call: _Call,
    ) -> Tensor:
        # The gradient with respect to an operand takes the other one, so what a frozen one would need is not kept.
        keep_w = w_column if ctx.needs_input_grad[0] else None
        x_scale = x_row_scale if x_column_scale is None else x_column_scale
        w_scale = w_row_scale if w_column_scale is None else w_column_scale
        ctx.save_for_backward(x_column, x_scale, keep_w, w_scale, place)
        ctx.call = call
        return gemm.scaled_mm(x_row, x_row_scale, w_row, w_row_scale, out_dtype=call.out_dtype, bias=bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        x_column, x_scale_inv, w_column, w_scale_inv, place = ctx.saved_tensors
        want_x, want_w, want_bias = ctx.needs_input_grad[:3]
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise RuntimeError("FP8 layers have no second derivative: call backward without create_graph=True.")
            if place is not None:
                scaling.backward_begins_in(scaling.graph_task())
        dx = dw = db = None
        if want_x or want_w:
            dy_row, dy_column, scale = quantize(dy, call.how, place=place, record=True, row=want_x, column=want_w)
            observe(call.state, Operand.GRAD_OUTPUT, scale)
            if want_x:
                assert dy_row is not None
                precise = call.recipe.precise("input_gradient")
                dx = gemm.scaled_mm(*dy_row, w_column, w_scale_inv, out_dtype=call.out_dtype, precise=precise).to(call.x_dtype)
            if want_w:
                assert dy_column is not None
                precise = call.recipe.precise("weight_gradient")
                dw = gemm.scaled_mm(*dy_column, x_column, x_scale_inv, out_dtype=call.weight_dtype, precise=precise)
        if want_bias:
            db = dy.sum(0, dtype=torch.float32).to(call.bias_dtype)
        return dx, dw, db, *(None,) * 10
