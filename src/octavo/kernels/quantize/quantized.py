"""`Quantizer`, which tells a kernel how to store its result, and `QuantizedTensor`, the result in the layouts of FP8 products.

An FP8 product sums over the last dimension of both operands, so a matrix that enters two products is needed as it is (rowwise)
and transposed (columnwise). The kernel that computes a value stores both layouts itself: the value is never written in bf16.
Both types hold plain tensors, so that kernels take them apart and autograd saves them. Choosing dtype, scale and layouts is the
job of `octavo.fp8.quantizer`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels import reference


class Quantizer(NamedTuple):
    """How a kernel stores its float32 result, a matrix [R, C].

    Attributes:
        dtype: an FP8 dtype; or bfloat16, float16 or float32, for which `scale` is None.
        fp8_max: the largest value of the FP8 dtype.
        scale: float32 [], multiplies the result before it is rounded to FP8.
        amax: float32 [], raised in place to the largest |result| before scaling; None records nothing.
        rowwise: store the matrix as it is. columnwise: store it transposed. With neither, only the amax is measured.
    """

    dtype: torch.dtype
    fp8_max: float = 0.0
    scale: Tensor | None = None
    amax: Tensor | None = None
    rowwise: bool = True
    columnwise: bool = False


class QuantizedTensor(NamedTuple):
    """A matrix [R, C] as operand of products: in FP8, in one layout or both, or in high precision.

    Attributes:
        rowwise_data: FP8 [R, C], for products that sum over C; without a scale, the matrix in bfloat16, float16 or float32.
        rowwise_scale_inv: float32, multiplies FP8 back: [] | [R, 1] | [⌈R/rows⌉, ⌈C/128⌉].
        columnwise_data: FP8 [C, R], for products that sum over R.
        columnwise_scale_inv: as `rowwise_scale_inv`, of the transposed matrix; with one scale a tensor the same tensor.
    """

    rowwise_data: Tensor | None = None
    rowwise_scale_inv: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None

    @property
    def rowwise(self) -> tuple[Tensor, Tensor]:
        """FP8 [R, C] with its scales, as `octavo.kernels.gemm` takes an operand."""
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
        """The matrix [R, C] that is not in FP8."""
        assert self.rowwise_data is not None
        assert self.rowwise_scale_inv is None
        return self.rowwise_data

    @property
    def scale_inv(self) -> Tensor | None:
        """The inverse of the one scale of all elements, float32 []; None in high precision."""
        return self.columnwise_scale_inv if self.rowwise_scale_inv is None else self.rowwise_scale_inv


NOTHING = QuantizedTensor()
"""Neither layout: the operand of a product that is not computed."""


def of_one_scale(rowwise: Tensor | None, columnwise: Tensor | None, scale_inv: Tensor | None) -> QuantizedTensor:
    """The layouts that are there (None: not), which share `scale_inv`."""
    return QuantizedTensor(
        rowwise, None if rowwise is None else scale_inv, columnwise, None if columnwise is None else scale_inv
    )


def allocate(quantizer: Quantizer, rows: int, columns: int, device: torch.device) -> QuantizedTensor:
    """Uninitialised memory for the layouts of `quantizer`, of a matrix [rows, columns]."""
    dtype, scaled = quantizer.dtype, quantizer.scale is not None and (quantizer.rowwise or quantizer.columnwise)
    rowwise = torch.empty(rows, columns, dtype=dtype, device=device) if quantizer.rowwise else None
    columnwise = torch.empty(columns, rows, dtype=dtype, device=device) if quantizer.columnwise else None
    return of_one_scale(rowwise, columnwise, torch.empty((), dtype=torch.float32, device=device) if scaled else None)


def without_elements(quantizer: Quantizer, out: QuantizedTensor) -> QuantizedTensor:
    """`out` for a matrix without elements, for which no kernel is launched: only its scale is written."""
    if out.scale_inv is not None and quantizer.scale is not None:
        out.scale_inv.copy_(reference.divide(1.0, quantizer.scale))
    return out


def quantize(x: Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """A float32 matrix [R, C] in plain PyTorch: the definition of `Quantizer`, and what devices without Triton run."""
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
