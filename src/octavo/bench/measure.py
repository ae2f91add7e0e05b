"""All entries on one case, turn by turn.

Speed drifts with temperature and with what a machine did before, so entries take turns: each is built, warmed up and timed for
half of its steps, then all are timed again (A B C, A B C). Between turns an entry keeps its weights and optimizer states and
gives its activations back. Where the memory does not hold all of them, each takes both turns at once and ends; the row says
which it was (`interleaved`).
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.cases import Case
from octavo.bench.peers import Entry
from octavo.hardware import GIB, Device
from octavo.plan.flops import matmul_parameters

MEMORY_SHARE = 0.9
"""Of the device's memory, what resident entries and one step may fill together."""

CONTEXT_GIB = 1.0
"""What a process holds on a GPU beside its tensors: CUDA's context and the libraries' workspaces."""


@dataclass
class Measurement:
    """What is known of one entry.

    Attributes:
        seconds: each timed step, in order.
        loss: of the last step.
        peak_gib: the allocator's peak in the timed steps; None on a CPU.
        interleaved: whether its turns alternated with other entries'.
        error: why there are no figures.
    """

    entry: Entry
    seconds: list[float] = field(default_factory=list)
    loss: float = math.nan
    peak_gib: float | None = None
    interleaved: bool = False
    error: str | None = None

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)

    def take(self, answer: dict[str, Any]) -> None:
        """Add the answer of a turn."""
        self.seconds += answer["seconds"]
        self.loss = answer["loss"]
        self.peak_gib = answer.get("peak_gib")
        if not math.isfinite(self.loss):
            self.error = f"the loss is {self.loss} after {len(self.seconds)} timed steps"


class Worker:
    """The parent's side of `octavo.bench.worker`."""

    def __init__(self, entry: Entry, case: Case, device: str) -> None:
        self.result = Measurement(entry)
        command = [sys.executable, "-m", "octavo.bench.worker", entry.name, case.name, device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def ask(self, **request: int) -> dict[str, Any]:
        """Send a request and wait for the answer; after an error, {} and `result.error` says why."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"its process ended with exit code {self.process.wait()}"}
        self.result.error = answer.get("error")
        return {} if self.result.error else answer

    def turn(self, steps: int) -> dict[str, Any]:
        """Time steps, unless it has failed before; returns the answer."""
        if self.result.error is not None or steps < 1:
            return {}
        answer = self.ask(steps=steps)
        if answer:
            self.result.take(answer)
        return answer

    def close(self) -> None:
        """End the process and give back all it holds."""
        self.process.kill()
        self.process.communicate()


def measure_case(
    case: Case, entries: list[Entry], *, device: Device, where: str, steps: int, warmup: int, say: Callable[[str], None]
) -> list[Measurement]:
    """Measure every entry on one case; an entry that fails has its error instead of figures.

    Args:
        case: the workload.
        entries: what is compared, in order.
        device, where: the device, and its name as torch writes it.
        steps: timed steps of each entry, over both turns.
        warmup: steps before them, which compile.
        say: is told what happens, a line at a time.
    """
    later = steps // 2
    workers: list[Worker] = []
    keep: bool | None = None
    try:
        for entry in entries:
            say(f"{case.name}: {entry.name}")
            worker = Worker(entry, case, where)
            workers.append(worker)
            worker.ask(warmup=warmup)
            answer = worker.turn(steps - later)
            if keep is None and answer:
                keep = all_fit(answer, case, len(entries), device)
                say(
                    f"{case.name}: entries take turns" if keep else f"{case.name}: one entry after the other, to fit the memory"
                )
            if not keep:
                worker.turn(later)
                worker.close()
        if keep:
            for worker in workers:
                worker.result.interleaved = len(entries) > 1
                worker.turn(later)
    finally:
        for worker in workers:
            worker.close()
    for worker in workers:
        if worker.result.error:
            say(f"{case.name}: {worker.result.entry.name} failed: {worker.result.error}")
    return [worker.result for worker in workers]


def all_fit(answer: dict[str, Any], case: Case, entries: int, device: Device) -> bool:
    """Whether all entries can stay resident beside the steps of one, judged by the first that ran."""
    if "held_gib" in answer:
        held, needed = answer["held_gib"] + CONTEXT_GIB, answer["needed_gib"] + CONTEXT_GIB
    else:  # a CPU has no allocator to ask: bfloat16 weights, gradients and two moments
        counted = matmul_parameters(case.hf_config())
        held = needed = (counted.stored + (0 if case.tied else counted.head)) * 8 / GIB
    return needed + (entries - 1) * held <= MEMORY_SHARE * device.memory_gib
