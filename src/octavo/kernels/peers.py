"""The largest amaxes of the GPUs of one host, in one launch: each GPU writes its amaxes into the others' memory, and reads
theirs.

A collective of NCCL runs on a separate stream, between two events, and its call takes the host some 50 microseconds; current
scaling waits for 64 of them in a step of eight layers. This kernel is a launch like any other of the stream, and it also
computes the scale, which saves a launch.

A word of 64 bits is written at once: the number of the join, and the amax. So a reader that finds the number has the amax,
without a barrier. Two slots alternate: a rank writes word k + 2 when it has all words k + 1, and another rank sends its word
k + 1 when it has read all words k. Amaxes are 0 or more, and never NaN, so they are in the order of their bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quantize.cast_scaled import choose_scale
from octavo.kernels.tiles import next_power_of_2

_LEAST = 32
"""Lanes of a program: each has an element, none has another's."""


@triton.jit
def _join_largest(
    amax_ptr, scale_ptr, peers_ptr, slots_ptr, number_ptr, count, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    SCALES: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < count
    number = tl.load(number_ptr) + 1
    slot = (number % 2) * SIZE * ROOM
    largest = tl.load(amax_ptr + at, mask=inside, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
    word = (number << 32) + largest
    for step in tl.static_range(1, SIZE):
        there = tl.load(peers_ptr + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(there + slot + RANK * ROOM + at, word, mask=inside, sem="relaxed", scope="sys")
    nothing = tl.zeros([BLOCK], dtype=tl.int64)
    for step in tl.static_range(1, SIZE):
        here = slots_ptr + slot + (RANK + step) % SIZE * ROOM + at
        received = tl.atomic_add(here, nothing, mask=inside, sem="relaxed", scope="sys")
        while tl.max(tl.where(inside & ((received >> 32) != number), 1, 0)) > 0:
            received = tl.atomic_add(here, nothing, mask=inside, sem="relaxed", scope="sys")
        largest = tl.maximum(largest, tl.where(inside, received & 0xFFFFFFFF, 0))
    amax = largest.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(amax_ptr + at, amax, mask=inside)
    if SCALES:
        tl.store(scale_ptr + at, choose_scale(amax, FP8_MAX, POWER_OF_TWO), mask=inside)
    tl.store(number_ptr, number)


def join_largest_(
    amaxes: Tensor,
    slots: Tensor,
    peers: Tensor,
    number: Tensor,
    *,
    rank: int,
    fp8_max: float | None = None,
    power_of_two: bool = False,
) -> Tensor | None:
    """The largest of all ranks' amaxes, in place; with `fp8_max` also their scales, float32 like `amaxes`.

    amaxes: float32, contiguous, at least 0, of which all ranks have as many. slots: int64 [2, ranks, room], zeros before the
    first join, which the other ranks write. peers: int64 [ranks], the addresses of all ranks' slots. number: int64 [], joins
    so far.
    """
    scales = torch.empty_like(amaxes) if fp8_max is not None else None
    _, size, room = slots.shape
    _join_largest[(1,)](
        amaxes, scales, peers, slots, number, amaxes.numel(), fp8_max or 0.0, power_of_two, fp8_max is not None,
        RANK=rank, SIZE=size, ROOM=room, BLOCK=max(_LEAST, next_power_of_2(amaxes.numel())), num_warps=1,
    )  # fmt: skip
    return scales
