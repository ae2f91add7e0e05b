"""Splits the joint query/key/value product into heads and rotates queries and keys, as one kernel or in PyTorch.

With a norm of queries and keys between split and rotation (`rotate`), PyTorch rotates them on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.fp8.quantizer import DenseOperand, Producer
from octavo.kernels import reference
from octavo.kernels.attention.accumulated import Accumulated, Gradient
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer
from octavo.kernels.rope import join_rotated, split_rotate

Angles = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, bool]
"""cos, sin and optionally `mirrored`, as in `Rotation`."""


class Handover:
    """Passes gradients from attention to its `Rotation` outside autograd, which cannot add in a kernel's order.

    Autograd gets NaN in their place, so that any other use of queries, keys or values is noticed.
    """

    def __init__(self) -> None:
        self.expected = False
        """The rotation's backward will call `take`."""
        self._sums: list[Accumulated | None] = [None] * 3

    def give(self, gradients: Sequence[Gradient], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Store gradients; returns autograd's of q [B, T, H, D], k and v [B, T, G, D] in this dtype, NaN in place of sums."""
        self._sums = [x if isinstance(x, Accumulated) else None for x in gradients]
        some = next((x for x in self._sums if x is not None), None)
        if some is None:
            return tuple(x for x in gradients if isinstance(x, Tensor))
        nothing = some.sums.new_full((), math.nan, dtype=dtype)  # one for all three: each would be a launch
        return tuple(nothing.expand(x.shape) if isinstance(x, Accumulated) else x for x in gradients)

    def take(self, grads: Sequence[Tensor | None]) -> list[Gradient | None]:
        """The gradients of q [B, T, H, D], k and v [B, T, G, D]: the sums stored by `give`, else autograd's `grads`."""
        sums, self._sums = self._sums, [None] * 3
        for grad, summed in zip(grads, sums, strict=True):
            if summed is not None and (grad is None or any(grad.stride())):
                raise RuntimeError("queries, keys or values are used outside attention: the gradients of that use are lost.")
        return [grad if summed is None else summed for grad, summed in zip(grads, sums, strict=True)]


class Rotation(NamedTuple):
    """Split of a joint query/key/value product; cos and sin float32 [B or 1, T, Dr], None to rotate nothing.

    The first Dr columns of each head rotate; Dr is even, or D. mirrored: the second halves of both tables repeat the first
    halves, and only the first are read. handover: the gradients for `join`, if attention has stored them there.
    """

    heads: int
    groups: int
    cos: Tensor | None
    sin: Tensor | None
    mirrored: bool = False
    handover: Handover | None = None

    def composed(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`split` in differentiable PyTorch, for a compiler: qkv [B, T, (H + 2G)·D] → q [B, T, H, D], k and v [B, T, G, D]."""
        per_group = self.heads // self.groups
        q, k, v = qkv.unflatten(-1, (self.groups, per_group + 2, -1)).split([per_group, 1, 1], -2)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        if self.cos is not None and self.sin is not None:
            q, k = reference.rope(q, self.cos, self.sin), reference.rope(k, self.cos, self.sin)
        # A view of the values would keep the whole joint product alive until backward.
        return q, k, v.contiguous()

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [B, T, (H + 2G)·D] → q [B, T, H, D], k and v [B, T, G, D], queries and keys rotated."""
        if qkv.shape[-1] // (self.heads + 2 * self.groups) % 2:  # the kernel rotates halves of a head
            return reference.split_rotate(qkv, self.heads, self.groups, self.cos, self.sin)
        return split_rotate(qkv, self.heads, self.groups, self.cos, self.sin, mirrored=self.mirrored)

    def join(self, grads: Sequence[Tensor | None]) -> Producer:
        """Producer of the joint product's gradient [B·T, (H + 2G)·D] from those of q [B, T, H, D], k and v [B, T, G, D].

        At least one of them is not None.
        """
        gradients: list[Gradient | None] = [*grads] if self.handover is None else self.handover.take(grads)
        dq, dk, dv = gradients
        if dq is None or dk is None or dv is None:
            some = next(grad for grad in grads if grad is not None)
            shapes = [(*some.shape[:2], count, some.shape[3]) for count in (self.heads, self.groups, self.groups)]
            dq, dk, dv = (some.new_zeros(shape) if d is None else d for d, shape in zip(gradients, shapes, strict=True))

        def produce(quantizer: Quantizer) -> QuantizedTensor:
            if isinstance(dq, Tensor) and isinstance(dk, Tensor) and isinstance(dv, Tensor) and dq.shape[-1] % 2:
                return DenseOperand(reference.join_rotated(dq, dk, dv, self.cos, self.sin).flatten(0, 1))(quantizer)
            return join_rotated(dq, dk, dv, self.cos, self.sin, quantizer, mirrored=self.mirrored)

        return produce


class _RotateFunction(torch.autograd.Function):
    """`reference.rope`: x [B, T, H, D], cos and sin [B or 1, T, Dr] → [B, T, H, D]. Saves only the angles, nothing of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return reference.rope(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return reference.rope_backward(dy, *ctx.saved_tensors).to(dy.dtype), None, None


def table_bytes(sequences: int, tokens: int, columns: int) -> int:
    """Bytes of cos and sin, float32 [sequences, tokens, columns], which the layers of a model save as one."""
    return 2 * sequences * tokens * columns * torch.float32.itemsize


def rotate(x: Tensor, angles: Angles | None) -> Tensor:
    """x [B, T, H, D] with the first Dr columns of each head rotated; angles: cos and sin [B or 1, T, Dr]."""
    if angles is None:
        return x
    cos, sin = angles[:2]
    return reference.rope(x, cos, sin) if torch.compiler.is_compiling() else _RotateFunction.apply(x, cos, sin)
