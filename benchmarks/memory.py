"""The suite of memory: step times and peaks under recomputation, offloading and MLPs in chunks, beside the estimate.

One process trains each setting in turn, for a few steps: the allocator's peak is the same in each. Parameters and states are
bfloat16, FP8 is delayed scaling by the defaults.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from benchmarks.cases import Case
from benchmarks.peers import ADAMW
from octavo.config.recompute import Recompute
from octavo.errors import recorded
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import DelayedScaling
from octavo.hardware import GIB
from octavo.models.shapes import SHAPES
from octavo.parallel.gathered import memory_of_gpu
from octavo.plan.memory import estimate
from octavo.plan.saved import BlockRecipes, Setup, parameters
from octavo.train.adamw import AdamW


class Workload(NamedTuple):
    """A case with the settings of `octavo.transform` that save memory."""

    case: Case
    recompute: Recompute = False
    mlp_chunks: int = 1
    offload: bool = False

    @property
    def settings(self) -> str:
        """The settings other than the defaults, as in a run file."""
        changed = {key: getattr(self, key) for key, usual in self._field_defaults.items() if getattr(self, key) != usual}
        return " ".join(f"{key}={str(value).lower()}" for key, value in changed.items()) or "none"

    @property
    def name(self) -> str:
        """Its name for `--cases`."""
        return f"{self.case.name}-{self.settings.replace(' ', '-').replace('=', '-')}"

    def setup(self, memory: int | None) -> Setup:
        """The same as input of the estimate of memory, on a GPU of so many bytes; None for a CPU."""
        spec, case = self.case.spec, self.case
        blocks = (BlockRecipes(*(DelayedScaling().name,) * 4),) * spec.layers
        return Setup(
            spec, parameters(spec), case.batch, case.sequence_length, params_bytes=2, blocks=blocks, head="backward",
            recompute=self.recompute, mlp_chunks=self.mlp_chunks, offload=self.offload, history=1024,
            memory=memory,
        )  # fmt: skip


_SETTINGS: tuple[tuple[Any, int, bool], ...] = (
    *((False, 1, False), ("mlp", 1, False), ("selective", 1, False), (True, 1, False), ("selective", 8, False)),
    *((False, 1, True), ("mlp", 1, True), ("selective", 1, True), (True, 8, True)),
)
_CASES = (
    Case("llama-8b-8layers-32k", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 1, 32_768),
    Case("tiny", SHAPES["llama-tiny"], 1, 64),
)
WORKLOADS: dict[str, Workload] = {
    workload.name: workload for case in _CASES for setting in _SETTINGS for workload in [Workload(case, *setting)]
}
USUAL = tuple(name for name, workload in WORKLOADS.items() if workload.case is _CASES[0])


def measure_memory(
    workloads: Iterable[Workload], device: torch.device, *, iterations: int, warmup: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each workload, or its error; iterations: timed steps."""
    rows: list[dict[str, Any]] = []
    for workload in workloads:
        found = workload.case
        row: dict[str, Any] = {
            "workload": found.name, "entry": "octavo-delayed", "settings": workload.settings,
            "recompute": workload.recompute, "mlp_chunks": workload.mlp_chunks, "offload": workload.offload,
            "batch": found.batch, "sequence_length": found.sequence_length,
        }  # fmt: skip
        rows.append(row)
        with recorded(row, workload.name, say):
            planned = estimate(workload.setup(memory_of_gpu(device)))
            row |= {"estimated_gib": planned.total / GIB, "host_gib": planned.host / GIB}
            _release(device)  # memory of the previous setting
            seconds, peak = _train(workload, device, iterations, max(1, warmup))
            step = statistics.median(seconds)
            row |= {
                "tokens_per_second": found.units / step, "step_ms": step * 1e3, "peak_gib": peak / GIB, "steps": len(seconds),
            }  # fmt: skip
            say(f"{workload.name}: {step * 1e3:.0f} ms, {peak / GIB:.2f} GiB, by the estimate {planned.total / GIB:.2f}")
    return rows


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _train(workload: Workload, device: torch.device, steps: int, warmup: int) -> tuple[list[float], int]:
    """Seconds of each timed step, and the allocator's peak in bytes."""
    # With transformers' model classes, which import torchao: a broken torchao must not cost other suites their rows.
    from octavo.build import BuildOptions, build_model

    case = workload.case
    options = BuildOptions(
        dtype=torch.bfloat16, params_dtype=torch.bfloat16, recompute=workload.recompute, mlp_chunks=workload.mlp_chunks,
        offload=workload.offload,
    )  # fmt: skip
    model = build_model(case.hf_config(), options, device=device)
    optimizer = AdamW(model.parameters(), **ADAMW)
    seconds = []
    for step in range(warmup + steps):
        ids = torch.randint(case.spec.vocabulary, (case.batch, case.sequence_length), device=device)
        if step == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _wait(device)
        begun = time.perf_counter()
        with fp8_autocast(fp8_recipe=DelayedScaling()):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(device)
        seconds += [time.perf_counter() - begun] if step >= warmup else []
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return seconds, peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
