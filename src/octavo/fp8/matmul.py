"""The one autograd function of the FP8 layers: a linear layer's three products, each of FP8 operands.

    output          y  [M, N] = x  [M, K] · w [N, K]ᵀ      fast accumulation
    input gradient  dx [M, K] = dy [M, N] · w [N, K]       precise
    weight gradient dw [N, K] = dy [M, N]ᵀ · x [M, K]      precise

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
from octavo.fp8.scaling import ModuleState, Slot
from octavo.fp8.tensor import Quantized
from octavo.kernels import gemm, reference
from octavo.kernels.cast import cast, cast_scaled


def quantize(
    x: Tensor, how: Cast, *, slot: Slot | None = None, record: bool = False, row: bool = True, column: bool = True
) -> tuple[Quantized | None, Quantized | None]:
    """Cast a matrix for the products that read it.

    x: [R, C]. slot: the scale and amax of delayed scaling. row: wanted as [R, C], summed over C. column: as [C, R], over R.
    """
    dtype, fp8_max = how.format.dtype, how.format.max
    if how.granularity is Granularity.TENSOR:
        if slot is not None:
            q, q_t, scale_inv = scaling.cast_delayed(x, slot, dtype, fp8_max, record=record, column=column)
        else:
            scale = reference.scale_from_amax(reference.amax(x), fp8_max)
            if torch.compiler.is_compiling():
                q, q_t, scale_inv = cast_scaled(x, scale, dtype, fp8_max, column)
            else:
                q, q_t, scale_inv = cast(x, scale, None, dtype, fp8_max, column)
        return Quantized(q, scale_inv), Quantized(q_t, scale_inv) if column else None
    if how.granularity is Granularity.BLOCK_128X128:
        q, scale_inv = reference.cast_blocks(x, dtype, fp8_max, reference.BLOCK)
        return Quantized(q, scale_inv), Quantized(reference.transposed(q), reference.transposed(scale_inv)) if column else None

    def pieces(m: Tensor) -> Quantized:
        if how.granularity is Granularity.ROW:
            return Quantized(*reference.cast_rows(m, dtype, fp8_max))
        return Quantized(*reference.cast_blocks(m, dtype, fp8_max, 1))

    return pieces(x) if row else None, pieces(x.t()) if column else None


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
    shape = x.shape
    if is_first_microbatch is None:
        is_first_microbatch = autocast.first_microbatch()
    call = _Call(state, recipe, out_dtype, torch.is_grad_enabled(), is_first_microbatch)
    with autocast.unannounced():
        y = _Fp8Linear.apply(x.reshape(-1, shape[-1]), weight, bias, call)
    return y.view(*shape[:-1], weight.shape[0])


class _Call(NamedTuple):
    """What one call of a linear layer knows beside its tensors."""

    state: ModuleState
    recipe: Recipe
    out_dtype: torch.dtype
    grads: bool  # with them, amaxes are recorded
    first: bool | None


def _input_operand(x: Tensor, call: _Call, column: bool) -> tuple[Quantized, Quantized | None]:
    how = call.recipe.casts[Operand.INPUT]
    slot = call.state.slot(Operand.INPUT, call.recipe, x.device) if how.delayed else None
    row, out = quantize(x, how, slot=slot, record=call.grads, column=column)
    assert row is not None
    _observe(call.state, Operand.INPUT, row)
    return row, out


def _weight_operand(weight: Tensor, call: _Call) -> tuple[Quantized, Quantized | None]:
    cached = call.state.weight_cache
    if call.first is False and cached is not None and (cached[1] is not None or not call.grads):
        return cached
    how = call.recipe.casts[Operand.WEIGHT]
    slot = call.state.slot(Operand.WEIGHT, call.recipe, weight.device) if how.delayed else None
    row, column = quantize(weight, how, slot=slot, record=call.grads, column=call.grads)
    assert row is not None
    _observe(call.state, Operand.WEIGHT, row)
    call.state.weight_cache = None if call.first is None else (row, column)
    return row, column


def _observe(state: ModuleState, operand: Operand, q: Quantized | None) -> None:
    """Remember the last scales for `inspect`; compiled code does not look."""
    if q is not None and not torch.compiler.is_compiling():
        state.observed[operand] = q.scale_inv


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        need_x, need_w = (call.grads and need for need in ctx.needs_input_grad[:2])
        x_row, x_column = _input_operand(x, call, column=need_w)
        w_row, w_column = _weight_operand(weight, call)
        call.state.recipe = call.recipe
        empty = (None, None)
        ctx.save_for_backward(*(x_column or empty), *((w_column if need_x else None) or empty))
        ctx.call = call
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return gemm.scaled_mm(*x_row, *w_row, out_dtype=call.out_dtype, bias=bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        x_data, x_scale_inv, w_data, w_scale_inv = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        want_x, want_w, want_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if want_x or want_w:
            dy_row, dy_column = _grad_operand(dy, call, row=want_x, column=want_w)
            if dy_row is not None and want_x:
                dx = gemm.scaled_mm(*dy_row, w_data, w_scale_inv, out_dtype=call.out_dtype, precise=True).to(x_dtype)
            if dy_column is not None:
                dw = gemm.scaled_mm(*dy_column, x_data, x_scale_inv, out_dtype=weight_dtype, precise=True)
        if want_bias:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None


def _grad_operand(dy: Tensor, call: _Call, *, row: bool, column: bool) -> tuple[Quantized | None, Quantized | None]:
    how = call.recipe.casts[Operand.GRAD_OUTPUT]
    slot = call.state.slot(Operand.GRAD_OUTPUT, call.recipe, dy.device) if how.delayed else None
    if not torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            raise RuntimeError("FP8 layers have no second derivative: call backward without create_graph=True.")
        if slot is not None:
            scaling.backward_begins_in(scaling.graph_task())
    dy_row, dy_column = quantize(dy, how, slot=slot, record=True, row=row, column=column)
    _observe(call.state, Operand.GRAD_OUTPUT, dy_row or dy_column)
    return dy_row, dy_column
