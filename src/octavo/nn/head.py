"""The output head with its loss, in chunks of tokens: the whole logits never exist.

Loss and gradients are computed together in forward, chunk by chunk, so that only one chunk of logits is alive: 1 GiB instead
of 12 for 16,384 tokens and 128,256 words, and half of that in FP8. The price is that the head's gradients exist from forward
on. Statistics are float32, and the gradient of the weight is summed in float32. Products run in the dtype of the hidden
states or, where it is asked for, in FP8: all three, or those of backward, which leaves the loss as it is. An FP8 product
cannot add to what it writes, so the weight's sums over many chunks at once: their gradients are kept until then, in FP8 and
transposed, which takes as much memory as a float32 sum of a large head. Both products of the gradient accumulate precisely
whatever the recipe says: they add small probabilities to a target's −1, and the fast mode would cut those off.

float16 has no room for a gradient that is divided by the targets of a step, nor for the factor of a scaled loss: there forward
keeps the gradient of the sum, and backward multiplies in float32 by what is missing.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.fp8.formats import E5M2
from octavo.kernels import gemm
from octavo.kernels.cast import transpose
from octavo.kernels.cross_entropy import Gradient, Objective, cross_entropy_, scale_
from octavo.nn.linear import compute_dtype
from octavo.nn.products import NOTHING, Forms, Given, Products

CHUNK_BYTES = 1 << 30
"""Logits of one chunk: large enough that the products run at full speed."""
KEPT_BYTES = 4 << 30
"""Transposed FP8 gradients of logits that wait for one product."""
_ALIGNED = 128
"""Rows of a chunk are a multiple of this, where there are so many: the products' tiles then have no remainder."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    num_items: Tensor,
    *,
    objective: Objective | None = None,
    fp8: Products | None = None,
    fp8_logits: bool = True,
) -> Tensor:
    """Sum over real targets of the cross entropy with softmax(hidden · weightᵀ), divided by `num_items`: float32 [].

    hidden: [N, K]. weight: [V, K], any float dtype. target: int64 [N]. num_items: float32 [], the number of targets of the
    whole step. fp8: of a head with products in FP8, its products; fp8_logits: that of forward too.
    """
    hidden, grads = hidden.to(compute_dtype(hidden)), torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):  # it would round sums that are kept in float32
        return _LinearCrossEntropy.apply(hidden, weight, target, num_items, objective or Objective(), fp8, fp8_logits, grads)


class _Sum(Protocol):
    """The gradient of the weight, chunk by chunk."""

    def add(self, grad: Gradient, part: slice) -> None:
        """Add that of the tokens `part`."""

    def total(self) -> Tensor | None:
        """The sum, [V, K]; None of no tokens."""


class _Head:
    """Of one forward the logits and the gradient of the hidden states, chunk by chunk, in the hidden states' dtype."""

    gradient_dtype: torch.dtype | None = None
    chunk_share = 1.0  # of CHUNK_BYTES

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.weight = hidden, weight.to(hidden.dtype)

    def logits(self, part: slice) -> Tensor:
        return self.hidden[part] @ self.weight.t()

    def grad_hidden_(self, grad: Gradient, out: Tensor) -> None:
        torch.mm(_wide(grad), self.weight, out=out)

    def sum(self, chunk: int, dtype: torch.dtype) -> _Sum:
        return _WideSum(self.hidden)


class _Fp8Head:
    """`_Head` in FP8."""

    gradient_dtype = E5M2.dtype
    chunk_share = 0.5  # gradients are kept beside a chunk, and no sum in float32 is written for each

    def __init__(self, hidden: Tensor, weight: Tensor, products: Products, want_hidden: bool, want_weight: bool) -> None:
        self.products, self.rows = products, hidden.shape[0]
        self.x, _ = products.input(Given(hidden), column=want_weight)
        self.w = products.weight(weight, column=want_hidden)

    def logits(self, part: slice) -> Tensor:
        x = self.x.by_row
        return self.products.output(Forms(x.data[part], x.scale_inv), self.w, None)

    def grad_hidden_(self, grad: Gradient, out: Tensor) -> None:
        out.copy_(gemm.scaled_mm(*_fp8(grad), *self.w.by_column, out_dtype=out.dtype, precise=True))

    def sum(self, chunk: int, dtype: torch.dtype) -> _Sum:
        return _Fp8Sum(self.x, self.rows, chunk, dtype)


class _Fp8Backward(_Fp8Head):
    """`_Fp8Head` with logits in the hidden states' dtype."""

    def __init__(self, hidden: Tensor, weight: Tensor, products: Products, want_hidden: bool, want_weight: bool) -> None:
        self.products, self.rows = products, hidden.shape[0]
        self.wide = _Head(hidden, weight)
        self.x = products.input(Given(hidden), row=False, column=True)[0] if want_weight else NOTHING
        self.w = products.weight(weight, row=False, column=True) if want_hidden else NOTHING

    def logits(self, part: slice) -> Tensor:
        return self.wide.logits(part)


