"""All-gather of one large matrix, such as an embedding or a head, directly into the memory that forward reads.

FSDP2 casts the shards of a group into one buffer, copies that into the buffer of the collective, and copies each parameter out
of it between the kernels of the forward. One matrix sharded by rows needs none of that: each rank casts its rows to their place
in the whole matrix, and the collective fills in those of the others. For an embedding of 8B the last copy alone reads and
writes a GB while forward waits, and the buffer holds a second GB. Groups of several matrices use FSDP2's all-gather: here each
parameter needs a separate collective, which waits for multiprocessors and for the other ranks. So do matrices whose rows the
ranks do not divide.

The matrix is a tensor extension (`fsdp_pre_all_gather`, `fsdp_post_all_gather`): before FSDP2's all-gather of the group, which
gets one element of it, it starts the matrix's. A custom all-gather that a user sets on the module gets that element alone. The
memory is that of the compute stream, where FSDP2 frees it, so the all-gather starts after all work enqueued there: it overlaps
with the previous part, which prefetches it, and not with earlier ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule

from octavo.collectives.work import all_gather
from octavo.parallel.fsdp2.adapter import Group, Parameter, groups_of
from octavo.parallel.fsdp2.sizes import one_is_large


def use(root: nn.Module, modules: Iterable[FSDPModule]) -> None:
    """Gather the large matrices of these modules directly, once every parameter has storage. root: whose forward reads them."""
    groups = [group for group in groups_of(modules) if group.is_sharded and group.ranks.size() > 1]
    matrices = [(group, parameter) for group in groups if (parameter := _large(group)) is not None]
    if matrices:
        running = _Running(groups[0].device)
        root.register_forward_pre_hook(running.note, prepend=True)
        for group, parameter in matrices:
            _Matrix(parameter, group, running).install()


def _large(group: Group) -> Parameter | None:
    """The matrix with nearly all elements of a group, if FSDP2 would only cast its shards; the same on all ranks."""
    sizes = [each.size.numel() for each in group.parameters]
    if not one_is_large(sizes):
        return None
    parameter = group.parameters[sizes.index(max(sizes))]
    fits = len(parameter.size) > 1 and parameter.size[0] % parameter.ranks == 0
    return parameter if fits and parameter.is_cast_alone else None


class _Running:
    """The stream of the current forward and its backward, which FSDP2 does not pass to a tensor extension."""

    def __init__(self, device: Any) -> None:
        self.device, self.stream = device, None

    def note(self, *_: Any) -> None:
        """Begin a forward of the root."""
        self.stream = self.device.current_stream()


class _Matrix:
    """A large matrix [N, K], of which each rank has N / ranks rows."""

    def __init__(self, parameter: Parameter, group: Group, running: _Running) -> None:
        self.parameter, self.group, self.running = parameter, group, running
        self.whole: Tensor | None = None
        self.stream: Any = None  # in whose memory the whole is
        self.is_pending, self.event = False, None  # at the end of its all-gather; a CPU has no events

    def install(self) -> None:
        """Extend the shard, and free the memory of an unused all-gather at the end of a backward, as FSDP2 frees its own."""
        # A weak reference, as for FP8 weights. The group holds the object alive.
        proxy = weakref.proxy(self)
        self.parameter.extend(functools.partial(_Matrix.before, proxy), functools.partial(_Matrix.after, proxy))
        self.group.before_end_of_backward(self.end)

    def before(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        """Start the all-gather; one element for FSDP2's, of the dtype of the group's other parameters."""
        shard, device, ranks = self.parameter.shard, self.group.device, self.group.ranks
        current = device.current_stream()
        self.stream = (self.running.stream if self.group.in_pass else None) or current
        with device.stream(self.stream):
            # FSDP2 casts only floating-point parameters.
            whole = self._memory(mp_policy.param_dtype if shard.is_floating_point() else None)
        current.wait_stream(self.stream)  # which may still use memory that it has freed
        own = whole.narrow(0, ranks.rank() * shard.numel(), shard.numel())
        # Autograd has saved views of a matrix that is freed and regathered, with the same values.
        with _unsafe_preserve_version_counter((whole,)):
            own.view_as(shard).copy_(shard)
            all_gather(whole, own, group=ranks)  # the stream waits, not the host
        self.is_pending, self.event = True, current.record_event()
        return (own[:1],), None

    def after(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        """The matrix, for which FSDP2's all-gather and the current stream have waited, and the memory that FSDP2 frees."""
        assert self.whole is not None
        self.is_pending = False
        if (current := self.group.device.current_stream()) != self.stream:
            self.whole.record_stream(current)
        return self.whole.view(self.parameter.size), (self.whole,)

    def end(self) -> None:
        """At the end of a backward, free the memory of an all-gather that nothing used."""
        if self.is_pending and self.whole is not None:
            self.is_pending = False
            self.group.device.current_stream().wait_event(self.event)
            self.whole.untyped_storage().resize_(0)

    @torch.inference_mode(False)  # a later forward may save it for backward
    def _memory(self, dtype: torch.dtype | None) -> Tensor:
        """The memory of the whole, flat. dtype: of the whole; None: the shard's."""
        if self.whole is None:
            shard = self.parameter.shard
            self.whole = shard.new_empty(self.parameter.size.numel(), dtype=dtype)
        elif (storage := self.whole.untyped_storage()).size() != self.whole.nbytes:
            storage.resize_(self.whole.nbytes)
        return self.whole
