"""Coordination of ranks: a function runs once on rank 0, and any rank's exception reaches all.

Every phase of a save or a load ends in a collective, after which all ranks continue or all raise: the failed rank its
exception, the others an `OctavoError` with its rank and text. No rank waits for a failed one.

Two gloo groups of all ranks are used, one by the training thread and one by the thread that reads or writes files: collectives
of two threads on one group would be confused. Objects are sent pickled, as in PyTorch.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from octavo.errors import InputError, OctavoError
from octavo.process import process

T = TypeVar("T")

_PATIENCE = datetime.timedelta(hours=4)  # the slowest disk among the ranks, hashing a whole checkpoint


@dataclass(frozen=True)
class Ranks:
    """All ranks of the job and their process group; one rank has no group and no collectives.

    Every method is collective, and raises an `OctavoError` when a rank is lost.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def max(self, number: int) -> int:
        """The maximum over ranks."""
        return self._all_reduce(number, dist.ReduceOp.MAX)

    def min(self, number: int) -> int:
        """The minimum over ranks."""
        return self._all_reduce(number, dist.ReduceOp.MIN)

    def sum(self, number: int) -> int:
        """The sum over ranks."""
        return self._all_reduce(number, dist.ReduceOp.SUM)

    def _all_reduce(self, number: int, operation: Any) -> int:
        if self.size == 1:
            return number
        value = torch.tensor(number, device="cpu")
        self._collective(dist.all_reduce, value, operation)
        return int(value)

    def _collective(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Call one of torch's collectives on this group; a RuntimeError there is a lost rank or a timeout."""
        try:
            collective(*arguments, group=self.group, **options)
        except RuntimeError as error:
            raise OctavoError(f"rank {self.rank} of {self.size} lost the others: {error}") from error

    def gather(self, value: T) -> list[T]:
        """Every rank's value on rank 0, an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._collective(dist.gather_object, value, values, dst=0)
        return values or []

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._collective(dist.all_gather_object, values, value)
        return values

    def scatter(self, values: list[T]) -> T:
        """This rank's entry of rank 0's list."""
        if self.size == 1:
            return values[0]
        received: list[Any] = [None]
        self._collective(dist.scatter_object_list, received, cast(list[Any], values) if self.rank == 0 else None, src=0)
        return cast(T, received[0])

    def share_error(self, error: BaseException | None, undo: Callable[[], None] | None = None) -> None:
        """Return if no rank has an error; otherwise raise on every rank, after rank 0 has called `undo`.

        Raises:
            BaseException: `error` itself, on its rank.
            OctavoError: on the other ranks, with the failed rank and its error; an `InputError` stays an `InputError`.
        """
        reports: list[tuple[bool, str] | None] = []
        try:
            if self.max(int(error is not None)):
                reports = self.all_gather(None if error is None else _report(error))
                if undo is not None:
                    self.on_rank_0(undo)
        except OctavoError:  # this rank's error is more informative than a lost connection
            if error is None:
                raise
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                is_input_error, text = report
                raise (InputError if is_input_error else OctavoError)(f"rank {rank} of {self.size}: {text}")

    @contextlib.contextmanager
    def sharing_errors(self, undo: Callable[[], None] | None = None) -> Iterator[None]:
        """A block that each rank runs independently, followed by `share_error`. Nothing inside may wait for another rank."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
        self.share_error(error, undo)

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 alone; every rank gets its result or its exception."""
        result: list[Any] = [None]
        with self.sharing_errors():
            if self.rank == 0:
                result[0] = function()
        if self.size > 1:
            self._collective(dist.broadcast_object_list, result, src=0)
        return cast(T, result[0])


def all_ranks(timeout: datetime.timedelta = _PATIENCE) -> Ranks:
    """The ranks for the training thread. The first call is collective and sets the timeout."""
    return _ranks("training", timeout)


def writing_ranks() -> Ranks:
    """The ranks for the one thread that reads or writes files. The first call is collective."""
    return _ranks("files", _PATIENCE)


def _ranks(purpose: str, timeout: datetime.timedelta) -> Ranks:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    world: Any = dist.group.WORLD
    created_in, group = process.rank_groups.get(purpose, (None, world))
    if created_in is not world:  # the first call, or the first after a shutdown
        shared = purpose == "training" and "gloo" in dist.get_backend_config()
        new: Any = dist.new_group  # its annotated result differs from version to version
        group = world if shared else new(backend="gloo", timeout=timeout)
        process.rank_groups[purpose] = (world, group)
    return Ranks(dist.get_rank(), dist.get_world_size(), group)


def _report(error: BaseException) -> tuple[bool, str]:
    """(True for an InputError, its text)."""
    text = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
    return isinstance(error, InputError), text
