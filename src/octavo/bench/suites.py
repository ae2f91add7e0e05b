"""The table of suites: entries, workloads and number of ranks of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.cases import ALL_CASES, CASES
from octavo.bench.kernels import KERNELS
from octavo.bench.layers.suite import LAYERS, SETTLING
from octavo.bench.peers import ENTRIES, Entry
from octavo.bench.products import WORKLOADS
from octavo.bench.sharded import SHARDED


@dataclass(frozen=True)
class Suite:
    """One row of the table.

    Attributes:
        name: as the results name it.
        entries: of the suite, by name.
        usual: default entries; empty: all.
        cases: default workloads on GPUs.
        cpu_cases: default workloads on a CPU.
        ranks: minimum and maximum of processes of an entry; None: the number of GPUs.
        known: all workloads, by name.
        steps, warmup: default numbers of timed steps and of steps before them.
    """

    name: str
    entries: Mapping[str, Entry]
    cases: tuple[str, ...]
    ranks: tuple[int, int | None]
    usual: tuple[str, ...] = ()
    cpu_cases: tuple[str, ...] = ("tiny",)
    known: Mapping[str, Any] = field(default_factory=lambda: CASES)
    steps: int = 20
    warmup: int = 5


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("one-gpu", ENTRIES, ("llama-1b", "llama-8b-8layers", "llama2-7b-8layers", "vit-huge"), (1, 1), known=ALL_CASES),
        Suite("sharded", SHARDED, ("llama-8b-8k", "llama-8b-16k"), (2, None)),
        Suite(
            "checkpoint",
            {name: entry for name, entry in SHARDED.items() if name.startswith("octavo-")},
            ("llama-8b-8k",),
            (1, None),
            usual=("octavo-delayed",),
        ),
        # No entries: kernels are compared with the device's copy.
        Suite("kernels", {}, tuple(KERNELS), (1, 1), known=KERNELS, steps=100, warmup=10),
        # PyTorch's choice of an algorithm stands beside Octavo's in each row.
        Suite("products", {}, tuple(WORKLOADS), (1, 1), known=WORKLOADS, steps=20, warmup=3),
        # Errors instead of times: a step is a seed, and the warm-up settles delayed scaling.
        Suite("layers", {}, tuple(LAYERS), (1, 1), known=LAYERS, steps=3, warmup=SETTLING),
    )
}
