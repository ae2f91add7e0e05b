"""The schedule of attention over a sequence that is split over n ranks: pure functions on the host.

A sequence is 2n chunks of C tokens; rank r holds the chunks r and 2n−1−r, in this order. Every rank then has the same number of
causal pairs of a query and an earlier key, and its tokens stay in order. Positions of queries are among this rank's 2C tokens;
each function documents those of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from octavo.kernels.attention.pattern import Pattern, Span, merged


class Split(NamedTuple):
    """This rank's part of sequences of `tokens` tokens over `size` ranks."""

    rank: int
    size: int
    tokens: int

    @property
    def chunk(self) -> int:
        """C, the tokens of a chunk."""
        return self.tokens // (2 * self.size)

    def chunks(self, rank: int | None = None) -> tuple[int, int]:
        """The numbers of a rank's two chunks."""
        rank = self.rank if rank is None else rank
        return rank, 2 * self.size - 1 - rank


class Earlier(NamedTuple):
    """Spans of a chunk's queries outside `diagonal`; keys are counted from the first token of chunk `low`."""

    low: int
    high: int  # one past the last chunk that is read
    spans: tuple[Span, ...]


@functools.lru_cache(maxsize=16)
def diagonal(pattern: Pattern, batch: int, split: Split) -> tuple[Span, ...]:
    """Pairs within each chunk, with keys counted among this rank's tokens; under a window without the rows of `earlier`."""
    spans = []
    for half, b0, b1, first, end, start in _documents(pattern, batch, split):
        if pattern.window is not None and start < first:
            continue  # `earlier` has one call, with keys from before the chunk up to the query itself
        at = half * split.chunk + max(first, start) - split.chunks()[half] * split.chunk
        spans.append(Span(b0, b1, at, at + end - max(first, start), at, at + end - max(first, start), pattern.causal))
    return tuple(spans)


@functools.lru_cache(maxsize=64)
def earlier(pattern: Pattern, batch: int, split: Split) -> tuple[Earlier | None, Earlier | None]:
    """For each of this rank's two chunks, its pairs with keys of earlier chunks; None without any.

    Without a window they are full rectangles over earlier chunks, and `diagonal` has the rest. With one they are causal and
    reach to the query itself.
    """
    spans: list[list[Span]] = [[], []]
    for half, b0, b1, first, end, start in _documents(pattern, batch, split):
        if start >= first:
            continue
        at = half * split.chunk
        rows = at, at + end - first
        if pattern.window is None:
            spans[half].append(Span(b0, b1, *rows, start, first, False))
        else:
            spans[half].append(Span(b0, b1, *rows, max(start, first - pattern.window + 1), end, True))
    return _based(spans[0], split.chunk), _based(spans[1], split.chunk)


def _based(spans: list[Span], chunk: int) -> Earlier | None:
    """Spans with keys counted from the first chunk that they read."""
    if not spans:
        return None
    low = min(span.k0 for span in spans) // chunk
    high = -(-max(span.k1 for span in spans) // chunk)
    base = low * chunk
    return Earlier(low, high, tuple(span._replace(k0=span.k0 - base, k1=span.k1 - base) for span in spans))


@functools.lru_cache(maxsize=64)
def ring(pattern: Pattern, batch: int, split: Split, source: int) -> tuple[Span, ...]:
    """Pairs of this rank's queries with the keys of rank `source`, counted among that rank's tokens."""
    spans = []
    if source == split.rank:  # a document's tokens on this rank are neighbours, in order
        for b0, b1, start, end in _all_documents(pattern, batch):
            first, last = (_at(split, position) for position in (start, end))
            if first < last:
                spans.append(Span(b0, b1, first, last, first, last, True))
        return tuple(spans)
    for half, b0, b1, first, end, start in _documents(pattern, batch, split):
        rows = half * split.chunk + max(first, start) - split.chunks()[half] * split.chunk
        for place, number in enumerate(split.chunks(source)):
            keys = max(start, number * split.chunk), (number + 1) * split.chunk
            if number < split.chunks()[half] and keys[0] < keys[1]:
                shift = (place - number) * split.chunk
                spans.append(Span(b0, b1, rows, rows + end - max(first, start), keys[0] + shift, keys[1] + shift, False))
    return tuple(merged(spans))


def _at(split: Split, position: int) -> int:
    """The number of this rank's tokens before a position of the sequence."""
    return sum(min(max(position - number * split.chunk, 0), split.chunk) for number in split.chunks())


def _all_documents(pattern: Pattern, batch: int) -> Iterator[tuple[int, int, int, int]]:
    """(b0, b1, first token, end) of each document."""
    if not pattern.documents:
        yield 0, batch, 0, pattern.tokens
        return
    for sample in range(batch):
        for start, end in pattern.bounds(sample):
            yield sample, sample + 1, start, end


def _documents(pattern: Pattern, batch: int, split: Split) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(0 or 1 for the chunk, b0, b1, the chunk's first token, the document's end in it, the document's first token)."""
    for half, number in enumerate(split.chunks()):
        first, last = number * split.chunk, (number + 1) * split.chunk
        for b0, b1, start, end in _all_documents(pattern, batch):
            if start < last and end > first:
                yield half, b0, b1, first, min(end, last), start
