"""Watchdog: a job ends when one of its ranks fails, and the first failure is reported first.

Each rank has a heartbeat thread that publishes its progress about once a second and reads that of the others. The first rank to
find a failure writes it to the job's key-value store and reports it. Then every rank has `grace` seconds to end; after that
its thread ends the process: a main thread in a hanging collective never would. The store must outlive the ranks: torchrun's
agent serves it; if rank 0 does, a frozen rank 0 goes unnoticed.
"""

from __future__ import annotations

import atexit
import itertools
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from octavo.errors import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED, OctavoError, RunStopped
from octavo.parallel.world import state
from octavo.supervision import NOTICES
from octavo.watchdog.diagnosis import Failure, Progress
from octavo.watchdog.heartbeat import HeartbeatThread
from octavo.watchdog.processes import SharedPage, exit_without_destructors

_BROKEN_CONNECTION = re.compile(r"gloo|nccl|process ?group|connection|broken pipe|socket|timed? ?out|\bpeer\b", re.IGNORECASE)
_RANK_PREFIX = re.compile(r"rank (\d+)\b")
_DONE, _INTERRUPTED = "done", "interrupted"  # reasons for a regular end; a RunStopped has its own text


class PeerFailed(OctavoError):
    """Another rank has failed; the message names rank and phase, and has already been reported."""

    reported = True  # nothing is left to print; the failed rank's exception gets the same attribute

    def __init__(self, failure: Failure, world: int) -> None:
        super().__init__(failure.message(world))
        # A single rank that received a stop signal stops alone only before the first step: nothing is lost.
        stopped = failure.kind == "left" and failure.detail not in (_DONE, _INTERRUPTED)
        self.exit_code = EXIT_INPUT if failure.kind == "input" else EXIT_STOPPED if stopped else EXIT_FAILED


