"""The products of stacked experts' matrices, and the casts of their operands; each expert is cast like a separate layer.

`octavo.fp8.quantizer` decides as for a linear layer; scales and amaxes are vectors here, with an entry per expert.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.fp8.linear import LinearGemms
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
    """Matrices [E, N, K] as a `Producer`, with one scale each."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, quantizer: Quantizer) -> QuantizedTensor:
        """Cast them, or only record their amaxes."""
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


class ExpertsGemms(LinearGemms):
    """The casts and products of one use of stacked matrices [E, N, K]: a `LinearGemms` of all experts' rows.

    routes: of a forward, which sets them to None once they are saved; a backward sets the saved ones.
    """

    _operand = StackedOperand

    def __init__(
        self,
        state: ModuleState,
        weight: Tensor,
        routes: Routes,
        recipe: Recipe | None,
        out_dtype: torch.dtype,
        first: bool | None,
    ) -> None:
        super().__init__(state, weight, recipe, out_dtype, first)
        self.routes: Routes | None = routes
        self._scales = (len(routes.ends),)
        self._all, self._local = state.experts, state.local_experts

    def output(
        self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """y [R, N] in `out_dtype`, without a bias."""
        assert self.routes is not None
        assert out is None
        return grouped_mm(_rowwise(x), _rowwise(w), self.routes, self.output_dtype or self.out_dtype)

    def grad_input(self, dy: QuantizedTensor, w: QuantizedTensor, *, out: Tensor | None = None) -> Tensor:
        """dx [R, K] in `out_dtype`. w: as saved, or restored already."""
        assert self.routes is not None
        assert out is None
        w, dtype = self.restored_weight(w), self.input_grad_dtype or self.out_dtype
        if self.recipe is None:
            return grouped_mm(_rowwise(dy), (w.high_precision.transpose(1, 2), None), self.routes, dtype)
        precise = self.recipe.precise["input_gradient"]
        return grouped_mm(_rowwise(dy), w.columnwise, self.routes, dtype, precise=precise)

    def grad_weight(self, dy: QuantizedTensor, x: QuantizedTensor, *, recurring: bool = False) -> Tensor:
        """dw [E, N, K] in the dtype of the weight. Product sizes change from step to step, so none is recurring."""
        assert self.routes is not None
        if self.recipe is None:
            return grouped_weight_mm(_rowwise(dy), _rowwise(x), self.routes, self.weight_dtype)
        precise = self.recipe.precise["weight_gradient"]
        return grouped_weight_mm(dy.columnwise, x.columnwise, self.routes, self.weight_dtype, precise=precise)

    def _join(self, largest: Tensor, group: dist.ProcessGroup) -> None:
        if self._local is None:
            super()._join(largest, group)
            return
        assert self._all is not None
        whole = largest.new_zeros(self._all)  # zeros for experts of other ranks: the maximum ignores them
        whole[self._local] = largest
        super()._join(whole, group)
        largest.copy_(whole[self._local])

    def _quantize(
        self, operand: Operand, matrix: Tensor, how: Cast, *, rowwise: bool, columnwise: bool
    ) -> tuple[QuantizedTensor, Tensor | None]:
        scales, kind = _SCALES[how.granularity], how.format
        if operand is Operand.WEIGHT:
            return cast_stacked_scaled(matrix, kind.dtype, kind.max, scales, rowwise=rowwise, columnwise=columnwise)
        assert self.routes is not None
        return cast_rows_scaled(matrix, self.routes, kind.dtype, kind.max, scales, rowwise=rowwise, columnwise=columnwise)


def _rowwise(x: QuantizedTensor) -> GemmOperand:
    """FP8 with its scales, or the matrix in high precision and None."""
    assert x.rowwise_data is not None
    return x.rowwise_data, x.rowwise_scale_inv
