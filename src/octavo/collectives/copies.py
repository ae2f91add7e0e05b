"""Exchanges between the GPUs of one host by their copy engines, which leave the multiprocessors to products beside them.

NCCL's kernels need multiprocessors: one that is launched just behind a product waits until that has ended, and one that runs
takes some from it. A copy into another GPU's memory needs none.

Each rank has memory that the others write (PyTorch's symmetric memory): two slots, with a block for each other rank. An
exchange copies this rank's blocks into the others' slots on a stream of its own, and meets them at a barrier; behind that, the
others' blocks are here. Exchanges take the slots in turns, in the same order on all ranks.

No block is overwritten before it is read. The blocks of exchange k are overwritten by exchange k + 2, whose copies come behind
the barrier of k + 1; a rank comes to that barrier when it has read those of k: an exchange that begins waits for the reads of
the one before, and blocks that nobody has read by then are moved to memory of their own.

Which of the two is faster for an exchange is measured at its second use, and agreed over its ranks; `choices` names it.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.kernels.timing import median_us
from octavo.process import process

_ALIGNMENT = 256
"""Bytes: of a block's begin, for products that read it."""
_HIDE_CYCLES = 400_000
"""About 0.2 ms, in which the host launches an exchange between two events."""
_WARM_UP, _ROUNDS = 3, 9


class PeerMemory:
    """Memory of the ranks of a group on one host that each of them writes, and the stream of the copies there."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._room = 0
        process.peer_memories.add(self)
        self._handle: Any = None
        self._slots: dict[int, Tensor] = {}
        """Of each rank: [2, other ranks, room] bytes."""
        self._turn = 0
        self._last: Exchange | None = None

    def reserve(self, block: int) -> None:
        """Have room for blocks of so many bytes. Collective where it has not."""
        block = -(-block // _ALIGNMENT) * _ALIGNMENT
        if block <= self._room:
            return
        # Nothing of Octavo's uses multicast, whose objects some containers forbid.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric_memory

        torch.cuda.synchronize(self._device)  # all have done so when they meet: nobody writes the present memory any more
        shape = 2, self.size - 1, block
        memory = symmetric_memory.empty(math.prod(shape), dtype=torch.uint8, device=self._device)
        self._handle = symmetric_memory.rendezvous(memory, self._group)
        self._slots = {rank: self._handle.get_buffer(rank, shape, torch.uint8) for rank in range(self.size)}
        self._room, self._last = block, None

    @property
    def bytes(self) -> int:
        """Of this rank's memory."""
        return 2 * (self.size - 1) * self._room

    def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> Exchange:
        """An exchange of blocks of this shape and dtype, of which each rank sends one to each other."""
        if self._last is not None:
            self._last.end()
            self.stream.wait_event(self._last.read)
        self.reserve(math.prod(shape) * dtype.itemsize)
        self._turn = 1 - self._turn
        self._last = Exchange(self, {rank: slots[self._turn] for rank, slots in self._slots.items()}, shape, dtype)
        return self._last

    def times_us(self, ways: tuple[Callable[[], object], ...]) -> tuple[float, ...]:
        """Median microseconds of each call, of the slowest rank. Collective."""
        # A collective in flight ends when its last rank comes, and that one waits for none that is not launched yet.
        torch.cuda.synchronize(self._device)
        found = median_us(*ways, device=self._device, rounds=_ROUNDS, warm_up=_WARM_UP, pause_cycles=_HIDE_CYCLES)
        times = torch.tensor(found, device=self._device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._group)
        return tuple(times.tolist())

    def meet(self) -> torch.cuda.Event:
        """The end of a barrier of all ranks behind this rank's copies."""
        with torch.cuda.stream(self.stream):
            self._handle.barrier()
        return self.stream.record_event()


