"""Reduces gradients over the shards in each micro-batch, so that a rank stores its shard of them, not the whole.

FSDP2 stores unsharded gradients between the micro-batches of a step (`set_requires_gradient_sync(False)`), or reduces each.
With replicas it can reduce over only the shards, and add the result to the sums of the last micro-batch; but it adds the sums
of a group as one vector, without checking its parameters. If these differ, as with a part of the model that not every
micro-batch uses, gradients would go to other parameters: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from octavo.errors import InputError, some
from octavo.parallel.fsdp2.adapter import Group, groups_of


def use(model: nn.Module, modules: Iterable[FSDPModule]) -> None:
    """Guard the sums of groups with replicas, of these modules in `model`."""
    names = {module: name for name, module in model.named_modules()}
    for group in groups_of(modules):
        if group.replicated:
            _Guard(group, [f"{names[one.module]}.{one.name}".lstrip(".") for one in group.parameters]).install()


def begin(root: FSDPModule, modules: Iterable[FSDPModule], *, last: bool) -> None:
    """Call before a backward, which then sums over the shards, and over the replicas if it is the last of its step."""
    FSDPModule.set_requires_gradient_sync(root, True)
    FSDPModule.set_requires_all_reduce(root, last)
    for group in groups_of(modules):
        group.micro_batch_follows = not last


class _Guard:
    """The parameters in a group's sums that wait for the replicas."""

    def __init__(self, group: Group, names: list[str]) -> None:
        self.group, self.names = group, names
        self.known: list[str] = []
        self.reduced = False  # in this backward

    def install(self) -> None:
        """Check each reduction of the group before it begins."""
        self.group.before_reduction("same parameters", self.check)
        self.group.before_end_of_backward(self.end)

    def end(self) -> None:
        """End a backward."""
        self.reduced = False

    def check(self) -> None:
        """Raise an InputError if this backward's gradients are of other parameters than the sums they would be added to."""
        pairs = zip(self.names, self.group.parameters, strict=True)
        found = [name for name, parameter in pairs if parameter.gradient() is not None]
        if self.reduced and not found:  # FSDP2 checks once more at the end of a backward
            return
        self.reduced = True
        if not self.group.waits_for_replicas:
            self.known = found
        elif found != self.known:
            other = sorted({*found} ^ {*self.known})
            raise InputError(
                f"{some(other)} has a gradient in some micro-batches of a step and not in others, and "
                "parallel.sync_each_micro_batch = true adds up those of a group as one for its replicas. Set "
                "parallel.sync_each_micro_batch = false, or parallel.hybrid_shard_degree = 0."
            )
