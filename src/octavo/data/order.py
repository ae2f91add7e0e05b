"""Order of samples: which sequence each sample of a run is, from one source or several weighted ones.

Sample g of a run is drawn from a source by its weight; within the source it is sequence `permutation(seed, epoch)[position]` of
its n sequences, with (epoch, position) = divmod(number of earlier samples from this source, n). Each source thus counts its
epochs separately, and the state of the data is one integer.

The source of a sample follows from its number alone: at each node of a binary tree over the sources, samples are divided in two
by rounding. The tree is Huffman's, in which weights grow with each level at least like Fibonacci numbers: at any sample, the
count of a source differs from its share by less than half the sum of their reciprocals, 1.68. Not supported: weights that
change during a run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from octavo.data import rng

Int64 = npt.NDArray[np.int64]

_EPOCHS = 2**40
"""Streams of random numbers per source: one per epoch."""


@dataclass(frozen=True)
class _Node:
    """A source, or an inner node with two subtrees; weight: an integer."""

    weight: int
    source: int = -1
    halves: tuple[_Node, _Node] | None = None

    def first_half(self, samples: int) -> int:
        """The number of this node's first `samples` samples that go to the first half."""
        assert self.halves is not None
        return (2 * samples * self.halves[0].weight + self.weight) // (2 * self.weight)


class Mixture:
    """Division of samples among sources by weight: in exact arithmetic, the same on every machine.

    Args:
        weights: one positive number per source, on any scale, taken as decimals: 0.1 is exactly a tenth.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(repr(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        heap = [(int(weight * scale), source, _Node(int(weight * scale), source)) for source, weight in enumerate(exact)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (_, first, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
            joined = _Node(one.weight + other.weight, halves=(one, other))
            heapq.heappush(heap, (joined.weight, len(exact) + first, joined))
        self._root = heap[0][2]
        self._sources = len(exact)

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the number of earlier samples from it."""
        node = self._root
        while node.halves is not None:
            one, other = node.halves
            before = node.first_half(sample)
            node, sample = (one, before) if node.first_half(sample + 1) > before else (other, sample - before)
        return node.source, sample

    def counts(self, samples: int) -> list[int]:
        """The number of samples from each source among the first `samples`; their sum is `samples`."""
        counts = [0] * self._sources
        open_nodes = [(self._root, samples)]
        while open_nodes:
            node, count = open_nodes.pop()
            if node.halves is None:
                counts[node.source] = count
            else:
                first = node.first_half(count)
                open_nodes += [(node.halves[0], first), (node.halves[1], count - first)]
        return counts


class SampleOrder:
    """The sequences of a split in the order of training, by number of the sample.

    Args:
        sequences: number of sequences of each source; they are numbered source by source.
        weights: one per source; ignored for a single source.
        seed: seed of the permutations.
    """

    def __init__(self, sequences: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self._sequences = list(sequences)
        self._weights = list(weights)
        self._first = [0, *np.cumsum(self._sequences).tolist()]
        self._mixture = Mixture(weights)
        self._seed = seed
        # A step spans at most two epochs of a source, unless epochs are tiny.
        self._permutation = lru_cache(maxsize=2 * len(self._sequences))(self._shuffled)

    def __getitem__(self, sample: int) -> int:
        source, earlier = self._mixture.locate(sample)
        epoch, position = divmod(earlier, self._sequences[source])
        return self._first[source] + int(self._permutation(source, epoch)[position])

    def epochs(self, samples: int) -> list[float]:
        """The epochs of each source in the first `samples` samples."""
        counts = self._mixture.counts(samples)
        return [count / sequences for count, sequences in zip(counts, self._sequences, strict=True)]

    def once(self) -> Int64:
        """Every sequence once, each source in its order, interleaved by weight until all are exhausted."""
        turns = [(np.arange(n) + 0.5) / weight for n, weight in zip(self._sequences, self._weights, strict=True)]
        return np.argsort(np.concatenate(turns), kind="stable")

    def _shuffled(self, source: int, epoch: int) -> Int64:
        return rng.generator(self._seed, source * _EPOCHS + epoch).permutation(self._sequences[source])
