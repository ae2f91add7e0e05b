"""Worker process of an entry, one a rank: builds the model, then trains and times steps on request.

    python -m benchmarks.worker SUITE ENTRY CASE DEVICE RENDEZVOUS

A separate process inherits no compiled code, allocator or FP8 state from another entry, and a crash becomes a row with an
error. Requests come on standard input as JSON objects, one a line: {"do": method, argument: value, …}. Each gets one answer on
standard output: its figures, or {"error": text}. Output of libraries goes to standard error. Ranks meet at the file RENDEZVOUS.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases import AnyCase, Case
from benchmarks.chosen import attention_of, experts_of, frees_blocks
from benchmarks.peers import SEED, Entry, reason_of
from benchmarks.profile.breakdown import record
from benchmarks.suites import SUITES
from octavo.checkpoint.api import Checkpointer
from octavo.checkpoint.reader import restore
from octavo.checkpoint.shard_io import raw
from octavo.collectives import copies
from octavo.collectives.whole import whole_tensor
from octavo.fp8.scaling import state_records
from octavo.hardware import GIB
from octavo.kernels import algorithms
from octavo.parallel import world

BATCHES = 4
LAUNCHES = 3
"""Steps whose launch is timed for a profile."""

T = TypeVar("T")


class Worker:
    """An entry on its device, with its batches: the same for every entry, different on each rank.

    Each public method answers a request.
    """

    def __init__(self, entry: Entry, case: AnyCase, device: torch.device, rendezvous: str, *, replicated: bool = False) -> None:
        self.entry = entry
        self.replicated = replicated
        self.case = case
        self.rendezvous = rendezvous
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.released = False  # whether the last turn gave its activations' memory back to the device
        self.trained = 0

    def build(self, seed: int = SEED) -> dict[str, Any]:
        """Join the other ranks and build the model with weights of this seed; returns choices and errors of attention."""
        self._join()
        self.trainer = self.entry.build(self.case, self.device, self.on_gpu, seed=seed)
        self.trainer.micro_batches = self.case.micro_batches
        # Octavo's entries are built so.
        self.trainer.sync_each = isinstance(self.case, Case) and self.case.sync_each and self.entry.group is not None
        if isinstance(self.case, Case) and self.case.spec.experts and not self.case.spec.tied:
            balance_routers(self.trainer.model)
        rank = world.state.dp_rank
        if self.replicated and dist.is_initialized():
            rank = dist.get_rank()
        self.batches = itertools.cycle(labelled_batches(self.case, self.device, rank))
        self._wait()
        of = self.entry, self.case, self.trainer.model, self.device
        freed, errors = frees_blocks(self.trainer.model), self.trainer.attention_errors
        return {"experts": experts_of(*of), "reshard_after_forward": freed, "attention_errors": errors}

    def warm_up(self, steps: int) -> dict[str, Any]:
        """Compile, allocate and fill caches in steps that are not timed."""
        for _ in range(steps):
            self._step()
        self._wait()
        if self.on_gpu and not self.trainer.graph:
            # The peak counts from here, without the memory of compilation and of kernel trials. A CUDA graph allocates when it
            # is recorded, and its replays are not counted.
            torch.cuda.reset_peak_memory_stats(self.device)
        return {}

    def measure(self, steps: int) -> dict[str, Any]:
        """Time steps; returns their seconds, the last loss, its step, the kernels of attention and products, memory in GiB.

        `loss_step`: steps trained since the first weights. `peak_gib`: the allocator's peak since the warm-up. `held_gib`:
        memory reserved until the next turn. `needed_gib`: the peak of the memory reserved on the device. Memory that other
        ranks write counts in the first and the last.
        """
        if self.released:
            self._step()  # reallocates it outside of the timed steps; without a GPU it is one more step
        # One mark between steps and no wait: the time between two marks is the whole step, launch gaps included.
        marks = [self._mark()]
        for _ in range(steps):
            loss = self._step()
            marks.append(self._mark())
        self._wait()
        figures: dict[str, Any] = {"seconds": [self._between(*pair) for pair in itertools.pairwise(marks)]}
        figures |= {"loss": float(loss), "loss_step": self.trained}
        if self.entry.group is None:
            figures |= {"products": algorithms.choices(), "exchanges": copies.choices()}
        self.released = True
        if not self.on_gpu:
            return {**figures, "attention": self._attention()}
        figures["peak_gib"] = (torch.cuda.max_memory_allocated(self.device) + copies.memory_bytes()) / GIB
        figures["needed_gib"] = (torch.cuda.max_memory_reserved(self.device) + copies.memory_bytes()) / GIB
        torch.cuda.empty_cache()
        return {**figures, "held_gib": torch.cuda.memory_reserved(self.device) / GIB, "attention": self._attention()}

    def profile(self, steps: int, trace: str | None = None) -> dict[str, Any]:
        """Kernel milliseconds a step by kind, and the largest kernels, from steps that are not timed.

        On a GPU also `host_ms`, the median time that the host takes to launch a step for an idle GPU: where it is near a
        step's, the host is the limit. trace: a file for the first rank's profile.
        """
        self._step()
        self._wait()
        launches = []
        for _ in range(LAUNCHES if self.on_gpu else 0):
            launches.append(_timed(self._step)[0])
            self._wait()
        first = not dist.is_initialized() or dist.get_rank() == 0
        found = record(self._step, steps, self.device, Path(trace) if trace and first else None)
        if self.on_gpu:
            found["host_ms"] = statistics.median(launches) * 1e3
            torch.cuda.empty_cache()
        return found

    def _join(self) -> None:
        """Join the process group of the environment's WORLD_SIZE; nothing for one rank."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo",
                init_method=f"file://{self.rendezvous}",
                rank=int(os.environ["RANK"]),
                world_size=size,
                device_id=self.device if self.on_gpu else None,
            )
            if not self.replicated:
                assert isinstance(self.case, Case)
                degrees = {
                    "context_parallel_degree": self.case.context,
                    "expert_parallel_degree": self.case.expert,
                    "tensor_parallel_degree": self.case.tensor,
                }
                world.init(degrees)

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _attention(self) -> str:
        return attention_of(self.entry, self.case, self.trainer.model, self.device)

    def _step(self) -> Tensor:
        self.trained += 1
        return self.trainer.step(*next(self.batches))

    def _mark(self) -> Any:
        """A point in time: an event in the GPU's stream, or the host's clock."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self.on_gpu else second - first


@torch.no_grad()
def balance_routers(model: nn.Module) -> None:
    """Balance the routing of a random model, as that of trained ones is: embeddings become a thousand times larger.

    In a model of random weights hidden states are mostly attention's mean over the tokens before, which is alike for all of
    them: in deeper blocks two of eight experts get nearly every token. Large embeddings keep tokens distinguishable.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.mul_(1e3)


