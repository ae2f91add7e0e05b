"""Activation offloading: a block's saved activations are in host memory until its backward.

Copies run on separate streams: to pinned memory while the next block runs, back while the backward of later blocks runs. The
cost is memory for tensors being copied: one block's saved tensors in forward, and `horizon` blocks' in backward. With
recomputation only the tensors that it saves are copied. PyTorch's `save_on_cpu` copies on the stream of the layers, loses
strides, which compiled backwards require, and copies weights, which FSDP2 frees and refills.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from octavo.config.parallel import HORIZON
from octavo.errors import InputError
from octavo.fp8.scaling import states_of
from octavo.kernels.attention.cached import moved

SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay on the device: statistics and scales are many and small."""


class _Saved:
    """A tensor in host memory.

    Attributes:
        host: the copy.
        original: the tensor on its device, as long as the copy may still read it.
        stored: the end of the copy to the host; None on a CPU.
        back: the tensor on its device, loaded ahead.
        loaded: the end of that copy.
    """

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        self.device = tensor.device
        self.original: Tensor | None = None if stream is None else tensor.detach()
        self.back: Tensor | None = None
        self.loaded: torch.cuda.Event | None = None
        like: dict[str, Any] = {"dtype": tensor.dtype, "device": "cpu", "pin_memory": stream is not None}
        self.host = torch.empty_strided(tensor.size(), tensor.stride(), **like)
        with _behind(stream):
            self.host.copy_(tensor, non_blocking=stream is not None)
            self.stored = None if stream is None else stream.record_event()

    def release(self) -> None:
        """Free the tensor's memory for later kernels, which wait for the copy."""
        if self.original is not None and self.stored is not None:
            torch.cuda.current_stream(self.device).wait_event(self.stored)
            self.original = None

    def load(self, stream: torch.cuda.Stream | None) -> None:
        """Start the copy back, unless it is done or pending."""
        if self.original is not None or self.back is not None:
            return
        self.back = torch.empty_strided(self.host.size(), self.host.stride(), dtype=self.host.dtype, device=self.device)
        with _behind(stream):
            self.back.copy_(self.host, non_blocking=stream is not None)
            if stream is not None:
                self.loaded = stream.record_event()
                self.back.record_stream(stream)  # a dropped autograd graph may free it during the copy

    def take(self, stream: torch.cuda.Stream | None) -> Tensor:
        """The tensor on its device."""
        if (there := self.original) is not None:
            self.release()
            return there
        self.load(stream)
        assert self.back is not None
        if self.loaded is not None:
            torch.cuda.current_stream(self.device).wait_event(self.loaded)
        back, self.back = self.back, None
        return back


class _BlockSaved:
    """Host copies of one forward of a block, with a reference to those of the previous block."""

    def __init__(self, before: _BlockSaved | None) -> None:
        self.tensors: list[_Saved] = []
        self.asked = False
        self.before = None if before is None else weakref.ref(before)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(saved.host.nbytes for saved in self.tensors)

    def load(self, stream: torch.cuda.Stream | None) -> None:
        """Begin all copies back, in the order of a backward; later calls do nothing."""
        if not self.asked:
            self.asked = True
            for saved in reversed(self.tensors):
                saved.load(stream)


class _Packed(NamedTuple):
    """Autograd's handle of an offloaded tensor."""

    block: _BlockSaved
    place: int


class _Offloader:
    """The copies of a stack of blocks."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}  # to the host, and back
        self.first: weakref.ref[nn.Module] | None = None  # the stack's first block
        self.last: weakref.ref[_BlockSaved] | None = None  # of this forward
        self.storing: deque[weakref.ref[_Saved]] = deque()  # originals whose memory is not yet free, the oldest first
        self.budget = math.inf

    def begin(self, block: nn.Module) -> _BlockSaved:
        """The record of the next block of a forward."""
        if self.first is None:
            self.first = weakref.ref(block)
        last = None if self.last is None or block is self.first() else self.last()
        self.budget = math.inf if last is None else last.bytes
        current = _BlockSaved(last)
        self.last = weakref.ref(current)
        return current

    def store(self, tensor: Tensor, into: _BlockSaved) -> _Packed:
        """Begin the copy of a tensor, and free as many bytes of the previous block."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "a CUDA graph (octavo.graphed) cannot capture offloading, whose copies run on separate streams: set "
                "train.offload = false, and train.recompute where memory is short."
            )
        if tensor.is_cuda and tensor.device not in self.streams:
            self.streams[tensor.device] = torch.cuda.Stream(tensor.device), torch.cuda.Stream(tensor.device)
        saved = _Saved(tensor, self.streams[tensor.device][0] if tensor.is_cuda else None)
        into.tensors.append(saved)
        if saved.original is not None:
            self.storing.append(weakref.ref(saved))
            self._free()
        return _Packed(into, len(into.tensors) - 1)

    def _free(self) -> None:
        """Free the oldest originals until the rest take no more than the previous block."""
        alive = [saved for reference in self.storing if (saved := reference()) is not None and saved.original is not None]
        held = sum(saved.host.nbytes for saved in alive)
        for saved in alive:
            if held <= self.budget:
                break
            saved.release()
            held -= saved.host.nbytes
        self.storing = deque(weakref.ref(saved) for saved in alive if saved.original is not None)

    def take(self, packed: Tensor | _Packed) -> Tensor:
        """The tensor on its device; starts to load its block, and the `horizon` blocks before it."""
        if isinstance(packed, Tensor):
            return packed
        saved = packed.block.tensors[packed.place]
        stream = self.streams[saved.device][1] if saved.device in self.streams else None
        block: _BlockSaved | None = packed.block
        for _ in range(1 + self.horizon):
            if block is not None:
                block.load(stream)
                block = None if block.before is None else block.before()
        return saved.take(stream)


def offloaded(run: Callable[..., Any], horizon: int = HORIZON) -> Callable[..., Any]:
    """`run(block, hidden, …)` of a stack of blocks, with saved activations in host memory, pinned for a GPU.

    horizon: in backward, blocks whose activations are loaded ahead.
    """
    offloader = _Offloader(horizon)

    def run_offloaded(block: nn.Module, hidden: Tensor, *args: Any, **options: Any) -> Any:
        saved, device = offloader.begin(block), hidden.device

        # No `hidden` in this closure: a recomputation references this function, and would hold the block's input alive.
        def pack(tensor: Tensor) -> Tensor | _Packed:
            if tensor.device != device or tensor.nbytes < SMALLEST_BYTES or 0 in tensor.stride():
                return tensor
            # Computed for each tensor: a sharded weight has memory only while its part of the block runs.
            if _memory(tensor) in _memory_of_weights(block):
                return tensor
            return offloader.store(tensor, saved)

        with saved_tensors_hooks(pack, offloader.take), moved(pack, offloader.take):
            return run(block, hidden, *args, **options)

    return run_offloaded


@contextlib.contextmanager
def _behind(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On `stream`, after all work of the current one; without one, here."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory_of_weights(block: nn.Module) -> set[int]:
    tensors: list[Tensor] = [p for p in block.parameters() if not isinstance(p, DTensor)]
    for _, state in states_of(block):
        if state.gathered is not None:
            tensors += [data for data in (state.gathered.rowwise_data, state.gathered.columnwise_data) if data is not None]
    return {_memory(tensor) for tensor in tensors} | {0}
