"""The supervisor of child processes: starts, signals and ends them, orphans included; identifies processes on a host.

The ranks of a host (`octavo.watchdog.launcher`) and the job of an estimator (`octavo.launch.supervisor`) are started by a
`Supervisor`, which gives both the same:

    this process ends, also by kill -9    the kernel kills each process that it started
    it ended while one was starting       the new process detects it before it runs anything
    a signal that asks to stop            each process gets it once, also processes started later
    Ctrl-C in a terminal                  comes only from here: each process has a separate process group
    a process ignores the signal          it is killed after `patience`
    an exception here                     every process is killed and waited for
    processes left behind                 adopted, also from other sessions; reaped when they end, killed at the end

The caller decides what a signal means, which exit code counts, and how long others may take after one has ended. Output goes to
a file, or to this process's output. Only Linux has the calls for an end with the parent and for adoption; elsewhere the rest
holds. No torch, and no thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_POLL_SECONDS = 0.05
_LONGEST_CHAIN = 100
"""Most rounds of ending orphans: a process becomes a child of this one only after its parent ends."""
_NAMES = {int(number): number.name for number in signal.Signals}  # real-time signals have none

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""User signals, which schedulers send some time before the end; by default they end a process."""


class StopHandler:
    """Base of handlers of stop signals: another handler may replace this one."""


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a run of this process, except those that it ignores or uses otherwise."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup, *(number for number in NOTICES if _is_free(number))]


def _is_free(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), StopHandler)


def signal_name(number: int) -> str:
    """A signal's name, such as SIGTERM, or "signal 40" without a name."""
    return _NAMES.get(number, f"signal {number}")


