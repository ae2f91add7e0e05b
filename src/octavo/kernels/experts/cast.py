"""Casts of experts' operands: matrices, stacked or separate, with a scale each, and rows with current scales.

Scales of stacked FP8 operands: [E] per matrix, [E, N, 1] per row, [E, ⌈N/128⌉, ⌈K/128⌉] for blocks. Of rows: [E],
[R, 1] or [R, ⌈C/128⌉], and columnwise [E], [E, C, 1] or [C, pieces], where each expert's pieces of 128 rows begin at its first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.experts.permute import inverse
from octavo.kernels.experts.routes import TILE, Routes, on_device
from octavo.kernels.quantize import cast as one
from octavo.kernels.quantize.cast_scaled import Layouts, Scaled, blocks, launch_blocks, launch_rows, rows
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor, Quantizer, of_one_scale
from octavo.kernels.tiles import cdiv

Scales = Literal["row", "block", "square"]
"""A scale for each row, each piece of 128 elements of a row, or each square block of them."""
Matrices = Tensor | Sequence[Tensor]
"""One matrix [N, K] per expert: stacked [E, N, K], or separate tensors of one dtype."""

_GROUPS, _GROUP_COLUMNS, _WARPS = 32, 64, 4
_INDICES = 2**31
"""Elements that the kernels of one matrix can index."""
_TILE_ROWS, _TILE_COLUMNS = 64, 128


@triton.jit
def _cast_stacked(
    x_ptr, addresses_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, rows, columns,
    PACKED: tl.constexpr, HIGH: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """addresses_ptr: of separate matrices, which begin at multiples of 16 bytes; None: they are stacked at x_ptr."""
    matrix = tl.program_id(1).to(tl.int64)
    size = rows.to(tl.int64) * columns
    if addresses_ptr is not None:
        x_ptr = tl.multiple_of(tl.load(addresses_ptr + matrix).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    else:
        x_ptr += matrix * size
    if rowwise_ptr is not None:
        rowwise_ptr += matrix * size
    if columnwise_ptr is not None:
        columnwise_ptr += matrix * size
    if scale_ptr is not None:
        scale_ptr += matrix
    if scale_inv_ptr is not None:
        scale_inv_ptr += matrix
    if amax_ptr is not None:
        amax_ptr += matrix
    if PACKED:
        one.cast_packed(
            x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, rows, columns, columns, None, HIGH, TILE_C
        )
    else:
        one.cast_tiles(
            x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr,
            rows, columns, columns, 1.0, True, HIGH, TILE_C,
        )  # fmt: skip


def launch(weights: Matrices, quantizer: Quantizer) -> QuantizedTensor:
    """Run the kernel; see `cast_stacked`."""
    if isinstance(weights, Tensor):
        weight, addresses = weights.contiguous(), None
    else:
        separate = [matrix.contiguous() for matrix in weights]
        addresses = _addresses(separate)
        weight = torch.stack(separate) if addresses is None else separate[0]
    experts, (n, k) = len(weights), weights[0].shape
    make: dict[str, Any] = {"dtype": quantizer.dtype, "device": weight.device}
    rowwise = torch.empty(experts, n, k, **make) if quantizer.rowwise else None
    columnwise = torch.empty(experts, k, n, **make) if quantizer.columnwise else None
    scale_inv = torch.empty(experts, dtype=torch.float32, device=weight.device)
    packed = quantizer.columnwise and n % 4 == 0
    high, wide = (_GROUPS, _GROUP_COLUMNS) if packed else (_TILE_ROWS, _TILE_COLUMNS)
    tiles = cdiv(n, high * (4 if packed else 1)) * cdiv(k, wide)
    scaled = scale_inv if quantizer.scale is not None else None
    _cast_stacked[(tiles, experts)](
        weight, addresses, quantizer.scale, quantizer.amax, rowwise, columnwise, scaled, n, k,
        PACKED=packed, HIGH=high, TILE_C=wide, num_warps=_WARPS,
    )  # fmt: skip
    return of_one_scale(rowwise, columnwise, scaled)


def cast_stacked(weights: Matrices, quantizer: Quantizer) -> QuantizedTensor:
    """Matrices in FP8 with a scale each, rowwise [E, N, K] and columnwise [E, K, N]; records their amaxes, float32 [E]."""
    if gemm.is_native(weights[0].device):
        return launch(weights, quantizer)
    weight = weights if isinstance(weights, Tensor) else torch.stack(tuple(weights))
    if quantizer.amax is not None:
        quantizer.amax.copy_(torch.maximum(quantizer.amax, reference.amax(weight, (1, 2))))
    if not (quantizer.rowwise or quantizer.columnwise):
        return NOTHING
    assert quantizer.scale is not None
    data = reference.cast(weight, quantizer.scale[:, None, None], quantizer.dtype, quantizer.fp8_max)
    return of_one_scale(
        data if quantizer.rowwise else None, data.transpose(1, 2) if quantizer.columnwise else None, inverse(quantizer.scale)
    )


def launch_scaled(
    weight: Tensor, dtype: torch.dtype, fp8_max: float, scales: Scales, *, rowwise: bool, columnwise: bool
) -> tuple[QuantizedTensor, Tensor | None]:
    """Run the kernel for the rows of all matrices [E, N, K] together, N in whole tiles; see `cast_stacked_scaled`."""
    experts, n, k = weight.shape
    x = weight.reshape(-1, k)
    if scales == "row":
        of_tiles = torch.arange(experts, dtype=torch.int32, device=x.device)[:, None].expand(-1, n // TILE).flatten()
        how: dict[str, Any] = {"experts": of_tiles, "count": experts}
        along, across = launch_rows(x, dtype, fp8_max, rowwise=rowwise, columnwise=columnwise, **how)
    else:
        high = TILE if scales == "square" else 1
        along, across = launch_blocks(x, dtype, fp8_max, high, rowwise=rowwise, columnwise=columnwise)
    row = None if along is None else Scaled(*(part.unflatten(0, (experts, -1)).contiguous() for part in along))
    column = None if across is None else Scaled(*(_by_expert(part, experts) for part in across))
    chosen = column if row is None else row
    of_rows, of_columns = ((None, None) if each is None else (each.data, each.scale_inv) for each in (row, column))
    return QuantizedTensor(*of_rows, *of_columns), None if chosen is None else chosen.scale


def _by_expert(x: Tensor, experts: int) -> Tensor:
    """The part of each expert in a matrix [C, E · n], as [E, C, n]; unchanged if it has three dimensions."""
    return x if x.dim() == 3 else x.unflatten(1, (experts, -1)).transpose(0, 1).contiguous()


def cast_stacked_scaled(
    weights: Matrices, dtype: torch.dtype, fp8_max: float, scales: Scales, *, rowwise: bool, columnwise: bool
) -> tuple[QuantizedTensor, Tensor | None]:
    """Matrices in FP8, with a scale per row or block; also the scales of one layout."""
    n, k = weights[0].shape
    if gemm.is_native(weights[0].device) and n % TILE == 0 and len(weights) * n * k < _INDICES:
        weight = weights if isinstance(weights, Tensor) else torch.stack(tuple(weights))
        return launch_scaled(weight, dtype, fp8_max, scales, rowwise=rowwise, columnwise=columnwise)
    parts = [_scaled(matrix, dtype, fp8_max, scales, rowwise=rowwise, columnwise=columnwise) for matrix in weights]
    along, across = ([part[i] for part in parts] for i in (0, 1))
    row, row_scale, chosen = _stack(along)
    column, column_scale, other = _stack(across)
    return QuantizedTensor(row, row_scale, column, column_scale), chosen if chosen is not None else other


def _addresses(weights: Sequence[Tensor]) -> Tensor | None:
    """The address of each matrix, int64 [E] on its device; None if one begins inside 16 bytes."""
    addresses = [weight.data_ptr() for weight in weights]
    return None if any(address % 16 for address in addresses) else on_device(addresses, weights[0].device, torch.int64)


def _stack(parts: list[Scaled | None]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Data, inverse scales and scales of all matrices."""
    there = [part for part in parts if part is not None]
    if not there:
        return None, None, None
    data = torch.stack([part.data.contiguous().view(torch.uint8) for part in there]).view(there[0].data.dtype)
    return data, torch.stack([part.scale_inv for part in there]), torch.stack([part.scale for part in there])


def _scaled(x: Tensor, dtype: torch.dtype, fp8_max: float, scales: Scales, *, rowwise: bool, columnwise: bool) -> Layouts:
    if scales == "row":
        return rows(x, dtype, fp8_max, rowwise=rowwise, columnwise=columnwise)
    return blocks(x, dtype, fp8_max, TILE if scales == "square" else 1, rowwise=rowwise, columnwise=columnwise)


def cast_rows_scaled(
    x: Tensor, routes: Routes, dtype: torch.dtype, fp8_max: float, scales: Scales, *, rowwise: bool, columnwise: bool
) -> tuple[QuantizedTensor, Tensor | None]:
    """Rows [R, C] in FP8 with their scales; columnwise scales depend only on one expert's values. Also the scales."""
    if scales == "block" and routes.tile == TILE:
        along, across = blocks(x, dtype, fp8_max, 1, rowwise=rowwise, columnwise=columnwise)
    elif routes.tile == TILE and gemm.is_native(x.device):
        how: dict[str, Any] = {"experts": routes.experts, "count": len(routes.ends)}
        along, across = launch_rows(x, dtype, fp8_max, rowwise=rowwise, columnwise=columnwise, **how)
    elif routes.tile == TILE:
        along = rows(x, dtype, fp8_max, rowwise=True, columnwise=False)[0] if rowwise else None
        across = _by_columns(x, routes, dtype, fp8_max) if columnwise else None
    else:
        parts = [
            _scaled(part, dtype, fp8_max, scales, rowwise=rowwise, columnwise=columnwise) for part in x.split(routes.splits)
        ]
        along = _joined([part[0] for part in parts], 0, 0)
        across = _joined([part[1] for part in parts], 1, None if scales == "row" else 1)
    chosen = along if along is not None else across
    row, column = ((None, None) if each is None else (each.data, each.scale_inv) for each in (along, across))
    return QuantizedTensor(*row, *column), None if chosen is None else chosen.scale


