"""Bandwidth of Octavo's Triton kernels, relative to a device-to-device copy in the same run.

All kernels are memory-bound. The figure is the necessary traffic over the median time, with a cold L2 cache and without the
launch. The table gives the traffic in bytes read and written per element of the shape: every operand once, or twice if a kernel
needs two passes over more than the L2 cache. Statistics, scales and angles are small and not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import recorded
from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import activation, adamw, column_sum, cross_entropy, norm, rope
from octavo.kernels.embedding.backward import embedding_backward
from octavo.kernels.quantize import cast, cast_scaled
from octavo.kernels.quantize.quantized import Quantizer
from octavo.kernels.timing import median_us

EPS = 1e-5
GATE_UP_BLOCK = 32
"""Columns of gate, then equally many of up: the MLP's layout."""
HEAD_DIM, HEADS_A_GROUP = 128, 4
FLUSHED_BYTES = 256 * 2**20
"""Bytes read between two calls: several times the L2 cache of any GPU in `octavo.hardware`."""
PAUSE_CYCLES = 1_000_000
"""GPU cycles of half a millisecond: longer than the launch of a call."""


class Call(NamedTuple):
    """A call of a kernel, and its operands."""

    run: Callable[[], Any]
    reads: tuple[Tensor, ...]


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: name in the results.
        make: creates the call for (rows, columns) on the default device.
        reads, writes: necessary traffic in bytes for each element of the shape.
        shapes: measured [rows, columns].
    """

    name: str
    make: Callable[[int, int], Call]
    reads: float
    writes: float
    shapes: tuple[tuple[int, int], ...] = ((16_384, 4096),)

    def bytes(self, rows: int, columns: int) -> int:
        """Necessary traffic in bytes."""
        return round(rows * columns * (self.reads + self.writes))


def _random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype)


def _quantizer(*, fp8: bool = True, rowwise: bool = True, columnwise: bool = True) -> Quantizer:
    """FP8 in the given layouts with scale and amax of delayed scaling; or bfloat16."""
    if not fp8:
        return Quantizer(torch.bfloat16)
    return Quantizer(E4M3.dtype, E4M3.max, torch.ones(()), torch.zeros(()), rowwise, columnwise)


def _matrix(rows: int, columns: int, *, kernel: Callable[[Tensor], Any]) -> Call:
    x = _random(rows, columns)
    return Call(lambda: kernel(x), (x,))


def _cast(rows: int, columns: int, *, columnwise: bool, dtype: torch.dtype = torch.bfloat16) -> Call:
    x, quantizer = _random(rows, columns, dtype), _quantizer(columnwise=columnwise)
    return Call(lambda: cast.cast(x, quantizer), (x,))


def _norm(rows: int, columns: int, *, kind: str, fp8: bool) -> Call:
    x, delta = (_random(rows, columns) for _ in range(2))
    weight, quantizer = torch.ones(columns, dtype=torch.bfloat16), _quantizer(fp8=fp8)
    bias = torch.zeros_like(weight) if kind == "LayerNorm" else None
    return Call(lambda: norm.norm(kind, x, delta, weight, bias, EPS, quantizer), (x, delta))


def _norm_backward(rows: int, columns: int, *, kind: str) -> Call:
    dy, h, residual = (_random(rows, columns) for _ in range(3))
    weight = torch.ones(columns, dtype=torch.bfloat16)
    _, stats, _ = norm.norm(kind, h, None, weight, None, EPS, Quantizer(torch.bfloat16))
    return Call(lambda: norm.norm_backward(kind, dy, h, weight, stats, residual), (dy, h, residual))


def _activation(rows: int, columns: int, *, name: str, fp8: bool) -> Call:
    # Rowwise alone, as in the layers: backward makes the columnwise FP8.
    x, quantizer = _random(rows, columns), _quantizer(fp8=fp8, columnwise=False)
    return Call(lambda: activation.activation(name, x, GATE_UP_BLOCK, quantizer), (x,))


def _activation_backward(rows: int, columns: int, *, name: str, fp8: bool, recompute: bool = False, bias: bool = False) -> Call:
    x, quantizer = _random(rows, columns), _quantizer(fp8=fp8)
    dy = _random(rows, columns // (2 if activation.is_gated(name) else 1))
    # The columnwise operand of the second product's weight gradient, recomputed; its amax was recorded in forward.
    recomputation = _quantizer(rowwise=False)._replace(amax=None) if recompute else None
    return Call(
        lambda: activation.activation_backward(name, dy, x, GATE_UP_BLOCK, quantizer, recompute=recomputation, bias=bias),
        (dy, x),
    )


def _angles(length: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(1, length, HEAD_DIM // 2).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def _split_rotate(rows: int, columns: int) -> Call:
    groups = columns // ((HEADS_A_GROUP + 2) * HEAD_DIM)
    qkv, (cos, sin) = _random(rows, columns).unflatten(0, (2, -1)), _angles(rows // 2)
    return Call(lambda: rope.split_rotate(qkv, HEADS_A_GROUP * groups, groups, cos, sin, mirrored=True), (qkv,))


def _join_rotated(rows: int, columns: int, *, fp8: bool) -> Call:
    groups = columns // ((HEADS_A_GROUP + 2) * HEAD_DIM)
    dq, dk, dv = (
        _random(rows, heads * HEAD_DIM).unflatten(-1, (heads, HEAD_DIM)).unflatten(0, (2, -1))
        for heads in (HEADS_A_GROUP * groups, groups, groups)
    )
    (cos, sin), quantizer = _angles(rows // 2), _quantizer(fp8=fp8)
    return Call(lambda: rope.join_rotated(dq, dk, dv, cos, sin, quantizer, mirrored=True), (dq, dk, dv))


def _cross_entropy(rows: int, columns: int, *, fp8: bool) -> Call:
    logits, target = _random(rows, columns), torch.randint(columns, (rows,))
    grad_scale = torch.ones(())
    grad = torch.empty(rows, columns, dtype=E5M2.dtype) if fp8 else None
    objective = cross_entropy.Objective()
    return Call(lambda: cross_entropy.cross_entropy_(logits, target, grad_scale, objective, grad)[1], (logits,))


def _embedding_backward(rows: int, columns: int) -> Call:
    """The gradient of an embedding with `rows` words and an eighth as many tokens."""
    d_out, ids = _random(rows // 8, columns), torch.randint(rows, (rows // 8,))
    return Call(lambda: embedding_backward(d_out, ids, rows, None, torch.bfloat16), (d_out,))


def _adamw(rows: int, columns: int, *, dtype: torch.dtype) -> Call:
    param, grad, exp_avg = (_random(rows, columns, dtype) for _ in range(3))
    states = (param, grad, exp_avg, exp_avg.square())
    step = torch.full((), 10.0)

    def run() -> list[Tensor]:
        adamw.adamw_(*states, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)
        return [tensor for tensor in states if tensor is not grad]

    return Call(run, states)


_rows = partial(cast_scaled.rows, dtype=E4M3.dtype, fp8_max=E4M3.max, rowwise=True)
_blocks = partial(cast_scaled.blocks, dtype=E4M3.dtype, fp8_max=E4M3.max, rowwise=True, columnwise=True)

GATED = ((16_384, 2 * 14_336), (16_384, 2 * 8192))
QKV = ((16_384, 6144),)
"""32 query heads and 8 key-value heads of 128."""
VIT = ((32_896, 5120),)
"""Activations of ViT-Huge: 128 images of 257 patches."""
LOGITS = ((4096, 128_256),)
"""A chunk of the head."""
WORDS = ((131_072, 4096),)
"""The embedding of 16,384 tokens."""
_swiglu, _gelu = partial(_activation, name="swiglu"), partial(_activation, name="gelu")
_swiglu_backward = partial(_activation_backward, name="swiglu")
_gelu_backward = partial(_activation_backward, name="gelu")

TABLE: tuple[Kernel, ...] = (
    Kernel("cast", partial(_cast, columnwise=False), 2, 1),
    Kernel("cast-transpose", partial(_cast, columnwise=True), 2, 2, ((16_384, 4096), (16_384, 14_336))),
    Kernel("cast-transpose-float32", partial(_cast, columnwise=True, dtype=torch.float32), 4, 2),
    # With the addition to the residual stream: reads x and delta, writes their sum and its norm.
    Kernel("rms-norm", partial(_norm, kind="RMSNorm", fp8=False), 4, 4),
    Kernel("rms-norm-fp8", partial(_norm, kind="RMSNorm", fp8=True), 4, 4),
    Kernel("layer-norm-fp8", partial(_norm, kind="LayerNorm", fp8=True), 4, 4),
    Kernel("rms-norm-backward", partial(_norm_backward, kind="RMSNorm"), 6, 2),
    Kernel("layer-norm-backward", partial(_norm_backward, kind="LayerNorm"), 6, 2),
    # The shape of gate and up; the result has half as many elements.
    Kernel("swiglu", partial(_swiglu, fp8=False), 2, 1, GATED),
    Kernel("swiglu-fp8", partial(_swiglu, fp8=True), 2, 0.5, GATED),
    Kernel("swiglu-backward", partial(_swiglu_backward, fp8=False), 3, 2, GATED),
    Kernel("swiglu-backward-fp8", partial(_swiglu_backward, fp8=True), 3, 2, GATED),
    Kernel("swiglu-backward-fp8-again", partial(_swiglu_backward, fp8=True, recompute=True), 3, 2.5, GATED),
    Kernel("gelu-fp8", partial(_gelu, fp8=True), 2, 1, VIT),
    Kernel("gelu-backward-fp8", partial(_gelu_backward, fp8=True), 4, 2, VIT),
    Kernel("gelu-backward-fp8-again-bias", partial(_gelu_backward, fp8=True, recompute=True, bias=True), 4, 3, VIT),
    Kernel("split-rotate", _split_rotate, 2, 2, QKV),
    Kernel("join-rotated", partial(_join_rotated, fp8=False), 2, 2, QKV),
    Kernel("join-rotated-fp8", partial(_join_rotated, fp8=True), 2, 2, QKV),
    # A row is read twice, the second time from registers and, if still cached, from L2.
    Kernel("cross-entropy", partial(_cross_entropy, fp8=False), 2, 2, LOGITS),
    Kernel("cross-entropy-fp8", partial(_cross_entropy, fp8=True), 2, 1, LOGITS),
    # Zeros are written too; rows of the tokens' words are written twice.
    Kernel("embedding-backward", _embedding_backward, 0.25, 2, WORDS),
    Kernel("adamw", partial(_adamw, dtype=torch.bfloat16), 8, 6),
    Kernel("adamw-float32", partial(_adamw, dtype=torch.float32), 16, 12),
    Kernel("amax", partial(_matrix, kernel=cast_scaled.amax), 2, 0),
    Kernel("column-sums", partial(_matrix, kernel=column_sum.column_sums), 2, 0),
    Kernel("cast-rows", partial(_matrix, kernel=partial(_rows, columnwise=False)), 2, 1),
    # A scale for each row and one for each column: two passes.
    Kernel("cast-rows-columns", partial(_matrix, kernel=partial(_rows, columnwise=True)), 4, 2),
    Kernel("cast-blocks", partial(_matrix, kernel=partial(_blocks, rows=1)), 2, 2),
    Kernel("cast-blocks-square", partial(_matrix, kernel=partial(_blocks, rows=128)), 2, 2),
)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in TABLE}
COPIED = ((16_384, 4096), (16_384, 14_336))


def cold_timer(device: torch.device, rounds: int, warm_up: int) -> Callable[..., list[float]]:
    """`median_us` of calls with a cold L2 cache."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    scratch = torch.zeros(FLUSHED_BYTES // 4, device=device)
    # Reading leaves no dirty lines in L2, which would be written back during the timed call.
    how: dict[str, Any] = {"pause_cycles": PAUSE_CYCLES, "prepare": scratch.sum}
    return partial(median_us, device=device, rounds=rounds, warm_up=warm_up, **how)


