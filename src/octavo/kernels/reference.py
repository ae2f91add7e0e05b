"""Every operation in plain PyTorch: the definition of correct for the fused kernels, and the implementation for CPUs.

Each function computes in float32, or in float64 of float64 tensors, and is short enough to be checked by reading. FP8 scales
are float32, and casts round float32.
Shapes: R rows, C columns, the dimension that a product sums over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
FLOAT32_MAX = torch.finfo(torch.float32).max


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if x is float64."""
    return x if x.dtype == torch.float64 else x.float()


def amax(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Largest |x| in float32, NaN ignored; 0 without elements. Shape [] or that of `x` reduced over `dim`."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32) if dim is None else x.float().sum(dim, keepdim=keepdim)
    if dim is None and x.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = torch.aminmax(x)  # one pass; a NaN anywhere shows in both
        largest = torch.maximum(-low, high).float()
        if not largest.isnan():
            return largest
    magnitude = x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
    return magnitude.amax() if dim is None else magnitude.amax(dim, keepdim=keepdim)


def divide(dividend: Tensor | float, divisor: Tensor) -> Tensor:
    """dividend / divisor in float32, correctly rounded, at most the largest float."""
    # A compiled float32 division is 2 ulp off. Float64 has enough bits that rounding twice gives the same result.
    if not isinstance(dividend, Tensor):
        dividend = divisor.new_full((), dividend)  # a compiler turns number / tensor into a reciprocal and a product
    return (dividend.double() / divisor.double()).clamp(max=FLOAT32_MAX).float()


def scale_from_amax(largest: Tensor, fp8_max: float, *, power_of_two: bool = False) -> Tensor:
    """fp8_max / amax in float32; an infinite scale becomes the largest float, and an amax of 0, inf or NaN gives 1.

    power_of_two: rounded down to one, so that scaling is exact.
    """
    scale = divide(fp8_max, largest)
    if power_of_two:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return torch.where((largest > 0) & largest.isfinite(), scale, torch.ones_like(scale))


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """round_to_nearest_even(clamp(float32(x) · scale, ±max)): NaN stays NaN, ±inf saturates. Same shape, FP8."""
    return (x.float() * scale).clamp(-fp8_max, fp8_max).to(dtype)


def transposed(x: Tensor) -> Tensor:
    """x [R, C] as [C, R]: a view; a copy in compiled code, which cannot save a view of a tensor that it also returns."""
    return x.t().clone(memory_format=torch.contiguous_format) if torch.compiler.is_compiling() else x.t()


def cast_rows(
    x: Tensor, dtype: torch.dtype, fp8_max: float, join: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """One scale per row. x [R, C] → FP8 [R, C] and the scales, float32 [R, 1]. join: raises the amaxes, in place."""
    largest = amax(x, 1, keepdim=True)
    scale = scale_from_amax(largest if join is None else join(largest.contiguous()), fp8_max)
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


def update_scales(history: Tensor, scale: Tensor, fp8_max: Tensor, *, algo: str, margin: int) -> tuple[Tensor, Tensor]:
    """One step of delayed scaling for n tensors: history [L, n], scale [n], fp8_max [n] → new history and scale.

    If slot 0 is 0, nothing was cast and nothing changes. Otherwise the largest slot ("most_recent": slot 0) gives the scale
    if it is finite and positive, and the history rolls: slot i takes slot i+1, the last one slot 0, which is cleared.
    """
    last = history[0]
    moves = last != 0
    largest = last if algo == "most_recent" else torch.cat([history[1:], last[None]]).amax(0)
    rolled = torch.cat([torch.zeros_like(last)[None], history[2:], last[None]])[: len(history)]
    candidate = divide(fp8_max * 2.0**-margin, largest)
    return (
        torch.where(moves, rolled, history),
        torch.where(moves & largest.isfinite() & (largest > 0), candidate, scale),
    )


def gain(weight: Tensor, *, zero_centered: bool) -> Tensor:
    """The factors [C] of a norm, float32: weight, or 1 + weight."""
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return 1 + weight if zero_centered else weight


def norm(
    kind: str, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of h [..., C] over C, float32, and its statistics for backward, float32.

    kind: "RMSNorm", h / √(mean(h²) + eps) · weight, with the statistics 1/σ [...]; or "LayerNorm", (h − mean) /
    √(variance + eps) · weight + bias, with mean and 1/σ [2, ...]. zero_centered: 1 + weight instead of weight.
    """
    dtype = torch.promote_types(h.dtype, torch.float32)
    h, w = h.to(dtype), gain(weight, zero_centered=zero_centered)
    b = None if bias is None else bias.to(dtype)
    if kind == "LayerNorm":
        normed, mean, rstd = torch.native_layer_norm(h, (h.shape[-1],), w, b, eps)
        return normed, torch.stack((mean[..., 0], rstd[..., 0]))
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    normed = h * rstd * w
    return normed if b is None else normed + b, rstd[..., 0]


def norm_backward(
    kind: str, dy: Tensor, h: Tensor, weight: Tensor, stats: Tensor, d_residual: Tensor | None, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `norm`'s h, [R, C], weight and bias, [C] (None: an RMSNorm's bias), in float32.

    dy: [R, C], of the normed result. stats: those of `norm`. d_residual: [R, C], the gradient of h by other paths.
    """
    dtype = torch.promote_types(h.dtype, torch.float32)
    dy, h = dy.to(dtype), h.to(dtype)
    centred, grad = kind == "LayerNorm", dy * gain(weight, zero_centered=zero_centered)
    rstd = (stats[1] if centred else stats)[:, None]
    normed = (h - stats[0, :, None]) * rstd if centred else h * rstd
    dh = grad - normed * (grad * normed).mean(-1, keepdim=True)
    if centred:
        dh -= grad.mean(-1, keepdim=True)
    dh *= rstd
    dh = dh if d_residual is None else dh + d_residual.to(dtype)
    return dh, (dy * normed).sum(0), dy.sum(0) if centred else None


def _silu_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _gelu_slope(x: Tensor) -> Tensor:
    return torch.special.ndtr(x) + x * torch.exp(-0.5 * x.square()) * (2 * torch.pi) ** -0.5


def _quick_gelu(x: Tensor, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _quick_gelu_slope(x: Tensor, alpha: float = 1.702) -> Tensor:
    sigmoid = torch.sigmoid(alpha * x)
    return sigmoid * (1 + alpha * x * (1 - sigmoid))


def _sigmoid_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 - sigmoid)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    # ½(1 + tanh z) is sigmoid(2z), which is 0 or 1 long before the bound, so that finite elements never give ∞ · 0.
    square, twice = x.square().clamp(max=1e4), 2 * (2 / torch.pi) ** 0.5
    sigmoid = torch.sigmoid(twice * x * (1 + 0.044715 * square))
    return x * sigmoid, sigmoid + x * sigmoid * (1 - sigmoid) * twice * (1 + 3 * 0.044715 * square)


CURVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # PyTorch's gelu is 17% off at −5 on a CPU, and NaN at ∞; ndtr is the normal distribution's ½(1 + erf(x/√2)).
    "gelu": (lambda x: x * torch.special.ndtr(x), _gelu_slope),
    "gelu_tanh": (lambda x: _gelu_tanh(x)[0], lambda x: _gelu_tanh(x)[1]),
    "quick_gelu": (_quick_gelu, _quick_gelu_slope),
    "relu": (torch.relu, lambda x: torch.where(x.isnan(), x, (x > 0).to(x.dtype))),
    "relu2": (lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x)),
    "sigmoid": (torch.sigmoid, _sigmoid_slope),
    "silu": (torch.nn.functional.silu, _silu_slope),
}
"""f and its derivative, of float32 tensors; quick_gelu is x · sigmoid(1.702 x)."""

_GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "qgeglu": "quick_gelu",
    "reglu": "relu",
    "sreglu": "relu2",
    "glu": "sigmoid",
}
"""Gated activation → its curve."""

