"""Products of FP8 matrices: every rule about layouts, padding and scales of a device is in this file.

Both operands sum over their last dimension (`a · bᵀ`), which is the one layout that Hopper's FP8 units take. On a GPU with
FP8 units the product is cuBLAS's through `torch._scaled_mm`; elsewhere the same numbers come from bf16 or float32 products:
FP8 values are exact in bf16, so only the order of the float32 sums differs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels import reference

ALIGNMENT = 16
"""cuBLAS wants the summed dimension and the columns of the result in multiples of this many elements (16 bytes)."""


@torch.compiler.assume_constant_result
def is_native(device: torch.device) -> bool:
    """Whether products of FP8 matrices run in FP8 units on this device (compute capability 8.9 or more)."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_mm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    *,
    out_dtype: torch.dtype,
    precise: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """(a · a_scale_inv) (b · b_scale_inv)ᵀ + bias, accumulated in float32.

    a: FP8 [M, C]. b: FP8 [N, C]. Scales as in `reference.dequantize`. bias: [N]. Returns [M, N] in `out_dtype`.
    precise: float32 accumulation of every partial sum; otherwise Hopper's fast mode, which keeps 14 bits inside a tile
    (0.27% of the result's norm over 16,384 summands, and about 7% faster).
    """
    if 0 in (*a.shape, *b.shape):
        empty = a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
        return empty if bias is None else empty + bias.to(out_dtype)
    if not is_native(a.device):
        return _emulated(a, a_scale_inv, b, b_scale_inv, out_dtype, bias)
    rowwise = _by_row(a, a_scale_inv) and _by_row(b, b_scale_inv)
    if not rowwise and a_scale_inv.dim() > 0:
        return _blockwise(a, a_scale_inv, b, b_scale_inv, out_dtype, bias)
    columns = b.shape[0]
    a, b = _pad(a, rows=False), _pad(b, rows=True)
    if rowwise:
        b_scale_inv = functional.pad(b_scale_inv, (0, 0, 0, b.shape[0] - columns), value=1.0).t()
    # Row scales come with a bf16 result only, and so does a bias in the epilogue.
    product_dtype = torch.bfloat16 if rowwise else out_dtype
    fused_bias = bias if bias is not None and product_dtype == torch.bfloat16 and b.shape[0] == columns else None
    out = torch._scaled_mm(
        a,
        b.t(),
        scale_a=a_scale_inv,
        scale_b=b_scale_inv,
        bias=None if fused_bias is None else fused_bias.to(product_dtype),
        out_dtype=product_dtype,
        use_fast_accum=not precise,
    )
    if out.shape[1] != columns:
        out = out[:, :columns].contiguous()
    if bias is not None and fused_bias is None:
        out = out + bias.to(out.dtype)
    # Not `.to` where there is nothing to convert: an alias of an intermediate as the result of an autograd function loses its
    # gradient when torch 2.11 compiles it.
    return out if out.dtype == out_dtype else out.to(out_dtype)


def _blockwise(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Blocks on a GPU: their scales are powers of two, so what they stand for is exact in bf16, which multiplies fast."""
    wide_a, wide_b = (reference.dequantize(*operand).bfloat16() for operand in ((a, a_scale_inv), (b, b_scale_inv)))
    with torch.autocast(a.device.type, enabled=False):
        out = wide_a @ wide_b.t() if out_dtype == torch.bfloat16 else torch.mm(wide_a, wide_b.t(), out_dtype=torch.float32)
    if bias is not None:
        out = out + bias.float()
    return out if out.dtype == out_dtype else out.to(out_dtype)


def _by_row(x: Tensor, scale_inv: Tensor) -> bool:
    return scale_inv.shape == (x.shape[0], 1)


def _pad(x: Tensor, *, rows: bool) -> Tensor:
    """Row-major, the last dimension (and the rows, if asked) filled up with zeros to multiples of 16."""
    more_rows, more_columns = -x.shape[0] % ALIGNMENT if rows else 0, -x.shape[1] % ALIGNMENT
    if more_rows or more_columns:
        return functional.pad(x.view(torch.uint8), (0, more_columns, 0, more_rows)).view(x.dtype)
    return x if x.is_contiguous() else x.contiguous()


def _emulated(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    tensorwise = a_scale_inv.dim() == 0 and b_scale_inv.dim() == 0
    if tensorwise and a.device.type == "cpu" and out_dtype == torch.bfloat16 and not torch.compiler.is_compiling():
        # oneDNN applies alpha to its float32 sums, so there is one rounding, as on a GPU; 2.5 × as fast as float32.
        alpha = float(a_scale_inv * b_scale_inv)
        start = a.new_zeros((), dtype=torch.bfloat16) if bias is None else bias.to(torch.bfloat16)
        beta = 0 if bias is None else 1
        return torch.addmm(start.expand(b.shape[0]), _widen(a), _widen(b).t(), beta=beta, alpha=alpha)
    # PyTorch's autocast would round these sums before they are scaled, and in float16 they would overflow.
    with torch.autocast(a.device.type, enabled=False):
        if tensorwise:
            out = (a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv)
        elif _by_row(a, a_scale_inv) and _by_row(b, b_scale_inv):
            out = (a.float() @ b.float().t()) * a_scale_inv * b_scale_inv.t()
        else:
            out = reference.dequantize(a, a_scale_inv) @ reference.dequantize(b, b_scale_inv).t()
    if bias is not None:
        out = out + bias.float()
    return out if out.dtype == out_dtype else out.to(out_dtype)


@functools.cache
def _bf16_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).bfloat16()


def _widen(x: Tensor) -> Tensor:
    """FP8 to bf16 on a CPU, exactly, through a table: a third of the time of PyTorch's conversion."""
    codes = x.contiguous().view(torch.uint8) if x.is_contiguous() else x.t().contiguous().view(torch.uint8)
    wide = _bf16_values(x.dtype).index_select(0, codes.flatten().int()).view(codes.shape)
    return wide if x.is_contiguous() else wide.t()
