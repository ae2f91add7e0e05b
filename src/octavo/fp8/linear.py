"""A linear layer's three products, in FP8 or in high precision.

    output          y  [M, N] = x  [M, K] · w [N, K]ᵀ      fast accumulation
    input gradient  dx [M, K] = dy [M, N] · w [N, K]       precise, unless the recipe says otherwise
    weight gradient dw [N, K] = dy [M, N]ᵀ · x [M, K]      the same

Every layer that multiplies in FP8 has a `LinearGemms` for each product: it casts the operands (`octavo.fp8.quantizer`),
decides which of them backward needs, and computes the requested gradients. The autograd functions are in `octavo.nn` with
their layers, which have the kernels that produce the operands:

    forward     gemms.want(x, weight, bias)
                x, w = gemms.input(producer), gemms.weight(weight)
                y = gemms.output(x, w, bias)
                ctx.save_for_backward(*gemms.saved(x, w, weight))
    backward    dx, dw, db = gemms.gradients(producer_of_dy, ctx.saved_tensors)
                or, with other kernels between them, `operands`, `grad_output`, `grad_input` and `grad_weight`

`octavo.fp8.experts` has the same for the matrices of several experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.fp8.quantizer import DenseOperand, LinearQuantizer, Producer, has_one_scale
from octavo.fp8.recipe import Granularity, Operand, Recipe
from octavo.kernels import gemm
from octavo.kernels.quantize.cast import transpose
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor

SAVED = 8
"""Entries of `LinearGemms.saved`: the parts of an input, then those of a weight."""


def operands(saved: Sequence[Tensor | None], use: int = 0) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Input [M, K] and weight [N, K] of a product, as `LinearGemms.saved` gave them; use: the index of one of several."""
    x = SAVED * use
    w = x + SAVED // 2
    return QuantizedTensor(*saved[x:w]), QuantizedTensor(*saved[w : x + SAVED])


class LinearGemms(LinearQuantizer):
    """The casts and products of one use of a linear layer, created in forward and saved for its backward.

    Arguments are those of `LinearQuantizer`; without a recipe products are in `out_dtype`.
    """

    output_dtype: torch.dtype | None = None
    """Dtype of an output that is a summand over ranks; None: `out_dtype`."""
    input_grad_dtype: torch.dtype | None = None
    """Dtype of an input's gradient that is a summand over ranks; None: `out_dtype`."""

    def output_shape(self, leading: Sequence[int]) -> tuple[int, ...]:
        """The dimensions of the output's rows, from those of the input's."""
        return tuple(leading)

    def output(self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """y [M, N] in `out_dtype`; out: receives it."""
        dtype = self.output_dtype or self.out_dtype
        if self.recipe is None:
            bias = None if bias is None else bias.to(self.out_dtype)
            return gemm.high_precision_mm(
                x.high_precision, w.high_precision.t(), dtype, bias, out=out, unrounded=self.output_dtype is not None
            )
        return gemm.scaled_mm(*x.rowwise, *w.rowwise, out_dtype=dtype, bias=bias, out=out)

    def recomputed_output(
        self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None
    ) -> tuple[Tensor, QuantizedTensor, QuantizedTensor]:
        """The output [M, N] from saved operands (`recomputes_output`), and these in the layouts of the gradients."""
        w = self.restored_weight(w, rowwise=True)
        y = self.output(x, w, bias)
        if not self.wants_weight:
            x = NOTHING
        elif x.scale_inv is not None and x.columnwise_data is None:  # one scale a tensor
            data, scale_inv = x.rowwise
            x = QuantizedTensor(data, scale_inv, transpose(data), scale_inv)
        return y, x, w

    def gradients(
        self, producer: Producer, saved: Sequence[Tensor | None], use: int = 0, *, slot_index: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx [M, K], dw [N, K] and db [N], None where not wanted.

        producer: of dy [M, N]. With a bias it is a `DenseOperand` with its column sum. saved, use: as in `operands`.
        """
        x, w = operands(saved, use)
        dy = self.grad_output(producer, slot_index=slot_index)
        db = producer.column_sum() if self.wants_bias and isinstance(producer, DenseOperand) else None
        dx, dw = self.both_gradients(dy, x, w)
        return dx, dw, db

    def both_gradients(
        self, dy: QuantizedTensor, x: QuantizedTensor, w: QuantizedTensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx [M, K] and dw [N, K], None where not wanted; x, w: as saved."""
        dw = self.grad_weight(dy, x) if self.wants_weight else None
        return self.grad_input(dy, w) if self.wants_x else None, dw

    def grad_input(self, dy: QuantizedTensor, w: QuantizedTensor, *, out: Tensor | None = None) -> Tensor:
        """dx [M, K] in `out_dtype`. w: as saved, or restored already. out: receives it."""
        w, dtype = self.restored_weight(w), self.input_grad_dtype or self.out_dtype
        if self.recipe is None:
            return gemm.high_precision_mm(
                dy.high_precision, w.high_precision, dtype, out=out, unrounded=self.input_grad_dtype is not None
            )
        precise = self.recipe.precise["input_gradient"]
        return gemm.scaled_mm(*dy.rowwise, *w.columnwise, out_dtype=dtype, precise=precise, out=out)

    def grad_weight(self, dy: QuantizedTensor, x: QuantizedTensor, *, recurring: bool = True) -> Tensor:
        """dw [N, K] in the dtype of the weight. recurring: as in `octavo.kernels.algorithms.mm`."""
        dtype = self.weight_dtype
        if self.recipe is None:
            return gemm.high_precision_mm(dy.high_precision.t(), x.high_precision, dtype, recurring=recurring)
        precise = self.recipe.precise["weight_gradient"]
        return gemm.scaled_mm(*dy.columnwise, *x.columnwise, out_dtype=dtype, precise=precise, recurring=recurring)


def saved_input_bytes(
    rows: int, columns: int, recipe: Recipe | None, compute: int, *, rowwise: bool = False, runs: int = 1
) -> list[int]:
    """Bytes of an input [rows, columns] in `LinearGemms.saved`, by tensor; outside FP8 `compute` bytes per element.

    runs: tensor-parallel ranks whose tokens these are; each rank's tokens begin a new block. rowwise: also for a recomputed
    output, for which one scale a tensor needs no second layout (`recomputed_output`).
    """
    if recipe is None:
        return [rows * columns * compute]
    granularity = recipe.casts[Operand.INPUT].granularity
    data, scales = granularity.layout_bytes(columns, rows)
    if runs > 1 and granularity is Granularity.BLOCK_1X128:
        scales = runs * granularity.layout_bytes(columns, rows // runs)[1]
    columnwise = [data, scales]
    if not rowwise or has_one_scale(recipe, Operand.INPUT):
        return columnwise
    return [*columnwise, *granularity.layout_bytes(rows, columns)]