class Supervisor(StopHandler):
    """A context that handles signals and starts processes; neither they nor their orphans outlive it.

    Other children of this process are left alone if they are older, or in its process group.

    Args:
        sends: the signal that processes get, once, whichever arrives; None: each gets every signal that arrives.
        patience: seconds that processes may take to end after the first signal.
        always: handle SIGTERM and SIGINT even if this process inherited that they are ignored.
    """

    def __init__(self, *, sends: signal.Signals | None = None, patience: float = math.inf, always: bool = False) -> None:
        self.asked: list[signal.Signals] = []
        """Signals to send to the processes, in order."""
        self.codes: dict[int, int] = {}
        """Index of a process in start order → exit code, in the order of ends; negative for a signal."""
        self._sends, self._patience, self._always = sends, patience, always
        self._deadline = math.inf
        self._processes: list[_Supervised] = []
        self._older: set[int] = set()
        self._previous: dict[signal.Signals, Any] = {}
        self._adopted_before = False

    def __enter__(self) -> Supervisor:
        """Handle signals, and adopt orphans; on the main thread, since Python handles signals there.

        The kernel ends the processes with the thread that started them.
        """
        for number in stop_signals():
            if self._always or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        # Inherited: otherwise `stty tostop` would stop processes outside the terminal's foreground group.
        self._previous[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._older = set(children(os.getpid()))
        self._adopted_before = _adopt_orphans(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
        _adopt_orphans(self._adopted_before)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        """Start a process, which has no input.

        Args:
            command: program and arguments.
            environment: its complete environment.
            folder: its working directory; None: this one.
            output: file of its stdout and stderr; None: those of this process.
        """
        self._processes.append(_Supervised(command, environment, folder, output))
        self._processes[-1].send(self.asked)

    def wait(self) -> Iterator[list[int]]:
        """Supervise the processes until all have ended; yields new exit codes 20 times a second."""
        while len(self.codes) < len(self._processes):
            ended = {
                place: code
                for place, each in enumerate(self._processes)
                if place not in self.codes and (code := each.process.poll()) is not None
            }
            self.codes |= ended
            if time.monotonic() > self._deadline:
                self.kill()
            yield list(ended.values())
            self._reap()
            time.sleep(_POLL_SECONDS)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to every process, as if it had arrived from outside."""
        number = self._sends or number
        if self._sends is None or not self.asked:
            self.asked.append(number)
            self._deadline = min(self._deadline, time.monotonic() + self._patience)
        for each in self._processes:
            each.send(self.asked)

    def terminate(self) -> None:
        """Send SIGTERM to the running processes, without marking the whole as stopped."""
        for each in self._processes:
            each.process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the processes; `end` ends their orphans."""
        for each in self._processes:
            each.process.kill()

    def end(self) -> None:
        """Kill the running processes and all orphans, and wait for them."""
        self.kill()
        for each in self._processes:
            each.process.wait()
        for _ in range(_LONGEST_CHAIN):
            left = [pid for pid in children(os.getpid()) if self._is_left(pid)]
            if not left:
                return
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(signal.Signals(number))

    def _reap(self) -> None:
        """Reap adopted processes that have ended: a long job would fill the process table."""
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
            # It reports one child, possibly one that other code still has to wait for.
            for pid in children(os.getpid()):
                if self._is_left(pid):
                    os.waitpid(pid, os.WNOHANG)

    def _is_left(self, pid: int) -> bool:
        """True for an adopted child, which no code of this process started."""
        started = {each.process.pid for each in self._processes if each.process.returncode is None}
        with contextlib.suppress(ProcessLookupError):
            return pid not in started | self._older and os.getpgid(pid) != os.getpgrp()
        return False


class _Supervised:
    """A process, and the number of its supervisor's signals sent to it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None, output: IO[bytes] | None
    ) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            process_group=0,  # a terminal sends Ctrl-C to a whole group, so it would arrive twice
            preexec_fn=partial(die_with_parent, os.getpid()),  # the caller has no other threads yet
        )
        self._sent = 0

    def send(self, signals: Sequence[signal.Signals]) -> None:
        """Send the signals that were not sent yet; a signal handler may interrupt this."""
        while self._sent < len(signals):
            number = signals[self._sent]
            self._sent += 1
            self.process.send_signal(number)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (Linux only).

    parent: the process of that thread; if it has ended, the signal is sent at once.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _adopt_orphans(adopts: bool) -> bool:
    """Become the parent of orphaned descendants, or stop being it (Linux only); returns the previous setting."""
    before = ctypes.c_int(0)
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        library.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
    return bool(before.value)


def children(parent: int) -> list[int]:
    """The children of a process of this host, also those that have ended and were not waited for."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(fields_of(path)[1]) == parent:
                processes.append(int(path.parent.name))
    return processes


def fields_of(stat: Path | str) -> list[bytes]:
    """The fields of a process's or thread's stat file after its name: state, parent, process group, …; OSError without one."""
    return Path(stat).read_bytes().rpartition(b")")[2].split()


def boot_id() -> str:
    """An id of the machine's boot; empty if the kernel does not provide one."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def start_time(pid: int) -> int | None:
    """Start time of a living process in the kernel's ticks; 0 if unknown, None if the process is dead."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        fields = fields_of(f"/proc/{pid}/stat")
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class Process:
    """A process of this host; its start time distinguishes it from a later one with the same pid.

    A process descriptor (`pidfd_open`) becomes readable the moment the process dies, and no signal through it reaches a later
    process.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid, self.started = pid, started
        # Readable once the process has ended; None without kernel support, or if it had already ended.
        self.descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.descriptor = os.pidfd_open(pid)
        if start_time(pid) != started:
            self.close()  # another process's descriptor

    def ended(self, within: float = 0.0) -> bool:
        """True if it has ended; waits for that up to `within` seconds."""
        if self.descriptor is None:
            return start_time(self.pid) != self.started
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(within * 1000))

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended; PermissionError if it is another user's."""
        with contextlib.suppress(ProcessLookupError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, number)
            elif not self.ended():
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended, or is another user's."""
        with contextlib.suppress(PermissionError):
            self.send(signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
