"""Measures all entries on one case, in turns.

Speed drifts with temperature and load, so entries take turns: each is built, warmed up and timed for half of its steps, then
all are timed again (A B C, A B C). Between turns an entry keeps weights and optimizer states and frees its activations. If
the memory does not hold all entries, each takes both turns at once and ends; `interleaved` in the row tells the two apart.
Either way every entry trains the same number of steps, one of them untimed between its turns, so that their losses are of the
same step. An entry alone takes all steps in one turn.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import AnyCase
from benchmarks.group import Answers, EntryFailed, Group
from benchmarks.peers import Entry
from octavo.hardware import GIB, Device

MEMORY_SHARE = 0.9
"""Share of the device's memory for all resident entries and one step."""

CONTEXT_GIB = 1.0
"""GPU memory of a process beside its tensors: CUDA's context and the libraries' workspaces."""


@dataclass(frozen=True)
class Target:
    """Device and number of ranks of a suite.

    Attributes:
        device: one of the GPUs, or the CPU.
        torch_device: torch's name of it; "cuda" or "cpu" for several ranks.
        ranks: processes of an entry, one a GPU.
    """

    device: Device
    torch_device: str
    ranks: int = 1


@dataclass
class Measurement:
    """Figures of one entry, or its error.

    Attributes:
        seconds: each timed step of the first rank, in order.
        loss: of the last step, mean over the ranks.
        loss_step: number of that step, counted from the first weights.
        peak_gib: the allocator's peak in the timed steps, with memory that other ranks write, maximum over the ranks; None on a
            CPU.
        interleaved: its turns alternated with other entries'.
        build_seconds: from the start of its process to a built and filled model.
        start_seconds: from the start of its process to the end of the first step; None without a warm-up.
        attention, experts: the kernels that compute them, in words; None for a model without experts.
        attention_errors: relative errors of its attention; None if it was not compared with the reference.
        reshard_after_forward: blocks are freed behind their forward; None for a model that is not sharded.
        products: the algorithm of each of Octavo's measured products, a table a rank (`octavo.kernels.algorithms.choices`).
        exchanges: how tensor ranks of Octavo exchange rows (`octavo.collectives.copies.choices`).
        start: the number of this start of its processes, from 1; None where they start once.
        breakdown: kernel times (`benchmarks.profile.breakdown`); empty unless recorded.
        error: the reason for missing figures.
    """

    entry: Entry
    seconds: list[float] = field(default_factory=list)
    loss: float = math.nan
    loss_step: int | None = None
    peak_gib: float | None = None
    interleaved: bool = False
    build_seconds: float | None = None
    start_seconds: float | None = None
    attention: str | None = None
    attention_errors: dict[str, float] | None = None
    experts: str | None = None
    reshard_after_forward: bool | None = None
    products: list[dict[str, str]] = field(default_factory=list)
    exchanges: dict[str, str] = field(default_factory=dict)
    start: int | None = None
    breakdown: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)

    def take(self, answers: Answers) -> None:
        """Add the ranks' answers of a turn."""
        self.seconds += answers[0]["seconds"]
        self.loss = statistics.fmean(answer["loss"] for answer in answers)
        self.peak_gib = largest(answers, "peak_gib")
        self.exchanges = answers[0].get("exchanges", {})
        self.products = [answer.get("products", {}) for answer in answers]
        self.loss_step, self.attention = answers[0].get("loss_step"), answers[0].get("attention")
        if not math.isfinite(self.loss):
            self.error = f"the loss is {self.loss} after {len(self.seconds)} timed steps"


