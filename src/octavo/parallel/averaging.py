"""Averages gradients over replicas during the backward, as DistributedDataParallel does, in a form that a CUDA graph captures.

Large gradients are reduced in place, a group of them by one kernel, as soon as autograd has accumulated them; small ones go
into flat buckets after the backward. NCCL's collectives run on a separate stream, are captured by a CUDA graph, and include the
division. Other backends cannot be captured: after a replay they reduce all gradients at once.

From the second backward on, groups end where Octavo's attentions began in the first one, so that NCCL's kernels overlap
attention: NCCL's kernels hold multiprocessors, for which products would wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.collectives.work import Pending, start_collective
from octavo.errors import InputError
from octavo.kernels.autograd import at_attention
from octavo.parallel.storages import SOLE_OWNER, reference_count

LARGE_BYTES = 2**20
"""Gradients from this size on are reduced in place: that costs less than a copy into a bucket and back."""
GROUP_BYTES = 32 * 2**20
"""Least bytes of a group of large gradients if no attention ends it: fewer kernels wait for multiprocessors and other ranks."""
GROUP_BYTES_BETWEEN_ATTENTIONS = 256 * 2**20
"""Least bytes of a group between two attentions, which end groups too."""
BUCKET_BYTES = 128 * 2**20
"""Bytes of a bucket of small gradients: enough for the full rate of the links."""
_ALIGNMENT = 64
"""Elements: every gradient in a bucket begins at a multiple, so that optimizers read it in whole vectors."""


class Average:
    """Means of the gradients of parameters over the ranks of a group.

    As in DistributedDataParallel, each rank's share is divided by the number of ranks before the sum, and parameters start
    with the values of the group's first rank. `recordable`: a CUDA graph can capture the reductions.
    """

    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._devices = {parameter.device for parameter in self._parameters}
        on_gpus = {device.type for device in self._devices} == {"cuda"}
        self.recordable = on_gpus and _backends(group).get("cuda") == "nccl"
        self._buckets: list[Tensor] = []
        self._in_bucket: list[dict[Tensor, Tensor]] = []  # of each bucket: its parameters → their parts of it
        # In the order of a backward: the reversed order of the forward, which is nearly always the parameters' order.
        self._large = [p for p in reversed(self._parameters) if p.nbytes >= LARGE_BYTES and p.is_contiguous()]
        large = set(self._large)
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in self._parameters:
            if parameter not in large:
                by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for parameters_of_kind in by_kind.values():
            self._lay_out(parameters_of_kind)
        self._ends = self._group_ends([])  # ends of groups in the list of large gradients
        self._has_schedule = False
        self._ready: set[Tensor] = set()
        self._next = 0  # index of the first large gradient not added to a group yet
        self._group: list[Tensor] = []  # shares of the incomplete group
        self._pending: list[Pending[None]] = []
        for parameter in parameters:
            value = parameter.detach().contiguous()
            dist.broadcast(value, group=group, group_src=0)
            parameter.detach().copy_(value)

    def _lay_out(self, parameters: list[Tensor]) -> None:
        """Assign each of these parameters, of one dtype and device, its part of a bucket."""
        first, limit = parameters[0], BUCKET_BYTES // parameters[0].element_size()
        buckets: list[list[tuple[Tensor, int]]] = [[]]
        end = 0
        for parameter in parameters:
            if end + parameter.numel() > limit and buckets[-1]:
                self._fill(buckets[-1], first.new_zeros(end))
                buckets.append([])
                end = 0
            buckets[-1].append((parameter, end))
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._fill(buckets[-1], first.new_zeros(end))

    def _fill(self, parts: list[tuple[Tensor, int]], bucket: Tensor) -> None:
        views = {}
        for parameter, start in parts:
            strides = torch.empty_like(parameter, device="meta").stride()  # the parameter's, or contiguous where it overlaps
            views[parameter] = bucket.as_strided(parameter.shape, strides, start)
        self._buckets.append(bucket)
        self._in_bucket.append(views)

    def _group_ends(self, attentions: Collection[int]) -> frozenset[int]:
        """Indices of large gradients after which a group ends. attentions: counts of complete gradients where one began."""
        first, last = min(attentions, default=0), max(attentions, default=0)
        ends, size = set(attentions), 0
        for number, parameter in enumerate(self._large, 1):
            after = self._large[number] if number < len(self._large) else None
            size += parameter.nbytes
            least = GROUP_BYTES_BETWEEN_ATTENTIONS if first < number <= last else GROUP_BYTES
            if size >= least or after is None or (after.device, after.dtype) != (parameter.device, parameter.dtype):
                ends.add(number)
            size = 0 if number in ends else size
        return frozenset(ends)

    def _agree(self, attentions: set[int]) -> None:
        """Use the group ends of the first rank's attentions, on all ranks."""
        began = torch.zeros(len(self._large) + 1, dtype=torch.uint8, device=self._large[0].device)
        began[list(attentions)] = 1
        dist.broadcast(began, group=self.group, group_src=0)
        self._ends = self._group_ends(began[1:].nonzero().flatten().add(1).tolist())
        self._has_schedule = True

    @contextlib.contextmanager
    def of_backward(self, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Around a backward that sets every `grad`: at the end each is the mean, and the current stream has waited for it.

        meanwhile: called after the backward, while the last gradients are being reduced.
        """
        self._restart()
        # Each device has a backward thread; several would begin reductions concurrently.
        beside = self._large if len(self._devices) == 1 else []
        learns = bool(beside) and not self._has_schedule
        attentions: set[int] = set()
        with contextlib.ExitStack() as hooks:
            for parameter in beside:
                if parameter.requires_grad:
                    hooks.callback(parameter.register_post_accumulate_grad_hook(self._arrived).remove)
            if learns:
                hooks.enter_context(at_attention(lambda: attentions.add(self._next)))
            try:
                yield
            except BaseException:
                self._restart()  # without a reference to gradients
                raise
        self._finish(meanwhile)
        if learns:
            self._agree(attentions)

    def reduce(self) -> None:
        """Average the gradients of all parameters at once."""
        self._restart()
        self._finish()

    def _restart(self) -> None:
        self._ready.clear()
        self._pending.clear()
        self._group = []
        self._next = 0

    def _arrived(self, parameter: Tensor) -> None:
        """Reduce the groups that are complete, in one order on all ranks."""
        if parameter in self._ready:
            raise InputError(
                f"a parameter of shape {tuple(parameter.shape)} got two gradients in one backward, after the average of the "
                "first had begun: octavo.graphed with a group does not support reentrant checkpoints of a shared parameter. "
                "Give torch.utils.checkpoint use_reentrant=False."
            )
        self._ready.add(parameter)
        while self._next < len(self._large) and self._large[self._next] in self._ready:
            self._add_next()

    def _add_next(self) -> None:
        """Add the next large gradient to its group, which is reduced with its last one."""
        parameter = self._large[self._next]
        assert parameter.grad is not None
        # Autograd can pass a view of memory that the rest of the backward reads.
        shared = reference_count(parameter.grad) > SOLE_OWNER
        if shared or not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        self._group.append(parameter.grad.detach())
        self._next += 1
        if self._next in self._ends:
            self._sum(self._group)
            self._group = []

    def _sum(self, shares: list[Tensor]) -> None:
        """Begin to average the ranks' shares on one device, under NCCL with one call per dtype."""
        if not self.recordable:
            torch._foreach_mul_(shares, 1 / self.ranks)
            self._pending.append(start_collective(dist.all_reduce, [(share,) for share in shares], self.group, lambda: None))
            return
        options = dist.AllreduceCoalescedOptions()
        options.asyncOp = True
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)  # NCCL divides as it reads
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for share in shares:
            share = torch.view_as_real(share) if share.is_complex() else share
            by_dtype.setdefault(share.dtype, []).append(share)
        works = [self.group.allreduce_coalesced(of_dtype, options) for of_dtype in by_dtype.values()]
        self._pending.append(Pending(works, lambda: None, shares))

    def _finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Reduce the remaining gradients, and wait."""
        if missing := [tuple(parameter.shape) for parameter in self._parameters if parameter.grad is None]:
            raise InputError(
                f"{len(missing)} of {len(self._parameters)} parameters got no gradient, the first of shape {missing[0]}, and "
                "other ranks wait for their averages: give octavo.graphed only parameters that the loss depends on, or freeze "
                "the others (requires_grad_(False))."
            )
        while self._next < len(self._large):
            self._add_next()
        for views in self._in_bucket:
            torch._foreach_copy_(list(views.values()), [p.grad for p in views if p.grad is not None])  # all, by the check above
            for parameter, view in views.items():
                parameter.grad = view
        for bucket in self._buckets:
            self._sum([bucket])
        meanwhile()
        for reduction in self._pending:
            reduction.wait()
        self._pending.clear()


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of each type of device."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}
