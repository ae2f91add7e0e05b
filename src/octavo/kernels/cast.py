"""Delayed scaling's cast: one read of a tensor gives FP8 in both layouts, and the amax for the next scale.

A product sums over the last dimension of both its operands, so a tensor that enters two products is needed as it is and
transposed. Doing both in one pass costs 2 bytes read and 2 written an element, against 7 for amax, cast and transpose apart.
On devices without FP8 conversions in Triton the reference runs, and the transpose is a view.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference

# Of the tiles tried at 16384 × 4096 on an H200 the fastest: 3.6 TB/s from bf16, 3.9 from float32.
_TILE_ROWS, _TILE_COLUMNS, _WARPS = 64, 128, 4


@triton.jit
def _cast_transpose(
    x_ptr, scale_ptr, amax_ptr, row_ptr, column_ptr, scale_inv_ptr,
    rows, columns, stride, one,
    FP8_MAX: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, TWICE: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(columns, TILE_C)
    r = (tile // tiles_across) * TILE_R + tl.arange(0, TILE_R)
    c = (tile % tiles_across) * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    if tile == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    if AMAX:
        magnitude = tl.where(x == x, tl.abs(x), 0.0)
        # Non-negative floats order as their bits do, and an integer maximum is one instruction.
        tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), tl.max(magnitude).to(tl.int32, bitcast=True), sem="relaxed")
    scaled = x * scale
    # A comparison with NaN is false both times, so NaN passes through the clamp, as it must.
    scaled = tl.where(scaled > FP8_MAX, FP8_MAX, scaled)
    scaled = tl.where(scaled < -FP8_MAX, -FP8_MAX, scaled)
    q = scaled.to(row_ptr.dtype.element_ty)
    tl.store(row_ptr + r[:, None].to(tl.int64) * columns + c[None, :], q, mask=inside)
    if COLUMN:
        if TWICE:
            # The ptxas of CUDA 12.9 that Triton brings loses bytes when one conversion from float32 feeds both stores. A factor
            # that it cannot know to be 1 makes this a conversion of its own, at no cost that shows.
            q = (scaled * one).to(column_ptr.dtype.element_ty)
        tl.store(column_ptr + c[:, None].to(tl.int64) * rows + r[None, :], tl.trans(q), mask=tl.trans(inside))


def launch(
    x: Tensor, scale: Tensor, amax: Tensor | None, dtype: torch.dtype, fp8_max: float, column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel; arguments and results as in `cast`, but an empty tensor for a transpose that was not asked for."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    q = torch.empty(rows, columns, dtype=dtype, device=x.device)
    q_t = torch.empty(columns if column else 0, rows, dtype=dtype, device=x.device)
    scale_inv = torch.empty((), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return q, q_t, scale_inv.copy_(reference.divide(1.0, scale))
    grid = (triton.cdiv(rows, _TILE_ROWS) * triton.cdiv(columns, _TILE_COLUMNS),)
    _cast_transpose[grid](
        x, scale, amax, q, q_t, scale_inv, rows, columns, x.stride(0), 1.0,
        FP8_MAX=fp8_max, COLUMN=column, AMAX=amax is not None, TWICE=x.dtype == torch.float32,
        TILE_R=_TILE_ROWS, TILE_C=_TILE_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return q, q_t, scale_inv


def cast(
    x: Tensor, scale: Tensor, amax: Tensor | None, dtype: torch.dtype, fp8_max: float, column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast with a known scale, and record the amax.

    x: [R, C]. scale: float32 []. amax: float32 [], raised to the largest |x| in place; None records nothing.
    Returns FP8 [R, C], its transpose [C, R] if `column` asks for it (else an empty tensor), and 1 / scale.
    """
    if gemm.is_native(x.device):
        return launch(x, scale, amax, dtype, fp8_max, column)
    if amax is not None:
        amax.copy_(torch.maximum(amax, reference.amax(x)))
    q = reference.cast(x, scale, dtype, fp8_max)
    return q, q.t() if column else q.new_empty(0, x.shape[0]), reference.divide(1.0, scale)


@torch.library.custom_op("octavo::cast_scaled", mutates_args=())
def cast_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, column: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`cast` without an amax, as one operator to a compiler."""
    return apart(cast(x, scale, None, dtype, fp8_max, column))


@cast_scaled.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, column: bool) -> tuple[Tensor, Tensor, Tensor]:
    return like_cast(x, dtype, column)


def apart(results: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `cast` in memory of their own: an operator may not return views of one tensor."""
    q, q_t, scale_inv = results
    return q, q_t if q_t.is_contiguous() else q_t.contiguous(), scale_inv


def like_cast(x: Tensor, dtype: torch.dtype, column: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the results of `cast`, for a compiler."""
    rows, columns = x.shape
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(columns if column else 0, rows, dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )
