"""Permutes rows of tokens into the order of their experts, with the cast in the same pass, and back: copies are summed.

A copy of bf16 rows and a cast after it would write and read them once more: 8 bytes an element for 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.experts.routes import TILE, Routes
from octavo.kernels.quantize.cast import cast_row_groups, record_amax
from octavo.kernels.quantize.packed_transpose import store_packed
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor, Quantizer, allocate, of_one_scale
from octavo.kernels.scales import inverse_
from octavo.kernels.tiles import adjacent_columns, cdiv

_GROUPS, _GROUP_COLUMNS, _WARPS = TILE // 4, 64, 4
_TILE_ROWS, _TILE_COLUMNS, _ROW_WARPS = 8, 512, 4
_SUM_TOKENS, _SUM_COLUMNS, _SUM_WARPS = 4, 512, 4


@triton.jit
def _gather_tiles(
    x_ptr, tokens_ptr, experts_ptr, scale_ptr, amax_ptr, rowwise_ptr, columns, stride, experts,
    SKIPS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Rowwise, or only the amax. SKIPS: leave out the rows after the last expert, which are zeros otherwise."""
    across = tl.cdiv(columns, TILE_C)
    first = (tl.program_id(0) // across) * TILE_R
    expert = tl.load(experts_ptr + first // TILE_ROWS)
    if SKIPS and expert >= experts:
        return
    r = first + tl.arange(0, TILE_R)
    c = (tl.program_id(0) % across) * TILE_C + tl.arange(0, TILE_C)
    t = tl.load(tokens_ptr + r)
    inside = (c < columns)[None, :]
    x = tl.load(x_ptr + t[:, None].to(tl.int64) * stride + c[None, :], mask=inside & (t >= 0)[:, None], other=0).to(tl.float32)
    if amax_ptr is not None:
        record_amax(amax_ptr + expert, x)
    if scale_ptr is not None:
        x = x * tl.load(scale_ptr + expert)
    if rowwise_ptr is not None:
        tl.store(rowwise_ptr + r[:, None].to(tl.int64) * columns + c[None, :], x.to(rowwise_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gather_packed(
    x_ptr, tokens_ptr, experts_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, rows, columns, stride, experts,
    GROUPS: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """FP8 columnwise, and optionally rowwise: a tile has the rows of one expert."""
    across = tl.cdiv(columns, TILE_C)
    tile = tl.program_id(0) // across
    expert = tl.load(experts_ptr + tile)
    if expert >= experts:
        return
    g = tile * GROUPS + tl.arange(0, GROUPS)
    c = (tl.program_id(0) % across) * TILE_C + tl.arange(0, TILE_C)
    inside = (g >= 0)[:, None] & (c < columns)[None, :]
    t0, t1 = tl.load(tokens_ptr + g * 4), tl.load(tokens_ptr + g * 4 + 1)
    t2, t3 = tl.load(tokens_ptr + g * 4 + 2), tl.load(tokens_ptr + g * 4 + 3)
    xs = (
        _token_rows(x_ptr, t0, c, stride, inside),
        _token_rows(x_ptr, t1, c, stride, inside),
        _token_rows(x_ptr, t2, c, stride, inside),
        _token_rows(x_ptr, t3, c, stride, inside),
    )
    scale = tl.load(scale_ptr + expert)
    packed, largest, _ = cast_row_groups(
        xs, scale, amax_ptr, None, rowwise_ptr, columnwise_ptr, g, c, rows, columns, inside, GROUPS, TILE_C
    )
    if amax_ptr is not None:
        record_amax(amax_ptr + expert, largest)
    store_packed(packed, columnwise_ptr, g, c, rows, inside)


@triton.jit
def _token_rows(x_ptr, t, c, stride, inside):
    return tl.load(x_ptr + t[:, None].to(tl.int64) * stride + c[None, :], mask=inside & (t >= 0)[:, None], other=0)


@triton.jit
def _add_copies(
    y_ptr, rows_ptr, out_ptr, tokens, columns, stride, TOP_K: tl.constexpr, TILE_T: tl.constexpr, TILE_C: tl.constexpr
):
    across = tl.cdiv(columns, TILE_C)
    t = (tl.program_id(0) // across) * TILE_T + tl.arange(0, TILE_T)
    c = (tl.program_id(0) % across) * TILE_C + tl.arange(0, TILE_C)
    there = t < tokens
    inside = there[:, None] & (c < columns)[None, :]
    total = tl.zeros([TILE_T, TILE_C], tl.float32)
    for i in tl.static_range(TOP_K):
        r = tl.load(rows_ptr + t * TOP_K + i, mask=there, other=0)
        total += tl.load(y_ptr + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0).to(tl.float32)
    out = out_ptr + t[:, None].to(tl.int64) * columns + c[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch(x: Tensor, routes: Routes, quantizer: Quantizer) -> QuantizedTensor:
    """Run the kernel; see `permute`."""
    x = adjacent_columns(x)
    rows, columns = len(routes.tokens), x.shape[1]
    out = allocate_rows(quantizer, rows, columns, x.device)
    if quantizer.columnwise:
        _gather_packed[(rows // TILE * cdiv(columns, _GROUP_COLUMNS),)](
            x, routes.tokens, routes.experts, quantizer.scale, quantizer.amax, out.rowwise_data, out.columnwise_data,
            rows, columns, x.stride(0), len(routes.ends), GROUPS=_GROUPS, TILE_C=_GROUP_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
    elif quantizer.rowwise or quantizer.amax is not None:
        # Without a scale all rows are written: products of other kinds read those after the last expert.
        _gather_tiles[(rows // _TILE_ROWS * cdiv(columns, _TILE_COLUMNS),)](
            x, routes.tokens, routes.experts, quantizer.scale, quantizer.amax, out.rowwise_data,
            columns, x.stride(0), len(routes.ends), SKIPS=quantizer.scale is not None or not quantizer.rowwise,
            TILE_ROWS=TILE, TILE_R=_TILE_ROWS, TILE_C=_TILE_COLUMNS, num_warps=_ROW_WARPS,
        )  # fmt: skip
    return out


def allocate_rows(quantizer: Quantizer, rows: int, columns: int, device: torch.device) -> QuantizedTensor:
    """Memory for the layouts of `quantizer`, [rows, columns] and [columns, rows], with an inverse scale per expert, [E]."""
    out = allocate(quantizer._replace(scale=None), rows, columns, device)
    return of_one_scale(out.rowwise_data, out.columnwise_data, inverse(quantizer.scale))


def inverse(scale: Tensor | None) -> Tensor | None:
    """1 / scale of each expert, float32 [E]; a copy, since the slot's scale may change before backward."""
    return None if scale is None else inverse_(scale, torch.empty_like(scale))


def permute(x: Tensor, routes: Routes, quantizer: Quantizer) -> QuantizedTensor:
    """Copies [R, C] of the rows of x [T, C] in the order of `routes`, stored by `quantizer`, with a scale per expert.

    quantizer: its scale and amax are float32 [E]; columnwise only with a scale.
    """
    if routes.tile == TILE:
        return launch(x, routes, quantizer)
    return quantize_rows(x[routes.tokens.long()].float(), routes, quantizer)


def quantize_rows(rows: Tensor, routes: Routes, quantizer: Quantizer) -> QuantizedTensor:
    """A float32 matrix [R, C] in `quantizer`'s layouts, a scale and an amax per expert, in plain PyTorch: the definition."""
    expert = routes.expert_of_rows
    if quantizer.amax is not None:
        largest = reference.amax(rows, 1)
        quantizer.amax.copy_(quantizer.amax.scatter_reduce(0, expert, largest, "amax"))
    if not (quantizer.rowwise or quantizer.columnwise):
        return NOTHING
    if quantizer.scale is None:
        return QuantizedTensor(rows.to(quantizer.dtype))
    data = reference.cast(rows, quantizer.scale[expert, None], quantizer.dtype, quantizer.fp8_max)
    return of_one_scale(
        data if quantizer.rowwise else None, data.t() if quantizer.columnwise else None, inverse(quantizer.scale)
    )


def add_copies(y: Tensor, rows: Tensor, tile: int) -> Tensor:
    """The sum of each token's rows of y [R, C], in float32 and rounded once: [T, C], of y's dtype.

    rows: whole numbers [T, K], as in `Routes`. tile: `TILE` runs the kernel.
    """
    tokens, top_k = rows.shape
    if tile != TILE:
        return reference.wide(y[rows.long()]).sum(1).to(y.dtype)
    y = adjacent_columns(y)
    out = y.new_empty(tokens, y.shape[1])
    if out.numel():
        _add_copies[(cdiv(tokens, _SUM_TOKENS) * cdiv(y.shape[1], _SUM_COLUMNS),)](
            y, rows, out, tokens, y.shape[1], y.stride(0),
            TOP_K=top_k, TILE_T=_SUM_TOKENS, TILE_C=_SUM_COLUMNS, num_warps=_SUM_WARPS,
        )  # fmt: skip
    return out
