"""Heartbeat thread: publishes this rank's progress, monitors its peers, ends the process when one fails.

Only this thread uses its connection to the job's key-value store: a client of the store blocks while another thread waits in
it. When the main thread raises, it requests the diagnosis from this thread before it prints anything: this thread learns of a
rank's death as soon as its connections break.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch.distributed.distributed_c10d import Store

from octavo.errors import EXIT_FAILED
from octavo.supervision import Process, start_time
from octavo.watchdog import diagnosis
from octavo.watchdog.diagnosis import Failure, Heartbeat, Progress
from octavo.watchdog.processes import SharedPage, host_identity, orphaned

_MANY_RANKS = 64  # with more the interval grows: each rank reads the heartbeats of all others
_LOST_INTERVALS = 4  # after which a rank without heartbeats counts as lost if connections break
_MEETING_SECONDS = 0.05  # polling interval until every peer was seen
_PATIENCE_INTERVALS = 6  # to wait whether a broken connection is the effect of another failure


@dataclass
class _Peer:
    """Another rank: its last heartbeat, the seconds since, and its process and shared page if it is on this host."""

    heartbeat: Heartbeat | None = None
    quiet: float = 0.0
    process: Process | None = None
    page: SharedPage | None = None

    @property
    def progress(self) -> Progress:
        if self.page is not None:
            return Progress.read(self.page.memory)
        return self.heartbeat.progress if self.heartbeat is not None else Progress()


@dataclass(frozen=True)
class _Request:
    """A request of the main thread, which has raised, for the diagnosis."""

    failure: Failure | None
    """The failure if its exception is the first; None if the run only received a stop signal."""
    uncertain: bool
    """The exception may be the consequence of another rank's failure."""
    since: float


