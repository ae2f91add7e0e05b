"""One entry in a process of its own, or one rank of it: builds a model, then trains and times steps when its parent says so.

    python -m octavo.bench.worker SUITE ENTRY CASE DEVICE MEETING

A process to itself costs seconds, and buys that no entry inherits another's compiled code, allocator or FP8 state, and that
one that crashes is a row with an error. It reads a JSON object a line, {"do": "build"} or {"do": "measure", "steps": n}, and
answers each with one: the figures, or {"error": text}. Standard output belongs to the answers; what libraries print goes to
standard error. Several ranks, told by WORLD_SIZE as torchrun does, meet at the file MEETING.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.bench.cases import AnyCase, Case, VisionCase
from octavo.bench.peers import SEED, Entry
from octavo.bench.suites import SUITES
from octavo.errors import InputError
from octavo.hardware import GIB
from octavo.parallel import world

BATCHES = 4


class Stand:
    """A built entry on its device, with the batches that every entry sees in the same order, on each rank others."""

    def __init__(self, entry: Entry, case: AnyCase, device: torch.device, *, seed: int = SEED) -> None:
        self.device, self.case = device, case
        build = entry.builder(case)
        if build is None:
            raise InputError(f"{entry.name} does not run {case.name}")
        self.trainer = build(case, device, device.type == "cuda", seed=seed)
        self.batches = itertools.cycle(labelled_batches(case, device, world.state.rank))
        self._wait()

    def warm_up(self, steps: int) -> dict[str, Any]:
        """Compile, allocate and fill caches in steps that count for nothing."""
        for _ in range(steps):
            self._step()
        self._wait()
        if self.device.type == "cuda" and not self.trainer.graph:
            # From here on: what a step needs, without what compiling and trying kernels needed. A graph's memory was taken when
            # it was recorded, and its replays are not counted.
            torch.cuda.reset_peak_memory_stats(self.device)
        return {}

    def measure(self, steps: int) -> dict[str, Any]:
        """Time steps; returns their seconds, the last loss and, on a GPU, memory in GiB.

        `peak_gib` is the allocator's peak since the warm-up; `held_gib` is what this process keeps until its next turn, and
        `needed_gib` the most that it took from the device.
        """
        if self.device.type != "cuda":
            seconds, loss = self._time_cpu(steps)
            return {"seconds": seconds, "loss": float(loss)}
        seconds, loss = self._time_cuda(steps)
        memory = {
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
            "needed_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
        }
        torch.cuda.empty_cache()
        return {"seconds": seconds, "loss": float(loss), **memory, "held_gib": torch.cuda.memory_reserved(self.device) / GIB}

    def profile(self, steps: int) -> dict[str, Any]:
        """Kernel milliseconds a step by kind, and the largest kernels, in steps that are not timed."""
        from octavo.bench.breakdown import record

        self._step()
        self._wait()
        found = record(self._step, steps, self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _step(self) -> Tensor:
        return self.trainer.step(*next(self.batches))

    def _time_cuda(self, steps: int) -> tuple[list[float], Tensor]:
        loss = self._step()  # the memory that went back after the last turn is taken again outside of the timed steps
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        # One event between steps and nothing waited for: from one to the next is all of a step, launch gaps included.
        marks[0].record()
        for mark in marks[1:]:
            loss = self._step()
            mark.record()
        self._wait()
        return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)], loss

    def _time_cpu(self, steps: int) -> tuple[list[float], Tensor]:
        loss = self._step()
        marks = [time.perf_counter()]
        for _ in range(steps):
            loss = self._step()
            marks.append(time.perf_counter())
        return [second - first for first, second in itertools.pairwise(marks)], loss


def random_batches(case: Case, device: torch.device, rank: int = 0) -> list[Tensor]:
    """A few batches of uniform random tokens, B × T int64: the same for every entry and on every device."""
    generator = torch.Generator().manual_seed(SEED + rank)
    shape = (BATCHES, case.batch, case.sequence_length)
    return list(torch.randint(case.vocab_size, shape, generator=generator).to(device))


def labelled_batches(case: AnyCase, device: torch.device, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    """A few batches with labels: random tokens, which are their own; or normal random images and random classes."""
    if not isinstance(case, VisionCase):
        return [(tokens, tokens) for tokens in random_batches(case, device, rank)]
    generator = torch.Generator().manual_seed(SEED + rank)
    sides = (case.batch, case.channels, case.image_size, case.image_size)
    images = [torch.randn(sides, generator=generator).to(device) for _ in range(BATCHES)]
    labels = torch.randint(case.classes, (BATCHES, case.batch), generator=generator).to(device)
    return list(zip(images, labels, strict=True))


def answers(requests: Iterator[str], build: Callable[..., Stand]) -> Iterator[str]:
    """Answer request lines until there are no more, or until one fails: a stand that failed is in no known state.

    {"do": "build", …} calls `build`, any other the stand's method of that name, with what else the request has.
    """
    stand: Stand | None = None
    for line in requests:
        request = json.loads(line)
        do = request.pop("do")
        try:
            answer: dict[str, Any] = {}
            if do == "build":
                stand = build(**request)
            else:
                answer = getattr(stand, do)(**request)
        except Exception as error:  # whatever a peer raises is its row of the results
            yield json.dumps({"error": f"{type(error).__name__}: {_first_line(str(error))}"})
            return
        yield json.dumps(answer)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def join(device: torch.device, meeting: str) -> None:
    """Be a rank of the world that the environment tells of; nothing where it tells of none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{meeting}",
            rank=int(os.environ["RANK"]),
            world_size=size,
            device_id=device if device.type == "cuda" else None,
        )
        world.init()


def main(arguments: list[str]) -> None:
    """Serve one entry over standard input and output."""
    suite, name, device = SUITES[arguments[0]], arguments[1], torch.device(arguments[3])
    case = suite.known[arguments[2]]
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def build(seed: int = SEED) -> Stand:
        join(device, arguments[4])
        if suite.name == "checkpoint":
            from octavo.bench.storing import CheckpointStand

            return CheckpointStand(suite.entries[name], case, device, seed=seed)
        return Stand(suite.entries[name], case, device, seed=seed)

    for answer in answers(iter(sys.stdin), build):
        print(answer, file=channel, flush=True)
    sys.stdin.read()  # a rank that failed stays until it is ended: the others would notice its end, and tell that instead


if __name__ == "__main__":
    main(sys.argv[1:])