def labelled_batches(case: AnyCase, device: torch.device, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    """A few batches, the same for every entry and on every device.

    Uniform random tokens B × T int64, which are also the labels, or normal random images with random classes.
    """
    generator = torch.Generator().manual_seed(SEED + rank)
    if isinstance(case, Case):
        shape = (BATCHES, case.batch * case.micro_batches, case.sequence_length)
        tokens = torch.randint(case.spec.vocabulary, shape, generator=generator).to(device)
        return list(zip(tokens, tokens, strict=True))
    sides = (case.batch, case.channels, case.image_size, case.image_size)
    images = [torch.randn(sides, generator=generator).to(device) for _ in range(BATCHES)]
    labels = torch.randint(case.classes, (BATCHES, case.batch), generator=generator).to(device)
    return list(zip(images, labels, strict=True))


class CheckpointWorker(Worker):
    """A rank of the checkpoint suite: one sequence a step, so that fewer GPUs can restore the same checkpoint."""

    def build(self, seed: int = SEED) -> dict[str, Any]:
        """As `Worker.build`."""
        self.case = dataclasses.replace(self.case, batch=1)
        super().build(seed)
        self.model = self.trainer.model
        self.optimizer = self.trainer.optimizer
        self.common = labelled_batches(self.case, self.device)[0]
        self._checkpointer: Checkpointer | None = None
        return {}

    def steps(self, steps: int) -> dict[str, Any]:
        """Train; returns the seconds of each step."""
        return {"seconds": [_timed(self._waited_step)[0] for _ in range(steps)]}

    def save(self, folder: str, step: int) -> dict[str, Any]:
        """Write `step-N` below `folder` in the foreground; returns seconds and, on rank 0, bytes."""
        checkpointer = self._ready(folder)
        seconds, path = _timed(lambda: checkpointer.save(step, self.model, self.optimizer, {}))
        return {"seconds": seconds, **_size(path)}

    def save_behind(self, folder: str, step: int) -> dict[str, Any]:
        """Write `step-N` below `folder` in the background and train until it is complete.

        Returns:
            stall_seconds: pause of training; whole_seconds: from the start of the save to the end of the step in which it was
            complete; seconds: of each step meanwhile; loss: of the first of them, on the same tokens on every rank; bytes, on
            rank 0.
        """
        checkpointer = self._ready(folder)
        begun = time.perf_counter()
        stall, path = _timed(lambda: checkpointer.save(step, self.model, self.optimizer, {}, background=True))
        first, answer = _timed(self.next_loss)
        seconds = [first]
        while checkpointer.ranks.max(int(not path.is_dir())):
            checkpointer.poll()
            seconds.append(_timed(self._waited_step)[0])
        whole = time.perf_counter() - begun
        checkpointer.wait()
        return {"stall_seconds": stall, "whole_seconds": whole, "seconds": seconds, **answer, **_size(path)}

    def restore(self, folder: str) -> dict[str, Any]:
        """Verify every byte of the newest checkpoint below `folder` and load it; returns seconds of both."""
        checkpointer = self._ready(folder)
        verify_seconds, path = _timed(checkpointer.latest)
        assert path is not None, folder
        begun = time.perf_counter()
        restore(path, self.model, self.optimizer, checkpointer.io_ranks)
        self._wait()
        return {"verify_seconds": verify_seconds, "restore_seconds": time.perf_counter() - begun}

    def next_loss(self) -> dict[str, Any]:
        """Train on the same tokens on every rank, so that the loss does not depend on the number of ranks."""
        return {"loss": float(self.trainer.step(*self.common))}

    def digests(self) -> dict[str, Any]:
        """On rank 0 the sha256 of some gathered weights and moments, and of the FP8 state; empty on the others."""
        named = list(self.model.named_parameters())
        found = {}
        for name, parameter in (named[0], named[len(named) // 2], named[-1]):
            states = self.optimizer.state[parameter]
            for key, tensor in {"weight": parameter, **{key: states[key] for key in ("exp_avg", "exp_avg_sq")}}.items():
                whole = whole_tensor(tensor)
                found[f"{key} of {name}"] = hashlib.sha256(raw(whole)).hexdigest()
        records = b"".join(raw(tensor) for _, tensor in sorted(state_records(self.model).items()))
        found["FP8 state"] = hashlib.sha256(records).hexdigest()
        return {"digests": found} if world.state.rank == 0 else {}

    def _ready(self, folder: str) -> Checkpointer:
        """The checkpointer of all saves, which keeps the pinned buffer; waits for the device and for the other ranks."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(Path(folder), keep=1, report=print)
        self._wait()
        self._checkpointer.ranks.max(1)
        return self._checkpointer

    def _waited_step(self) -> None:
        float(self._step())


def _timed(do: Callable[[], T]) -> tuple[float, T]:
    """Seconds of a call, and its result."""
    begun = time.perf_counter()
    result = do()
    return time.perf_counter() - begun, result


def _size(checkpoint: Path) -> dict[str, int]:
    return {"bytes": sum(file.stat().st_size for file in checkpoint.iterdir())} if world.state.rank == 0 else {}


def answers(requests: Iterable[str], worker: Worker) -> Iterator[str]:
    """Answer request lines up to the end or the first failure: after one the worker's state is unknown."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # a peer's exception of any kind becomes its row of the results
            yield json.dumps({"error": reason_of(error)})
            return
        yield json.dumps(answer)


def main(suite: str, entry: str, case: str, device: str, rendezvous: str) -> None:
    """Serve one entry over standard input and output."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    kind = CheckpointWorker if suite == "checkpoint" else Worker
    chosen = SUITES[suite]
    entry_of, case_of = chosen.entries[entry], chosen.known[case]
    worker = kind(entry_of, case_of, torch.device(device), rendezvous, replicated=chosen.replicated)
    for answer in answers(sys.stdin, worker):
        print(answer, file=channel, flush=True)
    sys.stdin.read()  # a failed rank waits for its end: if it left first, the other ranks would report that instead


if __name__ == "__main__":
    main(*sys.argv[1:])