class RunningEntry:
    """An entry with its worker processes and its figures so far."""

    def __init__(self, suite: str, entry: Entry, case: AnyCase, target: Target, start: int | None = None) -> None:
        self.result = Measurement(entry, start=start)
        how: dict[str, Any] = {"device": target.torch_device, "ranks": target.ranks, "environment": entry.environment}
        self.group = Group(suite, entry.name, case.name, **how)

    def start(self, warmup: int) -> None:
        """Build the model and take the warm-up steps."""
        answers = self._ask("build")
        if answers:
            for key in ("attention_errors", "experts", "reshard_after_forward"):
                setattr(self.result, key, answers[0][key])
        self.result.build_seconds = time.perf_counter() - self.group.started
        if warmup:
            self._ask("warm_up", steps=1)
            self.result.start_seconds = time.perf_counter() - self.group.started
        self._ask("warm_up", steps=warmup - 1)

    def turn(self, steps: int) -> Answers:
        """Time steps; returns the ranks' answers."""
        answers = self._ask("measure", steps=steps)
        if answers:
            self.result.take(answers)
        return answers

    def profile(self, steps: int, trace: Path | None) -> None:
        """Record kernel times of so many steps, and their trace in this file."""
        answers = self._ask("profile", steps=steps, trace=None if trace is None else str(trace))
        if answers:
            self.result.breakdown = answers[0]

    def _ask(self, do: str, **arguments: Any) -> Answers:
        """The ranks' answers; none for no steps and once the entry has failed."""
        if self.result.error is None and arguments.get("steps", 1) > 0:
            try:
                return self.group.ask(do, **arguments)
            except EntryFailed as failure:
                self.result.error = str(failure)
        return []


def trace_name(case: str, entry: str) -> str:
    """The file of an entry's trace."""
    return f"{case}-{entry}.json.gz"


def largest(answers: Answers, key: str) -> float | None:
    """The maximum of `key` over the ranks' answers; None if no answer has it."""
    return max((answer[key] for answer in answers if key in answer), default=None)


def measure_case(
    suite: str,
    case: AnyCase,
    entries: list[Entry],
    *,
    target: Target,
    steps: int,
    warmup: int,
    profiled: int = 0,
    traces: Path | None = None,
    start: int | None = None,
    say: Callable[[str], None],
    finished: Callable[[list[Measurement]], object] = lambda measured: None,
) -> list[Measurement]:
    """Measure every entry on one case; a failed entry has its error instead of figures.

    Args:
        steps: timed steps of each entry, over both turns.
        warmup: steps before them, compilation included.
        profiled: steps after them, whose kernel times are recorded.
        traces: folder for a trace of the profiled steps of each entry.
        exchanges: how tensor ranks of Octavo exchange rows (`octavo.collectives.copies.choices`).
        start: the number of this start, for the rows.
        finished: takes the entries that are complete, each time that another is.
    """
    later = steps // 2 if len(entries) > 1 else 0

    def trace_of(entry: Entry) -> Path | None:
        return None if traces is None else traces / trace_name(case.name, entry.name)

    running: list[RunningEntry] = []
    keep = None if len(entries) > 1 else False
    with contextlib.ExitStack() as processes:
        for entry in entries:
            say(f"{case.name}: {entry.name}" + ("" if start is None else f", start {start}"))
            one = RunningEntry(suite, entry, case, target, start)
            processes.callback(one.group.close)
            running.append(one)
            one.start(warmup)
            answers = one.turn(steps - later)
            if keep is None and answers:
                keep = all_fit(answers, case, len(entries), target)
                say(f"{case.name}: {'entries take turns' if keep else 'one entry after the other, to fit the memory'}")
            if not keep:
                one.turn(later)
                one.profile(profiled, trace_of(one.result.entry))
                one.group.close()
                if one.result.error is None:
                    say(f"{case.name}: {entry.name}: {one.result.step_seconds * 1e3:.1f} ms a step")
                finished([one.result for one in running])
        if keep:
            for one in running:
                one.result.interleaved = len(entries) > 1
                one.turn(later)
            for one in running:  # after all timed steps, since a profiler slows
                one.profile(profiled, trace_of(one.result.entry))
    for one in running:
        if one.result.error:
            say(f"{case.name}: {one.result.entry.name} failed: {one.result.error}")
    return [one.result for one in running]


def all_fit(answers: Answers, case: AnyCase, entries: int, target: Target) -> bool:
    """True if all entries fit in memory beside the steps of one, estimated from the first that ran."""
    held, needed = (largest(answers, key) for key in ("held_gib", "needed_gib"))
    if held is not None and needed is not None:
        held, needed = held + CONTEXT_GIB, needed + CONTEXT_GIB
    else:  # a CPU's allocator has no figures: weights, gradients and states, or sharded ones with two moments in float32
        held = needed = case.parameters * (case.state_bytes if target.ranks == 1 else 16) / GIB
    return needed + (entries - 1) * held <= MEMORY_SHARE * target.device.memory_gib
