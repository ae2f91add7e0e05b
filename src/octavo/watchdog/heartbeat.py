"""The thread of a rank that tells where its main thread is, looks after the others, and ends the process once one has failed.

All that is known of the other ranks is known here, and only here the job's key-value store is used: a client of it blocks
while another thread waits in it, so this one is a clone with a connection of its own. What follows from what is known is
decided in `octavo.watchdog.diagnosis`; `octavo.watchdog.watchdog` is the side of the main thread.

When the main thread raises it asks for the cause, and waits for the answer before anything is shown: the death of a rank is
known here as soon as its connections break there.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.distributed.distributed_c10d import Store

from octavo.errors import EXIT_FAILED
from octavo.watchdog import diagnosis
from octavo.watchdog.diagnosis import Beat, Cause, Place
from octavo.watchdog.processes import Page, Process, host_identity, orphaned, start_time

_MANY_RANKS = 64  # from here on ranks look less often: each reads of all the others
_MISSED = 4  # heartbeats that a rank has missed when connections break, to be taken for lost
_MEETING_SECONDS = 0.05  # between looks until all others were seen
_PATIENCE = 6  # heartbeats in which a broken connection may find another cause than itself


@dataclass
class _Peer:
    """What is known of another rank: its last beat, for how long there was none, and, on the same host, its process."""

    beat: Beat | None = None
    quiet: float = 0.0
    process: Process | None = None
    page: Page | None = None

    @property
    def place(self) -> Place:
        if self.page is not None:
            return Place.read(self.page.memory)
        return self.beat.place if self.beat is not None else Place()


@dataclass(frozen=True)
class _Question:
    """The main thread raised: `own` is what it takes for the cause, None if it was only stopped; in doubt if an echo of one."""

    own: Cause | None
    doubt: bool
    since: float


class Lookout:
    """The thread; it ends with the training, or ends the process.

    Args:
        rank, world: who this is.
        timeout, grace: seconds, as `Watch` has them.
        where: of the main thread, and `page` to which it writes that.
        store: for this thread alone, with keys of its own.

    Attributes:
        cause: why the job ends, once all agree on it.
    """

    def __init__(
        self, rank: int, world: int, timeout: float, grace: float, *, where: Callable[[], Place], page: Page, store: Store
    ) -> None:
        self.cause: Cause | None = None
        self._rank, self._world, self._timeout, self._grace = rank, world, timeout, grace
        self._where, self._page, self._store = where, page, store
        self._interval = min(1.0, timeout / 5) * max(1.0, world / _MANY_RANKS)
        # To notice a fault, and to be seen to have ended by the launcher, takes up to two beats of the time that there is.
        self._granted = max(0.0, grace - 2 * self._interval)
        self._peers = {other: _Peer() for other in range(world) if other != rank}
        self._host, self._pid, self._started = host_identity(), os.getpid(), start_time(os.getpid()) or 0
        self._count, self._looked = 0, time.monotonic()
        self._place, self._seconds = where(), 0.0
        self._wake_out, self._wake_in = os.pipe()
        self._met = threading.Event()
        self._question: _Question | None = None
        self._answered = threading.Event()
        self._ended = ""
        self._over = threading.Event()
        self._said = False
        self._thread = threading.Thread(target=self._run, name="octavo-watch", daemon=True)

    # For the main thread.

    def begin(self) -> None:
        """Start the thread, and wait until it knows the others: what a rank does before, it does unseen."""
        self._thread.start()
        self._met.wait(self._timeout)

    def ask(self, own: Cause | None, *, doubt: bool) -> Cause | None:
        """Why the job ends, now that the main thread has raised; None if nothing is wrong and it was only stopped."""
        self._question = _Question(own, doubt, time.monotonic())
        self._wake()
        if not self._answered.wait((_PATIENCE + 3) * self._interval + 5) and own is not None:
            self.cause = replace(own, by=self._rank, host=self._host)  # the store does not answer
            self.announce()
        return self.cause

    def announce(self) -> None:
        """Say the cause, once; past Python's buffers, whose locks a main thread that hangs may hold."""
        if self.cause is not None and not self._said:
            self._said = True
            below_progress = "\n" if os.isatty(2) else ""
            os.write(2, f"{below_progress}octavo: {self.cause.message(self._world)}\n".encode())

    def let_end(self, rank: int) -> None:
        """Give a rank of this host time to end first: torchrun, which looks every 0.1 s, reports the first as root cause."""
        process = self._peers[rank].process if rank in self._peers else None
        if process is not None and process.ended(within=self._granted / 2):
            time.sleep(min(0.3, self._granted / 4))

    def end(self, how: str) -> None:
        """Tell the others that this rank has ended in good order, and stop."""
        self._ended = how
        self._over.set()
        self._wake()
        self._thread.join(2 * self._interval + 1)
        if not self._thread.is_alive():  # otherwise it waits for a store that does not answer
            self._close()

    def _wake(self) -> None:
        os.write(self._wake_in, b".")

    # The thread itself.

    def _run(self) -> None:
        """Beat and look, until the end or a cause."""
        try:
            while self.cause is None and not self._look():
                self._sleep()
        except RuntimeError:  # the store's only exceptions: who kept it has ended
            self._without_store()
        if self.cause is not None and not self._over.is_set():
            self._enforce(self.cause)

    def _look(self) -> bool:
        """One beat and one look at the others; whether that was the last."""
        if orphaned():
            os._exit(EXIT_FAILED)
        ended, question = self._ended, self._question
        beat = self._beat(ended)
        self._store.set(f"beat-{self._rank}", beat.to_json())
        if ended:
            return True
        dead = self._dead()  # before reading: what a rank had to say before it died is then there to be read
        self._read()
        posted = self._store.check(["cause"])
        cause = Cause.from_json(self._store.get("cause")) if posted else self._fault(beat, dead, question)
        if cause is not None:
            self._settle(cause)
        elif question is not None and question.own is None:
            self._answered.set()
        return cause is not None

    def _beat(self, ended: str) -> Beat:
        now, place = time.monotonic(), self._where()
        # No more than this thread has seen go by: a job that was stopped as a whole, and goes on, is not late.
        elapsed = min(now - self._looked, 2 * self._interval)
        self._seconds = self._seconds + elapsed if place is self._place else min(now - place.since, elapsed)
        for peer in self._peers.values():
            peer.quiet += elapsed
        self._looked, self._place = now, place
        self._count += 1
        page = self._page.descriptor
        return Beat(self._count, place, self._seconds, ended, self._host, self._pid, self._started, page)

    def _dead(self) -> list[int]:
        return [rank for rank, peer in self._peers.items() if peer.process is not None and peer.process.ended()]

    def _read(self) -> None:
        ranks = [r for r, peer in self._peers.items() if peer.beat is not None or self._store.check([f"beat-{r}"])]
        texts = self._store.multi_get([f"beat-{rank}" for rank in ranks]) if ranks else []
        for rank, text in zip(ranks, texts, strict=True):
            peer, beat = self._peers[rank], Beat.from_json(text)
            if peer.beat is None and beat.host == self._host:
                peer.process, peer.page = Process(beat.pid, beat.started), Page.of(beat.pid, beat.page)
            if peer.beat is None or peer.beat.count != beat.count:
                peer.quiet = 0.0
            peer.beat = beat
        if len(ranks) == len(self._peers):
            self._met.set()

    def _fault(self, beat: Beat, dead: list[int], question: _Question | None) -> Cause | None:
        """What is wrong, as far as this rank can see."""
        beats = {rank: peer.beat for rank, peer in self._peers.items() if peer.beat is not None}
        quiet = {rank: peer.quiet for rank, peer in self._peers.items()}
        places = {rank: peer.place for rank, peer in self._peers.items()}
        found = diagnosis.killed(beats, dead, places) or diagnosis.silent(beats, quiet, self._timeout, places)
        if found is not None or (question is not None and not question.doubt):
            return found or (question.own if question is not None else None)
        if question is not None:
            lost = diagnosis.silent(beats, quiet, _MISSED * self._interval, places)
            impatient = time.monotonic() - question.since > _PATIENCE * self._interval
            return replace(lost, kind="lost") if lost else diagnosis.left(beats) or (question.own if impatient else None)
        late = diagnosis.stuck(beats | {self._rank: beat}, self._timeout)
        if late is None:
            return None
        # A frozen rank stands still like one that only hangs, but cannot end by itself.
        frozen = {rank: quiet[rank] for rank in late.ranks if rank in quiet}
        return diagnosis.silent(beats, frozen, (_MISSED - 1) * self._interval, places) or late

    def _settle(self, cause: Cause) -> None:
        """Agree with the others on one cause, and have it said once on every host that has ranks left."""
        if cause.by < 0:
            cause = replace(cause, by=self._rank, host=self._host)
        try:
            self.cause = Cause.from_json(self._store.compare_set("cause", "", cause.to_json()))
            speaks = self.cause.by == self._rank or (self.cause.host != self._host and self._lowest(self.cause))
        except RuntimeError:
            self.cause = cause
            speaks = cause.ranks == (self._rank,) or self._lowest(cause, here=True)
        if speaks:
            self.announce()
        self._answered.set()

    def _without_store(self) -> None:
        """Conclude from what can be known without it."""
        question = self._question
        beats = {rank: peer.beat for rank, peer in self._peers.items() if peer.beat is not None}
        found = diagnosis.killed(beats, self._dead(), {rank: peer.place for rank, peer in self._peers.items()})
        if found is None and question is not None and not question.doubt:
            found = question.own
        if found is not None:
            self._settle(found)
        elif not self._ended:
            self.cause = Cause("store", by=self._rank, host=self._host)  # said if this rank does not end well
        self._answered.set()

    def _lowest(self, cause: Cause, *, here: bool = False) -> bool:
        """Whether no rank below this one is left to speak, of all or of this host."""
        others = [(rank, peer) for rank, peer in self._peers.items() if rank < self._rank and rank not in cause.ranks]
        alive = [peer for _, peer in others if peer.beat is not None and not peer.beat.ended]
        return not any(not here or (peer.process is not None and not peer.process.ended()) for peer in alive)

    def _enforce(self, cause: Cause) -> None:
        """See to it that this process ends, and those of its host that cannot end by themselves."""
        if cause.kind in ("silent", "lost"):
            for rank in cause.ranks:
                process = self._peers[rank].process if rank in self._peers else None
                if process is not None:
                    process.kill()  # launchers wait long before they do
        _alarm(self._grace + self._interval)
        # A rank that keeps the others waiting goes before them: that breaks its connections, and wakes them.
        if self._over.wait(self._granted / 2 if self._rank in cause.ranks else self._granted):
            _alarm(0)
            return
        if cause.kind == "store" and self._lowest(cause, here=True):
            self.announce()
        os._exit(EXIT_FAILED)

    def _sleep(self) -> None:
        """Until the next beat is due, a process has ended or the main thread calls."""
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        for peer in self._peers.values():
            if peer.process is not None and peer.process.descriptor is not None and not (peer.beat and peer.beat.ended):
                poll.register(peer.process.descriptor, select.POLLIN)
        if self._wake_out in dict(poll.poll(1000 * (self._interval if self._met.is_set() else _MEETING_SECONDS))):
            os.read(self._wake_out, 64)

    def _close(self) -> None:
        for peer in self._peers.values():
            for part in (peer.process, peer.page):
                if part is not None:
                    part.close()
        self._page.close()
        os.close(self._wake_out)
        os.close(self._wake_in)


def _alarm(seconds: float) -> None:
    """Have the kernel end this process: the last resort where a library holds the interpreter's lock. 0: not any more."""
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, seconds)
