"""Pending collectives: one handle for several, and PyTorch's names of collectives into one tensor."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# PyTorch 2.12 renamed both, and warns about the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks:
    """The ranks of a process group that share a layer's computation; a single rank, or a plan's ranks, have no group.

    Attributes:
        size: number of ranks.
        rank: index of this rank.
    """

    size: int
    rank: int

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks' process group."""
        assert self._group is not None  # without one no collective is called
        return self._group

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # ranks belong to the process, not to a layer


class Pending(Generic[T]):
    """Pending collectives; call `wait` once for their result.

    finish: computes the result when all works are complete. held: tensors that are referenced until then, as the sent ones.
    """

    def __init__(self, works: Sequence[dist.Work | None], finish: Callable[[], T], held: Sequence[object] = ()) -> None:
        self._works, self._finish, self._held = works, finish, held

    def wait(self) -> T:
        """The result; a GPU's stream waits, not the host. No reference is held afterwards."""
        works, finish = self._works, self._finish
        del self._works, self._finish, self._held
        for work in works:
            if work is not None:
                work.wait()
        return finish()


def start_collective(
    collective: Callable[..., Any], calls: Sequence[Sequence[Any]], group: dist.ProcessGroup, finish: Callable[[], T]
) -> Pending[T]:
    """Start a collective for each of `calls`, its positional arguments. finish: as in `Pending`, which holds the arguments."""
    works = itertools.starmap(functools.partial(collective, group=group, async_op=True), calls)
    return Pending([*works], finish, calls)


def start_gather(x: Tensor, group: dist.ProcessGroup) -> Pending[Tensor]:
    """Start to all-gather `x`, contiguous: [n, *x.shape]."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    return start_collective(all_gather, [(out.view(-1), x.view(-1))], group, lambda: out)
