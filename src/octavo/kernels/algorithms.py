"""Matrix products by the fastest algorithm that cuBLAS has here, instead of the first of its heuristic.

On an H200 the first one is up to a fifth slower than the best. So a large product is measured at its second use: cuBLAS's
algorithms run on the operands, the fastest few in turns with PyTorch's. The fastest is taken if it has PyTorch's result to the
last bit, as all had in `tests/gpu/test_algorithms.py`; algorithms that split the sum are left out. So only time depends on a
measurement: ranks need not agree, and a repeated run has the same losses.

The GPU is idle when a measurement begins, so that the choice repeats: in a first step a collective holds multiprocessors for
seconds, while another rank compiles its kernels. `choices` names what was chosen.

With several ranks, whose collectives hold multiprocessors at times, only algorithms that assign tiles dynamically are used,
except in `without_collectives`.

PyTorch multiplies small products, those seen once, differentiated, compiled or first met while a CUDA graph is recorded, and
all under a dispatch mode, which would not see another product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from octavo.kernels import cublaslt
from octavo.kernels.cublaslt import ALIGNMENT, Product, ProductShape, RefusedError
from octavo.kernels.timing import median_us
from octavo.process import process

LEAST_OPERATIONS = 2**31
"""Multiplications and additions of a product that is worth a measurement: about two microseconds."""
MOST_SHAPES = 256
"""Shapes measured in a process, each by up to 170 products."""
MOST_USES = 64
"""Uses after which tuning of a shape stops: its results are zeros, infinities or NaN, which do not tell algorithms apart."""
_MOST_SEEN = 4096
_FIRST_ROUNDS, _FINALISTS, _ROUNDS = 2, 4, 5
_HIDE_CYCLES = 40_000
"""About 20 µs, in which the host launches a product between two events."""
_GAIN = 1.02
"""Least ratio of PyTorch's time to another algorithm's, twice."""
_SAMPLED_ROWS = 64
_DIGESTED = 2**22
"""Elements whose bits are summed at a time."""


class _Operands(NamedTuple):
    """Arguments of `mm`."""

    a: Tensor
    b: Tensor
    out_dtype: torch.dtype
    scales: tuple[Tensor, Tensor] | None
    fast: bool
    bias: Tensor | None

    def by_pytorch(self, out: Tensor | None = None) -> Tensor:
        """The product by PyTorch, in `out` if given."""
        into: dict[str, Any] = {} if out is None else {"out": out}
        if self.scales is not None:
            scale_a, scale_b = self.scales
            into |= {"scale_a": scale_a, "scale_b": scale_b, "bias": self.bias, "use_fast_accum": self.fast}
            return torch._scaled_mm(self.a, self.b, out_dtype=self.out_dtype, **into)
        if self.out_dtype != self.a.dtype:
            into["out_dtype"] = self.out_dtype
        return torch.mm(self.a, self.b, **into) if self.bias is None else torch.addmm(self.bias, self.a, self.b, **into)

    def by(self, product: Product, number: int, out: Tensor) -> Tensor:
        """The product by an algorithm, in `out`."""
        with torch.cuda.device(product.shape.device):
            return product(number, self.a, self.b, self.scales, self.bias, out)

    def shape(self) -> ProductShape | None:
        """The key of a choice; None for a small product, and where cuBLASLt does not support the operands' strides."""
        (rows, summed), columns, bias = self.a.shape, self.b.shape[1], self.bias
        if 2 * rows * summed * columns < LEAST_OPERATIONS or cublaslt.library() is None:
            return None
        a, b, out = self.a.dtype, self.b.dtype, self.out_dtype
        a_by_rows, b_by_rows = _by_rows(self.a), _by_rows(self.b)
        fits = {a, b} <= cublaslt.OPERANDS and a.itemsize == b.itemsize and out in cublaslt.RESULTS
        if a_by_rows is None or b_by_rows is None or not fits or not _is_aligned(self.a, self.b):
            return None
        if bias is not None and not (bias.is_contiguous() and _is_aligned(bias)):
            return None
        return ProductShape(
            self.a.device.index, rows, columns, summed, a, a_by_rows, b, b_by_rows, out, bias is not None, self.fast,
            dynamic=_has_collectives(),
        )  # fmt: skip


def mm(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    fast: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    recurring: bool = True,
) -> Tensor:
    """a [M, K] · b [K, N] + bias on a GPU: `torch._scaled_mm` where there are scales, else `torch.mm` and `torch.addmm`.

    a, b: by rows or by columns; FP8 with `scales` float32 [] each (`a` by rows, `b` by columns, K and N in multiples of 16), or
    one dtype of high precision. bias: [N] of `out_dtype`. out: contiguous [M, N], to be written. recurring: False for shapes
    that do not recur, such as those of a router.
    """
    operands = _Operands(a, b, out_dtype, scales, fast, bias)
    shape = operands.shape() if recurring and _is_free(a, b) else None
    if shape is None or (out is not None and not _is_aligned(out)):
        return operands.by_pytorch(out)
    if shape not in process.product_algorithms and _is_wanted(shape):
        return _measured(shape, operands, out)
    chosen: tuple[Product, int] | None = process.product_algorithms.get(shape)
    if chosen is not None:
        target = a.new_empty(shape.rows, shape.columns, dtype=out_dtype) if out is None else out
        try:
            return operands.by(*chosen, target)
        except RefusedError:
            process.product_algorithms[shape] = None
    return operands.by_pytorch(out)


