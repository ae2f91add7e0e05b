"""A sliding window as triangles and rectangles, for kernels with only causal and full attention.

Rows of W queries attend to a triangle of their W keys, and to the part of the previous W − 1 keys that is still in the window:
the mirror image of a triangle. With queries and keys in reverse order it is causal attention too. So a window costs as many
products as it has pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.kernels.attention.pattern import Span


def tiles(span: Span, window: int) -> Iterator[Span]:
    """Split a causal span, with at least as many keys as queries, into spans in which each query sees at most `window` keys.

    Each causal result has as many keys as queries.
    """
    for tile in _tiles(span.q1 - span.q0, span.k1 - span.k0, window):
        q0, q1, k0, k1, causal, mirrored = tile
        at = q0 + span.q0, q1 + span.q0, k0 + span.k0, k1 + span.k0
        yield Span(span.b0, span.b1, *at, causal, mirrored)


def _tiles(queries: int, keys: int, window: int) -> Iterator[tuple[int, int, int, int, bool, bool]]:
    """(q0, q1, k0, k1, causal, reversed): query i sees the last `window` of the keys up to i + keys − queries."""
    ahead = keys - queries
    for first in range(0, queries, window):
        end = min(first + window, queries)
        rows, diagonal = end - first, first + ahead
        yield first, end, diagonal, end + ahead, True, False
        # Key base + u is seen by row r if r ≤ u; u goes from the first key that there is, to window − 2.
        base = diagonal - window + 1
        low = max(0, -base)
        if (u := max(rows - 1, low)) < window - 1:
            yield first, end, base + u, diagonal, False, False
        if 0 < low < rows - 1:
            yield first, first + low, base + low, base + rows - 1, False, False
        if low < rows - 1:
            yield first + low, end - 1, base + low, base + rows - 1, True, True
