"""Rows of a matrix by token ids, rounded as they are read: a float32 weight needs no second pass for a stream in bf16.

An id outside the vocabulary gives a row of NaN, as the loss does for such a label: PyTorch's kernel instead raises an assertion
that ends the process's use of the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo.kernels.tiles import cdiv, next_power_of_2

_COLUMNS, _WARPS = 2048, 4
"""Most columns of a program, and its warps."""


@triton.jit
def _embedding_rows(ids_ptr, weight_ptr, out_ptr, words, columns, stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(ids_ptr + token).to(tl.int64)
    known = (word >= 0) & (word < words)
    row = tl.load(weight_ptr + word * stride + c, mask=known & (c < columns), other=float("nan"))
    tl.store(out_ptr + token * columns + c, row.to(out_ptr.dtype.element_ty), mask=c < columns)


def launch(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Run the kernel; see `embedding`."""
    words, columns = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = torch.empty(*ids.shape, columns, dtype=dtype, device=weight.device)
    if out.numel():
        block = min(_COLUMNS, next_power_of_2(columns))
        _embedding_rows[(ids.numel(), cdiv(columns, block))](
            ids.contiguous(), weight, out, words, columns, weight.stride(0), BLOCK=block, num_warps=_WARPS
        )
    return out


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of `weight` [V, K] at `ids`, whole numbers [...], in `dtype`: [..., K].

    An id outside of the vocabulary gives NaN on a GPU. Raises IndexError: there is one, on a CPU.
    """
    if weight.device.type == "cuda":
        return launch(ids, weight, dtype)
    return functional.embedding(ids, weight).to(dtype)
