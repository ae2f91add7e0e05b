"""Context-parallel ranks: splits sequences over them, gathers the parts, and chooses the exchange of keys and values.

Shapes: T tokens of the whole sequence, n ranks; a rank holds T / n, two chunks of T / 2n.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.collectives.schedule import Split
from octavo.collectives.work import Ranks, start_gather
from octavo.errors import InputError, unknown

STRATEGIES = ("all_gather", "p2p", "a2a")
"""Exchanges of keys and values: gathered, passed around a ring, or heads for tokens."""


class ContextGroup(Ranks):
    """The ranks of a context group and their exchange of keys and values; "auto" is decided by `resolved`.

    Without a `group` this rank alone, which needs no process group.

    Raises:
        InputError: an unknown `strategy`, or a `group` without this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, strategy: str = "all_gather") -> None:
        if strategy not in (*STRATEGIES, "auto", "own"):
            raise unknown("cp_comm_type", str(strategy), (*STRATEGIES, "auto"))
        super().__init__(group)
        self.strategy, self.size, self.rank = strategy, 1, 0
        if group is not None:
            _check_group(group)
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def resolved(self, heads: int, groups: int) -> ContextGroup:
        """This group; for "auto" with "a2a" if that can split the heads and moves fewer bytes, else with "all_gather"."""
        if self.strategy != "auto":
            return self
        return ContextGroup(self._group, cheaper_exchange(heads, groups, self.size))

    @property
    def multiple(self) -> int:
        """The tokens of a sequence are a multiple of this."""
        return 2 * self.size

    def split_of(self, tokens: int) -> Split:
        """This rank's part of sequences of `tokens` tokens.

        Raises:
            InputError: the chunks would not be equal.
        """
        if tokens % self.multiple or not tokens:
            near = max(1, round(tokens / self.multiple)) * self.multiple
            raise InputError(
                f"a sequence of {tokens} tokens cannot be split into {self.multiple} equal chunks, two for each of {self.size}"
                f" context-parallel ranks: pad it, as to {max(near, -(-tokens // self.multiple) * self.multiple)} tokens."
            )
        return Split(self.rank, self.size, tokens)

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of `x`, which has whole sequences along `dim`: [..., T, ...] → [..., T / n, ...]; differentiable.

        On one rank `x` itself.

        Raises:
            InputError: `x` has no dimension `dim`, or on several ranks cannot be cut into 2n equal chunks along it.
        """
        _check_dim(x, dim)
        if self.size == 1:
            return x
        split = self.split_of(x.shape[dim])
        return torch.cat([x.narrow(dim, number * split.chunk, split.chunk) for number in split.chunks()], dim)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `split`, on every rank: [..., T / n, ...] → [..., T, ...]. Collective.

        In backward each rank takes its part of the gradient, since all ranks compute the same from the whole.

        Raises:
            InputError: `x` has no dimension `dim`, or on several ranks cannot be cut into two equal chunks along it.
        """
        _check_dim(x, dim)
        if self.size == 1:
            return x
        tokens = x.shape[dim]
        if tokens % 2 or not tokens:
            raise InputError(
                f"a tensor of shape {list(x.shape)} has {tokens} tokens of a rank along dimension {dim}, which are not two "
                f"equal chunks: give as many tokens as split returns, such as {tokens + 1 if tokens % 2 else 2}."
            )
        gathered: Tensor = _Gather.apply(x, self, dim)
        return gathered

    def same(self, *tensors: Tensor | None) -> Tensor:
        """True, as bool [] on the first one's device, if these whole numbers are the same on every rank. Collective.

        Host tensors cause no GPU synchronisation.
        """
        return same_numbers(self._group, *tensors)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts, the same bits on each; the gradient is that of this rank's part. Collective."""
        return part if self._group is None else summed(part, self._group)


def same_numbers(group: dist.ProcessGroup | None, *tensors: Tensor | None) -> Tensor:
    """`ContextGroup.same` of the ranks of a group, bool []; True without one."""
    device = next(x.device for x in tensors if x is not None)
    digest = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        digest = digest * 1_000_003 + (0 if x is None else _digest(x).to(device))
    if group is None:
        return torch.ones_like(digest, dtype=torch.bool)
    both = torch.stack((digest, -digest))
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0] == -both[1]


def splits_heads(heads: int, groups: int, ranks: int) -> bool:
    """True if `ranks` ranks can have equally many query heads each, with their key-value heads."""
    return not heads % ranks and (not groups % ranks or not ranks % groups)


def cheaper_exchange(heads: int, groups: int, ranks: int) -> str:
    """The exchange that moves fewer bytes, of "all_gather" and "a2a".

    For each token of the other ranks, "all_gather" receives its keys and values, 2·G heads; "a2a" receives the n-th part of
    all that attention reads and writes, 2·(H + G) / n heads.
    """
    return "a2a" if splits_heads(heads, groups, ranks) and ranks * groups > heads + groups else "all_gather"


def summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' parts, the same bits on each; the gradient is that of this rank's part. Collective."""
    total: Tensor = _Sum.apply(part, group)
    return total


def averaged(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """x, for a caller's loss: its gradient is divided by the number of ranks, so that the sum over ranks is the mean loss's."""
    if group is None or not x.requires_grad:
        return x
    view, ranks = x.view_as(x), dist.get_world_size(group)
    view.register_hook(lambda grad: grad / ranks)
    return view


def _check_group(group: object) -> None:
    """Raise an InputError unless `group` is a process group of this rank."""
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if isinstance(group, dist.ProcessGroup) and not outside:
        if dist.get_rank(group) >= 0:
            return
        outside = True
    kind = "one without this rank" if outside else f"a {type(group).__name__}"
    raise InputError(
        f"the context group is {kind}: give a process group that this rank is in, as torch.distributed.new_group returns it "
        "to its ranks."
    )


def _check_dim(x: Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        raise InputError(f"a tensor of shape {list(x.shape)} has no dimension {dim}, the dimension of tokens: set dim.")


def _digest(x: Tensor) -> Tensor:
    """A hash, int64 [], of the shape of `x`, its values and their positions."""
    flat = x.flatten().to(torch.int64)
    places = torch.arange(1, flat.numel() + 1, device=x.device)
    return (flat * (places * 2_654_435_761 % 1_048_573)).sum() + flat.numel() * 7_919 + (x.shape[-1] if x.dim() else 0)


def in_order(parts: Tensor | list[Tensor], dim: int) -> Tensor:
    """The ranks' tensors [..., T / n, ...], each of two chunks along `dim`, as [..., T, ...] in the order of the sequence."""
    return torch.cat(chunks_in_order(parts, dim), dim)


def chunks_in_order(parts: Tensor | list[Tensor], dim: int) -> list[Tensor]:
    """The chunks [..., T / 2n, ...] of the ranks' tensors, two of each along `dim`, in the order of the sequence."""
    first, second = zip(*[part.chunk(2, dim) for part in parts], strict=True)
    return [*first, *reversed(second)]


class _Gather(torch.autograd.Function):
    """`ContextGroup.gather`: [..., T / n, ...] → [..., T, ...]; the gradient is this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextGroup, dim: int) -> Tensor:
        ctx.context, ctx.dim = context, dim
        return in_order(list(start_gather(x.contiguous(), context.group).wait()), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.context.split(grad, ctx.dim), None, None


class _Sum(torch.autograd.Function):
    """`summed`: an all-reduce of `part`, any shape; the gradient of the sum is that of the part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
