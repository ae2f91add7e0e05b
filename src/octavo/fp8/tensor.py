"""A matrix in FP8 with the scales that turn it back: plain data, so that it can be saved for backward as two tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo.kernels import reference


class Quantized(NamedTuple):
    """An operand of a product, laid out so that the product sums over its last dimension.

    data: FP8 [R, C], any strides. scale_inv: float32, what to multiply by: [] | [R, 1] | [⌈R/rows⌉, ⌈C/128⌉].
    """

    data: Tensor
    scale_inv: Tensor

    def dequantize(self) -> Tensor:
        """The values that the FP8 elements stand for, float32 [R, C]."""
        return reference.dequantize(self.data, self.scale_inv)


class GatheredWeight(NamedTuple):
    """A whole FP8 weight on a rank that keeps a part of it; the column form is filled for backward only."""

    row: Quantized
    column: Quantized