class _WideSum:
    """A product a chunk, added up in float32."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.so_far: Tensor | None = None

    def add(self, grad: Gradient, part: slice) -> None:
        self.so_far = _add_product(self.so_far, _wide(grad), self.hidden[part])

    def total(self) -> Tensor | None:
        return self.so_far


class _Fp8Sum:
    """A product of as many chunks of `chunk` tokens as `KEPT_BYTES` hold; the sum of several is float32, one is `dtype`."""

    def __init__(self, x: Forms, rows: int, chunk: int, dtype: torch.dtype) -> None:
        self.x, self.rows, self.chunk, self.dtype = x, rows, chunk, dtype
        self.kept: Tensor | None = None
        self.scale_inv: Tensor | None = None
        self.first = 0
        self.so_far: Tensor | None = None

    def add(self, grad: Gradient, part: slice) -> None:
        data, self.scale_inv = _fp8(grad)
        if self.kept is not None and part.start == self.first + self.kept.shape[1]:
            self._multiply()
        if self.kept is None:
            most = max(1, KEPT_BYTES // (data.shape[1] * self.chunk)) * self.chunk
            self.kept, self.first = data.new_empty(data.shape[1], min(most, self.rows - part.start)), part.start
        transpose(data, self.kept[:, part.start - self.first : part.stop - self.first])

    def _multiply(self) -> None:
        kept, scale_inv = self.kept, self.scale_inv
        assert kept is not None
        assert scale_inv is not None
        several = kept.shape[1] < self.rows
        x = self.x.by_column
        # Rows of a part of x need not begin where cuBLAS wants them to.
        data = x.data[:, self.first : self.first + kept.shape[1]].contiguous()
        product = gemm.scaled_mm(
            kept,
            scale_inv,
            data,
            x.scale_inv,
            out_dtype=torch.float32 if several else self.dtype,
            precise=True,
        )
        self.so_far = product if self.so_far is None else self.so_far.add_(product)
        self.kept = None

    def total(self) -> Tensor | None:
        if self.kept is not None:  # only now, when neither logits nor FP8 weights stand beside it any more
            self._multiply()
        return self.so_far


def _wide(grad: Gradient) -> Tensor:
    assert grad.wide is not None
    return grad.wide


def _fp8(grad: Gradient) -> tuple[Tensor, Tensor]:
    assert grad.fp8 is not None
    assert grad.scale_inv is not None
    return grad.fp8, grad.scale_inv


def _head(
    hidden: Tensor, weight: Tensor, fp8: Products | None, fp8_logits: bool, want_hidden: bool, want_weight: bool
) -> _Head | _Fp8Head:
    if fp8 is None or not (fp8_logits or want_hidden or want_weight):
        return _Head(hidden, weight)
    kind = _Fp8Head if fp8_logits else _Fp8Backward
    return kind(hidden, weight, fp8, want_hidden, want_weight)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, num_items: Tensor, objective: Objective,
        fp8: Products | None, fp8_logits: bool, grads: bool,
    ) -> Tensor:  # fmt: skip
        want_hidden, want_weight = (grads and need for need in ctx.needs_input_grad[:2])
        loss = hidden.new_zeros((), dtype=torch.float32)
        late = hidden.dtype == torch.float16
        factor = num_items.float().reciprocal()
        grad_scale = (torch.ones_like(factor) if late else factor) if want_hidden or want_weight else None
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        head = _head(hidden, weight, fp8, fp8_logits, want_hidden, want_weight)
        chunks = _chunks(hidden.shape[0], weight.shape[0] * hidden.element_size(), int(head.chunk_share * CHUNK_BYTES))
        weights = head.sum(chunks[0].stop, torch.float32 if late else weight.dtype) if want_weight and chunks else None
        for part in chunks:
            chunk_loss, grad = cross_entropy_(head.logits(part), target[part], grad_scale, objective, head.gradient_dtype)
            loss += chunk_loss
            if grad is not None and d_hidden is not None:
                head.grad_hidden_(grad, d_hidden[part])
            if grad is not None and weights is not None:
                weights.add(grad, part)
            del grad  # a chunk of logits: a gigabyte that must not stand beside the next, or beside d_weight's two forms
        del head
        d_weight = None if weights is None else weights.total()
        del weights
        if want_weight and d_weight is None:
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
        if d_weight is not None and not late:
            d_weight = d_weight.to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight, factor if late else None)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss / num_items

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the output head has no second derivative: call backward without create_graph=True.")
        *gradients, factor = ctx.saved_tensors
        if factor is None:
            # A gradient as large as the vocabulary is not worth a copy, nor a pass over it where the loss is not scaled.
            again = torch._C._autograd._get_current_graph_task_keep_graph()
            scaled = [None if d is None else scale_(d.clone() if again else d, grad_loss) for d in gradients]
        else:
            by = factor * grad_loss
            scaled = [None if d is None else (d.float() * by).to(t) for d, t in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None, None, None, None, None


def _chunks(rows: int, row_bytes: int, chunk_bytes: int) -> list[slice]:
    """Equal parts of `rows`, none of which has more than `chunk_bytes`."""
    most = max(1, chunk_bytes // row_bytes)
    size = math.ceil(rows / math.ceil(rows / most)) if rows else 1
    if size >= _ALIGNED:
        size = min(most, math.ceil(size / _ALIGNED) * _ALIGNED)
    return [slice(start, start + size) for start in range(0, rows, size)]


def _add_product(total: Tensor | None, grad: Tensor, hidden: Tensor) -> Tensor:
    """total + gradᵀ · hidden, float32 [V, K], in place but for the first; on a GPU the product is not rounded before."""
    if grad.device.type == "cuda" and grad.dtype != torch.float32:
        if total is None:
            return torch.mm(grad.t(), hidden, out_dtype=torch.float32)
        return torch.addmm(total, grad.t(), hidden, out_dtype=torch.float32, out=total)
    # A frequent word's sum ends beyond float16.
    part = (grad.t().float() @ hidden.float()) if grad.dtype == torch.float16 else (grad.t() @ hidden).float()
    return part if total is None else total.add_(part)