class Watchdog:
    """A context around the training of one of `octavo.init`'s ranks; all ranks enter theirs in the same order.

    An exception that leaves the context is the job's failure, or the consequence of another rank's. The failure is reported on
    stderr with rank and phase. Then the failed rank raises its original exception, with the attribute `reported`, and the
    others raise `PeerFailed`. Every process ends within `grace` seconds. `RunStopped`, and exceptions that are not an
    `Exception`, are not failures. A single rank has no thread and no store.

    Args:
        timeout: seconds without a heartbeat, or in one phase while others wait, before a rank counts as failed.
        grace: seconds in which ranks may end regularly once one has failed.
    """

    _count = itertools.count()

    def __init__(self, *, timeout: float = 600.0, grace: float = 10.0) -> None:
        self.timeout, self.grace = timeout, grace
        self.rank, self.world = state.rank, state.world_size
        self.progress = Progress(since=time.monotonic())
        self._first_step: int | None = None
        self._page: SharedPage | None = None
        self._heartbeat: HeartbeatThread | None = None

    def start(self) -> None:
        """Begin a training: no time limit until its first step."""
        self._first_step = None
        self._advance(Progress(self.progress.training + 1, since=time.monotonic()))

    def step(self, step: int) -> None:
        """Begin step `step`, with the phase "data"."""
        self._first_step = step if self._first_step is None else self._first_step
        first = step == self._first_step
        self._advance(Progress(self.progress.training, step, 0, "data", first, time.monotonic()))

    def phase(self, name: str) -> None:
        """Enter a phase; re-entering it shows progress within a long phase."""
        self._advance(replace(self.progress, phases=self.progress.phases + 1, phase=name, since=time.monotonic()))

    def _advance(self, progress: Progress) -> None:
        self.progress = progress
        if self._page is not None:
            progress.write(self._page.memory)

    def __enter__(self) -> Watchdog:
        if self.world > 1:
            self._page = SharedPage.create()
            self._advance(self.progress)
            default: Any = _get_default_store()  # earlier versions do not annotate `clone`
            # The prefix separates consecutive watchdogs of one job.
            store = PrefixStore(f"octavo-watchdog-{next(self._count)}", default.clone())
            self._heartbeat = HeartbeatThread(
                rank=self.rank,
                world=self.world,
                timeout=self.timeout,
                grace=self.grace,
                progress=lambda: self.progress,
                page=self._page,
                store=store,
            )
            try:
                self._heartbeat.start()
            except BaseException as error:  # launchers send a signal when a rank has died
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        heartbeat = self._heartbeat
        if heartbeat is None:
            return
        if error is not None and not _is_stop(error):
            _ignore_signals()
        try:
            failure = self._diagnose(heartbeat, error)
        except BaseException:  # a signal during the diagnosis
            self._stop(heartbeat, _INTERRUPTED)
            raise
        if failure is None or (failure.kind == "store" and error is None):
            self._stop(heartbeat, _DONE if error is None else " ".join(str(error).split()) or _INTERRUPTED)
        elif error is not None and self._is_of_this_rank(error, failure):
            error.reported = True  # type: ignore[attr-defined]
            # At exit, since the destructors of broken process groups abort, or wait for dead ranks.
            atexit.register(exit_without_destructors, error.exit_code if isinstance(error, OctavoError) else EXIT_FAILED)
        else:
            peer_failed = PeerFailed(failure, self.world)
            atexit.register(exit_without_destructors, peer_failed.exit_code)
            if failure.kind == "store":
                heartbeat.report()
            if failure.kind in ("failed", "input", "killed"):
                heartbeat.wait_for_exit(failure.ranks[0])
            try:
                raise peer_failed
            finally:
                peer_failed.__context__ = None  # neither shown nor, if it is a signal, taken as the reason

    def _diagnose(self, heartbeat: HeartbeatThread, error: BaseException | None) -> Failure | None:
        if error is None or heartbeat.failure is not None:
            return heartbeat.failure
        if _is_stop(error):
            return heartbeat.diagnose(None, uncertain=False)
        failure = Failure.of_error(_part_of_rank(error, self.rank) or error, self.rank, self.progress)
        return heartbeat.diagnose(failure, uncertain=is_consequence(error, self.rank))

    def _is_of_this_rank(self, error: BaseException, failure: Failure) -> bool:
        """True if the error is the failure, or explains itself on this rank, such as the same InputError on every rank."""
        if failure.ranks == (self.rank,) and failure.kind in ("failed", "input"):
            return True
        return isinstance(error, OctavoError) and not _is_stop(error) and not is_consequence(error, self.rank)

    def _stop(self, heartbeat: HeartbeatThread, reason: str) -> None:
        self._page = self._heartbeat = None
        heartbeat.stop(reason)


def is_consequence(error: BaseException, rank: int) -> bool:
    """True if another rank may have caused this rank's exception: a broken connection, a timeout, or that rank's message.

    Messages of another rank begin with "rank 2 …"; distributed checkpointing raises the exceptions of all ranks on each.
    """
    if isinstance(getattr(error, "failures", None), dict) and _part_of_rank(error, rank) is None:
        return True
    named = _RANK_PREFIX.match(str(error))
    if isinstance(error, OctavoError) and named is not None and int(named[1]) != rank:
        return True
    return any(
        isinstance(one, dist.DistError) or (isinstance(one, RuntimeError) and _BROKEN_CONNECTION.search(str(one)) is not None)
        for one in _chain(error)
    )


def _part_of_rank(error: BaseException, rank: int) -> BaseException | None:
    """This rank's exception from one that joins several in `failures`: {rank: (exception, traceback)}."""
    failures = getattr(error, "failures", None)
    part = failures.get(rank) if isinstance(failures, dict) else None
    inner = part[0] if isinstance(part, tuple) and part else part
    return inner if isinstance(inner, BaseException) else None


def _is_stop(error: BaseException) -> bool:
    """True if the run received a stop signal; a library may have wrapped the exception."""
    return any(isinstance(one, RunStopped) or not isinstance(one, Exception) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _ignore_signals() -> None:
    """A failure must not look like a request to stop: launchers send SIGTERM to the remaining ranks."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, *NOTICES):
            signal.signal(number, signal.SIG_IGN)
