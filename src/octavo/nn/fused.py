"""The fused halves of a block as autograd functions: norm and product (with the rotation of queries and keys), norm and MLP.

Between the products nothing is written twice: the norm adds what the layer before left to the residual stream and casts its
float32 result in both layouts, the activation casts its own, and in backward the gradient of the residual joins inside of the
norm's kernel. Saved for backward are the stream, FP8 operands transposed, and the activation's input; the activation's result
is made again. They run eagerly; a compiler gets the same layers as compositions it can read (`octavo.nn.linear`, `.mlp`).

Shapes: M rows (tokens), K and N features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.fp8 import autocast
from octavo.kernels import reference
from octavo.kernels.activation import activation, activation_backward
from octavo.kernels.cast import Into, Made
from octavo.kernels.norm import norm, norm_backward
from octavo.kernels.rope import join_rotated, split_rotate
from octavo.nn.products import NOTHING, Forms, Given, Products, cast_into

Stream = tuple[Tensor, Tensor | None]
"""A residual stream and what is still to be added to it, both [..., K]: the next norm adds it while it reads."""


Angles = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, bool]
"""cos, sin and, where it is promised, `mirrored`, as in `Rotation`."""


class Norm(NamedTuple):
    """A normalisation: "RMSNorm" or "LayerNorm", its parameters [K] and its constant."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float


