"""A pool that starts ranks for many comparisons from one process: imports take longer than a small model's steps.

    python -m octavo.verify.pool SOCKET

runs the server: a process with all imports that a rank needs, which forks the ranks of each job. A job begins with fresh
processes, process groups and random numbers, and leaves nothing behind; a rank that dies ends only its job. The ranks' store is
in the requesting process, which no rank outlives.

Not supported: GPUs, whose state does not survive a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.errors import EXIT_FAILED, InputError, OctavoError, RunStopped, warn
from octavo.job_ranks import refuse_ranks_of_ranks
from octavo.supervision import Supervisor, die_with_parent, signal_name
from octavo.watchdog.launcher import rank_environment, serve_store

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.01
_GRACE_SECONDS = 5.0
"""Seconds that other ranks have after one has failed, to report the error too."""
_EXIT_BY_ERROR = 3
"""Exit code of a rank that wrote its error to a file."""


class Pool:
    """A context that runs jobs of CPU ranks one after the other; variables: environment of every rank."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._context = contextlib.ExitStack()
        self._server: _Server | None = None

    def __enter__(self) -> Pool:
        """Start the server process; its imports run in the background.

        Raises:
            InputError: this process is one of several ranks itself, or this is not its main thread.
        """
        refuse_ranks_of_ranks(2)
        if "RANK" in os.environ:
            raise InputError("octavo verify starts its ranks, and RANK is set already: unset RANK.")
        if threading.current_thread() is not threading.main_thread():
            raise InputError("octavo verify starts its ranks only from the main thread: call it there.")
        listening = self._context.enter_context(socket.create_server((_HOST, 0), backlog=128))
        self._port = listening.getsockname()[1]
        self._server = _Server(self._variables)
        self._store = serve_store(listening, self._port)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        self._context.close()

    def run(self, ranks: int, folder: Path, names: Sequence[str]) -> None:
        """Run tasks of `octavo.verify.worker`, by name, on `ranks` ranks.

        Raises:
            OctavoError: a rank failed; the message has its number and error. The next job gets new ranks.
            RunStopped: this process received a stop signal.
        """
        self._server = self._server or _Server(self._variables)
        variables = [rank_environment(rank, ranks, self._port) for rank in range(ranks)]
        try:
            ended = self._server.ask({"folder": str(folder), "names": list(names), "ranks": variables})
        except BaseException:
            self._end()
            raise
        for rank, code in ended:
            if code:
                raise OctavoError(_error(folder, rank, ranks, code))

    def _end(self) -> None:
        if self._server is not None:
            self._server.end()
        self._server = None


class _Server:
    """Client of the process that forks ranks."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._context = contextlib.ExitStack()
        with contextlib.ExitStack() as context:
            folder = context.enter_context(tempfile.TemporaryDirectory())  # accessible only to this user
            self._listening = context.enter_context(socket.socket(socket.AF_UNIX))
            with _short(f"{folder}/socket") as address:
                self._listening.bind(address)
            self._listening.listen(1)
            self._supervisor = context.enter_context(Supervisor())
            command = [sys.executable, "-m", "octavo.verify.pool", f"{folder}/socket"]
            self._supervisor.start(command, {**os.environ, **variables})
            self._context = context.pop_all()
        self._connection: socket.socket | None = None

    def ask(self, job: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Run a job; returns ranks with exit codes, in the order in which they ended."""
        if self._connection is None:
            self._wait_for(self._listening)
            self._connection = self._context.enter_context(self._listening.accept()[0])
        self._connection.sendall(json.dumps(job).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            self._wait_for(self._connection)
            if not (read := self._connection.recv(1 << 16)):
                self._wait_for(None)
            answer += read
        return [(rank, code) for rank, code in json.loads(answer)]

    def end(self) -> None:
        """Kill the process and its running ranks."""
        self._context.close()

    def _wait_for(self, readable: socket.socket | None) -> None:
        """Return when there is data to read; raise if the process has ended, or this one received a stop signal."""
        for _ in self._supervisor.wait():
            if self._supervisor.asked:
                raise RunStopped(f"stopped by {self._supervisor.asked[0].name}: nothing was verified.")
            if readable is not None and select.select([readable], [], [], _POLL_SECONDS)[0]:
                return
        code = self._supervisor.codes[0]
        by = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        raise OctavoError(f"the process that starts the ranks {by}: nothing was verified.")


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """A short alias of a socket's path: a socket name has at most 107 bytes, and TMPDIR may be longer."""
    folder, _, name = path.rpartition("/")
    number = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{number}/{name}"
    finally:
        os.close(number)


def _error(folder: Path, rank: int, ranks: int, code: int) -> str:
    """The error message of a failed rank."""
    if code == _EXIT_BY_ERROR:
        return _error_file(folder, rank).read_text(encoding="utf-8")
    by = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} of {ranks} {by}: nothing was verified."


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.error"


def serve(path: str) -> None:
    """Fork the ranks of each job received over this socket, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the client ends this process
    with socket.socket(socket.AF_UNIX) as connection:
        with _short(path) as address:
            connection.connect(address)
        import torch

        from octavo.verify.worker import do

        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # a garbage collection in a rank would copy all imported objects
        with connection.makefile("r", encoding="utf-8") as jobs:
            for line in jobs:
                connection.sendall(json.dumps(_done(json.loads(line), do)).encode() + b"\n")


def _done(job: Mapping[str, Any], do: Callable[[Path, Sequence[str]], None]) -> list[tuple[int, int]]:
    """Run a job: ranks and exit codes, in the order in which they ended."""
    running: dict[int, int] = {}
    ended: list[tuple[int, int]] = []
    deadline = float("inf")
    parent = os.getpid()
    for rank, variables in enumerate(job["ranks"]):
        if (pid := os.fork()) == 0:
            die_with_parent(parent)
            os.environ |= variables
            _be_rank(rank, len(job["ranks"]), Path(job["folder"]), job["names"], do)
        running[pid] = rank
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            ended.append((running.pop(pid), os.waitstatus_to_exitcode(status)))
            if ended[-1][1]:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            continue
        if time.monotonic() > deadline:
            for left in running:
                os.kill(left, 9)
        time.sleep(_POLL_SECONDS)
    return ended


def _be_rank(rank: int, ranks: int, folder: Path, names: Sequence[str], do: Callable[[Path, Sequence[str]], None]) -> None:
    """Run the tasks and exit without interpreter finalization, during which gloo's threads may abort."""
    code = EXIT_FAILED
    faulthandler.enable()  # a crash in a library prints its traceback
    try:
        do(folder, names)
        code = 0
    except OctavoError as error:
        _error_file(folder, rank).write_text(str(error), encoding="utf-8")
        code = _EXIT_BY_ERROR
    except Exception as error:
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"rank {rank} of {ranks}: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        _error_file(folder, rank).write_text(text, encoding="utf-8")
        if rank == 0 or "closed by peer" not in text:
            warn("".join(traceback.format_exception(error)))
        code = _EXIT_BY_ERROR
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
