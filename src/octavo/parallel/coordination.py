"""What ranks have to agree on: who does what once, and that all stop when one fails.

A checkpoint that one rank could not finish is no checkpoint. So every phase of a save or a load ends in an exchange, after
which either all ranks go on or all raise: the one with the fault its own exception, the others an `OctavoError` that names the
rank and the fault. Nobody is left waiting for a rank that has given up.

Two gloo groups of all ranks carry this. One serves the thread that trains. The other, with hours of patience because a slow
disk is no failure, serves whoever writes or reads files, which may be a thread in the background: collectives of two threads
in one group would be mistaken for each other. Objects travel pickled between the processes of one job, as PyTorch's own object
collectives do; nothing pickled reaches a disk.
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
from octavo.parallel import world

T = TypeVar("T")

_PATIENCE = datetime.timedelta(hours=4)  # for the slowest disk among the ranks, and for hashing a whole checkpoint
_made: dict[str, tuple[Any, dist.ProcessGroup]] = {}


@dataclass(frozen=True)
class Ranks:
    """All ranks of the job, and the group over which they agree; None for one rank, which agrees with itself.

    Every method is collective, and raises an `OctavoError` where a rank is lost.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on some rank."""
        return self.largest(int(flag)) > 0

    def largest(self, number: int) -> int:
        """The largest of every rank's number."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def total(self, number: int) -> int:
        """The sum of every rank's number."""
        return self._reduced(number, dist.ReduceOp.SUM)

    def _reduced(self, number: int, operation: Any) -> int:
        if self.size == 1:
            return number
        value = torch.tensor(number)
        with self._connected():
            dist.all_reduce(value, operation, group=self.group)
        return int(value)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Around each collective: what breaks there is a rank that is gone, or whose time is over."""
        try:
            yield
        except RuntimeError as lost:
            raise OctavoError(f"rank {self.rank} of {self.size} lost the others: {lost}") from lost

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._connected():
            dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def everyone(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._connected():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def scatter(self, values: list[T]) -> T:
        """The entry of rank 0's list that belongs to this rank."""
        if self.size == 1:
            return values[0]
        received: list[Any] = [None]
        with self._connected():
            dist.scatter_object_list(received, cast(list[Any], values) if self.rank == 0 else None, src=0, group=self.group)
        return cast(T, received[0])

    def agree(self, fault: BaseException | None, undo: Callable[[], None] | None = None) -> None:
        """Go on if no rank has a fault; otherwise every rank raises, once rank 0 has called `undo`.

        Raises:
            BaseException: `fault` itself, on its rank.
            OctavoError: on the others, naming the rank and its fault (`InputError` if that is what it was).
        """
        said: list[tuple[bool, str] | None] = []
        try:
            if self.any(fault is not None):
                said = self.everyone(None if fault is None else _told(fault))
                if undo is not None:
                    self.on_first(undo)
        except OctavoError:  # the others are gone, which says less than a fault of this rank's own
            if fault is None:
                raise
        if fault is not None:
            raise fault
        for rank, told in enumerate(said):
            if told is not None:
                raise _error(told, f"rank {rank} of {self.size}: ")

    @contextlib.contextmanager
    def together(self, undo: Callable[[], None] | None = None) -> Iterator[None]:
        """What every rank does on its own, after which they `agree`. Nothing inside may wait for another rank."""
        fault: BaseException | None = None
        try:
            yield
        except BaseException as error:
            fault = error
        self.agree(fault, undo)

    def on_first(self, do: Callable[[], T]) -> T:
        """What rank 0 does alone: every rank gets its result, or an exception that names its fault."""
        if self.size == 1:
            return do()
        fault: BaseException | None = None
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[1] = do()
            except BaseException as error:
                fault, answer = error, [_told(error), None]
        try:
            with self._connected():
                dist.broadcast_object_list(answer, src=0, group=self.group)
        except OctavoError:
            if fault is None:
                raise
        if fault is not None:
            raise fault
        if answer[0] is not None:
            raise _error(answer[0], f"rank 0 of {self.size}: ")
        return cast(T, answer[1])


def all_ranks() -> Ranks:
    """The ranks as the training thread speaks to them. The first call is collective."""
    return _ranks("control", world.state.control)


def writing_ranks() -> Ranks:
    """The ranks as whoever writes or reads a checkpoint speaks to them; one at a time. The first call is collective."""
    return _ranks("writing", None)


def _ranks(purpose: str, group: dist.ProcessGroup | None) -> Ranks:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    if group is None:
        whole = dist.group.WORLD
        made = _made.get(purpose)
        if made is None or made[0] is not whole:  # of an earlier world, which was shut down
            made = _made[purpose] = (whole, dist.new_group(backend="gloo", timeout=_PATIENCE))
        group = made[1]
    return Ranks(dist.get_rank(), dist.get_world_size(), group)


def _told(fault: BaseException) -> tuple[bool, str]:
    text = str(fault) if isinstance(fault, OctavoError) else f"{type(fault).__name__}: {fault}"
    return isinstance(fault, InputError), text


def _error(told: tuple[bool, str], who: str = "") -> OctavoError:
    of_input, text = told
    return InputError(who + text) if of_input else OctavoError(who + text)
