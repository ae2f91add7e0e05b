"""Exchanges between the GPUs of one host by copy engines, which leave the multiprocessors to concurrent products.

NCCL's kernels need multiprocessors: a kernel launched just after a product waits until that has ended, and a running one takes
some from it. A copy into another GPU's memory needs none.

Each rank has memory that the others write (PyTorch's symmetric memory): two slots, with a block for each other rank. An
exchange copies this rank's blocks into the others' slots on a separate stream, then enters a barrier; after it, the others'
blocks have arrived. Exchanges alternate between the slots, in the same order on all ranks.

No block is overwritten before it is read. The blocks of exchange k are overwritten by exchange k + 2, whose copies follow the
barrier of k + 1; a rank enters that barrier after it has read those of k: a new exchange waits for the reads of the previous
one, and blocks that have not been read by then are moved to separate memory.

The faster of NCCL and copies is measured at the second use of an exchange, and agreed over its ranks; `choices` names it.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.kernels.timing import median_us
from octavo.process import process

T = TypeVar("T")

LEAST_BYTES = 2**20
"""Smallest block of a rank that may be copied; smaller ones use NCCL."""
_ALIGNMENT = 256
"""Alignment of a block in bytes, for products that read it."""
_HIDE_CYCLES = 400_000
"""GPU cycles of about 0.2 ms, in which the host launches an exchange between two events."""
_WARM_UP, _ROUNDS = 3, 9


class PeerMemory:
    """Memory that the ranks of a group on one host write to each other, and the stream of the copies."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        """The other ranks, starting at a different one on each rank."""
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.ready = torch.cuda.Event()
        self._room = 0
        self._handle: Any = None
        self._slots: dict[int, Tensor] = {}
        """Each rank's memory, [2, other ranks, room] bytes."""
        self._views: dict[Any, dict[int, Tensor]] = {}
        self._events = [(torch.cuda.Event(), torch.cuda.Event()) for _ in range(2)]
        self._turn = 0
        self._last: Exchange | None = None
        process.peer_memories.add(self)

    def reserve(self, block: int) -> None:
        """Grow to room for blocks of `block` bytes; collective if it grows."""
        block = -(-block // _ALIGNMENT) * _ALIGNMENT
        if block <= self._room:
            return
        # Octavo uses no multicast, which some containers forbid.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric_memory

        torch.cuda.synchronize(self._device)  # all ranks do so before the barrier: none writes the old memory after it
        shape = 2, self.size - 1, block
        with torch.inference_mode(False):  # an evaluation may reserve it, and training writes it
            memory = symmetric_memory.empty(math.prod(shape), dtype=torch.uint8, device=self._device)
            self._handle = symmetric_memory.rendezvous(memory, self._group)
            self._slots = {rank: self._handle.get_buffer(rank, shape, torch.uint8) for rank in range(self.size)}
        self._room, self._last = block, None
        self._views.clear()

    @property
    def bytes(self) -> int:
        """Size of this rank's memory."""
        return 2 * (self.size - 1) * self._room

    def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> Exchange:
        """An exchange of blocks of this shape and dtype: each rank sends one to each other rank."""
        if self._last is not None:
            self._last.end()
            self.stream.wait_event(self._last.read)
        self.reserve(math.prod(shape) * dtype.itemsize)
        self._turn = 1 - self._turn
        to = self._blocks("to", shape, dtype), self._blocks("from", shape, dtype)
        self._last = Exchange(self, *to, *self._events[self._turn])
        return self._last

    def _blocks(self, direction: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[int, Tensor]:
        """Blocks of an exchange in the current slot, by rank: "to" the others, in their memory, or "from" them, in this one."""
        key = direction, self._turn, shape, dtype
        if key not in self._views:
            with torch.inference_mode(False):
                self._views[key] = {
                    other: self._block(*((self.rank, other) if direction == "to" else (other, self.rank)), shape, dtype)
                    for other in self.others
                }
        return self._views[key]

    def _block(self, sender: int, receiver: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        place = sender - (sender > receiver)  # index among the receiver's other ranks
        return self._slots[receiver][self._turn, place, : math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def meet(self) -> None:
        """A barrier of all ranks after this rank's copies, on the current stream."""
        self._handle.barrier()

    def times_us(self, calls: tuple[Callable[[], object], ...]) -> tuple[float, ...]:
        """Median microseconds of each call, of the slowest rank. Collective."""
        # Collectives end when their last rank joins, and it does not wait for collectives that this process launches later.
        torch.cuda.synchronize(self._device)
        medians = median_us(*calls, device=self._device, rounds=_ROUNDS, warm_up=_WARM_UP, pause_cycles=_HIDE_CYCLES)
        times = torch.tensor(medians, dtype=torch.float64, device=self._device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._group)
        return tuple(times.tolist())


class Exchange:
    """Blocks being sent from each rank to each other rank. Call `send` for all other ranks, then `blocks`.

    to, here: for each other rank, the destination of this rank's block, and where that rank's block arrives. arrived, read:
    events after the arrival of all blocks, and after they were read.
    """

    def __init__(
        self,
        memory: PeerMemory,
        to: dict[int, Tensor],
        here: dict[int, Tensor],
        arrived: torch.cuda.Event,
        read: torch.cuda.Event,
    ) -> None:
        self._memory, self._to, self._here, self._arrived, self.read = memory, to, here, arrived, read
        self._held: list[Tensor] = []
        self._moved: dict[int, Tensor] | None = None
        self._open = False

    def send(self, blocks: dict[int, Tensor]) -> None:
        """Copy blocks, contiguous and complete on the current stream, to other ranks; after the last one the ranks
        synchronise."""
        memory, stream = self._memory, self._memory.stream
        memory.ready.record(torch.cuda.current_stream(stream.device))
        memory.ready.wait(stream)
        self._held += blocks.values()  # alive until the current stream waits for the copies
        with torch.no_grad(), torch.cuda.stream(stream):
            for rank, block in blocks.items():
                self._to[rank].copy_(block)
            if len(self._held) == len(self._to):
                memory.meet()
                self._arrived.record(stream)

    @contextlib.contextmanager
    def blocks(self) -> Iterator[dict[int, Tensor]]:
        """Context with the other ranks' blocks, rank → tensor of the exchange's shape, to be read on the current stream."""
        if self._moved is not None:
            yield self._moved
            return
        self._open = True
        yield self._wait()
        self.read.record(torch.cuda.current_stream(self._memory.stream.device))
        self._open, self._moved = False, {}

    def end(self) -> None:
        """Move blocks that have not been read to separate memory."""
        assert not self._open, "an exchange begins while another's blocks are read"
        if self._moved is None:
            self._moved = {rank: block.clone() for rank, block in self._wait().items()}
            self.read.record(torch.cuda.current_stream(self._memory.stream.device))

    def _wait(self) -> dict[int, Tensor]:
        assert len(self._held) == len(self._to), "blocks are awaited before all are sent"
        self._arrived.wait(torch.cuda.current_stream(self._memory.stream.device))
        self._held.clear()
        return self._here


def reach(group: dist.ProcessGroup, device: torch.device, block: int) -> PeerMemory | str:
    """Memory of a group's ranks with room for blocks of `block` bytes, or the reason why there is none. Collective."""

    def make() -> PeerMemory:
        memory = PeerMemory(group, device)
        memory.reserve(block)
        return memory

    return reached(group, make)


def reached(group: dist.ProcessGroup, make: Callable[[], T]) -> T | str:
    """The result of `make`, memory that a group's ranks write, or the reason for none, the same on all ranks. Collective."""
    reason = "" if process.peer_copies else "OCTAVO_PEER_COPIES=0"
    if refusal := _agreed([reason, platform.node()], group):
        return refusal
    memory = None
    try:
        memory = make()
    except RuntimeError as error:
        reason = f"no symmetric memory: {str(error).splitlines()[0]}"
    refusal = _agreed([reason, ""], group)
    return memory if memory is not None and not refusal else refusal


def _agreed(reason_and_host: list[str], group: dist.ProcessGroup) -> str:
    """One rank's reason, the same on all ranks; empty if none has one. reason_and_host: this rank's."""
    others: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(others, reason_and_host, group=group)
    if len({host for _, host in others}) > 1:
        return "ranks on several hosts"
    return next((reason for reason, _ in others if reason), "")


def by_copies(kind: str, block: int, memory: PeerMemory, calls: Callable[[], tuple[Callable[[], object], ...]]) -> bool:
    """True if copies are faster than NCCL for an exchange of blocks of `block` bytes; the same on all ranks. Collective.

    kind: of the exchange. calls: returns two calls, by NCCL and by copies, which are timed at the second use of a size; sizes
    between two powers of two count as one, so that few are timed for sequences of many lengths.
    """
    key = kind, memory.size, block.bit_length()
    if key not in process.exchanges:
        uses = process.exchange_uses[key] = process.exchange_uses.get(key, 0) + 1
        if uses == 1:
            return False
        process.exchanges[key] = memory.times_us(calls())
    by_nccl, copied = process.exchanges[key]
    return copied < by_nccl


def choices(ranks: int | None = None) -> dict[str, str]:
    """The method of each measured exchange, with its microseconds in isolation by NCCL and by copies, for a group
    size."""
    methods = {}
    for (kind, size, bits), (by_nccl, copied) in process.exchanges.items():
        if ranks in (None, size):
            faster = "copies" if copied < by_nccl else "NCCL"
            name = f"{kind} of {2 ** (bits - 21)} to {2 ** (bits - 20)} MiB, {size} ranks"
            methods[name] = f"{faster} (NCCL {by_nccl:.0f} µs, copies {copied:.0f} µs)"
    return methods


def memory_bytes() -> int:
    """Bytes of this process's memory that other ranks write; PyTorch's allocator does not count them."""
    return sum(memory.bytes for memory in process.peer_memories)
