"""What stands between the joint query/key/value product and attention, for `octavo.nn.fused`.

Long sequences take the product apart, rotate it, and join the gradients again. Short ones have attention of their own, whose
backward knows the product's gradient in float32. Where the scale is known it is FP8 in both layouts at once, 2 bytes written an
element; in bfloat16, to be read and cast, it would be 4 written and 2 read, and for a bias read once more.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from octavo.kernels import attention, reference
from octavo.kernels.cast import Into, Made
from octavo.kernels.rope import join_rotated, split_rotate
from octavo.nn.products import Given, cast_into


def split(
    qkv: Tensor, heads: int, groups: int, cos: Tensor | None, sin: Tensor | None, mirrored: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_rotate`, whose kernel takes heads in halves; PyTorch takes those that have none."""
    if qkv.shape[-1] // (heads + 2 * groups) % 2:
        return reference.split_rotate(qkv, heads, groups, cos, sin)
    return split_rotate(qkv, heads, groups, cos, sin, mirrored=mirrored)


def join(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, into: Into, mirrored: bool) -> Made:
    """`join_rotated`, as `split` is `split_rotate`."""
    if dq.shape[-1] % 2:
        return cast_into(reference.join_rotated(dq, dk, dv, cos, sin).flatten(0, 1), into)
    return join_rotated(dq, dk, dv, cos, sin, into, mirrored=mirrored)


def all_three(grads: tuple[Tensor | None, ...], heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, zeros where one was not used."""
    some = next(grad for grad in grads if grad is not None)
    shapes = [(*some.shape[:2], count, some.shape[3]) for count in (heads, groups, groups)]
    q, k, v = (some.new_zeros(shape) if grad is None else grad for grad, shape in zip(grads, shapes, strict=True))
    return q, k, v


class AttentionGradient(Given):
    """The gradient of the joint product that short attention read, as a kernel that an operand comes out of.

    d_out, qkv, out, lse: as of `octavo.kernels.attention.backward`. how: H, G and the softmax's scale. sums: as of `Given`.
    With a scale that is known (delayed scaling) attention's backward leaves FP8. Who has to see the amax or the matrix first
    gets `matrix`, made once: a cast of that costs less than a second backward.
    """

    def __init__(
        self, d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *, how: tuple[int, int, float], sums: bool = False
    ) -> None:
        self._tensors, self._how = (d_out, qkv, out, lse), how
        self._sums, self._partial = sums, None
        self._summed: Tensor | None = None

    @cached_property
    def matrix(self) -> Tensor:  # type: ignore[override]
        """[B·T, (H + 2G)·D] in the dtype of the joint product."""
        return attention.backward(*self._tensors, *self._how).flatten(0, 1)

    def __call__(self, into: Into) -> Made:
        """What `into` asks for."""
        if into.scale is None or "matrix" in self.__dict__:
            return super().__call__(into)
        made, self._summed = attention.backward_into(*self._tensors, *self._how, into, bias=self._sums)
        return made

    def sum(self) -> Tensor:
        """Over the rows, float32 [(H + 2G)·D]: the gradient of a bias."""
        return super().sum() if self._summed is None else self._summed
