"""The ranks of a run on one host: their environment and store, and the exit code of the whole.

Ranks are processes of a `Supervisor`. They get torchrun's environment, and like torchrun's agent the launcher serves their
store, so that the watchdog's first report survives any rank. Differences from torchrun: ranks get the time they need to save
after a signal, the exit code is theirs, and only one report follows a failed rank.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from octavo.errors import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED, InputError, warn
from octavo.job_ranks import refuse_ranks_of_ranks
from octavo.supervision import Supervisor, signal_name

_HOST = "127.0.0.1"
_SLACK_SECONDS = 2.0
"""Seconds after `grace`, at whose end the watchdogs end their ranks."""
_NOTHING_SAVED = ("before the first step: nothing to save. Run the same command again.", EXIT_STOPPED)


def launch(
    command: Sequence[str], ranks: int, *, timeout: float, grace: float, stopped: tuple[str, int] = _NOTHING_SAVED
) -> int:
    """Run `command` as `ranks` processes until all have ended; returns the exit code of the first that failed, or 0.

    Args:
        command: a command whose processes call `octavo.init`.
        ranks: number of processes, one per GPU.
        timeout: seconds for the other ranks to end after one that received a stop signal.
        grace: the same after one that failed; the watchdogs report it in this time.
        stopped: message and exit code if a signal ended all ranks before any of them handled it.

    Raises:
        InputError: this process is one of several ranks itself, or this is not its main thread.
    """
    refuse_ranks_of_ranks(ranks)
    if "RANK" in os.environ:
        raise InputError(f"--ranks {ranks} starts the ranks, and RANK is set already: leave --ranks out, or unset RANK.")
    if threading.current_thread() is not threading.main_thread():
        # The kernel ends the ranks with the thread that started them (`Supervisor`), and signals come to the main one.
        raise InputError("ranks can be started only from the main thread: call octavo.watchdog.launcher.launch there.")
    with socket.create_server((_HOST, 0), backlog=max(128, ranks)) as listening, Supervisor() as processes:
        port = listening.getsockname()[1]
        for rank in range(ranks):
            processes.start(command, rank_environment(rank, ranks, port))
        with ThreadPoolExecutor(1) as thread:  # importing it takes as long as the ranks' imports, and a rank may fail before
            store = thread.submit(serve_store, listening, port)
            _wait(processes, store, timeout=timeout, grace=grace)
        return _exit_code(processes, ranks, stopped)


def _wait(processes: Supervisor, store: Future[object], *, timeout: float, grace: float) -> None:
    """Wait until every rank has ended; raises the error that prevented the store from starting."""
    deadline = math.inf
    for codes in processes.wait():
        for code in codes:
            deadline = min(deadline, time.monotonic() + _patience(processes, code, timeout, grace))
        if time.monotonic() >= deadline:
            processes.kill()
        elif store.done():
            store.result()


def _patience(processes: Supervisor, code: int, timeout: float, grace: float) -> float:
    """Seconds that the other ranks get once one has ended with this code."""
    if code == EXIT_STOPPED:
        if not processes.asked:  # only one rank was stopped, and one that waits for it to join has no watchdog yet
            processes.terminate()
        return timeout
    if code == EXIT_INPUT:  # all ranks find it, or nothing can be lost yet
        return 0.0
    return grace + _SLACK_SECONDS if code else math.inf


def _exit_code(processes: Supervisor, ranks: int, stopped: tuple[str, int]) -> int:
    """The exit code of all, with a message if no rank survived to explain its end."""
    failed = {rank: code for rank, code in processes.codes.items() if code != 0}
    if reported := [code for code in failed.values() if code > 0]:
        return reported[0]
    if not failed:
        return 0
    if processes.asked:
        message, code = stopped
        warn(f"stopped by {processes.asked[0].name} {message}")
        return code
    rank, code = next(iter(failed.items()))
    cause = ", which Linux sends when the host's memory runs out" if -code == signal.SIGKILL else ""
    warn(f"rank {rank} of {ranks} was ended by {signal_name(-code)}{cause}.")
    return EXIT_FAILED


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The user's environment with torchrun's variables."""
    # If each rank had threads for all cores, ranks on a CPU would slow each other down.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": _HOST, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    job = {"TORCHELASTIC_RUN_ID": "octavo", "TORCHELASTIC_RESTART_COUNT": 0}
    return threads | dict(os.environ) | {name: str(value) for name, value in (of_rank | store | job).items()}


def serve_store(listening: socket.socket, port: int) -> object:
    """The ranks' store in this process, on a socket that listens at this port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
