"""Kernels that pack LoRA's adapters as one pair of matrices, split the pair's gradients, and add its product.

PyTorch's operations need up to seven launches for each matrix with adapters, of a few microseconds each, and up to four
in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.tiles import cdiv, next_power_of_2

LEAST_COLUMNS, LEAST_ELEMENTS = 8192, 1 << 25
"""Smallest width of a sum for the kernel: for narrower matrices cuBLAS reaches the memory's speed."""
MOST_BETWEEN = 128
"""Largest number of the narrow operand's columns with which the addition is bound by memory."""
MOST_PARTS = 4
"""Adapters, or runs of rows, in one launch of the packing kernel."""


class Tiles(NamedTuple):
    """Rows and columns of a tile of the sum, tiles of a program, side by side, and its warps."""

    rows: int
    columns: int
    steps: int
    warps: int


ADD = Tiles(32, 128, 4, 4)
_ELEMENTS, _WARPS = 2048, 4


@triton.jit
def _add_product(
    y_ptr, a_ptr, b_ptr, rows, columns, between, y_stride, a_stride, b_stride_k, b_stride_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BETWEEN: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    # The next tiles are loaded while one is added and stored: a program of one tile waits for its loads.
    across = tl.cdiv(columns, COLUMNS * STEPS)
    m = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    begin = (tl.program_id(0) % across) * (COLUMNS * STEPS)
    k = tl.arange(0, BETWEEN)
    a_at = a_ptr + m[:, None].to(tl.int64) * a_stride + k[None, :]
    if WHOLE:  # noqa: SIM108
        a = tl.load(a_at)
    else:
        a = tl.load(a_at, mask=(m < rows)[:, None] & (k < between)[None, :], other=0.0)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        n = begin + step * COLUMNS + tl.arange(0, COLUMNS)
        at = y_ptr + m[:, None].to(tl.int64) * y_stride + n[None, :]
        b_at = b_ptr + k[:, None].to(tl.int64) * b_stride_k + n[None, :].to(tl.int64) * b_stride_n
        if WHOLE:
            y = tl.load(at)
            tl.store(at, (y.to(tl.float32) + tl.dot(a, tl.load(b_at))).to(y.dtype))
        else:
            inside = (m < rows)[:, None] & (n < columns)[None, :]
            y = tl.load(at, mask=inside, other=0.0)
            b = tl.load(b_at, mask=(k < between)[:, None] & (n < columns)[None, :], other=0.0)
            tl.store(at, (y.to(tl.float32) + tl.dot(a, b)).to(y.dtype), mask=inside)


def takes(out: Tensor, a: Tensor) -> bool:
    """True if the kernel adds a product of few columns, a [M, C], to out [M, N] faster than cuBLAS does."""
    return (
        out.shape[1] >= LEAST_COLUMNS
        and out.numel() >= LEAST_ELEMENTS
        and a.shape[1] <= MOST_BETWEEN
        and out.dtype in (torch.bfloat16, torch.float16)
        and out.is_cuda
        and out.stride(1) == a.stride(1) == 1
    )


def launch_add(out: Tensor, a: Tensor, b: Tensor, tiles: Tiles = ADD) -> Tensor:
    """out [M, N] += a [M, C] · b [C, N] in place: sums in float32, rounded once. Rows of out and a are contiguous."""
    rows, columns = out.shape
    between = a.shape[1]
    padded, width = max(16, next_power_of_2(between)), tiles.columns * tiles.steps
    whole = rows % tiles.rows == columns % width == 0 and between == padded
    _add_product[(cdiv(rows, tiles.rows) * cdiv(columns, width),)](
        out, a, b, rows, columns, between, out.stride(0), a.stride(0), b.stride(0), b.stride(1),
        ROWS=tiles.rows, COLUMNS=tiles.columns, BETWEEN=padded, STEPS=tiles.steps, STAGES=3 if padded <= 64 else 2,
        WHOLE=whole, num_warps=tiles.warps,
    )  # fmt: skip
    return out


class Run(NamedTuple):
    """Rows of a joint B that belong to an adapter: its index, first row in its B, and first row and count in a repetition."""

    adapter: int
    start: int
    first: int
    size: int


@triton.jit
def _copy_a(a_ptr, joint_ptr, e, inside, columns, NUMBER: tl.constexpr, RANK: tl.constexpr):
    """The elements e of the joint A that belong to this adapter."""
    begin = NUMBER * RANK * columns
    mine = inside & (e >= begin) & (e < begin + RANK * columns)
    value = tl.load(a_ptr + (e - begin), mask=mine, other=0.0).to(tl.float32)
    tl.store(joint_ptr + e, value.to(joint_ptr.dtype.element_ty), mask=mine)


@triton.jit
def _place(e, inside, LENGTH: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, adapter, start, first, count):
    """Offsets in an adapter's B of the elements e of the joint B, and a mask of the elements that the adapter has."""
    row = e // WIDTH
    column = e % WIDTH - adapter * RANK
    within = row % LENGTH - first
    mine = inside & (column >= 0) & (column < RANK) & (within >= 0) & (within < count)
    return (start + (row // LENGTH) * count + within) * RANK + column, mine


@triton.jit
def _pack(
    a_0, a_1, a_2, a_3, b_0, b_1, b_2, b_3, joint_a, joint_b, columns, elements_a, elements_b, programs_a, scale,
    adapter_0, start_0, first_0, count_0, adapter_1, start_1, first_1, count_1,
    adapter_2, start_2, first_2, count_2, adapter_3, start_3, first_3, count_3,
    ADAPTERS: tl.constexpr, RUNS: tl.constexpr, LENGTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < programs_a:
        e = pid * BLOCK + tl.arange(0, BLOCK)
        inside = e < elements_a
        _copy_a(a_0, joint_a, e, inside, columns, 0, RANK)
        if ADAPTERS > 1:
            _copy_a(a_1, joint_a, e, inside, columns, 1, RANK)
        if ADAPTERS > 2:
            _copy_a(a_2, joint_a, e, inside, columns, 2, RANK)
        if ADAPTERS > 3:
            _copy_a(a_3, joint_a, e, inside, columns, 3, RANK)
    else:
        WIDTH: tl.constexpr = ADAPTERS * RANK
        e = (pid - programs_a) * BLOCK + tl.arange(0, BLOCK)
        inside = e < elements_b
        at, mine = _place(e, inside, LENGTH, WIDTH, RANK, adapter_0, start_0, first_0, count_0)
        total = tl.load(b_0 + at, mask=mine, other=0.0).to(tl.float32)
        if RUNS > 1:
            at, mine = _place(e, inside, LENGTH, WIDTH, RANK, adapter_1, start_1, first_1, count_1)
            total += tl.load(b_1 + at, mask=mine, other=0.0).to(tl.float32)
        if RUNS > 2:
            at, mine = _place(e, inside, LENGTH, WIDTH, RANK, adapter_2, start_2, first_2, count_2)
            total += tl.load(b_2 + at, mask=mine, other=0.0).to(tl.float32)
        if RUNS > 3:
            at, mine = _place(e, inside, LENGTH, WIDTH, RANK, adapter_3, start_3, first_3, count_3)
            total += tl.load(b_3 + at, mask=mine, other=0.0).to(tl.float32)
        tl.store(joint_b + e, (total * scale).to(joint_b.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(
    joint_b, b_0, b_1, b_2, b_3, elements_b, scale,
    adapter_0, start_0, first_0, count_0, adapter_1, start_1, first_1, count_1,
    adapter_2, start_2, first_2, count_2, adapter_3, start_3, first_3, count_3,
    WIDTH: tl.constexpr, RUNS: tl.constexpr, LENGTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < elements_b
    value = tl.load(joint_b + e, mask=inside, other=0.0) * scale
    at, mine = _place(e, inside, LENGTH, WIDTH, RANK, adapter_0, start_0, first_0, count_0)
    tl.store(b_0 + at, value, mask=mine)
    if RUNS > 1:
        at, mine = _place(e, inside, LENGTH, WIDTH, RANK, adapter_1, start_1, first_1, count_1)
        tl.store(b_1 + at, value, mask=mine)
    if RUNS > 2:
        at, mine = _place(e, inside, LENGTH, WIDTH, RANK, adapter_2, start_2, first_2, count_2)
        tl.store(b_2 + at, value, mask=mine)
    if RUNS > 3:
        at, mine = _place(e, inside, LENGTH, WIDTH, RANK, adapter_3, start_3, first_3, count_3)
        tl.store(b_3 + at, value, mask=mine)


def packs(matrices: Sequence[Tensor], runs: Sequence[Run]) -> bool:
    """True if one launch packs these adapters on their device: A [r, K] and B [N, r] in turn, contiguous, of one dtype."""
    first = matrices[0]
    return (
        first.is_cuda
        and len(runs) <= MOST_PARTS
        and len(matrices) <= 2 * MOST_PARTS
        and first.dtype != torch.float64
        and all(x.is_contiguous() and x.dtype == first.dtype for x in matrices)
    )


def launch_pack(
    matrices: Sequence[Tensor], runs: Sequence[Run], rows: int, length: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The joint A [R, K] and B [N, R], times the scale, of adapters A [r, K] and B [n, r] in turn; 0 where no adapter has rows.

    rows: N. length: rows of one repetition of the joint B; `runs`: the adapters' rows in it.
    """
    a, b = list(matrices[::2]), matrices[1::2]
    rank, columns = a[0].shape
    width = rank * len(a)
    joint_a, joint_b = a[0].new_empty(width, columns, dtype=dtype), a[0].new_empty(rows, width, dtype=dtype)
    programs_a, programs_b = cdiv(joint_a.numel(), _ELEMENTS), cdiv(joint_b.numel(), _ELEMENTS)
    _pack[(programs_a + programs_b,)](
        *_filled(a), *_filled([b[run.adapter] for run in runs]), joint_a, joint_b,
        columns, joint_a.numel(), joint_b.numel(), programs_a, scale, *_numbers(runs),
        ADAPTERS=len(a), RUNS=len(runs), LENGTH=length, RANK=rank, BLOCK=_ELEMENTS, num_warps=_WARPS,
    )  # fmt: skip
    return joint_a, joint_b


def launch_unpack(joint_b: Tensor, adapters: int, runs: Sequence[Run], length: int, scale: float) -> list[Tensor]:
    """The gradient of each B, of that of the joint B [N, R], times the scale; the inverse of `launch_pack`. All contiguous."""
    rows, width = joint_b.shape
    rank, repeats = width // adapters, rows // length
    sizes = [0] * adapters
    for run in runs:
        sizes[run.adapter] += repeats * run.size * rank
    gradients = [part.view(-1, rank) for part in joint_b.new_empty(sum(sizes)).split(sizes)]
    _unpack[(cdiv(joint_b.numel(), _ELEMENTS),)](
        joint_b, *_filled([gradients[run.adapter] for run in runs]), joint_b.numel(), scale, *_numbers(runs),
        WIDTH=width, RUNS=len(runs), LENGTH=length, RANK=rank, BLOCK=_ELEMENTS, num_warps=_WARPS,
    )  # fmt: skip
    return gradients


def _filled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, padded to the number of a launch's arguments."""
    return [*tensors, *[tensors[0]] * (MOST_PARTS - len(tensors))]


def _numbers(runs: Sequence[Run]) -> list[int]:
    return [number for run in (*runs, *[Run(0, 0, 0, 0)] * (MOST_PARTS - len(runs))) for number in run]
