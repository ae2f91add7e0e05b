"""The suites: which entries each compares, on what, over how many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.cases import ALL_CASES, CASES
from octavo.bench.kernels import KERNELS
from octavo.bench.layers import LAYERS, SETTLING
from octavo.bench.peers import ENTRIES, Entry
from octavo.bench.products import WORKLOADS
from octavo.bench.sharded import SHARDED


@dataclass(frozen=True)
class Suite:
    """One row of the table.

    Attributes:
        name: as the results name it.
        entries: what can be compared.
        usual: entries that are compared when none is named; none: all.
        cases: workloads on GPUs when none is named.
        cpu_cases: the same on a CPU.
        ranks: least and most processes of an entry; None: as many as there are GPUs.
        known: all workloads that can be named.
        steps, warmup: timed steps of each entry, and steps before them, where no number is given.
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
        # No entries: Octavo's kernels stand beside the device's copy.
        Suite("kernels", {}, tuple(KERNELS), (1, 1), known=KERNELS, steps=100, warmup=10),
        # PyTorch's choice of an algorithm stands beside Octavo's in each row.
        Suite("products", {}, tuple(WORKLOADS), (1, 1), known=WORKLOADS, steps=20, warmup=3),
        # Errors instead of times: a step is a seed, and warm-up is what delayed scaling needs.
        Suite("layers", {}, tuple(LAYERS), (1, 1), known=LAYERS, steps=3, warmup=SETTLING),
    )
}
