"""All entries on one case, turn by turn.

Speed drifts with temperature and with what a machine did before, so entries take turns: each is built, warmed up and timed for
half of its steps, then all are timed again (A B C, A B C). Between turns an entry keeps its weights and optimizer states and
gives its activations back. Where the memory does not hold all of them, each takes both turns at once and ends; the row says
which it was (`interleaved`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.cases import AnyCase
from octavo.bench.group import Answers, Group
from octavo.bench.peers import Entry
from octavo.hardware import GIB, Device

MEMORY_SHARE = 0.9
"""Of the device's memory, what resident entries and one step may fill together."""

CONTEXT_GIB = 1.0
"""What a process holds on a GPU beside its tensors: CUDA's context and the libraries' workspaces."""


@dataclass(frozen=True)
class Place:
    """Where a suite runs.

    Attributes:
        device: one of the GPUs, or the CPU.
        where: its name as torch writes it; "cuda" or "cpu" for several ranks.
        ranks: processes of an entry, one a GPU.
    """

    device: Device
    where: str
    ranks: int = 1


@dataclass
class Measurement:
    """What is known of one entry.

    Attributes:
        seconds: each timed step of the first rank, in order.
        loss: of the last step, mean of the ranks.
        peak_gib: the allocator's peak in the timed steps, of the rank with the largest; None on a CPU.
        interleaved: whether its turns alternated with other entries'.
        build_seconds: from the start of its process until the model was built and filled; None until it is.
        start_seconds: the same until the end of the first step; None where that was not a step of its own.
        breakdown: where the time of a step goes, as `octavo.bench.breakdown` tells; empty where nobody asked.
        error: why there are no figures.
    """

    entry: Entry
    seconds: list[float] = field(default_factory=list)
    loss: float = math.nan
    peak_gib: float | None = None
    interleaved: bool = False
    build_seconds: float | None = None
    start_seconds: float | None = None
    breakdown: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)

    def take(self, answers: Answers) -> None:
        """Add what the ranks answered in a turn."""
        self.seconds += answers[0]["seconds"]
        self.loss = statistics.fmean(answer["loss"] for answer in answers)
        self.peak_gib = largest(answers, "peak_gib")
        if not math.isfinite(self.loss):
            self.error = f"the loss is {self.loss} after {len(self.seconds)} timed steps"


class Worker:
    """An entry that is being measured: its processes and what is known of it."""

    def __init__(self, suite: str, entry: Entry, case: AnyCase, place: Place) -> None:
        self.result = Measurement(entry)
        self.group = Group([suite, entry.name, case.name], device=place.where, ranks=place.ranks)

    def start(self, warmup: int) -> None:
        """Build the model and take the steps that count for nothing."""
        self.result.build_seconds = self._until_done("build")
        if warmup:
            self.result.start_seconds = self._until_done("warm_up", steps=1)
        if warmup > 1:
            self._until_done("warm_up", steps=warmup - 1)

    def turn(self, steps: int) -> Answers:
        """Time steps, unless it has failed before; returns what the ranks answered."""
        answers = self.group.ask("measure", steps=steps) if steps and self.result.error is None else []
        self.result.error = self.result.error or self.group.error
        if answers:
            self.result.take(answers)
        return answers

    def profile(self, steps: int) -> None:
        """Add where the time of a step goes, unless it has failed before; `steps` 0: nobody asked."""
        answers = self.group.ask("profile", steps=steps) if steps and self.result.error is None else []
        self.result.error = self.result.error or self.group.error
        if answers:
            self.result.breakdown = answers[0]

    def _until_done(self, do: str, **arguments: int) -> float | None:
        """Seconds from the start of the processes until this is done; None where it failed."""
        done = self.group.ask(do, **arguments)
        self.result.error = self.group.error
        return time.perf_counter() - self.group.started if done else None


def largest(answers: Answers, key: str) -> float | None:
    """The largest of what the ranks tell under `key`; None where they do not."""
    return max((answer[key] for answer in answers if key in answer), default=None)


def measure_case(
    suite: str,
    case: AnyCase,
    entries: list[Entry],
    *,
    place: Place,
    steps: int,
    warmup: int,
    profiled: int = 0,
    say: Callable[[str], None],
) -> list[Measurement]:
    """Measure every entry on one case; an entry that fails has its error instead of figures.

    Args:
        suite: whose entries they are.
        case: the workload.
        entries: what is compared, in order.
        place: where.
        steps: timed steps of each entry, over both turns.
        warmup: steps before them, which compile.
        profiled: steps after them, in which the time of each kernel is recorded.
        say: is told what happens, a line at a time.
    """
    later = steps // 2
    workers: list[Worker] = []
    keep: bool | None = None
    try:
        for entry in entries:
            say(f"{case.name}: {entry.name}")
            worker = Worker(suite, entry, case, place)
            workers.append(worker)
            worker.start(warmup)
            answers = worker.turn(steps - later)
            if keep is None and answers:
                keep = all_fit(answers, case, len(entries), place)
                say(
                    f"{case.name}: entries take turns" if keep else f"{case.name}: one entry after the other, to fit the memory"
                )
            if not keep:
                worker.turn(later)
                worker.profile(profiled)
                worker.group.close()
                if worker.result.error is None:
                    say(f"{case.name}: {entry.name}: {worker.result.step_seconds * 1e3:.1f} ms a step")
        if keep:
            for worker in workers:
                worker.result.interleaved = len(entries) > 1
                worker.turn(later)
            for worker in workers:  # only now: a profiler's slowing must not reach anybody's timed steps
                worker.profile(profiled)
    finally:
        for worker in workers:
            worker.group.close()
    for worker in workers:
        if worker.result.error:
            say(f"{case.name}: {worker.result.entry.name} failed: {worker.result.error}")
    return [worker.result for worker in workers]


def all_fit(answers: Answers, case: AnyCase, entries: int, place: Place) -> bool:
    """Whether all entries can stay resident beside the steps of one, judged by the first that ran."""
    held, needed = (largest(answers, key) for key in ("held_gib", "needed_gib"))
    if held is not None and needed is not None:
        held, needed = held + CONTEXT_GIB, needed + CONTEXT_GIB
    else:  # a CPU has no allocator to ask: weights, gradients and states, or sharded ones with two moments in float32
        held = needed = case.parameters * (case.state_bytes if place.ranks == 1 else 16) / GIB
    return needed + (entries - 1) * held <= MEMORY_SHARE * place.device.memory_gib