ACTIVATIONS: dict[str, tuple[str, bool]] = {
    **{curve: (curve, False) for curve in ("gelu", "gelu_tanh")},
    "qgelu": ("quick_gelu", False),
    **{curve: (curve, False) for curve in ("relu", "relu2", "silu")},
    **{name: (curve, True) for name, curve in _GATED.items()},
}
"""Curve of each activation, and True for the gated ones: f(gate) · up."""

_CLAMPED = "clamped_swiglu"


class Clamp(NamedTuple):
    """Numbers of f(min(gate, limit)) · (clamp(up, ±limit) + offset), f(x) = x · sigmoid(alpha · x)."""

    limit: float
    alpha: float
    offset: float


class Activation(NamedTuple):
    """A curve of `CURVES`, gated or not; `clamp` belongs to "quick_gelu" with a gate."""

    curve: str
    gated: bool
    clamp: Clamp | None = None


def clamped_swiglu(limit: float, alpha: float, offset: float) -> str:
    """The name of a `Clamp`, as "clamped_swiglu(7.0, 1.702, 1.0)"."""
    return f"{_CLAMPED}{(float(limit), float(alpha), float(offset))}"


def activation_named(name: str) -> Activation:
    """An activation of `ACTIVATIONS`, or of a name that `clamped_swiglu` gives."""
    if not name.startswith(_CLAMPED):
        return Activation(*ACTIVATIONS[name])
    limit, alpha, offset = name.removeprefix(_CLAMPED).strip("()").split(", ")
    return Activation("quick_gelu", True, Clamp(float(limit), float(alpha), float(offset)))


