"""The gradient of an embedding: the rows of each word's tokens summed in float32, rounded once, in the same order every time.

PyTorch's kernels sum in passes over all tokens, and where the head shares its weight, another pass over both matrices adds its
gradient. Here tokens are sorted by their words, and a program sums the rows of a word: most words have one, which is read and
written once. A word of thousands of tokens would keep one program for long. So sums end where a chunk of the sorted tokens
ends, and a second kernel adds up the parts of words that go over such an end. No size depends on the ids: the host never waits
for the GPU, and CUDA graphs record it. The head's gradient is added to in place, as each row is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.tiles import adjacent_columns, cdiv, next_power_of_2

_CHUNK, _COLUMNS, _WARPS = 32, 2048, 4
"""Sorted tokens of a chunk, most columns of a program, and its warps."""
_PARTS, _FEW_COLUMNS = 16, 256
"""Parts that the second kernel reads at once, and most columns of a program."""
_IDS = 1024
"""Ids of a program that computes the keys."""


@triton.jit
def _embedding_keys(ids_ptr, keys_ptr, tokens, words, padding, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(ids_ptr + at, mask=at < tokens, other=0)
    trained = (word >= 0) & (word < words) & (word != padding)
    tl.store(keys_ptr + at, tl.where(trained, word, words).to(tl.int32), mask=at < tokens)


@triton.jit
def _write(grad_ptr, word, c, columns, summed, ADD: tl.constexpr):
    at = grad_ptr + word.to(tl.int64) * columns + c
    if ADD:
        summed += tl.load(at, mask=c < columns, other=0.0).to(tl.float32)
    tl.store(at, summed.to(grad_ptr.dtype.element_ty), mask=c < columns)


@triton.jit
def _embedding_sums(
    d_out_ptr, keys_ptr, order_ptr, grad_ptr, parts_ptr, tokens, words, columns, stride,
    ADD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    chunk = at // CHUNK
    end = (chunk + 1) * CHUNK
    word = tl.load(keys_ptr + at)
    before = tl.load(keys_ptr + at - 1, mask=at > 0, other=-1)
    if (word < words) & ((before != word) | (at == chunk * CHUNK)):
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        near = at + tl.arange(0, CHUNK)
        keys = tl.load(keys_ptr + near, mask=(near < end) & (near < tokens), other=-1)
        count = tl.sum((keys == word).to(tl.int32), 0)
        after = tl.load(keys_ptr + end, mask=end < tokens, other=-1)  # sorted: the same word if it continues
        summed = tl.zeros([BLOCK], tl.float32)
        for sorted_token in range(at, at + count):
            token = tl.load(order_ptr + sorted_token)
            row = tl.load(d_out_ptr + token * stride + c, mask=c < columns, other=0.0)
            summed += row.to(tl.float32)
        if (before == word) | (after == word):
            # Of a chunk at most two words reach beyond it: the part 2 · chunk came from before, the next one began here.
            part = 2 * chunk + (before != word).to(tl.int32)
            tl.store(parts_ptr + part.to(tl.int64) * columns + c, summed, mask=c < columns)
        else:
            _write(grad_ptr, word, c, columns, summed, ADD)


@triton.jit
def _embedding_join(
    keys_ptr, parts_ptr, grad_ptr, tokens, words, columns,
    ADD: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    first, end = chunk * CHUNK, (chunk + 1) * CHUNK
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=-1)
    word = tl.load(keys_ptr + end - 1, mask=end <= tokens, other=-1)
    after = tl.load(keys_ptr + end, mask=end < tokens, other=-2)
    if (word == after) & (word != before) & (word < words):
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        # The word's first part, then those of the chunks that begin with the word.
        summed = tl.load(parts_ptr + (2 * chunk + 1).to(tl.int64) * columns + c, mask=c < columns, other=0.0)
        following = chunk + 1
        joined = tl.full([], PARTS, tl.int32)
        while joined == PARTS:
            chunks = following + tl.arange(0, PARTS)
            keys = tl.load(keys_ptr + chunks.to(tl.int64) * CHUNK, mask=chunks * CHUNK < tokens, other=-1)
            same_word = keys == word
            at = (2 * chunks).to(tl.int64)[:, None] * columns + c[None, :]
            summed += tl.sum(tl.load(parts_ptr + at, mask=same_word[:, None] & (c < columns)[None, :], other=0.0), 0)
            joined = tl.sum(same_word.to(tl.int32), 0)
            following += PARTS
        _write(grad_ptr, word, c, columns, summed, ADD)


def launch(
    d_out: Tensor, ids: Tensor, words: int, padding: int | None, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:
    """Run the kernels; see `embedding_backward`."""
    (tokens, columns), device = d_out.shape, d_out.device
    add, d_out = total is not None, adjacent_columns(d_out)
    grad = torch.zeros(words, columns, dtype=dtype, device=device) if total is None else total.contiguous()
    if d_out.numel() == 0:
        return grad
    keys = torch.empty(tokens, dtype=torch.int32, device=device)
    _embedding_keys[(cdiv(tokens, _IDS),)](
        ids.contiguous(), keys, tokens, words, -1 if padding is None else padding, BLOCK=_IDS
    )
    keys, order = torch.sort(keys, stable=True)
    chunks = cdiv(tokens, _CHUNK)
    parts = torch.empty(2 * chunks, columns, dtype=torch.float32, device=device)
    block = min(_COLUMNS, next_power_of_2(columns))
    _embedding_sums[(tokens, cdiv(columns, block))](
        d_out, keys, order, grad, parts, tokens, words, columns, d_out.stride(0),
        ADD=add, CHUNK=_CHUNK, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    if chunks > 1:
        block = min(_FEW_COLUMNS, block)
        _embedding_join[(chunks, cdiv(columns, block))](
            keys, parts, grad, tokens, words, columns, ADD=add, CHUNK=_CHUNK, PARTS=_PARTS, BLOCK=block, num_warps=_WARPS
        )
    return grad


def embedding_backward(
    d_out: Tensor, ids: Tensor, words: int, padding: int | None, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:
    """The gradient of an embedding's weight [V, K], V = `words`, in `dtype`.

    d_out: [N, K], any float dtype, of the rows. ids: whole numbers [N]; `padding` and ids outside the vocabulary are ignored.
    total: [V, K] of `dtype`, to which the gradient is added in place and which is returned, or a contiguous copy of it: each
    row is rounded once, and a row without tokens keeps its bits.
    """
    if d_out.device.type == "cuda":
        return launch(d_out, ids, words, padding, dtype, total)
    summed = reference.embedding_backward(d_out, ids, words, padding)
    return summed.to(dtype) if total is None else total.copy_(summed.add_(total))
