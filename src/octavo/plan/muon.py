"""FLOPs and memory of Muon's steps, for the dry run: pure functions of the shapes of matrices, without an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 5
"""Number of Newton-Schulz steps (`octavo.train.muon`)."""


def iteration_flops(rows: int, columns: int) -> int:
    """FLOPs of the five steps for a matrix: X·Xᵀ, its square, and their product with X; shorter side m: 4m²n + 2m³ a step."""
    short, long = sorted((rows, columns))
    return STEPS * (4 * short * short * long + 2 * short**3)


@dataclass(frozen=True)
class MuonWork:
    """The work of Muon on a model's matrices.

    Attributes:
        matrices: number of matrices.
        elements: elements of all matrices; largest: elements of the largest parameter, which may hold several matrices.
        square: the largest square of a matrix's shorter side.
        flops: FLOPs of a step, over all ranks.
    """

    matrices: int
    elements: int
    largest: int
    square: int
    flops: int


def muon_work(matrices: Sequence[tuple[int, int, int]], parameters: Sequence[int]) -> MuonWork:
    """The work from (number, rows, columns) of matrices, and the elements of each parameter."""
    return MuonWork(
        sum(count for count, *_ in matrices),
        sum(parameters),
        max(parameters),
        max(min(shape) ** 2 for _, *shape in matrices),
        sum(count * iteration_flops(*shape) for count, *shape in matrices),
    )