@dataclass(eq=False)
class HeartbeatThread:
    """Ends with the training, or ends the process."""

    rank: int
    world: int
    timeout: float
    grace: float
    progress: Callable[[], Progress]  # returns the main thread's progress
    page: SharedPage  # with the main thread's progress
    store: Store  # a connection that only this thread uses
    failure: Failure | None = None  # the reason for the job's end, once all ranks agree on it

    def __post_init__(self) -> None:
        self._interval = min(1.0, self.timeout / 5) * max(1.0, self.world / _MANY_RANKS)
        # Detecting a failure, and the launcher detecting the end, each take up to an interval of the grace period.
        self._granted = max(0.0, self.grace - 2 * self._interval)
        self._peers = {other: _Peer() for other in range(self.world) if other != self.rank}
        self._host, self._pid, self._started = host_identity(), os.getpid(), start_time(os.getpid()) or 0
        self._count, self._polled = 0, time.monotonic()
        self._progress, self._seconds = self.progress(), 0.0
        self._wake_out, self._wake_in = os.pipe()
        self._met = threading.Event()
        self._request: _Request | None = None
        self._answered = threading.Event()
        self._ended = ""
        self._stopped = threading.Event()
        self._reported = False
        self._thread = threading.Thread(target=self._run, name="octavo-heartbeat", daemon=True)

    # For the main thread.

    def start(self) -> None:
        """Start, and wait until every peer was seen: before that a peer's death would go unnoticed."""
        self._thread.start()
        self._met.wait(self.timeout)

    def diagnose(self, failure: Failure | None, *, uncertain: bool) -> Failure | None:
        """The reason for the job's end, after the main thread raised; None if the run only received a stop signal."""
        self._request = _Request(failure, uncertain, time.monotonic())
        os.write(self._wake_in, b".")
        if not self._answered.wait((_PATIENCE_INTERVALS + 3) * self._interval + 5) and failure is not None:
            self.failure = replace(failure, found_by=self.rank, host=self._host)  # the store is unresponsive
            self.report()
        return self.failure

    def report(self) -> None:
        """Print the failure, once; not through Python's buffers, whose locks a hanging main thread may hold."""
        if self.failure is not None and not self._reported:
            self._reported = True
            below_progress_bar = "\n" if os.isatty(2) else ""
            os.write(2, f"{below_progress_bar}octavo: {self.failure.message(self.world)}\n".encode())

    def wait_for_exit(self, rank: int) -> None:
        """Let a rank of this host exit first: torchrun polls every 0.1 s and reports the first exit as the root cause."""
        process = self._peers[rank].process if rank in self._peers else None
        if process is not None and process.ended(within=self._granted / 2):
            time.sleep(min(0.3, self._granted / 4))

    def stop(self, reason: str) -> None:
        """Publish that this rank's training has ended regularly, and end the thread."""
        self._ended = reason
        self._stopped.set()
        os.write(self._wake_in, b".")
        self._thread.join(2 * self._interval + 1)
        if not self._thread.is_alive():  # otherwise the thread waits for an unresponsive store
            self._close()

    # The thread itself.

    def _run(self) -> None:
        try:
            while self.failure is None and not self._poll():
                self._sleep()
        except RuntimeError:  # the store's process has ended
            self._diagnose_without_store()
        if self.failure is not None and not self._stopped.is_set():
            self._end_process(self.failure)

    def _poll(self) -> bool:
        """Publish a heartbeat and look for a failure; True when the thread is done."""
        if orphaned():
            os._exit(EXIT_FAILED)
        ended, request = self._ended, self._request
        heartbeat = self._next_heartbeat(ended)
        self.store.set(f"heartbeat-{self.rank}", diagnosis.to_json(heartbeat))
        if ended:
            return True
        dead = self._dead_ranks()  # before reading heartbeats: a dead rank's last one is then in the store
        self._read_heartbeats()
        posted = self.store.check(["failure"])
        failure = Failure.from_json(self.store.get("failure")) if posted else self._find_failure(heartbeat, dead, request)
        if failure is not None:
            self._agree(failure)
        elif request is not None and request.failure is None:
            self._answered.set()
        return failure is not None

    def _next_heartbeat(self, ended: str) -> Heartbeat:
        now, progress = time.monotonic(), self.progress()
        # Capped by this thread's running time: a job that was suspended and resumed as a whole is not late.
        elapsed = min(now - self._polled, 2 * self._interval)
        self._seconds = self._seconds + elapsed if progress is self._progress else min(now - progress.since, elapsed)
        for peer in self._peers.values():
            peer.quiet += elapsed
        self._polled, self._progress = now, progress
        self._count += 1
        page = self.page.descriptor
        return Heartbeat(self._count, progress, self._seconds, ended, self._host, self._pid, self._started, page)

    def _dead_ranks(self) -> list[int]:
        return [rank for rank, peer in self._peers.items() if peer.process is not None and peer.process.ended()]

    def _read_heartbeats(self) -> None:
        ranks = [r for r, peer in self._peers.items() if peer.heartbeat or self.store.check([f"heartbeat-{r}"])]
        texts = self.store.multi_get([f"heartbeat-{rank}" for rank in ranks]) if ranks else []
        for rank, text in zip(ranks, texts, strict=True):
            peer, heartbeat = self._peers[rank], Heartbeat.from_json(text)
            if peer.heartbeat is None and heartbeat.host == self._host:
                peer.process = Process(heartbeat.pid, heartbeat.started)
                peer.page = SharedPage.of(heartbeat.pid, heartbeat.page)
            if peer.heartbeat is None or peer.heartbeat.count != heartbeat.count:
                peer.quiet = 0.0
            peer.heartbeat = heartbeat
        if len(ranks) == len(self._peers):
            self._met.set()

    def _killed(self, dead: list[int]) -> Failure | None:
        return diagnosis.killed(self._peer_heartbeats(), dead, self._peer_progress())

    def _silent(self, ranks: Iterable[int], limit: float) -> Failure | None:
        quiet = {rank: self._peers[rank].quiet for rank in ranks if rank in self._peers}
        return diagnosis.silent(self._peer_heartbeats(), quiet, limit, self._peer_progress())

    def _peer_heartbeats(self) -> dict[int, Heartbeat]:
        return {rank: peer.heartbeat for rank, peer in self._peers.items() if peer.heartbeat is not None}

    def _peer_progress(self) -> dict[int, Progress]:
        return {rank: peer.progress for rank, peer in self._peers.items()}

    def _find_failure(self, heartbeat: Heartbeat, dead: list[int], request: _Request | None) -> Failure | None:
        """The failure, as far as this rank can see."""
        failure = self._killed(dead) or self._silent(self._peers, self.timeout)
        if failure is not None:
            return failure
        if request is None:
            stuck = diagnosis.stuck(self._peer_heartbeats() | {self.rank: heartbeat}, self.timeout)
            if stuck is None:
                return None
            # A frozen rank looks stuck too, but cannot end itself.
            return self._silent(stuck.ranks, (_LOST_INTERVALS - 1) * self._interval) or stuck
        if not request.uncertain:
            return request.failure
        lost = self._silent(self._peers, _LOST_INTERVALS * self._interval)
        if lost is not None:
            return replace(lost, kind="lost")
        waited_enough = time.monotonic() - request.since > _PATIENCE_INTERVALS * self._interval
        return diagnosis.left(self._peer_heartbeats()) or (request.failure if waited_enough else None)

    def _agree(self, failure: Failure) -> None:
        """Agree with all ranks on one failure; one rank of each host reports it."""
        if failure.found_by < 0:
            failure = replace(failure, found_by=self.rank, host=self._host)
        try:
            self.failure = Failure.from_json(self.store.compare_set("failure", "", diagnosis.to_json(failure)))
            reports = self.failure.found_by == self.rank or (self.failure.host != self._host and self._lowest(self.failure))
        except RuntimeError:
            self.failure = failure
            reports = failure.ranks == (self.rank,) or self._lowest(failure, here=True)
        if reports:
            self.report()
        self._answered.set()

    def _diagnose_without_store(self) -> None:
        """Diagnose from the processes of this host and this rank's exception."""
        request = self._request
        failure = self._killed(self._dead_ranks())
        if failure is None and request is not None and not request.uncertain:
            failure = request.failure
        if failure is not None:
            self._agree(failure)
        elif not self._ended:
            self.failure = Failure("store", found_by=self.rank, host=self._host)  # reported if this rank fails
        self._answered.set()

    def _lowest(self, failure: Failure, *, here: bool = False) -> bool:
        """True for the lowest rank left to report, of all or of this host."""
        lower = [peer for rank, peer in self._peers.items() if rank < self.rank and rank not in failure.ranks]
        running = [peer for peer in lower if peer.heartbeat is not None and not peer.heartbeat.ended]
        return not any(not here or (peer.process is not None and not peer.process.ended()) for peer in running)

    def _end_process(self, failure: Failure) -> None:
        """End this process after the grace period, and kill failed processes of this host that cannot exit themselves."""
        if failure.kind in ("silent", "lost"):
            for rank in failure.ranks:
                process = self._peers[rank].process if rank in self._peers else None
                if process is not None:
                    process.kill()  # launchers wait long before they do
        _alarm(self.grace + self._interval)
        # The failed rank ends before the others: that breaks its connections, and wakes them.
        if self._stopped.wait(self._granted / 2 if self.rank in failure.ranks else self._granted):
            _alarm(0)
            return
        if failure.kind == "store" and self._lowest(failure, here=True):
            self.report()
        os._exit(EXIT_FAILED)

    def _sleep(self) -> None:
        """Sleep until the next heartbeat is due, a process of this host ends, or the main thread wakes this thread."""
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        for peer in self._peers.values():
            ended = peer.heartbeat is not None and peer.heartbeat.ended
            if peer.process is not None and peer.process.descriptor is not None and not ended:
                poll.register(peer.process.descriptor, select.POLLIN)
        if self._wake_out in dict(poll.poll(1000 * (self._interval if self._met.is_set() else _MEETING_SECONDS))):
            os.read(self._wake_out, 64)

    def _close(self) -> None:
        for peer in self._peers.values():
            for resource in (peer.process, peer.page):
                if resource is not None:
                    resource.close()
        self.page.close()
        os.close(self._wake_out)
        os.close(self._wake_in)


def _alarm(seconds: float) -> None:
    """Have the kernel end this process, in case a library holds the interpreter's lock; 0 cancels it."""
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, seconds)
