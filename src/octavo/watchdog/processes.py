"""A rank's process on its host: how it ends, also with its launcher; signals during imports; its last progress.

A shared page of memory holds a rank's last progress after its death; the others see it at once (`supervision.Process`), without
waiting for a heartbeat. Without Linux, or in a container that forbids these calls, processes are looked up at every heartbeat,
and progress comes only from heartbeats.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from octavo.process import process
from octavo.supervision import boot_id, children, die_with_parent, fields_of

_LAUNCHERS = ("python", "torchrun", "octavo")
_PAGE_BYTES = 4096
_LONGEST_WAIT_SECONDS = 300.0


def die_with_launcher() -> None:
    """Have the kernel kill this process when torchrun ends; a run started from a shell may outlive it.

    The kernel follows the thread that started this process, which in torchrun lives as long as the launcher.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    process.launcher = os.getppid()
    die_with_parent(process.launcher)  # `orphaned` is checked at every heartbeat as well
    if _adopted(process.launcher):
        os._exit(1)


def leave(code: int) -> NoReturn:
    """Exit after Python's exit functions and before C++ destructors: those of process groups sometimes abort."""
    atexit._run_exitfuncs()
    exit_without_destructors(code)


def exit_without_destructors(code: int) -> NoReturn:
    """Exit at once, with the streams flushed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # None: the stream was closed before Python started
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Defer stop signals to the end of the block: one during an import leaves half a module, or aborts."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection during imports, whose objects are permanent: it took 0.9 of 6.7 seconds of a training's
    imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def tell_launcher(message: str, code: int) -> None:
    """Store an error for torchrun, so that its report ends with the error of the rank that failed first.

    The file is the one that torch.distributed.elastic reads, in its format; torch is not imported.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        report = {"message": message, "errorCode": code, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": report}), encoding="utf-8")


def wait_for_rank_0(seconds: float) -> None:
    """Wait until rank 0 has been idle for some seconds, so that it reports an error that all ranks find.

    On a busy host it may find the error much later. The launcher ends this rank once rank 0 has reported and exited. A rank
    that torchrun ends exits with 0: torchrun's report has eight lines for each rank with another code.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    rank_0, began = _sibling_of_rank_0(), time.monotonic()
    used, idle_since = 0, began
    while time.monotonic() - idle_since < seconds and time.monotonic() - began < _LONGEST_WAIT_SECONDS:
        time.sleep(min(seconds, 0.5))
        before, (used, runs) = used, _main_thread(rank_0)
        if runs or used > before + 1:
            idle_since = time.monotonic()


def _sibling_of_rank_0() -> int | None:
    """The process of rank 0, if this rank's launcher started it on this host."""
    for pid in children(os.getppid()):
        with contextlib.suppress(OSError):
            if b"RANK=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


def _main_thread(pid: int | None) -> tuple[int, bool]:
    """CPU time in kernel ticks; and True while the thread runs, or waits for a processor or a disk."""
    with contextlib.suppress(OSError):
        fields = fields_of(f"/proc/{pid}/task/{pid}/stat")
        return int(fields[11]) + int(fields[12]), fields[0] in (b"R", b"D")
    return 0, False


def orphaned() -> bool:
    """True once the launcher of `die_with_launcher` has ended."""
    return process.launcher is not None and os.getppid() != process.launcher


def _adopted(parent: int) -> bool:
    """True if init adopted this process before `die_with_launcher`; a launcher may be process 1 itself."""
    if parent != 1:
        return False
    with contextlib.suppress(OSError):
        command = Path("/proc/1/cmdline").read_bytes().decode(errors="replace")
        return not any(name in command for name in _LAUNCHERS)
    return False


def host_identity() -> str:
    """Equal for processes that share process ids: the same boot of the same host, and the same container."""
    parts = [socket.gethostname(), boot_id()]
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


class SharedPage:
    """A page of memory that one process writes, and others on its host read, also after its death.

    It is an anonymous file that the others open through /proc: nothing is left on disk.
    """

    def __init__(self, memory: mmap.mmap | bytearray, descriptor: int) -> None:
        self.memory, self.descriptor = memory, descriptor

    @classmethod
    def create(cls) -> SharedPage:
        """A new page to write; with descriptor −1 it cannot be shared."""
        try:
            descriptor = os.memfd_create("octavo-watchdog", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, _PAGE_BYTES)
            return cls(mmap.mmap(descriptor, _PAGE_BYTES), descriptor)
        except (AttributeError, OSError):
            return cls(bytearray(_PAGE_BYTES), -1)

    @classmethod
    def of(cls, pid: int, descriptor: int) -> SharedPage | None:
        """The page with this descriptor in process `pid`, to read; None if that is not allowed."""
        if descriptor < 0:
            return None
        with contextlib.suppress(OSError, ValueError), Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
            return cls(mmap.mmap(file.fileno(), _PAGE_BYTES, access=mmap.ACCESS_READ), -1)
        return None

    def close(self) -> None:
        """Unmap and close it."""
        if isinstance(self.memory, mmap.mmap):
            self.memory.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