def measure_kernels(
    kernels: Iterable[Kernel], device: torch.device, *, iterations: int, warmup: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each copy and for each shape of each kernel, or its error; shares are of the fastest copy."""
    time = cold_timer(device, iterations, max(1, warmup))
    rows: list[dict[str, Any]] = []
    for shape in COPIED:
        row: dict[str, Any] = {"workload": "copy", "entry": "torch", "shape": list(shape)}
        rows.append(row)
        with recorded(row, f"copy {shape[0]} x {shape[1]}", say):
            source = torch.randn(shape, device=device, dtype=torch.bfloat16)
            (us,) = time(partial(torch.empty_like(source).copy_, source))
            row |= _figures(2 * source.nbytes, us)
    ceiling = max((row["gb_per_s"] for row in rows if "gb_per_s" in row), default=None)
    for kernel in kernels:
        for shape in kernel.shapes:
            row = {"workload": kernel.name, "entry": "octavo", "shape": list(shape)}
            rows.append(row)
            named = f"{kernel.name} {shape[0]} x {shape[1]}"
            with recorded(row, named, say):
                with device:
                    call = kernel.make(*shape)
                (us,) = time(call.run)
                row |= _figures(kernel.bytes(*shape), us)
                of_copy = "" if ceiling is None else f", {row['gb_per_s'] / ceiling:.1%} of a copy"
                say(f"{named}: {us:.1f} us{of_copy}")
    if ceiling is None:  # every copy failed
        return rows
    return [row if "error" in row else {**row, "share_of_copy": row["gb_per_s"] / ceiling} for row in rows]


def _figures(moved: int, us: float) -> dict[str, Any]:
    return {"bytes": moved, "us": us, "gb_per_s": moved / us / 1e3}
