"""The handle of pending collectives: results, and the references that it holds until they are complete."""

import re
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

import octavo
import ranks
from octavo.collectives.work import start_collective, start_gather


def exchanged():
    """Results of collectives started together, and which operands are referenced before and after `wait`."""
    group, rank = dist.group.WORLD, dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    sent = [torch.randn(2, 3, generator=draw) for _ in range(2)]
    received = [torch.empty_like(part) for part in sent]
    alive = [weakref.ref(part) for part in sent]
    values = [part.clone() for part in sent]
    calls = [*zip(received, sent, strict=True)]
    pending = start_collective(dist.all_to_all_single, calls, group, lambda: [part.sum() for part in received])
    gathering = start_gather(values[0], group)
    del sent, calls
    before = [each() is not None for each in alive]
    sums = pending.wait()
    return values, received, sums, gathering.wait(), before, [each() is not None for each in alive]


def test_several_collectives_have_one_handle_which_holds_their_operands():
    first, second = ranks.run(2, exchanged)
    for rank, (_, received, sums, gathered, before, after) in enumerate((first, second)):
        for part, mine, theirs, total in zip(received, first[0], second[0], sums, strict=True):
            assert torch.equal(part, torch.stack((mine[rank], theirs[rank])))
            assert torch.equal(total, part.sum())
        assert torch.equal(gathered, torch.stack((first[0][0], second[0][0])))
        assert (before, after) == ([True, True], [False, False])


def test_one_place_starts_collectives():
    source = Path(octavo.__file__).parent
    found = [path.relative_to(source) for path in source.rglob("*.py") if re.search(r"async_op ?= ?True", path.read_text())]
    assert found == [Path("collectives/work.py")]