def _gated(clamp: Clamp | None, curve: str, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """f(gate) and its factor, of float32 tensors."""
    if clamp is None:
        return CURVES[curve][0](gate), up
    return _quick_gelu(gate.clamp(max=clamp.limit), clamp.alpha), up.clamp(-clamp.limit, clamp.limit) + clamp.offset


def activation(name: str, x: Tensor, block: int) -> Tensor:
    """f(x), or f(gate) · up of gate and up interleaved in blocks of `block` columns, in float32. [..., F or 2F] → [..., F].

    name: of `activation_named`.
    """
    curve, gated, clamp = activation_named(name)
    if not gated:
        return CURVES[curve][0](wide(x))
    # Split before the conversion: otherwise a compiler saves all of x in float32 for backward (30 GiB at 16,384 tokens of a
    # Llama-8B).
    gate, up = x.unflatten(-1, (-1, 2, block)).unbind(-2)
    value, factor = _gated(clamp, curve, wide(gate), wide(up))
    return (value * factor).flatten(-2)


def activation_backward(name: str, dy: Tensor, x: Tensor, block: int) -> Tensor:
    """The gradient of `activation`'s input in float32, of the shape of `x`; dy: [..., F]."""
    curve, gated, clamp = activation_named(name)
    slope = CURVES[curve][1]
    if not gated:
        return wide(dy) * slope(wide(x))
    gate, up = (wide(part) for part in x.unflatten(-1, (-1, 2, block)).unbind(-2))
    dy = wide(dy.unflatten(-1, (-1, block)))
    value, factor = _gated(clamp, curve, gate, up)
    if clamp is None:
        d_gate, d_up = dy * factor * slope(gate), dy * value
    else:  # zero beyond the limit; at the limit the whole gradient, as in PyTorch's clamp
        d_gate = torch.where(gate > clamp.limit, 0, dy * factor * _quick_gelu_slope(gate.clamp(max=clamp.limit), clamp.alpha))
        d_up = torch.where(up.abs() > clamp.limit, 0, dy * value)
    return torch.stack((d_gate, d_up), -2).flatten(-3)


def embedding_backward(d_out: Tensor, ids: Tensor, words: int, padding: int | None) -> Tensor:
    """The gradient [V, K] of the V = `words` rows that `ids` [N] chose, from d_out [N, K]; float32, in the order of the tokens.

    The row `padding` and ids outside of the vocabulary get no gradient.
    """
    trained = (ids >= 0) & (ids < words)
    if padding is not None:
        trained &= ids != padding
    summed = d_out.new_zeros(words + 1, d_out.shape[1], dtype=torch.promote_types(d_out.dtype, torch.float32))
    return summed.index_add_(0, torch.where(trained, ids, words), d_out.to(summed.dtype))[:words]


def rope(x_BTHD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """x [B, T, H, D], the halves of each head's first R columns rotated by cos, sin [B or 1, T, R]; in float32, x's dtype."""
    x, rest = x_BTHD.tensor_split([cos_BTR.shape[-1]], -1)
    x = wide(x)
    first, second = x.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    turned = (x * cos_BTR[:, :, None] + rotated * sin_BTR[:, :, None]).to(x_BTHD.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def rope_backward(d_BTHD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """The gradient of `rope`'s x, float32 [B, T, H, D], from that of its result."""
    (cos_1, cos_2), (sin_1, sin_2) = (table[:, :, None].chunk(2, -1) for table in (cos_BTR, sin_BTR))
    half = cos_1.shape[-1]
    first, second, rest = wide(d_BTHD).split([half, half, d_BTHD.shape[-1] - 2 * half], -1)
    return torch.cat((first * cos_1 + second * sin_2, second * cos_2 - first * sin_1, rest), -1)


def split_rotate(
    qkv_BTW: Tensor, heads: int, groups: int, cos_BTR: Tensor | None, sin_BTR: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, T, H, D], keys and values [B, T, G, D] of the joint product, W = (H + 2G)·D grouped by key-value head.

    With angles, queries and keys are rotated as in `rope`.
    """
    grouped = qkv_BTW.unflatten(-1, (groups, heads // groups + 2, -1))
    q, k, v = (part.flatten(2, 3) for part in grouped.split([heads // groups, 1, 1], 3))
    if cos_BTR is not None and sin_BTR is not None:
        q, k = rope(q, cos_BTR, sin_BTR), rope(k, cos_BTR, sin_BTR)
    return q.contiguous(), k.contiguous(), v.contiguous()


def join_rotated(dq_BTHD: Tensor, dk_BTGD: Tensor, dv_BTGD: Tensor, cos_BTR: Tensor | None, sin_BTR: Tensor | None) -> Tensor:
    """The gradient of the joint product, float32 [B, T, W], from those of `split_rotate`'s results."""
    dq, dk, dv = wide(dq_BTHD), wide(dk_BTGD), wide(dv_BTGD)
    if cos_BTR is not None and sin_BTR is not None:
        dq, dk = rope_backward(dq, cos_BTR, sin_BTR), rope_backward(dk, cos_BTR, sin_BTR)
    groups = dk.shape[2]
    return torch.cat([part.unflatten(2, (groups, -1)) for part in (dq, dk, dv)], 3).flatten(2)


def _grouped_heads(qkv_BTW: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, G, P, T, D], k and v [B, G, 1, T, D] of a joint product in float32, P = H/G."""
    parts = wide(qkv_BTW).unflatten(-1, (groups, heads // groups + 2, -1)).permute(0, 2, 3, 1, 4)
    q, k, v = parts.split([heads // groups, 1, 1], 2)
    return q, k, v


def attention(qkv_BTW: Tensor, heads: int, groups: int, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q · kᵀ · scale) · v of a joint product, W = (H + 2G)·D as in `split_rotate`; every query attends to every key.

    Statistics are float32; probabilities are rounded to the dtype of `qkv` before the second product, for matrix units.
    Returns the result [B, T, H·D] in that dtype, and the logarithm of each softmax's denominator, float32 [B, H, T].
    """
    q, k, v = _grouped_heads(qkv_BTW, heads, groups)
    with torch.autocast(q.device.type, enabled=False):
        logits = q @ k.mT * scale
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp().to(qkv_BTW.dtype).float() @ v
    return out.flatten(1, 2).transpose(1, 2).flatten(2).to(qkv_BTW.dtype), lse.flatten(1, 2)


def attention_backward(
    d_out: Tensor, qkv_BTW: Tensor, out: Tensor, lse: Tensor, heads: int, groups: int, scale: float
) -> Tensor:
    """The gradient [B, T, W] of `attention`'s joint product, in its dtype; out, lse: results of `attention`, d_out like out."""
    dtype = qkv_BTW.dtype
    q, k, v = _grouped_heads(qkv_BTW, heads, groups)
    d_o, o = (wide(x).unflatten(-1, (groups, heads // groups, -1)).permute(0, 2, 3, 1, 4) for x in (d_out, out))
    with torch.autocast(q.device.type, enabled=False):
        p = (q @ k.mT * scale - lse.unflatten(1, (groups, -1))[..., None]).exp()
        ds = (p * (d_o @ v.mT - (d_o * o).sum(-1, keepdim=True))).to(dtype).float()
        dq = ds @ k * scale
        dv = (p.to(dtype).float().mT @ d_o).sum(2, keepdim=True)
        dk = (ds.mT @ q).sum(2, keepdim=True) * scale
    return torch.cat((dq, dk, dv), 2).permute(0, 3, 1, 2, 4).flatten(2).to(dtype)


def cross_entropy(
    logits_NV: Tensor,
    target_N: Tensor,
    grad_scale: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of real targets with softmax(logits), float32 [], and its gradient · grad_scale, like logits.

    The target distribution is 1 − label_smoothing on the target and label_smoothing spread evenly over all V words; z_loss is
    the weight of log²Σexp(logits), which bounds the logits. Statistics are float32. A target outside the vocabulary makes the
    loss and its row of the gradient NaN.
    """
    logits = wide(logits_NV)
    real = target_N != ignore_index
    unknown = real & ((target_N < 0) | (target_N >= logits.shape[1]))
    index = torch.where(real & ~unknown, target_N, 0)[:, None]
    total = logits.logsumexp(-1)
    log_probabilities = logits - total[:, None]
    losses = -(1 - label_smoothing) * log_probabilities.gather(1, index)[:, 0]
    if label_smoothing:
        losses = losses - label_smoothing * log_probabilities.mean(-1)
    losses = (losses + z_loss * total.square()).masked_fill(unknown, torch.nan)
    grad = log_probabilities.exp() * (1 + 2 * z_loss * total)[:, None] - label_smoothing / logits.shape[1]
    grad.scatter_add_(1, index, torch.full_like(index, label_smoothing - 1, dtype=grad.dtype))
    grad.masked_fill_(unknown[:, None], torch.nan)
    return (losses * real).sum(), (grad * (real[:, None] * grad_scale)).to(logits_NV.dtype)


def adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One step of AdamW (Loshchilov and Hutter, 2019) in float32: the new parameter and moments. `step` [] counts from 1."""
    param, grad, exp_avg, exp_avg_sq = (wide(x) for x in (param, grad, exp_avg, exp_avg_sq))
    correction1, correction2 = (1 - beta ** step.double() for beta in (beta1, beta2))
    param = param * (1 - lr * weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denominator = exp_avg_sq.sqrt() / correction2.sqrt().float() + eps
    return param - (lr / correction1).float() * exp_avg / denominator, exp_avg, exp_avg_sq


def dequantize(data: Tensor, scale_inv: Tensor) -> Tensor:
    """FP8 elements in float32 [R, C]; scales are [], per row [R, 1], or per block [⌈R/rows⌉, ⌈C/128⌉] with 1 or 128 rows."""
    rows, columns = data.shape
    if scale_inv.dim() == 2 and scale_inv.shape != (rows, 1):
        high = 1 if scale_inv.shape[0] == rows else BLOCK
        scale_inv = scale_inv.repeat_interleave(high, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return wide(data) * scale_inv
