"""The ranks of a job keep an eye on each other, so that one that fails ends all of them and is named first.

A rank that is killed or frozen leaves the others waiting in a collective, and one that raises gives them errors about broken
connections: what is printed first is seldom what went wrong. So each rank has a thread (`octavo.watchdog.heartbeat`) that tells
about once a second where its main thread is, and reads where the others are. The first rank to find a fault writes the cause
to the job's key-value store, where all agree on it, and says it. Then every rank has `grace` seconds to end by itself, after
which its thread ends it: a main thread that waits in a collective never would.

    watch = Watch.of_job(timeout=600, grace=10)
    with watch:
        watch.start()               # loading, building: no limit on time
        for step in steps:
            watch.step(step)        # its phase is "data"
            watch.phase("forward")

    killed      noticed within milliseconds on the same host, with the phase it died in (`octavo.watchdog.processes`)
    raising     at once; nobody shows an error before the cause is settled
    frozen      after `timeout` without a heartbeat; the others of its host kill it
    waited for  after `timeout` in one place: the rank that is behind the others

A dead rank of another host is one whose heartbeats have stopped: for `timeout`, or for a few of them if connections break.
The main thread only writes to memory. The store has to outlive the ranks: torchrun's agent keeps it; where rank 0 keeps it
and is frozen, nobody can tell. One rank alone has no thread and no store.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from octavo.errors import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED, OctavoError, RunStopped
from octavo.parallel.world import state
from octavo.watchdog import diagnosis
from octavo.watchdog.diagnosis import Cause, Place
from octavo.watchdog.heartbeat import Lookout
from octavo.watchdog.processes import Page

_BROKEN = re.compile(r"gloo|nccl|process ?group|connection|broken pipe|socket|timed? ?out|\bpeer\b", re.IGNORECASE)
_OF_RANK = re.compile(r"rank (\d+)\b")
_DONE, _INTERRUPTED = "done", "interrupted"  # how a training ends in good order, or a RunStopped in its own words


class PeerFailed(OctavoError):
    """Another rank has failed; who and where is in the message, and has already been said.

    Attributes:
        reported: there is nothing left to say. The exception of the rank that failed gets the same attribute.
    """

    reported = True

    def __init__(self, cause: Cause, world: int) -> None:
        super().__init__(cause.message(world))
        # A rank that alone was asked to stop leaves by itself only before the first step, and there is nothing to lose.
        stopped = cause.kind == "left" and cause.text not in (_DONE, _INTERRUPTED)
        self.exit_code = EXIT_INPUT if cause.kind == "input" else EXIT_STOPPED if stopped else EXIT_FAILED


class Watch:
    """A context around the training of one rank; see the module.

    An exception that leaves it is the cause of the job's end, or a consequence of another rank's. The cause is said on stderr
    with rank and phase; then the original exception leaves the context on the rank that failed, with the attribute `reported`,
    and `PeerFailed` on the others. Either way the process ends within `grace` seconds. `RunStopped` and what is no `Exception`
    are no fault.

    Args:
        timeout: seconds that a rank may be silent, or the others may wait for it.
        grace: seconds that ranks have to end by themselves once one has failed.
        rank, world: who this is.
        store: of the job; cloned, and only needed for several ranks.

    Attributes:
        place: where the main thread is.
    """

    _made = itertools.count()

    def __init__(
        self, *, timeout: float = 600.0, grace: float = 10.0, rank: int = 0, world: int = 1, store: Store | None = None
    ) -> None:
        self.timeout, self.grace, self.rank, self.world = timeout, grace, rank, world
        self.place = Place(since=time.monotonic())
        self._first: int | None = None
        self._page: Page | None = None
        self._lookout: Lookout | None = None
        # Several watches of one job, one after another, find nothing of each other.
        prefix = f"octavo-watch-{next(self._made)}"
        self._store = PrefixStore(prefix, store.clone()) if store is not None else None  # type: ignore[attr-defined]

    @classmethod
    def of_job(cls, *, timeout: float, grace: float) -> Watch:
        """A watch over the ranks of `octavo.init`; all ranks make theirs in the same order if they make several."""
        store = _get_default_store() if state.world_size > 1 else None
        return cls(timeout=timeout, grace=grace, rank=state.rank, world=state.world_size, store=store)

    def start(self) -> None:
        """A training begins: what comes before its first step has no limit on time."""
        self._first = None
        self._move(Place(self.place.part + 1, since=time.monotonic()))

    def step(self, step: int) -> None:
        """Step `step` begins, with its data."""
        self._first = step if self._first is None else self._first
        self._move(Place(self.place.part, step, 0, "data", step == self._first, time.monotonic()))

    def phase(self, name: str) -> None:
        """The main thread enters a phase; the same again is a sign of life from within a long one."""
        self._move(replace(self.place, move=self.place.move + 1, phase=name, since=time.monotonic()))

    def _move(self, place: Place) -> None:
        self.place = place
        if self._page is not None:
            place.write(self._page.memory)

    def __enter__(self) -> Watch:
        if self._store is not None and self.world > 1:
            self._page = Page.own()
            self._move(self.place)
            self._lookout = Lookout(
                self.rank,
                self.world,
                self.timeout,
                self.grace,
                where=lambda: self.place,
                page=self._page,
                store=self._store,
            )
            try:
                self._lookout.begin()
            except BaseException as error:  # launchers send a signal when a rank has died
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        lookout = self._lookout
        if lookout is None:
            return
        if error is not None and not _stops(error):
            _ignore_signals()
        try:
            cause = self._cause_of(lookout, error)
        except BaseException:  # a signal that came just now
            self._end(lookout, _INTERRUPTED)
            raise
        if cause is None or (cause.kind == "store" and error is None):
            self._end(lookout, _DONE if error is None else " ".join(str(error).split()) or _INTERRUPTED)
        elif error is not None and self._says_enough(error, cause):
            error.reported = True  # type: ignore[attr-defined]
            atexit.register(_leave, error.exit_code if isinstance(error, OctavoError) else EXIT_FAILED)
        else:
            failed = PeerFailed(cause, self.world)
            atexit.register(_leave, failed.exit_code)
            if cause.kind == "store":
                lookout.announce()
            if cause.kind in ("failed", "input", "killed"):
                lookout.let_end(cause.ranks[0])
            try:
                raise failed
            finally:
                failed.__context__ = None  # neither shown nor, where it was a signal, taken for the reason

    def _cause_of(self, lookout: Lookout, error: BaseException | None) -> Cause | None:
        if error is None or lookout.cause is not None:
            return lookout.cause
        own = None if _stops(error) else diagnosis.failure(_share(error, self.rank) or error, self.rank, self.place)
        return lookout.ask(own, doubt=own is not None and is_consequence(error, self.rank))

    def _says_enough(self, error: BaseException, cause: Cause) -> bool:
        """Whether it is the cause itself, or an explained error of this rank's own, such as the same one on every rank."""
        if cause.ranks == (self.rank,) and cause.kind in ("failed", "input"):
            return True
        return isinstance(error, OctavoError) and not _stops(error) and not is_consequence(error, self.rank)

    def _end(self, lookout: Lookout, how: str) -> None:
        self._page = self._lookout = None
        lookout.end(how)


