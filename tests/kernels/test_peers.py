"""The largest amaxes over ranks by memory that each of them writes: here processes with shared memory at one address."""

import multiprocessing

import pytest
import torch

from octavo.fp8.formats import E4M3
from octavo.kernels import reference
from octavo.kernels.peers import join_largest_

ROUNDS, MOST = 5, 40
COUNTS = (1, 40, 1, 7, 33)


def amaxes(rank, size):
    draw = torch.Generator().manual_seed(17 * rank + size)
    values = torch.rand(ROUNDS, MOST, generator=draw).exponential_(generator=draw) * 10.0 ** (rank - 1)
    values[0, 0] = torch.inf if rank == size - 1 else 0.0
    values[1, :2] = 0.0
    return values


def join(rank, slots, results, scales):
    size, number = slots.shape[0], torch.zeros((), dtype=torch.int64)
    peers = torch.tensor([one.data_ptr() for one in slots])
    for turn, count in enumerate(COUNTS):
        own = amaxes(rank, size)[turn, :count].clone()
        asked = {"fp8_max": E4M3.max, "power_of_two": turn == 2} if turn else {}
        made = join_largest_(own, slots[rank], peers, number, rank=rank, **asked)
        results[rank, turn, :count] = own
        if made is not None:
            scales[rank, turn, :count] = made
    assert number == ROUNDS


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes of one GPU wait for each other: tests/gpu has two GPUs")
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_has_the_largest_of_all_and_its_scale(size):
    slots = torch.zeros(size, 2, size, 64, dtype=torch.int64).share_memory_()
    results, scales = (torch.zeros(size, ROUNDS, MOST).share_memory_() for _ in range(2))
    started = [
        multiprocessing.get_context("fork").Process(target=join, args=(rank, slots, results, scales), daemon=True)
        for rank in range(size)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    largest = torch.stack([amaxes(rank, size) for rank in range(size)]).amax(0)
    for turn, count in enumerate(COUNTS):
        of_all = reference.scale_from_amax(largest[turn, :count], E4M3.max, power_of_two=turn == 2)
        for rank in range(size):
            assert torch.equal(results[rank, turn, :count], largest[turn, :count])
            assert turn == 0 or torch.equal(scales[rank, turn, :count], of_all)
