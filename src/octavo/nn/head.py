"""The output head with its loss, in chunks of tokens: the whole logits never exist.

Loss and gradients are computed together in forward, so that one chunk of logits is alive: 1 GiB instead of 12 for 16,384 tokens
and 128,256 words, half of that in FP8. The price: the head's gradients exist from forward on. The gradient of the weight is
summed in float32. FP8 products of the gradients are precise under every recipe: they add small probabilities to a target's −1,
which the fast mode would cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.fp8.formats import E5M2
from octavo.fp8.linear import LinearGemms, operands
from octavo.fp8.quantizer import DenseOperand
from octavo.kernels import gemm
from octavo.kernels.autograd import refuse_second_derivative
from octavo.kernels.cross_entropy import Gradient, Objective, cross_entropy_, scale_
from octavo.kernels.quantize.cast import transpose
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor
from octavo.kernels.reference import wide
from octavo.nn.embedding import Words
from octavo.nn.linear import compute_dtype
from octavo.nn.word_slices import cross_entropy_of_slices_

CHUNK_BYTES = 1 << 30
"""Logits of one chunk: large enough that the products run at full speed."""
BUFFER_BYTES = 4 << 30
"""FP8 gradients of logits that are buffered for one pair of products."""
TRANSPOSED_BYTES = 1 << 25
"""Bytes of these gradients that are transposed at a time."""
_ALIGNED = 128
"""Larger chunks and transposed pieces have a multiple of this many rows, or words, so that no tile is partly filled."""


class OutputHead(nn.Linear):
    """The matrix of the logits, [V, K]. Code that reads it runs within its forward, where a sharded weight is gathered."""

    def forward(self, input: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`run(input)`, such as a loss; without it the logits."""
        return super().forward(input) if run is None else run(input)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    num_items: Tensor,
    *,
    objective: Objective | None = None,
    fp8: LinearGemms | None = None,
    fp8_logits: bool = True,
    words: Words | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over real targets of the cross entropy with softmax(hidden · weightᵀ), divided by `num_items`: float32 [].

    hidden: [N, K]. weight: [V, K], any float dtype. target: int64 [N]. num_items: float32 [], the number of targets of the
    whole step. fp8: the products of a head in FP8; fp8_logits: the logits are one of them. words: this rank's slice of the
    vocabulary; `hidden` is then the same on all ranks of the group, and its gradient is this rank's summand. dtype: of the
    products; None: `compute_dtype`. A wider `hidden` has its values, and a gradient that is not rounded to it.
    """
    if dtype is None:
        dtype = compute_dtype(hidden)
        hidden = hidden.to(dtype)
    grads = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):  # it would round float32 sums
        how = objective or Objective(), fp8, fp8_logits, grads, words, dtype
        return _LinearCrossEntropy.apply(hidden, weight, target, num_items, *how)


class _Head:
    """The products of one forward with its gradients, chunk by chunk, in the dtype of both operands."""

    chunk_share = 1.0  # of CHUNK_BYTES

    def __init__(self, hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool) -> None:
        self.hidden, self.weight, self.want_weight = hidden, weight, want_weight
        self.d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if want_hidden else None
        self.d_weight: Tensor | None = None  # also None without tokens

    def logits(self, part: slice) -> Tensor:
        return gemm.high_precision_mm(self.hidden[part], self.weight.t(), self.hidden.dtype)

    def room(self, part: slice) -> Tensor | None:
        """Memory for the gradient of these tokens' logits; None to write it over the logits."""
        return None

    def add(self, grad: Gradient, part: slice) -> None:
        assert grad.high_precision is not None
        if self.d_hidden is not None:
            if gemm.widens(grad.high_precision):
                self.d_hidden[part] = gemm.high_precision_mm(grad.high_precision, self.weight, self.d_hidden.dtype)
            else:
                torch.mm(grad.high_precision, self.weight, out=self.d_hidden[part])
        if self.want_weight:
            self.d_weight = _add_product(self.d_weight, grad.high_precision, self.hidden[part])

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden states and weight."""
        return self.d_hidden, self.d_weight


class _Fp8Head(_Head):
    """`_Head` in FP8. An FP8 product cannot add to its output, so gradient products take all chunks that `BUFFER_BYTES` hold.

    A few words at a time are transposed for the weight's gradient. The last products run when the logits are gone.
    """

    chunk_share = 0.5  # gradients exist at the same time as a chunk, and no float32 sum is written for each

    def __init__(
        self, hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool, gemms: LinearGemms, fp8_logits: bool
    ) -> None:
        super().__init__(hidden, weight, want_hidden, want_weight)
        self.gemms, self.rows, self.words = gemms, hidden.shape[0], weight.shape[0]
        gemms.want(want_hidden, want_weight)
        self.high_precision = None if fp8_logits else _Head(hidden, weight.to(hidden.dtype), False, False)
        self.buffer: Tensor | None = None
        self.part = slice(0, 0)  # the tokens whose gradients are buffered
        self.scale_inv: Tensor | None = None
        self.x: QuantizedTensor | None = None
        self.w: QuantizedTensor | None = None
        if fp8_logits:
            self.x = gemms.input(DenseOperand(hidden))
            self.w = gemms.weight(weight, cache=False)

    def logits(self, part: slice) -> Tensor:
        if self.high_precision is not None:
            return self.high_precision.logits(part)
        assert self.x is not None
        assert self.w is not None
        data, scale_inv = self.x.rowwise
        return self.gemms.output(QuantizedTensor(data[part], scale_inv), self.w, None)

    def room(self, part: slice) -> Tensor | None:
        if self.buffer is not None and part.start == self.part.stop:
            self._multiply()
        if self.buffer is None:
            chunk, width = part.stop - part.start, _aligned(self.words)
            most = max(1, BUFFER_BYTES // (width * chunk)) * chunk
            self.part = slice(part.start, min(part.start + most, self.rows))
            rows = self.part.stop - self.part.start
            # Multiples of 16 bytes in both dimensions, as products need them; the padding is 0 and adds nothing.
            self.buffer = torch.empty(_aligned(rows), width, dtype=E5M2.dtype, device=self.hidden.device)
            self.buffer[rows:].view(torch.uint8).zero_()
            self.buffer[:, self.words :].view(torch.uint8).zero_()
        start = self.part.start
        return self.buffer[part.start - start : min(part.stop, self.part.stop) - start, : self.words]

    def add(self, grad: Gradient, part: slice) -> None:
        self.scale_inv = grad.scale_inv

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        if self.buffer is not None:
            self._multiply()
        if self.rows == 0 and self.d_hidden is not None and self.high_precision is not None:
            self._columnwise_weight()  # cached for later micro-batches
        return self.d_hidden, self.d_weight

    def _multiply(self) -> None:
        """Compute gradients from the buffered gradients of the logits, and free these."""
        buffer, scale_inv, part = self.buffer, self.scale_inv, self.part
        assert buffer is not None
        assert scale_inv is not None
        if part.stop == self.rows:  # the last logits are through
            self.high_precision = None
            if self.x is not None:
                self.x = self.x._replace(rowwise_data=None)
            if self.d_hidden is None:
                self.w = None
        if self.d_hidden is not None:
            data, w_scale_inv = self._columnwise_weight().columnwise
            data = _padded(data, buffer.shape[1])
            gemm.scaled_mm_into(self.d_hidden[part], buffer[: part.stop - part.start], scale_inv, data, w_scale_inv)
            del data
        if self.want_weight:
            self._multiply_weight(buffer, scale_inv)
        self.buffer = None

    def _columnwise_weight(self) -> QuantizedTensor:
        if self.w is None:
            self.w = self.gemms.weight(self.weight, rowwise=False, columnwise=True)
        _, w = operands(self.gemms.saved(NOTHING, self.w, self.weight))
        if self.part.stop == self.rows:
            self.w = None
        return self.gemms.restored_weight(w)

    def _multiply_weight(self, buffer: Tensor, scale_inv: Tensor) -> None:
        if self.x is None:
            self.x = self.gemms.input(DenseOperand(self.hidden), rowwise=False)
        (data, x_scale_inv), began = self.x.columnwise, self.d_weight is not None
        data = _padded(data[:, self.part], buffer.shape[0]).contiguous()
        if self.d_weight is None:
            several = self.part.stop - self.part.start < self.rows
            wider = several or self.hidden.dtype == torch.float16
            dtype = torch.promote_types(self.weight.dtype, torch.float32) if wider else self.weight.dtype
            self.d_weight = torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device)
        step = max(1, TRANSPOSED_BYTES // (buffer.shape[0] * _ALIGNED)) * _ALIGNED
        for start in range(0, self.words, step):
            words = slice(start, min(start + step, self.words))
            total, turned = self.d_weight[words], transpose(buffer[:, words])
            out = torch.empty_like(total) if began else total
            gemm.scaled_mm_into(out, turned, scale_inv, data, x_scale_inv)
            if began:
                total += out


def _aligned(size: int) -> int:
    return -(-size // gemm.ALIGNMENT) * gemm.ALIGNMENT


def _padded(x: Tensor, columns: int) -> Tensor:
    """An FP8 matrix padded with zeros to `columns` columns; itself if it has them."""
    more = columns - x.shape[1]
    return functional.pad(x.view(torch.uint8), (0, more)).view(x.dtype) if more else x


def peak_bytes(
    tokens: int, hidden_size: int, words: int, element: int, weight_element: int,
    *, fp8: bool | Literal["backward"], cached: bool, late: bool, trained: bool = True,
) -> int:  # fmt: skip
    """Bytes of `linear_cross_entropy` with its gradients at their peak, its result included, without hidden states and weight.

    element, weight_element: bytes per element of the hidden states and of the weight. fp8: products in FP8; "backward": only
    those of gradients. cached: micro-batches share the FP8 weight. late: float16, whose gradients are scaled in backward.
    trained: the weight has a gradient.
    """
    n, whole, row_bytes = tokens, words * hidden_size, words * element
    d_hidden = n * hidden_size * element
    copy = whole * element if weight_element != element else 0  # of the weight, for logits in high precision
    converted = 0 if late or weight_element == 4 else whole * weight_element
    if not fp8:
        logits = _largest_chunk(n, row_bytes, int(_Head.chunk_share * CHUNK_BYTES)) * row_bytes
        if not trained:
            return d_hidden + copy + logits
        return d_hidden + max(copy + logits + 4 * whole, 4 * whole + converted)
    rows, width = _largest_chunk(n, row_bytes, int(_Fp8Head.chunk_share * CHUNK_BYTES)), _aligned(words)
    part = min(n, max(1, BUFFER_BYTES // (width * rows)) * rows)
    buffer, several = _aligned(part) * width, part < n
    if not trained:
        x, w = (n * hidden_size, whole) if fp8 is True else (0, 0)
        logits_peak = buffer + rows * row_bytes + (0 if fp8 is True else copy) + x + w
        return d_hidden + max(logits_peak, buffer + (0 if cached else whole))
    total = whole * (4 if several or late else weight_element)
    w_columnwise = 0 if cached else whole
    x, w = (2 * n * hidden_size, w_columnwise) if fp8 is True else (0, 0)  # of FP8 logits
    sums = total if several else 0
    before = buffer + rows * row_bytes + (0 if fp8 is True else copy) + x + w + sums
    x_rowwise = n * hidden_size if fp8 is True else 0
    weight = buffer + w_columnwise + x_rowwise + sums
    turned = 2 * TRANSPOSED_BYTES  # two pieces are in memory at once
    last = buffer + n * hidden_size + (x_rowwise if several else 0) + total + (2 * turned if several else turned)
    return d_hidden + max(before, weight, last, total + converted if several else 0)


class _LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy`: hidden [N, K], weight [V, K], target [N] → float32 []. Forward saves both gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, num_items: Tensor, objective: Objective,
        fp8: LinearGemms | None, fp8_logits: bool, grads: bool, words: Words | None, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        given, hidden = hidden.dtype, hidden.to(dtype)
        want_hidden, want_weight = (grads and need for need in ctx.needs_input_grad[:2])
        loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        # float16 has no room for a gradient divided by a step's targets: backward divides and scales in float32.
        late = hidden.dtype == torch.float16
        factor = num_items.to(loss.dtype).reciprocal()
        grad_scale = (torch.ones_like(factor) if late else factor) if want_hidden or want_weight else None
        if fp8 is not None and (fp8_logits or want_hidden or want_weight):
            head: _Head = _Fp8Head(hidden, weight, want_hidden, want_weight, fp8, fp8_logits)
        else:
            head = _Head(hidden, weight.to(hidden.dtype), want_hidden, want_weight)
        for part in _chunks(hidden.shape[0], weight.shape[0] * hidden.element_size(), int(head.chunk_share * CHUNK_BYTES)):
            room = None if grad_scale is None else head.room(part)
            what = head.logits(part), target[part], grad_scale, objective, room
            chunk_loss, grad = cross_entropy_(*what) if words is None else cross_entropy_of_slices_(*what, words)
            del what
            loss += chunk_loss
            if grad is not None:
                head.add(grad, part)
            # Logits or buffered gradients: gigabytes that must not be alive with the next chunk, or with d_weight's two dtypes.
            del grad, room
        d_hidden, d_weight = head.gradients()
        del head
        if want_weight and d_weight is None:
            d_weight = torch.zeros_like(weight, dtype=loss.dtype)
        if d_weight is not None and not late:
            d_weight = d_weight.to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight, factor if late else None)
        ctx.dtypes = given, weight.dtype
        return loss / num_items

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("losses of the output head")
        *gradients, factor = ctx.saved_tensors
        if factor is None:
            # No copy of a gradient as large as the vocabulary, and no pass over it if the loss is not scaled.
            reused = torch._C._autograd._get_current_graph_task_keep_graph()
            scaled = [None if d is None else scale_(d.clone() if reused else d, grad_loss) for d in gradients]
        else:
            by = factor * grad_loss
            scaled = [None if d is None else (d.float() * by).to(t) for d, t in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, *(None,) * 8


def _chunks(rows: int, row_bytes: int, chunk_bytes: int) -> list[slice]:
    """Equal parts of `rows`, each with at most `chunk_bytes`."""
    most = max(1, chunk_bytes // row_bytes)
    size = math.ceil(rows / math.ceil(rows / most)) if rows else 1
    if size >= _ALIGNED:
        size = min(most, math.ceil(size / _ALIGNED) * _ALIGNED)
    return [slice(start, start + size) for start in range(0, rows, size)]


def _largest_chunk(rows: int, row_bytes: int, chunk_bytes: int) -> int:
    """Rows of the largest part."""
    return min(rows, _chunks(rows, row_bytes, chunk_bytes)[0].stop)


def _add_product(total: Tensor | None, grad: Tensor, hidden: Tensor) -> Tensor:
    """total + gradᵀ · hidden, float32 [V, K], in place except the first; on a GPU the product is added unrounded."""
    if grad.device.type == "cuda" and grad.dtype != torch.float32:
        if total is None:
            return torch.mm(grad.t(), hidden, out_dtype=torch.float32)
        return torch.addmm(total, grad.t(), hidden, out_dtype=torch.float32, out=total)
    # A frequent word's sum ends beyond float16.
    widened = grad.dtype == torch.float16 or gemm.widens(grad)
    part = (grad.t().float() @ hidden.float()) if widened else wide(grad.t() @ hidden)
    return part if total is None else total.add_(part)
