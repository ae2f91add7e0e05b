"""`Quantizer`: dtype, scale and layouts of a kernel's result; `QuantizedTensor`: the result, an operand of FP8 products.

An FP8 product sums over the last dimension of both operands, so a matrix in two products is needed as stored (rowwise) and
transposed (columnwise). The kernel that computes a value stores both layouts itself: the value is never written in bf16. Both
types hold plain tensors, which autograd saves. `octavo.fp8.quantizer` chooses dtype, scale and layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels import reference


class Quantizer(NamedTuple):
    """Storage of a kernel's float32 result, a matrix [R, C].

    Attributes:
        dtype: an FP8 dtype; or bfloat16, float16 or float32, for which `scale` is None.
        fp8_max: the largest value of the FP8 dtype.
        scale: float32 [], multiplies the result before rounding to FP8.
        amax: float32 [], raised in place to the largest |result| before scaling; None records nothing.
        rowwise, columnwise: store the matrix as it is, and transposed. With neither, only the amax is measured.
    """

    dtype: torch.dtype
    fp8_max: float = 0.0
    scale: Tensor | None = None
    amax: Tensor | None = None
    rowwise: bool = True
    columnwise: bool = False


class QuantizedTensor(NamedTuple):
    """A matrix [R, C] as operand of products: in FP8, in one or both layouts, or in high precision.

    Attributes:
        rowwise_data: FP8 [R, C], for products that sum over C; without a scale, in high precision.
        rowwise_scale_inv: float32, multiplies FP8 back: [] | [R, 1] | [⌈R/rows⌉, ⌈C/128⌉].
        columnwise_data: FP8 [C, R], for products that sum over R.
        columnwise_scale_inv: as `rowwise_scale_inv`, of the transposed matrix; with one scale per tensor the same tensor.
    """

    rowwise_data: Tensor | None = None
    rowwise_scale_inv: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None

    @property
    def rowwise(self) -> tuple[Tensor, Tensor]:
        """FP8 [R, C] with its scales, an operand of `octavo.kernels.gemm`."""
        assert self.rowwise_data is not None
        assert self.rowwise_scale_inv is not None
        return self.rowwise_data, self.rowwise_scale_inv

    @property
    def columnwise(self) -> tuple[Tensor, Tensor]:
        """FP8 [C, R] with its scales."""
        assert self.columnwise_data is not None
        assert self.columnwise_scale_inv is not None
        return self.columnwise_data, self.columnwise_scale_inv

    @property
    def high_precision(self) -> Tensor:
        """The matrix [R, C] in bfloat16, float16 or float32."""
        assert self.rowwise_data is not None
        assert self.rowwise_scale_inv is None
        return self.rowwise_data

    @property
    def scale_inv(self) -> Tensor | None:
        """The inverse of the scale of all elements, float32 []; None in high precision."""
        return self.columnwise_scale_inv if self.rowwise_scale_inv is None else self.rowwise_scale_inv


NOTHING = QuantizedTensor()
"""Placeholder operand of a product that is not computed."""


def of_one_scale(rowwise: Tensor | None, columnwise: Tensor | None, scale_inv: Tensor | None) -> QuantizedTensor:
    """One or both layouts, rowwise [R, C] and columnwise [C, R], with a common `scale_inv`, [] or of each expert [E]."""
    return QuantizedTensor(
        rowwise, None if rowwise is None else scale_inv, columnwise, None if columnwise is None else scale_inv
    )  # fmt: skip


def allocate(quantizer: Quantizer, rows: int, columns: int, device: torch.device) -> QuantizedTensor:
    """Uninitialised memory for the layouts of `quantizer`, of a matrix [rows, columns]."""
    rowwise = torch.empty(rows, columns, dtype=quantizer.dtype, device=device) if quantizer.rowwise else None
    columnwise = torch.empty(columns, rows, dtype=quantizer.dtype, device=device) if quantizer.columnwise else None
    scale_inv = None if quantizer.scale is None else torch.empty((), dtype=torch.float32, device=device)
    return of_one_scale(rowwise, columnwise, scale_inv)


def without_elements(quantizer: Quantizer, out: QuantizedTensor) -> QuantizedTensor:
    """`out` for a matrix [R, C] without elements: no kernel is launched, only the scale is written."""
    if out.scale_inv is not None and quantizer.scale is not None:
        out.scale_inv.copy_(reference.divide(1.0, quantizer.scale))
    return out


def quantize(x: Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """A float32 matrix [R, C] in `quantizer`'s layouts, in plain PyTorch: the definition, and the path without Triton."""
    if quantizer.amax is not None:
        quantizer.amax.copy_(torch.maximum(quantizer.amax, reference.amax(x)))
    if not (quantizer.rowwise or quantizer.columnwise):
        return NOTHING
    if quantizer.scale is None:
        data, scale_inv = x.to(quantizer.dtype), None
    else:
        data = reference.cast(x, quantizer.scale, quantizer.dtype, quantizer.fp8_max)
        scale_inv = reference.divide(1.0, quantizer.scale)
    columnwise = data.t().contiguous() if quantizer.columnwise else None
    return of_one_scale(data if quantizer.rowwise else None, columnwise, scale_inv)
