"""The processes of this host: which of them live, what a dead one was doing, and who dies with whom.

A rank that is killed cannot say so. On its own host the kernel can: a descriptor of the process becomes readable at the
moment it dies (`pidfd_open`), and a page of memory shared with it still holds what it wrote last, so that neither a
heartbeat nor a timeout decides how soon a death is seen, or how precisely. The page is an anonymous file that the others
open through /proc: nothing is left on disk whoever dies first.

Elsewhere than on Linux, or where a container forbids these calls, processes are looked up once a heartbeat and there is no
page; heartbeats alone then tell where a rank was.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_LAUNCHERS = ("python", "torchrun", "octavo")
_PAGE = 4096

_launcher: int | None = None


def die_with_launcher(*, asked: bool = False) -> None:
    """Have the kernel kill this process as soon as the one that started it has ended.

    Does so under torchrun only, unless `asked`: a run that was started from a shell may outlive it. The launcher has to start
    its ranks from a thread that lives as long as itself, as torchrun does: the kernel watches that thread.
    """
    global _launcher
    if not asked and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _launcher = os.getppid()
    with contextlib.suppress(AttributeError, OSError):  # Linux only; `orphaned` is asked once a heartbeat as well
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if orphaned() or _adopted(_launcher):
        os._exit(1)


def leave(code: int) -> NoReturn:
    """End this process with an exit code once Python has done what it does at an exit, and before C++ does.

    The destructors of process groups, and threads that wait in them for a rank that has left, abort now and then.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def orphaned() -> bool:
    """Whether the launcher that `die_with_launcher` was told to follow is gone."""
    return _launcher is not None and os.getppid() != _launcher


def _adopted(parent: int) -> bool:
    """Whether init has taken this process over before it could ask who its parent is; a launcher may be process 1 itself."""
    if parent != 1:
        return False
    with contextlib.suppress(OSError):
        command = Path("/proc/1/cmdline").read_bytes().decode(errors="replace")
        return not any(name in command for name in _LAUNCHERS)
    return False


def host_identity() -> str:
    """Equal where process numbers mean the same: the same boot of the same host, and the same container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(Path("/proc/self/ns/pid").readlink())]
    return " ".join(parts)


def start_time(pid: int) -> int | None:
    """When a living process started, in the kernel's ticks; 0 where the kernel does not tell; None when it is dead."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class Process:
    """A process of this host, told by its start from a later one of the same number.

    Attributes:
        descriptor: readable once it has ended; None where the kernel has no such thing, or it ended before it was looked at.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid, self.started = pid, started
        self.descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.descriptor = os.pidfd_open(pid)
        if start_time(pid) != started:
            self.close()  # the descriptor is another's

    def ended(self, within: float = 0.0) -> bool:
        """Whether it has ended; waits for that up to `within` seconds."""
        if self.descriptor is None:
            return start_time(self.pid) != self.started
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(within * 1000))

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        with contextlib.suppress(OSError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif not self.ended():
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Forget the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Page:
    """A page of memory that one process writes and others of the host read, also after its death."""

    def __init__(self, memory: mmap.mmap | bytearray, descriptor: int) -> None:
        self.memory, self.descriptor = memory, descriptor

    @classmethod
    def own(cls) -> Page:
        """A new one to write in; with descriptor −1 it cannot be shared."""
        try:
            descriptor = os.memfd_create("octavo-watch", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, _PAGE)
            return cls(mmap.mmap(descriptor, _PAGE), descriptor)
        except (AttributeError, OSError):
            return cls(bytearray(_PAGE), -1)

    @classmethod
    def of(cls, pid: int, descriptor: int) -> Page | None:
        """The page that process `pid` calls `descriptor`, to read; None where that is not allowed."""
        if descriptor < 0:
            return None
        with contextlib.suppress(OSError, ValueError), Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
            return cls(mmap.mmap(file.fileno(), _PAGE, access=mmap.ACCESS_READ), -1)
        return None

    def close(self) -> None:
        """Give it back."""
        if isinstance(self.memory, mmap.mmap):
            self.memory.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
