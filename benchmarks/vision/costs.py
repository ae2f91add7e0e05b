"""Speed and cost of training ViT-Huge: the published rows, and those of a measurement beside them.

A row's cost is that of its share of a machine: dollars of a GPU and hour over images of a GPU and hour. Costs are not stored:
they follow from rows and prices. The published speeds are step times with timm's blocks in bf16, and gains in percent: of
Transformer Engine's block, then of FP8. They are taken off the time of an image, since the published conclusions follow only
so; `gained_speed` has the other reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.vision.prices import EXAMPLE, PUBLISHED_PRICES, Price, price_of

PUBLISHED_BATCH = 64
PUBLISHED_GPUS = 8
PUBLISHED_SECONDS = {"A100": 0.41, "H100": 0.199}
"""Of a step with timm's blocks in bf16."""
BLOCK_PERCENT = {"A100": 19, "H100": 32}
"""The gain of Transformer Engine's block in bf16 over timm's."""
FP8_PERCENT = 20
"""The gain of FP8 with twice the batch over Transformer Engine's block in bf16; H100 alone: an A100 has no FP8 units."""
_PUBLISHED: tuple[tuple[str, str, int, tuple[int, ...]], ...] = (
    ("A100", "timm, bf16", PUBLISHED_BATCH, ()),
    ("H100", "timm, bf16", PUBLISHED_BATCH, ()),
    ("A100", "Transformer Engine, bf16", PUBLISHED_BATCH, (BLOCK_PERCENT["A100"],)),
    ("H100", "Transformer Engine, bf16", PUBLISHED_BATCH, (BLOCK_PERCENT["H100"],)),
    ("H100", "Transformer Engine, FP8", 2 * PUBLISHED_BATCH, (BLOCK_PERCENT["H100"], FP8_PERCENT)),
)
"""GPU, entry, batch and gains."""
COMPARABLE = ("vit-huge-patch16", "vit-huge-patch16-b64")
"""Workloads with the published model's tokens: their costs are of the same images."""


@dataclass(frozen=True)
class CostRow:
    """One row of the table.

    Attributes:
        figures: "published" or "measured".
        machine: number and name of the GPUs.
        workload: of the vision suite.
        entry: implementation and precision.
        batch: images of a GPU in a step.
        images_per_second: of one GPU.
        gpus: in the measurement.
        price: of the machine; None: not known.
    """

    figures: str
    machine: str
    workload: str
    entry: str
    batch: int
    images_per_second: float
    gpus: int
    price: Price | None

    @property
    def total(self) -> float:
        """Images a second of all GPUs."""
        return self.images_per_second * self.gpus

    @property
    def dollars(self) -> float | None:
        """Of a million images."""
        return None if self.price is None else self.price.per_million(self.images_per_second)

    @property
    def relative(self) -> float | None:
        """Images of a dollar in percent of the first published row's, for the same work."""
        baseline = PUBLISHED[0].dollars
        if self.dollars is None or baseline is None or self.workload not in COMPARABLE:
            return None
        return 100 * baseline / self.dollars


def shorter_steps(percent: int) -> float:
    """The factor of speed of a gain that is taken off the time."""
    return 1 / (1 - percent / 100)


def gained_speed(percent: int) -> float:
    """The factor of speed of a gain that is added to the speed."""
    return 1 + percent / 100


def published(read: Callable[[int], float] = shorter_steps) -> tuple[CostRow, ...]:
    """The published rows, with their gains read as these factors of speed."""
    prices = dict(zip(PUBLISHED_SECONDS, PUBLISHED_PRICES, strict=True))
    rows = []
    for gpu, entry, batch, gains in _PUBLISHED:
        rate = PUBLISHED_BATCH / PUBLISHED_SECONDS[gpu] * math.prod(read(percent) for percent in gains)
        workload = COMPARABLE[0] if batch == 2 * PUBLISHED_BATCH else COMPARABLE[1]
        machine = f"{PUBLISHED_GPUS} x {gpu}"
        rows.append(CostRow("published", machine, workload, entry, batch, rate, PUBLISHED_GPUS, prices[gpu]))
    return tuple(rows)


PUBLISHED = published()
"""The first is the baseline of `CostRow.relative`."""


def measured(results: Mapping[str, Any]) -> list[CostRow]:
    """The rows of a document of the vision suite, by the prices that it holds; failed entries have none."""
    gpu = results["machine"]["gpu"]
    price = price_of(gpu, _prices(results))
    return [
        CostRow(
            "measured",
            f"{row['gpus']} x {gpu.removeprefix('NVIDIA ')}" if gpu else f"CPU, {row['gpus']} ranks",
            row["workload"],
            row["entry"],
            row["batch"],
            row["images_per_second"],
            row["gpus"],
            price,
        )
        for row in results["rows"]
        if "error" not in row
    ]


def with_published(rows: Sequence[CostRow]) -> list[CostRow]:
    """Measured rows, below the published ones if any is of the same work."""
    return [*(PUBLISHED if any(row.workload in COMPARABLE for row in rows) else ()), *rows]


def figures_of(row: CostRow) -> tuple[str, ...]:
    """Images a second of a GPU and of all, dollars of a million images, images of a dollar beside the baseline's; "-"."""
    return (
        f"{row.images_per_second:,.0f}",
        f"{row.total:,.0f}",
        "-" if row.dollars is None else f"{row.dollars:.2f}",
        "-" if row.relative is None else f"{row.relative:.1f}%",
    )


FIGURES = ("img/s a GPU", "img/s", "$ a million img", "per $")
"""Titles of `figures_of`."""


def unpriced(results: Mapping[str, Any]) -> str | None:
    """A message about the machine of a document if its GPU has no price; None if it has one, and for a CPU."""
    gpu = results["machine"]["gpu"]
    if gpu is None or price_of(gpu, _prices(results)) is not None:
        return None
    return f"no price of {gpu} is known, so there is no cost: give one with --prices FILE.toml, {EXAMPLE}."


def _prices(results: Mapping[str, Any]) -> list[Price]:
    return [Price(**record) for record in results["prices"]]