class Rotation(NamedTuple):
    """How a joint query/key/value product comes apart; cos and sin float32 [B or 1, T, D], None to rotate nothing.

    mirrored: a promise that the second halves of both tables repeat their first, of which half need then be read.
    """

    heads: int
    groups: int
    cos: Tensor | None
    sin: Tensor | None
    mirrored: bool = False

    def apart(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same in PyTorch, which a compiler reads: qkv [B, T, (H + 2G)·D] → q [B, T, H, D], k and v [B, T, G, D]."""
        per_group = self.heads // self.groups
        q, k, v = qkv.unflatten(-1, (self.groups, per_group + 2, -1)).split([per_group, 1, 1], -2)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        if self.cos is not None and self.sin is not None:
            q, k = reference.rope(q, self.cos, self.sin), reference.rope(k, self.cos, self.sin)
        # The rotated queries and keys are tensors of their own. The values become one, or backward would keep the whole joint
        # product for their sake.
        return q, k, v.contiguous()


class Linear(NamedTuple):
    """A matrix [N, K] with its bias [N] and its products."""

    weight: Tensor
    bias: Tensor | None
    products: Products


def linear(x: Tensor, of: Linear) -> Tensor:
    """x · weightᵀ + bias by a recipe's FP8 products, [..., K] → [..., N]."""
    with autocast.unannounced():
        return _Linear.apply(x, of.weight, of.bias, of.products)


def norm_linear(
    x: Tensor, pending: Tensor | None, of: Norm, linear: Linear, rotation: Rotation | None = None
) -> tuple[Tensor, ...]:
    """h = x + pending, then norm(h) · weightᵀ + bias.

    x, pending: [..., K]. Returns h and the product [..., N]; with a rotation (x: [B, T, K]) h and q [B, T, H, D], k and v
    [B, T, G, D], queries and keys rotated.
    """
    x = _promoted(x, pending)
    cos, sin = (None, None) if rotation is None else (rotation.cos, rotation.sin)
    call = _NormLinearCall(of.kind, of.eps, linear.products, rotation and (rotation.heads, rotation.groups, rotation.mirrored))
    with autocast.unannounced():
        return _NormLinear.apply(x, pending, of.weight, of.bias, linear.weight, linear.bias, cos, sin, call)


def norm_mlp(
    x: Tensor, pending: Tensor | None, of: Norm, fc1: Linear, fc2: Linear, name: str, block: int, *, recompute: bool = False
) -> tuple[Tensor, Tensor]:
    """h = x + pending, then activation(norm(h) · w1ᵀ + b1) · w2ᵀ + b2; returns h and that, [..., K].

    name, block: as in `octavo.kernels.activation`. recompute: the first product is made again in backward, from the same
    operands, rather than kept.
    """
    x = _promoted(x, pending)
    call = _MlpCall(of.kind, of.eps, fc1.products, fc2.products, name, block, recompute)
    with autocast.unannounced():
        return _NormMlp.apply(x, pending, of.weight, of.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias, call)


def norm_alone(x: Tensor, pending: Tensor | None, of: Norm) -> Tensor:
    """norm(x + pending) in the dtype of the sum, [..., K]."""
    x = _promoted(x, pending)
    return _Norm.apply(x, pending, of.weight, of.bias, of.kind, of.eps)


def _promoted(x: Tensor, pending: Tensor | None) -> Tensor:
    """`x` in the dtype that `x + pending` has: a float32 stream stays one when a layer hands over bfloat16."""
    return x if pending is None else x.to(torch.promote_types(x.dtype, pending.dtype))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Stream:
    """The norm as a kernel that an operand comes out of; asked twice (amax, then cast) it adds `pending` once."""

    def __init__(self, x: Tensor, pending: Tensor | None, of: Norm) -> None:
        self.h, self.of = _rows(x), of
        self.pending = None if pending is None else _rows(pending)
        self.stats: Tensor | None = None

    def __call__(self, into: Into) -> Made:
        self.h, self.stats, made = norm(self.of.kind, self.h, self.pending, self.of.weight, self.of.bias, self.of.eps, into)
        self.pending = None
        return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        want_x, want_weight = ctx.needs_input_grad[:2]
        operand, _ = products.input(Given(_rows(x)), column=want_weight)
        w = products.weight(weight)
        y = products.output(operand, w, bias)
        ctx.products, ctx.shape, ctx.dtype = products, x.shape, x.dtype
        kept_weight = products.kept_weight(w, weight) if want_x else NOTHING
        ctx.save_for_backward(*_kept_input(operand, want_weight), *kept_weight)
        return _shaped(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        products: Products = ctx.products
        products.begin_backward()
        want_x, want_weight, want_bias = ctx.needs_input_grad[:3]
        kept = ctx.saved_tensors
        x, w = Forms(*kept[:4]), Forms(*kept[4:])
        given = Given(_rows(dy), sums=want_bias)
        forms = products.grad_output(given, row=want_x, column=want_weight)
        dw = products.grad_weight(forms, x) if want_weight else None
        dx = products.grad_input(forms, products.weight_again(w)).to(ctx.dtype).view(ctx.shape) if want_x else None
        return dx, dw, given.sum() if want_bias else None, None


class _NormLinearCall(NamedTuple):
    kind: str
    eps: float
    products: Products
    heads: tuple[int, int, bool] | None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pending: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None,
        weight: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, call: _NormLinearCall,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        products = call.products
        want_x, want_weight = any(ctx.needs_input_grad[:4]), ctx.needs_input_grad[4]
        stream = _Stream(x, pending, Norm(call.kind, norm_weight, norm_bias, call.eps))
        operand, _ = products.input(stream, column=want_weight)
        w = products.weight(weight)
        y = products.output(operand, w, bias)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.shape = call, x.shape
        h = x if pending is None else _shaped(stream.h, x.shape)
        ctx.save_for_backward(
            h,
            stream.stats,
            norm_weight,
            *_kept_input(operand, want_weight),
            *(products.kept_weight(w, weight) if want_x else NOTHING),
            cos,
            sin,
        )
        y = _shaped(y, (*x.shape[:-1], weight.shape[0]))
        if call.heads is None:
            return h, y
        return h, *_split(y, call.heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _NormLinearCall = ctx.call
        products = call.products
        products.begin_backward()
        h, stats, norm_weight, *kept = ctx.saved_tensors
        x, w, (cos, sin) = Forms(*kept[:4]), Forms(*kept[4:8]), kept[8:]
        want_x, (want_weight, want_bias) = any(ctx.needs_input_grad[:4]), ctx.needs_input_grad[4:6]
        if all(grad is None for grad in grads):
            return d_stream, d_stream if ctx.needs_input_grad[1] else None, *(None,) * 7
        joined: Any
        if call.heads is None:
            (dy,) = grads
            assert dy is not None
            joined = Given(_rows(dy), sums=want_bias)
        else:
            *heads, mirrored = call.heads
            dq, dk, dv = _all_three(grads, *heads)

            def joined(into: Into) -> Made:
                return _join(dq, dk, dv, cos, sin, into, mirrored)

            if want_bias:
                joined = Given(joined(Into(products.out_dtype)).row, sums=True)
        forms = products.grad_output(joined, row=want_x, column=want_weight)
        d_bias = joined.sum() if want_bias else None
        dw = products.grad_weight(forms, x) if want_weight else None
        dx = d_norm_weight = d_norm_bias = None
        if want_x:
            d_normed = products.grad_input(forms, products.weight_again(w))
            dx, d_norm_weight, d_norm_bias = _through_norm(ctx, call.kind, d_normed, h, norm_weight, stats, d_stream)
        return dx, dx if ctx.needs_input_grad[1] else None, d_norm_weight, d_norm_bias, dw, d_bias, None, None, None


class _MlpCall(NamedTuple):
    kind: str
    eps: float
    fc1: Products
    fc2: Products
    name: str
    block: int
    recompute: bool


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pending: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None,
        weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor, bias_2: Tensor | None, call: _MlpCall,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        want_1, want_2 = ctx.needs_input_grad[4], ctx.needs_input_grad[6]
        want_x = any(ctx.needs_input_grad[:4])
        want_hidden = want_x or want_1 or ctx.needs_input_grad[5]
        want_again = call.recompute and (want_hidden or (want_2 and call.fc2.repeatable))
        stream = _Stream(x, pending, Norm(call.kind, norm_weight, norm_bias, call.eps))
        operand, _ = call.fc1.input(stream, column=want_1 and not (want_again and call.fc1.repeatable))
        w1 = call.fc1.weight(weight_1)
        hidden = call.fc1.output(operand, w1, bias_1)
        repeat = call.fc2.repeatable
        activated, scale = call.fc2.input(
            lambda into: activation(call.name, hidden, call.block, into), column=want_2 and not repeat
        )
        if repeat and scale is not None and call.fc2.grads:
            scale = scale.clone()  # the slot moves on before backward
        w2 = call.fc2.weight(weight_2)
        y = call.fc2.output(activated, w2, bias_2)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.shape = call, x.shape
        h = x if pending is None else _shaped(stream.h, x.shape)
        ctx.save_for_backward(
            h, stream.stats, norm_weight, None if want_again or not (want_hidden or (want_2 and repeat)) else hidden,
            bias_1 if want_again else None,
            scale if want_2 and repeat else None, activated.row_scale if want_2 and repeat else None,
            *(operand if want_again else _kept_input(operand, want_1)), *_kept_input(NOTHING if repeat else activated, want_2),
            *(call.fc1.kept_weight(w1, weight_1, row=want_again) if want_x or want_again else NOTHING),
            *(call.fc2.kept_weight(w2, weight_2) if want_hidden else NOTHING),
        )  # fmt: skip
        return h, _shaped(y, (*x.shape[:-1], weight_2.shape[0]))

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _MlpCall = ctx.call
        fc1, fc2 = call.fc1, call.fc2
        for products in (fc1, fc2):  # either may stay out of FP8
            products.begin_backward()
        if dy is None:
            return d_stream, d_stream if ctx.needs_input_grad[1] else None, *(None,) * 7
        h, stats, norm_weight, hidden, bias_1, scale, scale_inv, *kept = ctx.saved_tensors
        x, activated, w1, w2 = (Forms(*kept[i : i + 4]) for i in (0, 4, 8, 12))
        want_x = any(ctx.needs_input_grad[:4])
        want_w1, want_b1, want_w2, want_b2 = ctx.needs_input_grad[4:8]
        want_hidden = want_x or want_w1 or want_b1
        given = Given(_rows(dy), sums=want_b2)
        forms = fc2.grad_output(given, row=want_hidden, column=want_w2)
        d_b2 = given.sum() if want_b2 else None
        again = fc2.again(scale) if want_w2 and fc2.repeatable else None
        if hidden is None and (want_hidden or again is not None):
            w1 = fc1.weight_again(w1, row=True)
            hidden = fc1.output(x, w1, bias_1)
            x = x.with_column() if want_w1 else NOTHING
        dx = d_norm_weight = d_norm_bias = d_w1 = d_b1 = d_w2 = None
        if want_hidden:
            d_activated = fc2.grad_input(forms, fc2.weight_again(w2))

            def through(into: Into) -> Made:
                nonlocal again, activated, d_b1
                made, repeated, bias = activation_backward(
                    call.name, d_activated, hidden, call.block, into, again=again if into.row or into.column else None,
                    bias=want_b1 and (into.row or into.column),
                )  # fmt: skip
                d_b1 = bias if bias is not None else d_b1
                if repeated is not None:
                    activated = _repeated(repeated, scale_inv)
                    again = None
                return made

            d_hidden = fc1.grad_output(through, row=want_x, column=want_w1)
            if want_b1 and d_b1 is None:  # nothing but the bias is trained
                through(Into(fc1.out_dtype))
            del d_activated
        if again is not None:
            activated = _repeated(activation(call.name, hidden, call.block, again), scale_inv)
        if want_w2:
            d_w2 = fc2.grad_weight(forms, activated)
        if want_w1:
            d_w1 = fc1.grad_weight(d_hidden, x)
        if want_x:
            d_normed = fc1.grad_input(d_hidden, fc1.weight_again(w1))
            dx, d_norm_weight, d_norm_bias = _through_norm(ctx, call.kind, d_normed, h, norm_weight, stats, d_stream)
        return dx, dx if ctx.needs_input_grad[1] else None, d_norm_weight, d_norm_bias, d_w1, d_b1, d_w2, d_b2, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pending: Tensor | None, weight: Tensor, bias: Tensor | None, kind: str, eps: float
    ) -> Tensor:  # fmt: skip
        stream = _Stream(x, pending, Norm(kind, weight, bias, eps))
        normed = stream(Into(x.dtype)).row
        assert normed is not None
        ctx.save_for_backward(stream.h, stream.stats, weight)
        ctx.kind, ctx.shape = kind, x.shape
        return _shaped(normed, x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, stats, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise RuntimeError("fused norms have no second derivative: call backward without create_graph=True.")
        dx, d_weight, d_bias = _through_norm(ctx, ctx.kind, _rows(dy), h, weight, stats, None)
        return dx, dx if ctx.needs_input_grad[1] else None, d_weight, d_bias, None, None


def _through_norm(
    ctx: Any, kind: str, d_normed: Tensor, h: Tensor, weight: Tensor, stats: Tensor, d_stream: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the stream (the residual's included) and of the norm's parameters."""
    residual = None if d_stream is None else _rows(d_stream)
    h = _rows(h)
    want = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    dx, d_weight, d_bias, _ = norm_backward(kind, d_normed, h, weight, stats, residual, want_weight=want)
    d_weight = d_weight if ctx.needs_input_grad[2] else None
    return dx.view(ctx.shape), d_weight, d_bias if ctx.needs_input_grad[3] else None


def _shaped(y: Tensor, shape: Sequence[int]) -> Tensor:
    """A result that nobody else holds in the shape of its input, and not as a view: autograd lets nobody write into one."""
    reshaped: Tensor = torch.ops.aten._unsafe_view.default(y, shape)
    return reshaped


def _split(qkv: Tensor, how: tuple[int, int, bool], cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`split_rotate`, whose kernel takes heads in halves; PyTorch takes those that have none."""
    heads, groups, mirrored = how
    if qkv.shape[-1] // (heads + 2 * groups) % 2:
        return reference.split_rotate(qkv, heads, groups, cos, sin)
    return split_rotate(qkv, heads, groups, cos, sin, mirrored=mirrored)


def _join(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, into: Into, mirrored: bool) -> Made:
    if dq.shape[-1] % 2:
        return cast_into(reference.join_rotated(dq, dk, dv, cos, sin).flatten(0, 1), into)
    return join_rotated(dq, dk, dv, cos, sin, into, mirrored=mirrored)


def _kept_input(x: Forms, wanted: bool) -> tuple[Tensor | None, ...]:
    """Of an input what the weight gradient reads."""
    if not wanted:
        return NOTHING
    return (x.row, None, None, None) if x.row_scale is None else (None, None, x.column, x.column_scale)


def _repeated(made: Made, scale_inv: Tensor | None) -> Forms:
    return Forms(made.row) if made.column is None else Forms(column=made.column, column_scale=scale_inv)


def _all_three(grads: tuple[Tensor | None, ...], heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, zeros where one was not used."""
    some = next(grad for grad in grads if grad is not None)
    shapes = [(*some.shape[:2], count, some.shape[3]) for count in (heads, groups, groups)]
    q, k, v = (some.new_zeros(shape) if grad is None else grad for grad, shape in zip(grads, shapes, strict=True))
    return q, k, v
