"""Matrix products by the fastest algorithm that cuBLAS has here, in place of the first that its heuristic names.

On an H200 the first one is up to a third slower than the best: 7 to 9% over a model's products in FP8, about 5% in bf16. So a
large product is measured when it is asked for a second time: each algorithm that cuBLAS offers runs on the operands at hand, in
turns, and the fastest is taken of those that give PyTorch's result to the last bit. So nothing but time depends on a
measurement: ranks need not agree, and a run that is repeated has the same losses.

What is small, seen once, compiled or first met while a CUDA graph is recorded is left to PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import cublaslt
from octavo.kernels.cublaslt import ALIGNMENT, Product, RefusedError, Shape

LEAST_OPERATIONS = 2**31
"""Multiplications and additions of a product that is worth a measurement: about two microseconds."""
MOST_SHAPES = 256
"""That are measured in a process, some 20 ms each."""
_MOST_SEEN = 4096
_ROUNDS = 5
_HIDE_CYCLES = 400_000
"""About 200 µs, in which the host has launched a round of small products."""
_GAIN = 1.01
"""What another algorithm has to be faster by."""

_seen: set[Shape] = set()
_chosen: dict[Shape, tuple[Product, int] | None] = {}


def mm(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    fast: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """a [M, K] · b [K, N] + bias on a GPU: `torch._scaled_mm` where there are scales, else `torch.mm` and `torch.addmm`.

    a, b: by rows or by columns; FP8 with `scales` float32 [] each (`a` by rows, `b` by columns, K and N in multiples of 16), or
    one wide dtype. bias: [N] of `out_dtype`. out: contiguous [M, N], to be written.
    """
    shape = None if torch.compiler.is_compiling() else _shape(a, b, out_dtype, fast, bias)
    if shape is not None:
        out = a.new_empty(shape.rows, shape.columns, dtype=out_dtype) if out is None else out
        if all(x.data_ptr() % ALIGNMENT == 0 for x in (a, b, out)) and (bias is None or bias.data_ptr() % 16 == 0):
            if shape not in _chosen and _is_wanted(shape):
                _chosen[shape] = _measured(shape, a, b, scales, bias, out)
            if chosen := _chosen.get(shape):
                product, number = chosen
                with torch.cuda.device(shape.device):
                    return product(number, a, b, scales, bias, out)
    return _by_pytorch(a, b, out_dtype, scales, fast, bias, out)


def _shape(a: Tensor, b: Tensor, out_dtype: torch.dtype, fast: bool, bias: Tensor | None) -> Shape | None:
    """What is multiplied, where it is worth a measurement and cuBLASLt takes it as it is stored."""
    (rows, summed), columns = a.shape, b.shape[1]
    if 2 * rows * summed * columns < LEAST_OPERATIONS or not cublaslt.is_loaded():
        return None
    a_by_rows, b_by_rows = _by_rows(a), _by_rows(b)
    fits = {a.dtype, b.dtype} <= cublaslt.OPERANDS and a.dtype.itemsize == b.dtype.itemsize and out_dtype in cublaslt.RESULTS
    if a_by_rows is None or b_by_rows is None or not fits:
        return None
    return Shape(
        a.device.index, rows, columns, summed, a.dtype, a_by_rows, b.dtype, b_by_rows, out_dtype, bias is not None, fast
    )


def _by_rows(x: Tensor) -> bool | None:
    """Whether a matrix is stored row after row; False for column after column, None where there are gaps."""
    if x.is_contiguous():
        return True
    return False if x.t().is_contiguous() else None


def _by_pytorch(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None,
    fast: bool,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    into: dict[str, Any] = {} if out is None else {"out": out}
    if scales is not None:
        scale_a, scale_b = scales
        return torch._scaled_mm(
            a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast, **into
        )
    if out_dtype != a.dtype:
        into["out_dtype"] = out_dtype
    return torch.mm(a, b, **into) if bias is None else torch.addmm(bias, a, b, **into)


def _is_wanted(shape: Shape) -> bool:
    """Whether a shape that was not measured is now; remembers it otherwise."""
    if shape in _seen and len(_chosen) < MOST_SHAPES and not torch.cuda.is_current_stream_capturing():
        _seen.discard(shape)
        return True
    if len(_seen) >= _MOST_SEEN:
        _seen.clear()
    _seen.add(shape)
    return False


def _measured(
    shape: Shape, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None, out: Tensor
) -> tuple[Product, int] | None:
    """The fastest algorithm with PyTorch's bits; None where that is PyTorch's own. `out` is overwritten."""

    def by_pytorch() -> Tensor:
        return _by_pytorch(a, b, shape.out, scales, shape.fast, bias, out)

    def by(number: int) -> Tensor:
        return product(number, a, b, scales, bias, out)

    with torch.cuda.device(shape.device):
        wanted, same = _sums(by_pytorch()), []
        with contextlib.suppress(RefusedError):  # by a cuBLAS that has no such products
            product = Product(shape)
            for number in range(len(product.algorithms)):
                with contextlib.suppress(RefusedError):
                    if torch.equal(_sums(by(number)), wanted):
                        same.append(number)
        own, *times = _times([by_pytorch, *(functools.partial(by, number) for number in same)])
    best, number = min(zip(times, same, strict=True), default=(own, -1))
    return (product, number) if best * _GAIN < own else None


def _sums(x: Tensor) -> Tensor:
    """Of the bits of each row and of each column, without another matrix of this size: two that agree in all are the same."""
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    return torch.cat([bits.sum(dim, dtype=torch.int64) for dim in (0, 1)])


def _times(runs: Sequence[Callable[[], Tensor]]) -> list[float]:
    """Milliseconds of each: medians over rounds in which all take turns."""
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        torch.cuda._sleep(_HIDE_CYCLES)
        for run, pairs in zip(runs, events, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in pairs) for pairs in events]