@contextlib.contextmanager
def without_collectives() -> Iterator[None]:
    """Context without concurrent collectives: products inside may give each multiprocessor a fixed share of tiles."""
    process.without_collectives += 1
    try:
        yield
    finally:
        process.without_collectives -= 1


def choices() -> dict[str, str]:
    """The algorithm of each measured product by cuBLAS's numbers; "PyTorch's" where none is faster."""
    return {
        _text(shape): "PyTorch's" if taken is None else taken[0].name(taken[1])
        for shape, taken in process.product_algorithms.items()
    }


def _text(shape: ProductShape) -> str:
    """A product in words, such as "cuda:0, 8192 x 4096 x 14336, e4m3 rows · e4m3 columns → bfloat16, fast"."""

    def operand(dtype: torch.dtype, by_rows: bool) -> str:
        return f"{_name(dtype)} {'rows' if by_rows else 'columns'}"

    sizes = f"{shape.rows} x {shape.columns} x {shape.summed}"
    operands = f"{operand(shape.a, shape.a_by_rows)} · {operand(shape.b, shape.b_by_rows)} → {_name(shape.out)}"
    marks = [word for word, holds in (("bias", shape.bias), ("fast", shape.fast), ("dynamic", shape.dynamic)) if holds]
    return ", ".join([f"cuda:{shape.device}", sizes, operands, *marks])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("float8_").removesuffix("fn")


def _has_collectives() -> bool:
    """True if collectives can run concurrently with a product: the process is one of several ranks."""
    return not process.without_collectives and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_free(*operands: Tensor) -> bool:
    """True if no compiler, dispatch mode or autograd has to see the product."""
    watched = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return not (watched or (torch.is_grad_enabled() and any(x.requires_grad for x in operands)))


def _by_rows(x: Tensor) -> bool | None:
    """True for a matrix stored row after row, False for column after column, None if it is not contiguous."""
    if x.is_contiguous():
        return True
    return False if x.stride() == (1, x.shape[0]) else None


def _is_aligned(*tensors: Tensor) -> bool:
    return all(x.data_ptr() % ALIGNMENT == 0 for x in tensors)


def _is_wanted(shape: ProductShape) -> bool:
    """True from a shape's second use on, until an algorithm is chosen: results may be too uniform to compare algorithms."""
    if len(process.product_algorithms) >= MOST_SHAPES or torch.cuda.is_current_stream_capturing():
        return False
    if len(process.product_uses) >= _MOST_SEEN:
        process.product_uses.clear()
    uses = process.product_uses[shape] = process.product_uses.get(shape, 0) + 1
    return 1 < uses <= MOST_USES


def _measured(shape: ProductShape, operands: _Operands, out: Tensor | None) -> Tensor:
    """The product; an algorithm is chosen if the result can tell one from another."""
    with torch.cuda.device(shape.device):
        out = operands.by_pytorch(out)
        # Collectives end when their last rank joins, and it does not wait for collectives that this process launches later.
        torch.cuda.synchronize()
        sample = out[:: max(1, shape.rows // _SAMPLED_ROWS)].float()
        if bool(sample.isfinite().all() & (2 * sample.count_nonzero() > sample.numel())):
            process.product_algorithms[shape] = None
            try:
                process.product_algorithms[shape] = _fastest(shape, operands, out)
            except torch.OutOfMemoryError:  # `out` may hold another algorithm's bits; the product itself fits in memory
                operands.by_pytorch(out)
            process.product_uses.pop(shape, None)
    return out


def _fastest(shape: ProductShape, operands: _Operands, out: Tensor) -> tuple[Product, int] | None:
    """The fastest algorithm with the bits of `out`, PyTorch's result; None if PyTorch's is fastest. `out` is not changed."""
    wanted = _digest(out)
    try:
        product = Product(shape)
    except RefusedError:  # by a cuBLAS that has no such products
        return None
    time = functools.partial(median_us, device=out.device, warm_up=0, pause_cycles=_HIDE_CYCLES)
    pytorch = functools.partial(operands.by_pytorch, out)
    runs = {}
    for number in range(len(product.algorithms)):
        run = functools.partial(operands.by, product, number, out)
        with contextlib.suppress(RefusedError):
            run()
            runs[number] = run
    first = zip(time(*runs.values(), rounds=_FIRST_ROUNDS), runs, strict=True)
    finalists = [number for _, number in sorted(first)[:_FINALISTS]]
    pytorch_us, *times = time(pytorch, *(runs[number] for number in finalists), rounds=_ROUNDS)
    for us, number in sorted(zip(times, finalists, strict=True)):
        if us * _GAIN >= pytorch_us:
            break
        if torch.equal(_digest(runs[number]()), wanted):
            # Measured once more, so that a lucky timing does not win.
            pytorch_us, us = time(pytorch, runs[number], rounds=_ROUNDS)
            if us * _GAIN < pytorch_us:
                return product, number
    pytorch()
    return None


def _digest(x: Tensor) -> Tensor:
    """A number for each row of a matrix, of all bits and their places, computed with little memory: int64 [M]."""
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    mixed = torch.arange(1, x.shape[1] + 1, device=x.device) * -0x61C8864680B583EB
    factors = (mixed ^ (mixed >> 31)) * -0x40A7B892E31B1A47 | 1  # odd, and without a regular pattern
    pieces = bits.split(max(1, _DIGESTED // x.shape[1]))
    return torch.cat([(piece * factors).sum(1) for piece in pieces])
