"""Entries of a suite of one rank in one process, for a machine whose time is short: imports and kernels are loaded once.

    python -m benchmarks.one_process lora llama-8b-lora octavo-delayed-fp8-base,torch-peft-compiled --output lora.json

As in `python -m benchmarks` entries take turns, and stay on the GPU between them; an entry's peak of memory is without what
the others hold. The file is written after each entry, and the seconds of each part of a start are printed. An entry that takes
longer to start than `--limit`, or fails, has its error as row. What one library sets for its process holds for the next too,
and Python's collector of garbage does not traverse what there is after a start: a step's launch would grow with the number of
entries.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGUN = time.perf_counter()

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks.lora import table  # noqa: E402
from benchmarks.measure import Measurement, Target  # noqa: E402
from benchmarks.peers import reason_of  # noqa: E402
from benchmarks.records import document, render, row, write  # noqa: E402
from benchmarks.suites import SUITES  # noqa: E402
from benchmarks.worker import Worker  # noqa: E402
from octavo.hardware import GIB, describe_device  # noqa: E402


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in the main thread after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not started after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Turns:
    """An entry with its model, its figures so far and the bytes that it holds between its turns."""

    measured: Measurement
    worker: Worker
    held: int = 0
    recorded: int | None = None  # the peak of the steps in which a CUDA graph was recorded: replays allocate nothing
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a part of the start."""
        begun = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - begun

    def start(self, warmup: int, limit: float) -> None:
        """Build the model and train the first steps."""
        before = _allocated(self.worker)
        try:
            with limited(limit):
                with self.timed("build"):
                    built = self.worker.build()
                with self.timed("first step"):
                    self.worker.warm_up(1)
                graph = self.worker.on_gpu and self.worker.trainer.graph
                if graph:
                    torch.cuda.reset_peak_memory_stats(self.worker.device)
                with self.timed("other steps"):
                    self.worker.warm_up(warmup - 1)
                if graph:
                    self.recorded = torch.cuda.max_memory_allocated(self.worker.device) - before
        except Exception as error:  # of any library: the other entries are measured all the same
            self.fail(error)
            return
        gc.collect()
        gc.freeze()
        self.held = _allocated(self.worker) - before
        for key in ("attention_errors", "experts", "reshard_after_forward"):
            setattr(self.measured, key, built[key])
        self.measured.build_seconds = self.seconds["build"]
        self.measured.start_seconds = self.seconds["build"] + self.seconds["first step"]

    def turn(self, steps: int) -> None:
        """Time steps."""
        if self.measured.error is not None or steps < 1:
            return
        others = _allocated(self.worker) - self.held
        if self.worker.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.worker.device)
        try:
            answer = self.worker.measure(steps)
        except Exception as error:
            self.fail(error)
            return
        if self.recorded is not None:
            answer["peak_gib"] = self.recorded / GIB
        elif "peak_gib" in answer:
            answer["peak_gib"] -= others / GIB
        self.measured.take([answer])

    def fail(self, error: Exception) -> None:
        """Note the reason and free the model."""
        self.measured.error = reason_of(error)
        vars(self.worker).pop("trainer", None)
        if self.worker.on_gpu:
            torch.cuda.empty_cache()


def _allocated(worker: Worker) -> int:
    return torch.cuda.memory_allocated(worker.device) if worker.on_gpu else 0


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run from the command line; returns the document that was written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_process", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument(
        "suite", choices=[name for name, suite in SUITES.items() if suite.entries and (suite.alone or suite.ranks[1] == 1)]
    )
    parser.add_argument("case")
    parser.add_argument("entries", help="names, separated by commas")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file, written after each entry")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of an entry, in two turns")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that an entry may take to start")
    parser.add_argument("--breakdown", action="store_true", help="also kernel times and the host's, by PyTorch's profiler")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    suite, device = SUITES[given.suite], torch.device(given.device)
    case = suite.known[given.case]
    target = Target(describe_device(given.device), given.device)
    names = given.entries.split(",")
    entries = [suite.entries[name] for name in names]
    command = shlex.join(["python", "-m", "benchmarks.one_process", *(sys.argv[1:] if arguments is None else arguments)])
    print(f"imports {time.perf_counter() - BEGUN:.1f} s", flush=True)
    running: list[Turns] = []

    def written() -> dict[str, Any]:
        rows = [row(case, one.measured, target) for one in running if one.measured.seconds or one.measured.error]
        results = document(suite.name, command, target, entries, rows)
        write(results, given.output)
        return results

    for entry in entries:
        one = Turns(Measurement(entry), Worker(entry, case, device, ""))
        one.start(given.warmup, given.limit)
        running.append(one)
        one.measured.interleaved = len(entries) > 1
        one.turn(given.steps - given.steps // 2 if len(entries) > 1 else given.steps)
        shown = ", ".join(f"{part} {seconds:.1f}" for part, seconds in one.seconds.items())
        speed = one.measured.error or f"{case.units / one.measured.step_seconds:,.0f} a second"
        print(f"{entry.name}: {shown} s; {speed}; {time.perf_counter() - BEGUN:.0f} s so far", flush=True)
        written()
    for one in running if len(entries) > 1 else []:
        one.turn(given.steps // 2)
        written()
    for one in running if given.breakdown else []:
        if one.measured.error is None:
            one.measured.breakdown = one.worker.profile(2)
            written()
    results = written()
    print(table(results))
    render(results, Console(width=140))
    return results


if __name__ == "__main__":
    main()
