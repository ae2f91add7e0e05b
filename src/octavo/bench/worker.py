"""One entry in a process of its own, or one rank of it: builds a model, then trains and times steps when its parent says so.

    python -m octavo.bench.worker SUITE ENTRY CASE DEVICE MEETING

A process to itself costs seconds, and buys that no entry inherits another's compiled code, allocator or FP8 state, and that
one that crashes is a row with an error. It reads a JSON object a line, {"do": "build"} or {"do": "measure", "steps": n}, and
answers each with one: the figures, or {"error": text}. Standard output belongs to the answers; what libraries print goes to
standard error. Several ranks, told by WORLD_SIZE as torchrun does, meet at the file MEETING.

In the checkpoint suite a worker also saves while it waits, saves while it trains, restores, and tells digests of its state,
through `octavo.checkpoint.api` as `octavo train` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from octavo.bench.cases import AnyCase, Case, VisionCase
from octavo.bench.peers import SEED, Entry, Training
from octavo.bench.suites import SUITES
from octavo.checkpoint.api import Checkpointer, restore
from octavo.checkpoint.shard_io import raw
from octavo.errors import InputError, OctavoError
from octavo.fp8.scaling import state_records
from octavo.hardware import GIB
from octavo.parallel import world

BATCHES = 4
STATES = ("exp_avg", "exp_avg_sq")


class Worker:
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


class CheckpointWorker(Worker):
    """A rank that trains, with one sequence a step: its checkpoint is as large, and fewer GPUs can restore it."""

    def __init__(self, entry: Entry, case: Case, device: torch.device, *, seed: int = SEED) -> None:
        case = dataclasses.replace(case, batch=1)
        super().__init__(entry, case, device, seed=seed)
        assert isinstance(self.trainer, Training)
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer
        self.common = random_batches(case, device)[0]
        self._checkpointer: Checkpointer | None = None

    def steps(self, steps: int) -> dict[str, Any]:
        """Train; returns the seconds of each step."""
        return {"seconds": [self._seconds(self._waited_step) for _ in range(steps)]}

    def save(self, folder: str, step: int) -> dict[str, Any]:
        """Write `step-N` below `folder` and wait until it is whole; returns seconds and, on rank 0, bytes."""
        checkpointer = self._checkpoints(folder)
        self._meet()
        seconds = self._seconds(lambda: checkpointer.save(step, self.model, self.optimizer, {}))
        return {"seconds": seconds, **self._size(Path(folder) / f"step-{step}")}

    def save_behind(self, folder: str, step: int) -> dict[str, Any]:
        """Write `step-N` below `folder` in the background and train until it is whole.

        Returns:
            stall_seconds, for which training stood still; whole_seconds from the start of the save to the end of the step in
            which it became whole; seconds of each step meanwhile; the loss of the first of them, which has the same tokens on
            every rank; on rank 0 bytes.
        """
        checkpointer, path = self._checkpoints(folder), Path(folder) / f"step-{step}"
        self._meet()
        begun = time.perf_counter()
        checkpointer.save(step, self.model, self.optimizer, {}, background=True)
        stall = time.perf_counter() - begun
        loss, seconds = 0.0, list[float]()
        while not seconds or not self._everywhere(path.is_dir()):
            checkpointer.poll()
            stepped = time.perf_counter()
            if seconds:
                self._waited_step()
            else:
                loss = self.next_loss()["loss"]
            seconds.append(time.perf_counter() - stepped)
        whole = time.perf_counter() - begun
        checkpointer.wait()
        return {"stall_seconds": stall, "whole_seconds": whole, "seconds": seconds, "loss": loss, **self._size(path)}

    def restore(self, folder: str) -> dict[str, Any]:
        """Verify the newest checkpoint below `folder`, every byte of it, and put it into the model; returns seconds of both.

        Raises:
            OctavoError: there is none.
        """
        checkpointer = self._checkpoints(folder)
        self._meet()
        begun = time.perf_counter()
        path = checkpointer.latest()
        verified = time.perf_counter()
        if path is None:
            raise OctavoError(f"there is no checkpoint in {folder}.")
        restore(path, self.model, self.optimizer)
        self._wait()
        return {"verify_seconds": verified - begun, "restore_seconds": time.perf_counter() - verified}

    def next_loss(self) -> dict[str, Any]:
        """Train on tokens that are the same on every rank, so that the loss does not depend on how many there are."""
        return {"loss": float(self.trainer.step(self.common, self.common))}

    def digests(self) -> dict[str, Any]:
        """On rank 0 the sha256 of some weights with their moments, gathered, and of the FP8 state; nothing on the others."""
        named = list(self.model.named_parameters())
        found = {}
        for name, parameter in (named[0], named[len(named) // 2], named[-1]):
            states = self.optimizer.state[parameter]
            for key, tensor in {"weight": parameter, **{key: states[key] for key in STATES}}.items():
                found[f"{key} of {name}"] = _sha256(_whole(tensor))
        records = hashlib.sha256()
        for _, tensor in sorted(state_records(self.model).items()):
            records.update(raw(tensor))
        found["FP8 state"] = records.hexdigest()
        return {"digests": found} if world.state.rank == 0 else {}

    def _checkpoints(self, folder: str) -> Checkpointer:
        """One for all saves: it keeps the memory that copies are made in."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(Path(folder), keep=1, report=lambda line: print(line))
        return self._checkpointer

    def _size(self, path: Path) -> dict[str, int]:
        return {"bytes": sum(file.stat().st_size for file in path.iterdir())} if world.state.rank == 0 else {}

    def _waited_step(self) -> None:
        float(self._step())

    def _seconds(self, do: Callable[[], object]) -> float:
        begun = time.perf_counter()
        do()
        return time.perf_counter() - begun

    def _meet(self) -> None:
        """Wait for the device and for the other ranks."""
        self._wait()
        self._everywhere(True)

    def _everywhere(self, flag: bool) -> bool:
        """Whether it is true on every rank."""
        value = torch.tensor(int(flag))
        if world.state.control is not None:
            dist.all_reduce(value, dist.ReduceOp.MIN, group=world.state.control)
        return bool(value)


def answers(requests: Iterator[str], build: Callable[..., Worker]) -> Iterator[str]:
    """Answer request lines until there are no more, or until one fails: a worker that failed is in no known state.

    {"do": "build", …} calls `build`, any other the worker's method of that name, with what else the request has.
    """
    worker: Worker | None = None
    for line in requests:
        request = json.loads(line)
        do = request.pop("do")
        try:
            answer: dict[str, Any] = {}
            if do == "build":
                worker = build(**request)
            else:
                answer = getattr(worker, do)(**request)
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


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(raw(tensor)).hexdigest()


def main(arguments: list[str]) -> None:
    """Serve one entry over standard input and output."""
    suite, name, device = SUITES[arguments[0]], arguments[1], torch.device(arguments[3])
    case = suite.known[arguments[2]]
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def build(seed: int = SEED) -> Worker:
        join(device, arguments[4])
        if suite.name == "checkpoint":
            return CheckpointWorker(suite.entries[name], case, device, seed=seed)
        return Worker(suite.entries[name], case, device, seed=seed)

    for answer in answers(iter(sys.stdin), build):
        print(answer, file=channel, flush=True)
    sys.stdin.read()  # a rank that failed stays until it is ended: the others would notice its end, and tell that instead


if __name__ == "__main__":
    main(sys.argv[1:])
