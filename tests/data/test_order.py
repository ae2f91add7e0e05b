"""Which sequence a sample is: the shares of sources are their weights, and each source has epochs of its own."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.data.order import Mixture, SampleOrder

WEIGHTS = st.lists(st.floats(1e-6, 1e6) | st.integers(1, 10).map(float), min_size=1, max_size=12)


@settings(deadline=None, max_examples=40)
@given(WEIGHTS, st.integers(0, 10**12))
@example([1.0] * 12, 7)
@example([2.0**k for k in range(12)], 0)
def test_every_source_has_its_share_at_any_sample(weights, first):
    mixture = Mixture(weights)
    before = mixture.counts(first)
    total = sum(map(Fraction, weights))
    for sample in range(first, first + 50):
        source, earlier = mixture.locate(sample)
        assert earlier == before[source]
        before[source] += 1
        assert before == mixture.counts(sample + 1)
        for weight, count in zip(weights, before, strict=True):
            assert abs(count - Fraction(weight) / total * (sample + 1)) < 1.7


def test_two_sources_take_turns_as_evenly_as_their_weights_allow():
    mixture = Mixture([0.7, 0.3])
    turns = [mixture.locate(sample)[0] for sample in range(10)]
    assert Counter(turns) == {0: 7, 1: 3}
    assert turns * 5 == [mixture.locate(sample)[0] for sample in range(50)]
    assert [mixture.locate(10**15 + sample)[0] for sample in range(10)] == turns
    assert max(np.diff([sample for sample in range(50) if (turns * 5)[sample] == 1])) == 4


def test_weights_have_any_scale_and_mean_their_decimal_digits():
    for same in ([7, 3], [70.0, 30.0], [7e-9, 3e-9]):
        assert [Mixture(same).locate(s) for s in range(100)] == [Mixture([0.7, 0.3]).locate(s) for s in range(100)]
    assert Mixture([0.1, 0.2]).counts(3 * 10**18) == [10**18, 2 * 10**18]  # 0.1 as a binary fraction would be above a tenth
    assert Mixture([1e-300, 1.0]).counts(10**6) == [0, 10**6]


def test_one_source_is_in_the_order_of_older_runs():
    """The definition that runs without weights have had: a permutation an epoch, keyed by (seed, epoch)."""
    order = SampleOrder([9], [1], seed=2**64 - 1)
    for epoch in (0, 1, 5):
        key = np.array([2**64 - 1, epoch], np.uint64)
        expected = np.random.Generator(np.random.Philox(key=key)).permutation(9)
        assert [order[9 * epoch + i] for i in range(9)] == expected.tolist()


def test_each_source_has_epochs_and_permutations_of_its_own():
    order = SampleOrder([10, 4, 10], [0.5, 0.4, 0.1], seed=3)
    samples = [order[sample] for sample in range(400)]
    by_source = [[s for s in samples if first <= s < last] for first, last in ((0, 10), (10, 14), (14, 24))]
    assert [len(found) for found in by_source] == [200, 160, 40]
    assert order.epochs(400) == [20.0, 40.0, 4.0]
    assert order.epochs(10) == [0.5, 1.0, 0.1]
    for found, n in zip(by_source, (10, 4, 10), strict=True):
        epochs = [found[at : at + n] for at in range(0, len(found), n)]
        assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == n for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 2
    assert by_source[0][:10] != [s - 14 for s in by_source[2][:10]]  # sources of one size are not in step
    assert [order[sample] for sample in (399, 0, 237)] == [samples[399], samples[0], samples[237]]


@pytest.mark.parametrize(("sequences", "weights"), [([5], [1]), ([5, 3], [1, 1]), ([2, 0, 20], [3, 1, 1])])
def test_once_has_every_sequence_once_by_weight_while_there_are_some(sequences, weights):
    found = SampleOrder(sequences, weights, 0).once().tolist()
    assert sorted(found) == list(range(sum(sequences)))
    edges = np.cumsum([0, *sequences])
    sources = [int(np.searchsorted(edges, s, side="right")) - 1 for s in found]
    for source in set(sources):
        assert [s for s, at in zip(found, sources, strict=True) if at == source] == list(
            range(edges[source], edges[source + 1])
        )
    if len(sequences) == 2:
        assert sources == [0, 1, 0, 1, 0, 1, 0, 0]
