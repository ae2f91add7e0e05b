"""Worker process of an entry, one a rank: builds the model, then trains and times steps on request.

    python -m octavo.bench.worker SUITE ENTRY CASE DEVICE RENDEZVOUS

A process of its own costs seconds. In return no entry inherits compiled code, an allocator or FP8 state from another, and a
crash is a row with an error. Requests come on standard input as JSON objects, one a line: {"do": "build"} or {"do": "measure",
"steps": n}. Each gets one answer on standard output: figures, or {"error": text}. Output of libraries goes to standard error.
Ranks have torchrun's environment variables and meet at the file RENDEZVOUS.

The worker of the checkpoint suite also saves, restores and hashes its state, by `octavo.checkpoint.api` as `octavo train` does.
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
from octavo.checkpoint.api import Checkpointer
from octavo.checkpoint.reader import restore
from octavo.checkpoint.shard_io import raw
from octavo.errors import InputError, OctavoError, first_line
from octavo.fp8.scaling import state_records
from octavo.hardware import GIB
from octavo.parallel import world

BATCHES = 4
STATES = ("exp_avg", "exp_avg_sq")


class Worker:
    """A built entry on its device, with its batches: the same for every entry, different on each rank."""

    def __init__(self, entry: Entry, case: AnyCase, device: torch.device, *, seed: int = SEED) -> None:
        self.device, self.case = device, case
        build = entry.builder(case)
        if build is None:
            raise InputError(f"{entry.name} does not run {case.name}")
        self.trainer = build(case, device, device.type == "cuda", seed=seed)
        self.batches = itertools.cycle(labelled_batches(case, device, world.state.rank))
        self._wait()

    def warm_up(self, steps: int) -> dict[str, Any]:
        """Compile, allocate and fill caches in steps that are not timed."""
        for _ in range(steps):
            self._step()
        self._wait()
        if self.device.type == "cuda" and not self.trainer.graph:
            # The peak counts from here, without the memory of compilation and of kernel trials. A CUDA graph allocates when it
            # is recorded, and its replays are not counted.
            torch.cuda.reset_peak_memory_stats(self.device)
        return {}

    def measure(self, steps: int) -> dict[str, Any]:
        """Time steps; returns their seconds, the last loss and, on a GPU, memory in GiB.

        `peak_gib`: the allocator's peak since the warm-up. `held_gib`: memory kept until the next turn. `needed_gib`: the peak
        of the memory reserved on the device.
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
        """Kernel milliseconds a step by kind, and the largest kernels, from steps that are not timed."""
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
        loss = self._step()  # allocates again the memory that the last turn gave back, outside of the timed steps
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        # One event between steps and no wait: the time between two events is the whole step, launch gaps included.
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
    """A few batches with labels: random tokens as their own labels, or normal random images with random classes."""
    if not isinstance(case, VisionCase):
        return [(tokens, tokens) for tokens in random_batches(case, device, rank)]
    generator = torch.Generator().manual_seed(SEED + rank)
    sides = (case.batch, case.channels, case.image_size, case.image_size)
    images = [torch.randn(sides, generator=generator).to(device) for _ in range(BATCHES)]
    labels = torch.randint(case.classes, (BATCHES, case.batch), generator=generator).to(device)
    return list(zip(images, labels, strict=True))


class CheckpointWorker(Worker):
    """A rank of the checkpoint suite. It trains one sequence a step, so that fewer GPUs can restore the same checkpoint."""

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
        """Write `step-N` below `folder` in the foreground; returns seconds and, on rank 0, bytes."""
        checkpointer = self._checkpoints(folder)
        self._meet()
        seconds = self._seconds(lambda: checkpointer.save(step, self.model, self.optimizer, {}))
        return {"seconds": seconds, **self._size(Path(folder) / f"step-{step}")}

    def save_behind(self, folder: str, step: int) -> dict[str, Any]:
        """Write `step-N` below `folder` in the background and train until it is complete.

        Returns:
            stall_seconds: pause of training; whole_seconds: from the start of the save to the end of the step in which it was
            complete; seconds: of each step meanwhile; loss: of the first of them, on the same tokens on every rank; bytes, on
            rank 0.
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
        """Verify every byte of the newest checkpoint below `folder` and load it; returns seconds of both.

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
        restore(path, self.model, self.optimizer, checkpointer.io_ranks)
        self._wait()
        return {"verify_seconds": verified - begun, "restore_seconds": time.perf_counter() - verified}

    def next_loss(self) -> dict[str, Any]:
        """Train on the same tokens on every rank, so that the loss does not depend on the number of ranks."""
        return {"loss": float(self.trainer.step(self.common, self.common))}

    def digests(self) -> dict[str, Any]:
        """On rank 0 the sha256 of some gathered weights and moments, and of the FP8 state; empty on the others."""
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
        """One for all saves, since it keeps the pinned buffer."""
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
    """Answer request lines up to the end or the first failure: after one the worker's state is unknown.

    {"do": "build", …} calls `build`, any other the worker's method of that name; the other keys are its arguments.
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
        except Exception as error:  # a peer's exception of any kind becomes its row of the results
            yield json.dumps({"error": first_line(error)})
            return
        yield json.dumps(answer)


def join(device: torch.device, rendezvous: str) -> None:
    """Join the process group of the environment's WORLD_SIZE; nothing for one rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{rendezvous}",
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
    sys.stdin.read()  # a failed rank waits for its end: if it left first, the other ranks would report that instead


if __name__ == "__main__":
    main(sys.argv[1:])
