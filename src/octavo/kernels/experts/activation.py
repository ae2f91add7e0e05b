"""Activations of experts' rows: each row's result times its weight, cast by the scale of its expert.

The router's weight multiplies the input of the second product instead of its output: that output is then neither saved nor
reread for the weight's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.kernels import activation, reference
from octavo.kernels.experts.permute import allocate_rows, quantize_rows
from octavo.kernels.experts.routes import TILE, Routes
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer
from octavo.kernels.tiles import adjacent_columns, cdiv


def _arguments(name: str, columns: int, weights: Tensor, routes: Routes, tiles: activation.Tiles) -> dict[str, Any]:
    return {
        "weights_ptr": weights, "experts_ptr": routes.experts, "experts": len(routes.ends), "EXPERT_ROWS": TILE,
        "BLOCK": 0, "TILE_R": tiles.rows, "TILE_C": tiles.columns, "num_warps": tiles.warps, **activation.constants(name),
    }  # fmt: skip


def launch(name: str, x: Tensor, weights: Tensor, routes: Routes, quantizer: Quantizer) -> QuantizedTensor:
    """Run the kernel; see `expert_activation`."""
    x = adjacent_columns(x)
    rows, columns = x.shape[0], x.shape[1] // (2 if activation.is_gated(name) else 1)
    if quantizer.columnwise:
        tiles = activation.FORWARD_GATED if activation.is_gated(name) else activation.FORWARD
    else:
        tiles = activation.FORWARD_ROWS
    out = allocate_rows(quantizer, rows, columns, x.device)
    activation.activation_tiles[(cdiv(rows, tiles.rows) * cdiv(columns, tiles.columns),)](
        x, quantizer.scale, quantizer.amax, out.rowwise_data, out.columnwise_data, out.scale_inv,
        rows, columns, x.stride(0), 1.0, **_arguments(name, columns, weights, routes, tiles),
    )  # fmt: skip
    return out


def launch_backward(
    name: str, dy: Tensor, x: Tensor, weights: Tensor, routes: Routes, quantizer: Quantizer, recompute: Quantizer | None
) -> tuple[QuantizedTensor, QuantizedTensor | None, Tensor]:
    """Run the kernel; see `expert_activation_backward`."""
    x, dy = adjacent_columns(x), adjacent_columns(dy)
    (rows, columns), width = dy.shape, x.shape[1]
    y_quantizer = recompute or Quantizer(torch.float32, rowwise=False)
    dx, y = allocate_rows(quantizer, rows, width, x.device), allocate_rows(y_quantizer, rows, columns, x.device)
    packed = activation.packs(quantizer, recompute)
    tiles = activation.BACKWARD_GATED if activation.is_gated(name) else activation.BACKWARD
    tiles = activation.PACKED if packed else tiles
    across = cdiv(columns, tiles.columns)
    d_weights = torch.empty(across, rows, dtype=torch.float32, device=x.device)
    run, one = (activation.activation_backward_packed, {}) if packed else (activation.activation_backward_tiles, {"one": 1.0})
    run[(cdiv(rows, tiles.rows) * across,)](
        dy, x, quantizer.scale, quantizer.amax, dx.rowwise_data, dx.columnwise_data, dx.scale_inv,
        y_quantizer.scale, y_quantizer.amax, y.rowwise_data, y.columnwise_data, y.scale_inv, None,
        rows, columns, dy.stride(0), x.stride(0), **one,
        d_weights_ptr=d_weights, **_arguments(name, columns, weights, routes, tiles),
    )  # fmt: skip
    return dx, None if recompute is None else y, d_weights.sum(0)


def expert_activation(name: str, x: Tensor, weights: Tensor, routes: Routes, quantizer: Quantizer) -> QuantizedTensor:
    """An activation [R, F] times the weight of each row, computed in float32 and stored by `quantizer`.

    name: an activation of `reference.activation_named`. x: [R, F], or [R, 2F], all gates before all ups. weights: float32 [R].
    quantizer: with a scale and an amax per expert, float32 [E].
    """
    if routes.tile == TILE:
        return launch(name, x, weights, routes, quantizer)
    return quantize_rows(reference.activation(name, x, _block(name, x)) * weights[:, None], routes, quantizer)


def expert_activation_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    routes: Routes,
    quantizer: Quantizer,
    *,
    recompute: Quantizer | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor | None, Tensor]:
    """The gradients of `expert_activation`'s x, stored by `quantizer`, and of its weights, float32 [R].

    dy: [R, F]. recompute: in the same pass the result of forward, with its bits, stored by this quantizer. Rows after the
    last expert's are undefined.
    """
    if routes.tile == TILE:
        return launch_backward(name, dy, x, weights, routes, quantizer, recompute)
    y, weighted = reference.activation(name, x, _block(name, x)), reference.wide(dy) * weights[:, None]
    dx = quantize_rows(reference.activation_backward(name, weighted, x, _block(name, x)), routes, quantizer)
    recomputed = None if recompute is None else quantize_rows(y * weights[:, None], routes, recompute)
    return dx, recomputed, (reference.wide(dy) * y).sum(1)


def _block(name: str, x: Tensor) -> int:
    return x.shape[1] // 2 if activation.is_gated(name) else x.shape[1]
