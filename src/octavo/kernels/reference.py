"""Every operation in plain PyTorch: the definition of correct, and what a CPU runs.

Each function computes in float32 and is short enough to be believed by reading. The fused kernels beside this file are tested
against it. Shapes: R rows, C columns, C being the dimension that a product sums over.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
FLOAT32_MAX = torch.finfo(torch.float32).max


def amax(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Largest |x| in float32, NaN ignored; 0 where there is nothing. Shape [] or that of `x` reduced over `dim`."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32) if dim is None else x.float().sum(dim, keepdim=keepdim)
    if dim is None:
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = torch.aminmax(x)  # one pass; a NaN anywhere shows in both
            largest = torch.maximum(-low, high).float()
            if not largest.isnan():
                return largest
        return x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax()
    return x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim, keepdim=keepdim)


def divide(dividend: Tensor | float, divisor: Tensor) -> Tensor:
    """dividend / divisor in float32, correctly rounded, at most the largest float.

    By way of float64, whose 53 bits are enough that rounding twice changes nothing: a compiled float32 division is 2 ulp off.
    """
    if not isinstance(dividend, Tensor):
        dividend = divisor.new_full((), dividend)  # a compiler turns number / tensor into a reciprocal and a product
    return (dividend.double() / divisor.double()).clamp(max=FLOAT32_MAX).float()


def scale_from_amax(largest: Tensor, fp8_max: float, *, margin: int = 0, power_of_two: bool = False) -> Tensor:
    """max · 2^-margin / amax in float32; an infinite scale becomes the largest float, and an amax of 0, inf or NaN gives 1.

    `power_of_two` rounds the scale down to one, which makes scaling itself exact.
    """
    scale = divide(fp8_max * 2.0**-margin, largest)
    if power_of_two:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return torch.where((largest > 0) & largest.isfinite(), scale, torch.ones_like(scale))


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """round_to_nearest_even(clamp(float32(x) · scale, ±max)): NaN stays NaN, ±inf saturates. Same shape, FP8."""
    return (x.float() * scale).clamp(-fp8_max, fp8_max).to(dtype)


def transposed(x: Tensor) -> Tensor:
    """xᵀ: a view, but for compiled code, which cannot save a view of what it also returns."""
    return x.t().clone(memory_format=torch.contiguous_format) if torch.compiler.is_compiling() else x.t()


def cast_rows(x: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    """One scale a row. x [R, C] → FP8 [R, C] and the scales, float32 [R, 1]."""
    scale = scale_from_amax(amax(x, 1, keepdim=True), fp8_max)
    return cast(x, scale, dtype, fp8_max), scale


def cast_blocks(x: Tensor, dtype: torch.dtype, fp8_max: float, rows: int) -> tuple[Tensor, Tensor]:
    """One power-of-two scale for each `rows` × 128 block; the last blocks may be smaller.

    x [R, C] → FP8 [R, C] and the scales, float32 [⌈R/rows⌉, ⌈C/128⌉].
    """
    height, width = x.shape
    padded = torch.nn.functional.pad(x, (0, -width % BLOCK, 0, -height % rows))
    blocks_RrCc = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    scale = scale_from_amax(amax(blocks_RrCc, (1, 3), keepdim=True), fp8_max, power_of_two=True)
    q = cast(blocks_RrCc, scale, dtype, fp8_max).reshape(padded.shape)[:height, :width]
    return q.contiguous(), scale[:, 0, :, 0].clone()


def spread(scale_inv: Tensor, rows: int, shape: tuple[int, int]) -> Tensor:
    """Block scales [⌈R/rows⌉, ⌈C/128⌉] repeated to one an element, [R, C]."""
    return scale_inv.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def update_scales(history: Tensor, scale: Tensor, fp8_max: Tensor, *, algo: str, margin: int) -> tuple[Tensor, Tensor]:
    """One step of delayed scaling for n tensors: history [L, n], scale [n], fp8_max [n] → new history and scale.

    `last` is slot 0. Where it is 0, nothing was cast and nothing changes. Otherwise the largest of `last` and slots 1…L−1 (or
    `last` alone, "most_recent") gives the scale if it is finite and positive, and the history rolls: slot i takes slot i+1,
    the last slot takes `last`, slot 0 is cleared.
    """
    last = history[0]
    largest = last if algo == "most_recent" else torch.cat([history[1:], last[None]]).amax(0)
    rolled = (
        torch.cat([torch.zeros_like(last)[None], history[2:], last[None]]) if len(history) > 1 else torch.zeros_like(history)
    )
    candidate = divide(fp8_max * 2.0**-margin, largest)
    moves = last != 0
    return (
        torch.where(moves, rolled, history),
        torch.where(moves & largest.isfinite() & (largest > 0), candidate, scale),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, in float32. Same shape, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias over the last dimension, in float32. Same shape, float32."""
    return torch.nn.functional.layer_norm(
        x.float(), (x.shape[-1],), weight.float(), None if bias is None else bias.float(), eps
    )


def swiglu(gate_up: Tensor, block: int) -> Tensor:
    """silu(gate) · up in float32; gate and up are interleaved in blocks of `block` columns. [..., 2F] → [..., F]."""
    # Taken apart before it is widened: otherwise a compiler keeps all of it in float32 for backward (14 bytes more for each
    # element of a Llama-8B's hidden states, 30 GiB at 16,384 tokens).
    gate, up = gate_up.unflatten(-1, (-1, 2, block)).unbind(-2)
    return (torch.nn.functional.silu(gate.float()) * up.float()).flatten(-2)


def rope(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotate the two halves of each head by the angles of its position, in float32; the result has x's dtype."""
    x = x_BTHD.float()
    first, second = x.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    return (x * cos_BTD[:, :, None] + rotated * sin_BTD[:, :, None]).to(x_BTHD.dtype)


def cross_entropy(logits_NV: Tensor, target_N: Tensor, ignore_index: int, grad_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of −log softmax(logits)[target] over the targets that count, and its gradient · grad_scale.

    Statistics are float32. Returns a float32 scalar and a gradient [N, V] in the dtype of the logits.
    """
    logits = logits_NV.float()
    real = target_N != ignore_index
    index = target_N.clamp(min=0)[:, None]
    log_probabilities = logits.log_softmax(-1)
    loss = -(log_probabilities.gather(1, index)[:, 0] * real).sum()
    grad = log_probabilities.exp()
    grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=torch.float32))
    return loss, (grad * (real[:, None] * grad_scale)).to(logits_NV.dtype)


def dequantize(data: Tensor, scale_inv: Tensor) -> Tensor:
    """What FP8 elements stand for, in float32 [R, C]: one scale [], one a row [R, 1], or one a block [⌈R/rows⌉, ⌈C/128⌉]."""
    if scale_inv.dim() == 2 and scale_inv.shape != (data.shape[0], 1):
        rows = 1 if scale_inv.shape[0] == data.shape[0] else BLOCK
        scale_inv = spread(scale_inv, rows, (data.shape[0], data.shape[1]))
    return data.float() * scale_inv