def _joined(parts: list[Scaled | None], dim: int, scale_dim: int | None) -> Scaled | None:
    """The experts' parts side by side; their scales too, or stacked (None)."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    data = torch.cat([part.data.view(torch.uint8) for part in there], dim).view(there[0].data.dtype)
    scale_inv, scale = ([getattr(part, name) for part in there] for name in ("scale_inv", "scale"))
    if scale_dim is None:
        return Scaled(data, torch.stack(scale_inv), torch.stack(scale))
    return Scaled(data, torch.cat(scale_inv, scale_dim), torch.cat(scale, scale_dim))


def _by_columns(x: Tensor, routes: Routes, dtype: torch.dtype, fp8_max: float) -> Scaled:
    """Columnwise with a scale for each column of each expert; rows after the last expert's belong to no expert."""
    experts = len(routes.ends)
    tiles = reference.amax(x.unflatten(0, (-1, TILE)), 1)
    index = routes.experts.long()[:, None].expand_as(tiles)
    largest = tiles.new_zeros(experts + 1, x.shape[1]).scatter_reduce(0, index, tiles, "amax")[:experts]
    scale = reference.scale_from_amax(largest, fp8_max)
    data = reference.cast(x, scale[routes.expert_of_rows], dtype, fp8_max).t().contiguous()
    return Scaled(data, reference.divide(1.0, scale)[:, :, None], scale[:, :, None])