class Exchange:
    """Blocks on their way from each rank to each other: `send` to all others and `close`, then `blocks`, in this order."""

    def __init__(self, memory: PeerMemory, slots: dict[int, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._memory, self._slots, self._shape, self._dtype = memory, slots, shape, dtype
        self._bytes = math.prod(shape) * dtype.itemsize
        self._held: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None
        self._moved: list[Tensor | None] | None = None
        self._open = False
        self.read = torch.cuda.Event()
        """Behind what reads the blocks."""

    def send(self, rank: int, block: Tensor) -> None:
        """Copy a contiguous block, complete on the current stream, to another rank."""
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream(block.device))
        with torch.cuda.stream(stream):
            self._slots[rank][_place(self._memory.rank, rank), : self._bytes].copy_(block.view(-1).view(torch.uint8))
        self._held.append(block)  # alive until the current stream waits for the copies

    def close(self) -> None:
        """All blocks are sent."""
        self._arrived = self._memory.meet()

    @contextlib.contextmanager
    def blocks(self) -> Iterator[list[Tensor | None]]:
        """The other ranks' blocks by rank, None at this rank's place, to be read inside on the current stream."""
        if self._moved is not None:
            yield self._moved
            return
        self._open = True
        yield self._views()
        self.read.record()
        self._open, self._moved = False, []

    def end(self) -> None:
        """Move blocks that nobody has read to memory of their own."""
        assert not self._open, "an exchange begins while another's blocks are read"
        if self._moved is None:
            self._moved = [None if block is None else block.clone() for block in self._views()]
            self.read.record()

    def _views(self) -> list[Tensor | None]:
        assert self._arrived is not None
        torch.cuda.current_stream(self._memory.stream.device).wait_event(self._arrived)
        self._held.clear()
        own, rank = self._slots[self._memory.rank], self._memory.rank
        return [
            None if other == rank else own[_place(other, rank), : self._bytes].view(self._dtype).view(self._shape)
            for other in range(self._memory.size)
        ]


def _place(sender: int, receiver: int) -> int:
    """The sender's block among those of the other ranks."""
    return sender - (sender > receiver)


def reach(group: dist.ProcessGroup, device: torch.device, block: int) -> PeerMemory | str:
    """Memory of a group's ranks with room for blocks of so many bytes, or the reason why there is none. Collective."""
    reason = "" if process.peer_copies else "OCTAVO_PEER_COPIES=0"
    if found := _agreed([reason, platform.node()], group):
        return found
    memory, reason = PeerMemory(group, device), ""
    try:
        memory.reserve(block)
    except RuntimeError as error:
        reason = f"no symmetric memory: {str(error).splitlines()[0]}"
    return _agreed([reason, ""], group) or memory


def _agreed(found: list[str], group: dist.ProcessGroup) -> str:
    """A reason of any rank, the same on all; empty if none has one. found: of this rank, and its host."""
    others: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(others, found, group=group)
    if len({host for _, host in others}) > 1:
        return "ranks on several hosts"
    return next((reason for reason, _ in others if reason), "")


def by_copies(kind: str, block: int, memory: PeerMemory, ways: Callable[[], tuple[Callable[[], object], ...]]) -> bool:
    """Whether copies are faster than NCCL for an exchange of blocks of so many bytes; all ranks find the same. Collective.

    kind: of the exchange. ways: makes calls of it by NCCL and by copies, for a measurement at its second use.
    """
    key = kind, memory.size, block
    if key not in process.exchanges:
        uses = process.exchange_uses[key] = process.exchange_uses.get(key, 0) + 1
        if uses == 1:
            return False
        process.exchanges[key] = memory.times_us(ways())
    by_nccl, copied = process.exchanges[key]
    return copied < by_nccl


def choices(ranks: int | None = None) -> dict[str, str]:
    """The way of each measured exchange, with the microseconds that it takes alone by NCCL and by copies; of so many ranks."""
    found = {}
    for (kind, size, block), (by_nccl, copied) in process.exchanges.items():
        if ranks in (None, size):
            way = "copies" if copied < by_nccl else "NCCL"
            found[f"{kind}, {size} ranks, blocks of {block} bytes"] = f"{way} (NCCL {by_nccl:.0f} µs, copies {copied:.0f} µs)"
    return found


def memory_bytes() -> int:
    """Of this process, that other ranks write, which PyTorch's allocator does not count."""
    return sum(memory.bytes for memory in process.peer_memories)
