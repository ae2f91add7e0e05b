"""The ranks of a run on one host: started, signalled and awaited together.

Ranks get torchrun's environment, and like its agent the launcher keeps their store: the watchdog's first report survives any
rank. In three points it is not like torchrun. Ranks have the time they need to save after a signal, the exit code is theirs,
and a failed rank's report is not followed by another.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

from octavo.errors import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED, InputError, warn
from octavo.job_ranks import refuse_ranks_of_ranks
from octavo.watchdog.processes import die_with_parent
from octavo.watchdog.stopping import stop_signals

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.05
_SLACK_SECONDS = 2.0
"""After `grace`, at whose end the watchdogs end their ranks themselves."""
_NOTHING_SAVED = ("before the first step: nothing to save. Run the same command again.", EXIT_STOPPED)
_NAMES = {int(number): number.name for number in signal.Signals}


def launch(
    command: Sequence[str], ranks: int, *, timeout: float, grace: float, stopped: tuple[str, int] = _NOTHING_SAVED
) -> int:
    """Run `command` as `ranks` processes until all have ended; returns the exit code of the first that failed, or 0.

    Args:
        command: a command whose processes call `octavo.init`.
        ranks: processes, one a GPU.
        timeout: seconds that the others may take to end after one that was asked to stop.
        grace: the same after one that failed, in which their watchdogs report it.
        stopped: message and exit code where a signal ended all ranks before any of them took it.

    Raises:
        InputError: this process is one of several ranks itself, or this is not its main thread.
    """
    refuse_ranks_of_ranks(ranks)
    if "RANK" in os.environ:
        raise InputError(f"--ranks {ranks} starts the ranks, and RANK is set already: leave --ranks out, or unset RANK.")
    if threading.current_thread() is not threading.main_thread():
        # The kernel ends the ranks with the thread that started them (`die_with_launcher`), and signals come to the main one.
        raise InputError("ranks are started from the main thread alone: call octavo.watchdog.launcher.launch there.")
    job = _Job(stopped)
    with socket.create_server((_HOST, 0), backlog=max(128, ranks)) as listening, job.signals():
        port = listening.getsockname()[1]
        for rank in range(ranks):
            job.start(command, _environment(rank, ranks, port))
        with ThreadPoolExecutor(1) as thread:  # its import takes as long as theirs, and one may fail before
            store = thread.submit(_keep_store, listening, port)
            code = job.wait(store, timeout=timeout, grace=grace)
    return code


class _Rank:
    """A rank's process, and how many of the job's signals it has been sent."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        # In a process group of its own: a terminal sends Ctrl-C to a whole group, so it would come twice.
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=die_with_parent,  # this process has no other thread until `_keep_store`
        )
        self._sent = 0

    def send(self, signals: Sequence[signal.Signals]) -> None:
        """Send those of all signals that were not sent before; a signal handler may interrupt it."""
        while self._sent < len(signals):
            number = signals[self._sent]
            self._sent += 1
            self.process.send_signal(number)


class _Job:
    """All ranks, and the signals that this process got."""

    def __init__(self, stopped: tuple[str, int]) -> None:
        self.asked: list[signal.Signals] = []
        self._stopped = stopped
        self._ranks: list[_Rank] = []

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start a rank."""
        self._ranks.append(_Rank(command, environment))
        self._ranks[-1].send(self.asked)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Signals go to every rank; an exception in this process ends them."""
        numbers = [number for number in stop_signals() if signal.getsignal(number) != signal.SIG_IGN]
        before: dict[signal.Signals, Any] = {number: signal.signal(number, self._pass_on) for number in numbers}
        # Ranks inherit it: a process that is not in the terminal's own group is else stopped where `stty tostop` is set.
        before[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            yield
        finally:
            self._kill()
            for each in self._ranks:
                each.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, store: Future[object], *, timeout: float, grace: float) -> int:
        """The job's exit code, once every rank has ended; raises what has kept the store from being made."""
        ended: dict[int, int] = {}  # in order of time
        deadline = math.inf
        while len(ended) < len(self._ranks):
            for rank, each in enumerate(self._ranks):
                if rank not in ended and (code := each.process.poll()) is not None:
                    ended[rank] = code
                    deadline = min(deadline, time.monotonic() + self._patience(code, timeout, grace))
            if time.monotonic() >= deadline:
                self._kill()
            elif store.done():
                store.result()
            time.sleep(_POLL_SECONDS)
        failed = {rank: code for rank, code in ended.items() if code != 0}
        reported = [code for code in failed.values() if code > 0]
        return reported[0] if reported else self._unreported(failed)

    def _patience(self, code: int, timeout: float, grace: float) -> float:
        """Seconds that the other ranks have once one has ended with this code."""
        if code == EXIT_STOPPED:
            if not self.asked:  # one rank alone was, and a rank that waits for it to join has no watchdog yet
                for each in self._ranks:
                    each.process.terminate()
            return timeout
        if code == EXIT_INPUT:  # found by all, or before there was anything to lose
            return 0.0
        return grace + _SLACK_SECONDS if code else math.inf

    def _unreported(self, failed: dict[int, int]) -> int:
        """The exit code where no rank lived to say why it ended."""
        if not failed:
            return 0
        if self.asked:
            message, code = self._stopped
            warn(f"stopped by {self.asked[0].name} {message}")
            return code
        rank, code = next(iter(failed.items()))
        cause = ", which Linux sends when the host's memory runs out" if -code == signal.SIGKILL else ""
        name = _NAMES.get(-code, f"signal {-code}")
        warn(f"rank {rank} of {len(self._ranks)} was ended by {name}{cause}.")
        return EXIT_FAILED

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(signal.Signals(number))
        for each in self._ranks:
            each.send(self.asked)

    def _kill(self) -> None:
        for each in self._ranks:
            each.process.kill()


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The user's environment with torchrun's variables."""
    # With threads for all cores in each, ranks on a CPU would wait for one another.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": _HOST, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    job = {"TORCHELASTIC_RUN_ID": "octavo", "TORCHELASTIC_RESTART_COUNT": 0}
    return threads | dict(os.environ) | {name: str(value) for name, value in (own | store | job).items()}


def _keep_store(listening: socket.socket, port: int) -> object:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
