"""The products of stacked experts' matrices, and the casts of their operands: an expert's are those of a layer of its own.

`octavo.fp8.quantizer` decides as for a linear layer; its scales and amaxes are vectors here, an entry an expert.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.fp8.quantizer import LinearQuantizer
from octavo.fp8.recipe import Cast, Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels.experts.cast import Scales, cast_rows_scaled, cast_stacked, cast_stacked_scaled
from octavo.kernels.experts.gemm import Operand as GemmOperand
from octavo.kernels.experts.gemm import grouped_mm, grouped_weight_mm
from octavo.kernels.experts.permute import permute
from octavo.kernels.experts.routes import Routes
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer

_SCALES: dict[Granularity, Scales] = {
    Granularity.ROW: "row",
    Granularity.BLOCK_1X128: "block",
    Granularity.BLOCK_128X128: "square",
}


class StackedOperand:
    """Matrices [E, N, K] as a `Producer`: a scale each."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, quantizer: Quantizer) -> QuantizedTensor:
        """Cast them, or record their amaxes alone."""
        if quantizer.scale is None and quantizer.amax is None:
            return QuantizedTensor(self.weight.to(quantizer.dtype))
        return cast_stacked(self.weight, quantizer)


class PermutedRows:
    """The rows of x [T, K] in the order of their experts, as a `Producer`."""

    def __init__(self, x: Tensor, routes: Routes) -> None:
        self.x, self.routes = x, routes

    def __call__(self, quantizer: Quantizer) -> QuantizedTensor:
        """Run the kernel."""
        return permute(self.x, self.routes, quantizer)


class ExpertsQuantizer(LinearQuantizer):
    """Casts the operands of one use of stacked matrices [E, N, K]."""

    _operand = StackedOperand

    def __init__(
        self, state: ModuleState, routes: Routes, recipe: Recipe | None, out_dtype: torch.dtype, first: bool | None
    ) -> None:
        super().__init__(state, routes.rows.device, recipe, out_dtype, first)
        self.routes: Routes | None = routes
        self._scales = (len(routes.ends),)
        self._all, self._own = state.experts, state.own_experts

    def _join(self, largest: Tensor, group: dist.ProcessGroup) -> None:
        if self._own is None:
            super()._join(largest, group)
            return
        assert self._all is not None
        whole = largest.new_zeros(self._all)  # the experts of other ranks: a maximum of 0 changes none
        whole[self._own] = largest
        super()._join(whole, group)
        largest.copy_(whole[self._own])

    def _quantize(
        self, operand: Operand, matrix: Tensor, how: Cast, *, rowwise: bool, columnwise: bool
    ) -> tuple[QuantizedTensor, Tensor | None]:
        scales, kind = _SCALES[how.granularity], how.format
        if operand is Operand.WEIGHT:
            return cast_stacked_scaled(matrix, kind.dtype, kind.max, scales, rowwise=rowwise, columnwise=columnwise)
        assert self.routes is not None
        return cast_rows_scaled(matrix, self.routes, kind.dtype, kind.max, scales, rowwise=rowwise, columnwise=columnwise)


class ExpertsGemms:
    """The products of one use of stacked matrices; made in forward and kept for its backward.

    Arguments are those of `octavo.fp8.linear.LinearGemms`.
    """

    def __init__(
        self,
        state: ModuleState,
        weight: Tensor,
        routes: Routes,
        recipe: Recipe | None,
        out_dtype: torch.dtype,
        first: bool | None,
    ) -> None:
        self.quantizer = ExpertsQuantizer(state, routes, recipe, out_dtype, first)
        self.recipe, self.out_dtype, self.weight_dtype = recipe, out_dtype, weight.dtype

    def output(self, x: QuantizedTensor, w: QuantizedTensor, routes: Routes) -> Tensor:
        """y [R, N] in `out_dtype`."""
        return grouped_mm(_rowwise(x), _rowwise(w), routes, self.out_dtype)

    def grad_input(self, dy: QuantizedTensor, w: QuantizedTensor, routes: Routes) -> Tensor:
        """dx [R, K] in `out_dtype`."""
        if self.recipe is None:
            return grouped_mm(_rowwise(dy), (w.high_precision.transpose(1, 2), None), routes, self.out_dtype)
        precise = self.recipe.precise["input_gradient"]
        return grouped_mm(_rowwise(dy), w.columnwise, routes, self.out_dtype, precise=precise)

    def grad_weight(self, dy: QuantizedTensor, x: QuantizedTensor, routes: Routes) -> Tensor:
        """dw [E, N, K] in the dtype of the weight."""
        if self.recipe is None:
            return grouped_weight_mm(_rowwise(dy), _rowwise(x), routes, self.weight_dtype)
        precise = self.recipe.precise["weight_gradient"]
        return grouped_weight_mm(dy.columnwise, x.columnwise, routes, self.weight_dtype, precise=precise)


def _rowwise(x: QuantizedTensor) -> GemmOperand:
    """FP8 with its scales, or the matrix in high precision and None."""
    assert x.rowwise_data is not None
    return x.rowwise_data, x.rowwise_scale_inv
