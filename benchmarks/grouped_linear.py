"""`octavo.nn.GroupedLinear` beside Transformer Engine's: a forward and a backward, in turns, on the same input.

    python -m benchmarks.grouped_linear --output benchmarks/results/grouped-linear.json

`octavo-single` is Octavo with one product per expert, as it runs large experts. Rows are even: in FP8 Transformer Engine
multiplies only multiples of 16 per expert. Before it is timed, an entry's output and gradients are compared with float32. Times
are medians; peaks are beside weights, gradients and input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import octavo
from benchmarks.peers import reason_of
from octavo.bench.results import document
from octavo.fp8.recipe import RECIPES
from octavo.hardware import GIB, describe_device
from octavo.nn import grouped
from octavo.storage import write_atomic

TOLERANCE = 0.1
"""Relative error of an FP8 result or gradient; E5M2's rounding alone is 0.05 to 0.06."""


class Workload(NamedTuple):
    """Experts [columns_out, columns_in], and the rows of all."""

    name: str
    experts: int
    columns_in: int
    columns_out: int
    rows: int


WORKLOADS = (
    Workload("gate and up of Mixtral-8x7B", 8, 4096, 28_672, 16_384),
    Workload("gate and up of 16 of Qwen3-30B-A3B's experts", 16, 2048, 1536, 32_768),
    Workload("gate and up of Qwen3-30B-A3B", 128, 2048, 1536, 65_536),
)
TINY = Workload("tiny", 3, 64, 48, 96)


class _Entry(NamedTuple):
    name: str
    layer: nn.Module
    around: Callable[[], Any]
    large: float
    """Operations of an expert from which Octavo runs one product per expert."""


def _octavo(layer: nn.Module, recipe: str) -> list[_Entry]:
    if recipe == "bf16":
        return [_Entry("octavo", layer, contextlib.nullcontext, grouped._LARGE)]
    around = partial(octavo.fp8_autocast, fp8_recipe=RECIPES[recipe]())
    return [_Entry("octavo", layer, around, grouped._LARGE), _Entry("octavo-single", layer, around, 0.0)]


def _transformer_engine(workload: Workload, recipe: str, device: torch.device) -> list[_Entry]:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    classes = {"delayed": recipes.DelayedScaling, "current": recipes.Float8CurrentScaling, "block": recipes.Float8BlockScaling}
    if recipe not in ("bf16", *classes):
        return []
    chosen = classes[recipe]() if recipe in classes else None
    sizes = workload.experts, workload.columns_in, workload.columns_out
    layer = te.GroupedLinear(*sizes, bias=False, params_dtype=torch.bfloat16, device=device)
    return [_Entry("te", layer, lambda: te.autocast(enabled=chosen is not None, recipe=chosen), grouped._LARGE)]


class _Step:
    """A forward and a backward of an entry on fixed rows x, with dy as the gradient of the output."""

    def __init__(self, entry: _Entry, splits: list[int], x: Tensor, dy: Tensor) -> None:
        self.entry, self.splits, self.x, self.dy = entry, splits, x.detach().requires_grad_(), dy
        self.seconds: list[float] = []

    def __call__(self) -> Tensor:
        """Run it, without gradients from before; returns the output."""
        self.entry.layer.zero_grad()
        self.x.grad = None
        with mock.patch.object(grouped, "_LARGE", self.entry.large), self.entry.around():
            y: Tensor = self.entry.layer(self.x, self.splits)
        y.backward(self.dy)
        return y

    def time(self) -> None:
        """Add the time of one step."""
        _wait(self.x.device)
        begin = time.perf_counter()
        self()
        _wait(self.x.device)
        self.seconds.append(time.perf_counter() - begin)

    def check(self) -> float:
        """The largest relative error of output, input gradient and the last expert's weight gradient, beside float32.

        Raises:
            ValueError: it exceeds `TOLERANCE`.
        """
        y = self()
        weights = [parameter for parameter in self.entry.layer.parameters() if parameter.dim() == 2]
        parts = zip(self.x.split(self.splits), self.dy.split(self.splits), weights, strict=True)
        begin, worst = 0, 0.0
        assert self.x.grad is not None
        for x, dy, weight in parts:
            x, dy, w = x.detach().float(), dy.float(), weight.detach().float()
            rows = slice(begin, begin + len(x))
            begin += len(x)
            assert weight.grad is not None
            pairs = (y[rows], x @ w.t()), (self.x.grad[rows], dy @ w), (weight.grad, dy.t() @ x)
            worst = max(worst, *(float((found.detach().float() - exact).norm() / exact.norm()) for found, exact in pairs))
        if not worst < TOLERANCE:
            raise ValueError(f"a relative error of {worst:.3f}")
        return worst


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    workloads: Sequence[Workload], device: torch.device, *, steps: int, peer: bool, say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """A row for each workload, recipe and entry, with its time, or its error."""
    rows = []
    for workload in workloads:
        splits = [workload.rows // workload.experts] * workload.experts
        x = torch.randn(workload.rows, workload.columns_in, device=device, dtype=torch.bfloat16)
        dy = torch.randn(workload.rows, workload.columns_out, device=device, dtype=torch.bfloat16)
        for recipe in ("bf16", *RECIPES):
            sizes = workload.experts, workload.columns_in, workload.columns_out
            layer = octavo.nn.GroupedLinear(*sizes, bias=False, params_dtype=torch.bfloat16, device=device)
            entries = _octavo(layer, recipe)
            entries += _transformer_engine(workload, recipe, device) if peer else []
            found: list[tuple[dict[str, Any], _Step]] = []
            for entry in entries:
                step = _Step(entry, splits, x, dy)
                row: dict[str, Any] = {"workload": workload.name, **workload._asdict(), "recipe": recipe, "entry": entry.name}
                del row["name"]
                rows.append(row)
                try:
                    for _ in range(4):  # delayed scaling settles
                        step()
                    row["error_of_values"] = step.check()
                    if device.type == "cuda":
                        before = torch.cuda.memory_allocated(device)
                        torch.cuda.reset_peak_memory_stats(device)
                        step()
                        row["peak_gib"] = (torch.cuda.max_memory_allocated(device) - before) / GIB
                    found.append((row, step))
                except Exception as error:  # of any library
                    row["error"] = reason_of(error)
            for _ in range(steps):
                for _, step in found:
                    step.time()
            for row, step in found:
                row |= {"ms": statistics.median(step.seconds) * 1e3, "fastest_ms": min(step.seconds) * 1e3}
            say(f"{workload.name}, {recipe}: " + ", ".join(f"{row['entry']} {row['ms']:.2f} ms" for row, _ in found))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped_linear", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="Transformer Engine too")
    parser.add_argument("--tiny", action="store_true", help="a shape for CPUs; measures nothing")
    given = parser.parse_args(arguments)
    device = describe_device()
    workloads = (TINY,) if given.tiny else WORKLOADS
    rows = measure(workloads, torch.device(device.kind), steps=given.steps, peer=given.peer)
    command = f"python -m benchmarks.grouped_linear {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    if given.output is not None:
        peers = ["transformer-engine"] if given.peer else []
        found = document("grouped-linear", command, device, rows, peers=peers)
        write_atomic(given.output, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