def is_consequence(error: BaseException, rank: int) -> bool:
    """Whether an exception of this rank may be but the echo of another's: a broken or overdue connection, or words from there.

    Ranks that agree on an error say "rank 2 …" first; distributed checkpointing raises those of all ranks on each of them.
    """
    if isinstance(getattr(error, "failures", None), dict) and _share(error, rank) is None:
        return True
    named = _OF_RANK.match(str(error))
    if isinstance(error, OctavoError) and named is not None and int(named[1]) != rank:
        return True
    return any(
        isinstance(one, dist.DistError) or (isinstance(one, RuntimeError) and _BROKEN.search(str(one)) is not None)
        for one in _chain(error)
    )


def _share(error: BaseException, rank: int) -> BaseException | None:
    """This rank's part of an exception that joins those of several ranks in `failures`: {rank: (exception, traceback)}."""
    shares = getattr(error, "failures", None)
    share = shares.get(rank) if isinstance(shares, dict) else None
    inner = share[0] if isinstance(share, tuple) and share else share
    return inner if isinstance(inner, BaseException) else None


def _stops(error: BaseException) -> bool:
    """Whether the run was asked to stop: what is no `Exception` may have become one on its way through a library."""
    return any(isinstance(one, RunStopped) or not isinstance(one, Exception) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _ignore_signals() -> None:
    """What ends for a fault is not to be taken for a run that was asked to stop: launchers send SIGTERM to who is left."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _leave(code: int) -> None:
    """Leave once Python has said all it has to say: the destructors of broken process groups abort, or wait for the dead."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
