"""Matrix products that two contestants run: their sizes, and those of the blocks that the suite of products measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Contest = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""A product by PyTorch and by Octavo."""


class Workload(NamedTuple):
    """The linear layers of one block: tokens a step, (columns in, columns out) of each; of experts if top_k is above 0."""

    name: str
    tokens: int
    layers: tuple[tuple[int, int], ...]
    experts: int = 0
    top_k: int = 0


class Product(NamedTuple):
    """a [rows, summed] · b [columns, summed]ᵀ, in FP8 with the formats of a and b.

    Of experts: each has a separate b and the rows of the tokens routed to it, or in a weight gradient the sum over them;
    `rows` or `summed` counts the copies of tokens.
    """

    kind: str
    rows: int
    columns: int
    summed: int
    gradient: bool
    experts: int = 0
    top_k: int = 0

    @property
    def flops(self) -> int:
        """Multiplications and additions of one call."""
        return 2 * self.rows * self.columns * self.summed

    @property
    def tokens(self) -> int:
        """Tokens whose copies are the experts' rows."""
        return (self.summed if self.kind == "weight gradient" else self.rows) // self.top_k
