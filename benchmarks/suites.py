"""The table of suites: entries, workloads and number of ranks of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import memory
from benchmarks.cases import CASES, CONTEXT_CASES, LORA_CASES, VISION_CASES
from benchmarks.kernels import attention, products
from benchmarks.lora import LORA
from benchmarks.peers import ENTRIES, Entry
from benchmarks.sharded import CONTEXT, SHARDED
from benchmarks.vision.replicas import REPLICAS
from octavo.bench.kernels import KERNELS
from octavo.bench.layers import LAYERS, SETTLING


@dataclass(frozen=True)
class Suite:
    """One row of the table.

    Attributes:
        name: in the results.
        entries: by name; a suite without entries runs in one process.
        known: all workloads, by name.
        cases: default workloads; on a CPU `tiny` for a suite with entries.
        ranks: minimum and maximum of processes of an entry; None: the number of GPUs.
        usual: default entries; empty: all.
        steps, warmup: default numbers of timed steps and of steps before them.
        tiny: default workload on a CPU.
        replicated: each rank has the whole model, and `octavo.init` shards nothing.
        alone: one rank, unless more are asked for.
    """

    name: str
    entries: Mapping[str, Entry]
    known: Mapping[str, Any]
    cases: tuple[str, ...]
    ranks: tuple[int, int | None] = (1, 1)
    usual: tuple[str, ...] = ()
    steps: int = 20
    warmup: int = 5
    tiny: str = "tiny"
    replicated: bool = False
    alone: bool = False


_OWN_SHARDED = {name: entry for name, entry in SHARDED.items() if name.startswith("octavo-")}

_ALONE = {name: case for name, case in CASES.items() if case.expert == case.tensor == 1}

_SPLIT = ("llama-8b-16k", "llama-8b-16k-cp2", "llama-8b-32k", "llama-8b-32k-cp2", "llama-8b-128k-cp2", "llama-8b-256k-cp2")
_VITS = ("vit-huge-patch16", "vit-huge-patch16-b64", "vit-huge")

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "one-gpu", ENTRIES, {**_ALONE, **VISION_CASES}, ("llama-1b", "llama-8b-8layers", "llama2-7b-8layers", "vit-huge")
        ),
        Suite("lora", LORA, LORA_CASES, ("llama-8b-lora", "llama-70b-lora"), (1, None), tiny="tiny-lora", steps=10, alone=True),
        Suite("sharded", SHARDED, CASES, ("llama-8b-8k", "llama-8b-16k"), (1, None)),
        Suite("context", CONTEXT, CONTEXT_CASES, _SPLIT, (2, None)),
        # The published measurement averages the steps after the 10th to the 50th.
        Suite("vision", REPLICAS, VISION_CASES, _VITS, (1, None), steps=40, warmup=10, tiny="tiny-vit", replicated=True),
        Suite("checkpoint", _OWN_SHARDED, CASES, ("llama-8b-8k",), (1, None), usual=("octavo-delayed",)),
        # Kernels are compared with the device's copy, products with PyTorch's choice of an algorithm.
        Suite("kernels", {}, KERNELS, tuple(KERNELS), steps=100, warmup=10),
        Suite("products", {}, products.WORKLOADS, tuple(products.WORKLOADS), steps=20, warmup=3),
        Suite("attention", {}, attention.WORKLOADS, tuple(attention.WORKLOADS), steps=20, warmup=3),
        Suite("memory", {}, memory.WORKLOADS, memory.USUAL, steps=5, warmup=2),
        # Errors instead of times: a step is a seed, and the warm-up settles delayed scaling.
        Suite("layers", {}, LAYERS, tuple(LAYERS), steps=3, warmup=SETTLING),
    )
}
