"""A linear layer's three products, in FP8 or in high precision, of one layer or of several experts.

    output          y  [M, N] = x  [M, K] · w [N, K]ᵀ      fast accumulation
    input gradient  dx [M, K] = dy [M, N] · w [N, K]       precise, unless the recipe says otherwise
    weight gradient dw [N, K] = dy [M, N]ᵀ · x [M, K]      the same

`octavo.fp8.quantizer` casts the operands; the autograd functions stand beside their layers in `octavo.nn`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.fp8.quantizer import DenseOperand, LinearQuantizer, has_one_scale
from octavo.fp8.recipe import Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels import gemm
from octavo.kernels.quantize.cast import transpose
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor


class LinearGemms:
    """The products of one use of a linear layer; made in forward and kept for its backward.

    recipe: None for products in `out_dtype`. first: of several micro-batches, as in `LinearQuantizer`.
    """

    def __init__(
        self, state: ModuleState, weight: Tensor, recipe: Recipe | None, out_dtype: torch.dtype, first: bool | None
    ) -> None:
        self.quantizer = LinearQuantizer(state, weight.device, recipe, out_dtype, first)
        self.recipe, self.out_dtype, self.weight_dtype = recipe, out_dtype, weight.dtype

    def output(self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None) -> Tensor:
        """y [M, N] in `out_dtype`."""
        if self.recipe is None:
            bias = None if bias is None else bias.to(self.out_dtype)
            return gemm.high_precision_mm(x.high_precision, w.high_precision.t(), self.out_dtype, bias)
        return gemm.scaled_mm(*x.rowwise, *w.rowwise, out_dtype=self.out_dtype, bias=bias)

    def grad_input(self, dy: QuantizedTensor, w: QuantizedTensor) -> Tensor:
        """dx [M, K] in `out_dtype`."""
        if self.recipe is None:
            return gemm.high_precision_mm(dy.high_precision, w.high_precision, self.out_dtype)
        precise = self.recipe.precise["input_gradient"]
        return gemm.scaled_mm(*dy.rowwise, *w.columnwise, out_dtype=self.out_dtype, precise=precise)

    def grad_weight(self, dy: QuantizedTensor, x: QuantizedTensor, *, recurring: bool = True) -> Tensor:
        """dw [N, K] in the dtype of the weight. recurring: as in `octavo.kernels.algorithms.mm`."""
        dtype = self.weight_dtype
        if self.recipe is None:
            return gemm.high_precision_mm(dy.high_precision.t(), x.high_precision, dtype, recurring=recurring)
        precise = self.recipe.precise["weight_gradient"]
        return gemm.scaled_mm(*dy.columnwise, *x.columnwise, out_dtype=dtype, precise=precise, recurring=recurring)


def saved_input(x: QuantizedTensor, wanted: bool) -> QuantizedTensor:
    """The part of an input that the weight gradient reads."""
    if not wanted:
        return NOTHING
    return x if x.scale_inv is None else QuantizedTensor(None, None, x.columnwise_data, x.columnwise_scale_inv)


def saved_input_bytes(rows: int, columns: int, recipe: Recipe | None, compute: int, *, rowwise: bool = False) -> list[int]:
    """Bytes of the tensors of `saved_input` of [rows, columns], which has `compute` bytes an element outside FP8.

    rowwise: for a repeated output too, where one scale a tensor needs no second layout (`transposed_input`).
    """
    if recipe is None:
        return [rows * columns * compute]
    granularity = recipe.casts[Operand.INPUT].granularity
    columnwise = granularity.layout_bytes(columns, rows)
    if not rowwise or has_one_scale(recipe, Operand.INPUT):
        return columnwise
    return [*columnwise, *granularity.layout_bytes(rows, columns)]


def transposed_input(x: QuantizedTensor) -> QuantizedTensor:
    """An input for the weight gradient too: one that was saved rowwise, with one scale a tensor, is transposed."""
    if x.scale_inv is None or x.columnwise_data is not None:
        return x
    data, scale_inv = x.rowwise
    return QuantizedTensor(data, scale_inv, transpose(data), scale_inv)


class GroupedGemms:
    """The products of several experts, which share a recipe and nothing else.

    Outputs and input gradients of all experts are one launch where PyTorch has a kernel for it; weight gradients are one
    product an expert. In high precision the rows of all experts are one operand, in FP8 each expert has its own.
    """

    def __init__(self, experts: Sequence[LinearGemms], splits: list[int]) -> None:
        self.experts, self.splits = experts, splits
        self.quantizers = [expert.quantizer for expert in experts]
        self.recipe, self.out_dtype = experts[0].recipe, experts[0].out_dtype

    def input(self, x: Tensor, columnwise: Sequence[bool]) -> list[QuantizedTensor]:
        """The input [M, K] of all experts; columnwise: of those whose weight gradient is wanted."""
        if self.recipe is None:
            return [QuantizedTensor(x)]
        parts = zip(self.quantizers, x.split(self.splits), columnwise, strict=True)
        return [quantizer.input(DenseOperand(part), columnwise=wanted) for quantizer, part, wanted in parts]

    def output(self, x: Sequence[QuantizedTensor], w: Sequence[QuantizedTensor], biases: Sequence[Tensor | None]) -> Tensor:
        """y [M, N] of all experts."""
        if self.recipe is not None:
            pairs = [one.rowwise for one in x], [one.rowwise for one in w]
            return gemm.grouped_scaled_mm(*pairs, out_dtype=self.out_dtype, biases=biases)
        y = gemm.grouped_mm(x[0].high_precision, self.splits, _stacked(w).transpose(1, 2))
        for part, bias in zip(y.split(self.splits), biases, strict=True):
            if bias is not None:
                part.add_(bias.to(part.dtype))
        return y

    def grad_output(self, dy: Tensor, *, rowwise: bool, columnwise: Sequence[bool]) -> list[QuantizedTensor]:
        """The gradient of the output [M, N] of all experts."""
        if self.recipe is None:
            return [QuantizedTensor(dy.contiguous())]
        parts = zip(self.quantizers, dy.split(self.splits), columnwise, strict=True)
        return [quantizer.grad_output(DenseOperand(part), rowwise=rowwise, columnwise=want) for quantizer, part, want in parts]

    def grad_input(self, dy: Sequence[QuantizedTensor], w: Sequence[QuantizedTensor]) -> Tensor:
        """dx [M, K] of all experts. w: as `saved_weight` gave them."""
        w = [quantizer.restored_weight(saved) for quantizer, saved in zip(self.quantizers, w, strict=True)]
        if self.recipe is None:
            return gemm.grouped_mm(dy[0].high_precision, self.splits, _stacked(w))
        precise = self.recipe.precise["input_gradient"]
        pairs = [one.rowwise for one in dy], [one.columnwise for one in w]
        return gemm.grouped_scaled_mm(*pairs, out_dtype=self.out_dtype, precise=precise)

    def grad_weights(
        self, dy: Sequence[QuantizedTensor], x: Sequence[QuantizedTensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """dw [N, K] of each expert in the dtype of its weight; None where not wanted."""
        if not any(wanted):
            return [None] * len(wanted)
        if self.recipe is None:
            dy, x = ([QuantizedTensor(part) for part in one[0].high_precision.split(self.splits)] for one in (dy, x))
        experts = zip(self.experts, dy, x, wanted, strict=True)
        return [gemms.grad_weight(dy_i, x_i, recurring=False) if want else None for gemms, dy_i, x_i, want in experts]


def _stacked(weights: Sequence[QuantizedTensor]) -> Tensor:
    return torch.stack([weight.high_precision for weight in weights])
