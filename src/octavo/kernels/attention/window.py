"""A sliding window as triangles and rectangles, for kernels that know only causal and full attention.

Rows of W queries see a triangle of their own keys, and of the W − 1 keys before them the part that the window still holds: the
mirror image of a triangle. With queries and keys in reverse order it is causal attention again. So a window costs as many
products as it has pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Tile(NamedTuple):
    """Queries q0 … q1 attend to keys k0 … k1: causal (as many keys as queries), or all; reversed: in reverse order of both."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    reversed: bool = False


def tiles(queries: int, keys: int, window: int) -> Iterator[Tile]:
    """All pairs of causal attention in which query i sees the last `window` of the keys up to i + keys − queries.

    keys ≥ queries.
    """
    ahead = keys - queries
    for first in range(0, queries, window):
        end = min(first + window, queries)
        rows, own = end - first, first + ahead
        yield Tile(first, end, own, end + ahead, True)
        # Key base + u is seen by row r if r ≤ u; u goes from the first key that there is, to window − 2.
        base = own - window + 1
        low = max(0, -base)
        if (u := max(rows - 1, low)) < window - 1:
            yield Tile(first, end, base + u, own, False)
        if 0 < low < rows - 1:
            yield Tile(first, first + low, base + low, base + rows - 1, False)
        if low < rows - 1:
            yield Tile(first + low, end - 1, base + low, base + rows - 1, True, reversed=True)
