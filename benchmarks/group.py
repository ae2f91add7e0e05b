"""Worker processes of an entry, one a rank: started, asked and ended together by the parent.

Every rank gets each request and answers it: if a rank fails while the others wait for it in a collective, the parent sees it at
once and the row names the rank. The ranks of one host meet at a file and use the loopback interface, so a suite needs no port
and no network.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

GRACE_SECONDS = 5.0
"""Wait after the first error, since the surviving ranks may report before the end of a killed one is seen."""

ONE_HOST = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # NVLink multicast needs rights over the whole fabric, which containers and virtual machines rarely have. Off for all.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Defaults of the environment for the ranks of one host; the user's variables win."""

CLONE = str(Path(__file__).parent.parent)
"""The folder from which workers import this package, in whatever folder they start."""

Answers = list[dict[str, Any]]
"""One answer of each rank, in order."""


class EntryFailed(Exception):
    """The processes of an entry failed; the message has the reason."""


class Group:
    """The processes of one entry; `started` is `time.perf_counter()` before the first."""

    def __init__(
        self, suite: str, entry: str, case: str, *, device: str, ranks: int = 1, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a worker for each rank; "cuda" is one GPU a rank. environment: variables of the entry's libraries."""
        self.started = time.perf_counter()
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-bench-")
        self._said: queue.Queue[tuple[int, str | None]] = queue.Queue()
        command = [sys.executable, "-m", "benchmarks.worker", suite, entry, case]
        self._processes = []
        for rank in range(ranks):
            of_rank = f"cuda:{rank}" if device == "cuda" else device
            # Only rank 0 prints, since the ranks print the same.
            with contextlib.nullcontext() if rank == 0 else self._log(rank).open("w") as log:
                process = subprocess.Popen(
                    [*command, of_rank, str(Path(self._folder.name) / "rendezvous")],
                    env=_environment(device, rank, ranks) | dict(environment or {}),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8",
                )  # fmt: skip
            assert process.stdout is not None
            threading.Thread(target=self._listen, args=(rank, process.stdout), daemon=True).start()
            self._processes.append(process)

    def ask(self, do: str, **arguments: Any) -> Answers:
        """Send a request to every rank and wait for all answers.

        Raises:
            EntryFailed: a rank answered with an error, or its process ended. The others are ended too.
        """
        request = json.dumps({"do": do, **arguments})
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: the listener reports that
                print(request, file=process.stdin, flush=True)
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._processes):
            rank, line = self._said.get()
            answer = json.loads(line) if line else None
            if answer is None or "error" in answer:
                reason = self._cause(rank, answer)
                self.close()
                raise EntryFailed(reason)
            answers[rank] = answer
        return [answers[rank] for rank in sorted(answers)]

    def close(self) -> None:
        """End the processes and remove their folder."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended before it read the last request
                process.stdin.close()
        self._folder.cleanup()

    def _listen(self, rank: int, answers: IO[str]) -> None:
        with answers:
            for line in answers:
                self._said.put((rank, line))
        self._said.put((rank, None))

    def _cause(self, rank: int, answer: dict[str, Any] | None) -> str:
        """The first error, or the end of a process shortly after it, which is then the cause of that error.

        A worker that reports an error stays until the parent ends it, so no process ends because of another's exception.
        """
        deadline = time.perf_counter() + GRACE_SECONDS
        while answer is not None and len(self._processes) > 1 and (left := deadline - time.perf_counter()) > 0:
            with contextlib.suppress(queue.Empty):
                other, line = self._said.get(timeout=left)
                if line is None:
                    rank, answer = other, None
        who = f"rank {rank}: " if len(self._processes) > 1 else ""
        return who + (self._death(rank) if answer is None else str(answer["error"]))

    def _death(self, rank: int) -> str:
        text = f"its process ended with exit code {self._processes[rank].wait()}"
        log = self._log(rank)
        last = log.read_text(encoding="utf-8", errors="replace").strip().rsplit("\n", 1)[-1].strip() if log.is_file() else ""
        return f"{text}: {last}" if last else text

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"


def _environment(device: str, rank: int, ranks: int) -> dict[str, str]:
    """The user's environment with torchrun's variables for one host."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (CLONE, environment.get("PYTHONPATH"))))
    if ranks > 1:
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # Each rank has threads for its share of the cores: with threads for all cores the ranks would wait for one another.
        environment = {**ONE_HOST, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), **environment}
    number, all_ranks = str(rank), str(ranks)
    return environment | {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": all_ranks, "LOCAL_WORLD_SIZE": all_ranks}
