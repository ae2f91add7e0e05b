"""Attention alone, forward and backward, by each kernel that Octavo may take; windows and documents beside plain causal.

All kernels of a workload run in turns on the same random tensors, and medians count. TFLOP/s are of the pairs of a query and a
key that attend: 4·D a pair and head in forward, 10·D in backward, which recomputes the logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.bench.kernels import cold_timer
from octavo.errors import recorded
from octavo.kernels.attention import flash
from octavo.kernels.attention.pattern import Pattern
from octavo.nn.attend import attend, backend


class Workload(NamedTuple):
    """Causal attention of a batch: heads is query heads, groups key-value heads.

    document: mean length of documents, drawn uniformly up to its double; 0 for one document a sample.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    groups: int
    head_dim: int
    window: int | None = None
    document: int = 0

    def pattern(self) -> Pattern:
        """The attention pattern, the same at each call."""
        draw = random.Random(0)
        documents = tuple(tuple(self._firsts(draw)) for _ in range(self.batch)) if self.document else ()
        return Pattern(self.tokens, documents=documents).with_window(self.window)

    def _firsts(self, draw: random.Random) -> Iterator[int]:
        first = 0
        while first < self.tokens:
            yield first
            first += draw.randint(1, 2 * self.document - 1)

    def pairs(self) -> int:
        """Pairs of a query and a key that attend, of one head."""
        pattern = self.pattern()
        return sum(
            sum(min(row + 1, self.window or self.tokens) for row in range(end - first))
            for sample in range(self.batch)
            for first, end in pattern.bounds(sample)
        )


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("llama-1b-4k", 4, 4096, 32, 8, 64),
        Workload("neox-20b-2k", 8, 2048, 64, 64, 96),
        Workload("llama-8b-8k", 2, 8192, 32, 8, 128),
        Workload("llama-8b-16k", 1, 16_384, 32, 8, 128),
        Workload("llama-8b-16k-window-4k", 1, 16_384, 32, 8, 128, window=4096),
        Workload("llama-8b-16k-documents-4k", 1, 16_384, 32, 8, 128, document=4096),
        Workload("llama-8b-64k", 1, 65_536, 32, 8, 128),
    )
}


def measure_attention(
    workloads: Iterable[Workload], device: torch.device, *, iterations: int, warmup: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each kernel of each workload, or its error; one for a workload that fails before any kernel runs."""
    time = cold_timer(device, iterations, max(1, warmup))
    rows: list[dict[str, Any]] = []
    for workload in workloads:
        found: dict[str, dict[str, Any]] = {}
        whole = _row(workload, "octavo")
        with recorded(whole, workload.name, say):
            _measure(workload, device, time, found, say)
        rows += found.values()
        if "error" in whole:
            # Kernels that ran are timed in turns: without one's time none has any.
            untimed = [row for row in found.values() if not {"error", "tflops"} & row.keys()]
            for row in untimed:
                row["error"] = whole["error"]
            rows += [] if untimed else [whole]
    return rows


def _row(workload: Workload, name: str) -> dict[str, Any]:
    return {"workload": workload.name, "entry": name, "shape": [*workload[1:6]], "pairs": workload.pairs()}


def _measure(
    workload: Workload,
    device: torch.device,
    time: Callable[..., list[float]],
    found: dict[str, dict[str, Any]],
    say: Callable[[str], None],
) -> None:
    """Add to `found` the row of each kernel by its name."""
    calls: dict[str, list[Callable[[], None]]] = {}
    tensors = _draw(workload, device)
    for allowed in (True, False):
        with _flash(allowed):
            name = backend(tensors[0], tensors[1], workload.pattern())
        if name not in found:
            row = found[name] = _row(workload, name)
            with recorded(row, f"{workload.name} {name}", say):
                calls[name] = _calls(tensors, workload.pattern(), allowed=allowed)
    times = time(*(call for pair in calls.values() for call in pair)) if calls else []
    pairs = workload.pairs() * workload.heads * workload.head_dim
    for number, name in enumerate(calls):
        forward, backward = times[2 * number : 2 * number + 2]
        found[name] |= {
            "forward_us": forward, "backward_us": backward, "forward_tflops": 4 * pairs / forward / 1e6,
            "backward_tflops": 10 * pairs / backward / 1e6, "tflops": 14 * pairs / (forward + backward) / 1e6,
        }  # fmt: skip
        say(f"{workload.name} {name}: {forward:.0f} us, backward {backward:.0f} us, {found[name]['tflops']:.0f} TFLOP/s")


def _draw(workload: Workload, device: torch.device) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    heads = (workload.heads, workload.groups, workload.groups, workload.heads)
    shape = workload.batch, workload.tokens
    return [torch.randn(*shape, count, workload.head_dim, device=device, dtype=torch.bfloat16) for count in heads]


def _calls(tensors: list[Tensor], pattern: Pattern, *, allowed: bool) -> list[Callable[[], None]]:
    """A forward, and its backward, which may be called repeatedly; both ran once, so that an error names this kernel."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    with _flash(allowed):
        out = attend(q, k, v, pattern, scale=None)

    def forward() -> None:
        with torch.no_grad(), _flash(allowed):
            attend(q, k, v, pattern, scale=None)

    def backward() -> None:
        with _flash(allowed):
            torch.autograd.grad(out, (q, k, v), tensors[3], retain_graph=True)

    forward()
    backward()
    return [forward, backward]


@contextmanager
def _flash(allowed: bool) -> Iterator[None]:
    before = flash.enabled()
    flash.enable(allowed and before)
    try:
        yield
    finally:
        flash.enable(before)
