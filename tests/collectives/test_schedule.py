"""The spans of the ranks are each pair of a query and a key that it may see, once; documents and windows by chance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.collectives.schedule import Split, diagonal, earlier, ring
from octavo.kernels.attention.pattern import Pattern, Span, merged, pattern_of


def pairs(spans, queries, keys, samples, window=None):
    """How often each pair [samples, queries, keys] is in the spans."""
    found = torch.zeros(samples, queries, keys, dtype=torch.int64)
    for span in spans:
        rows, columns = torch.arange(span.q1 - span.q0)[:, None], torch.arange(span.k1 - span.k0)
        seen = torch.ones(len(rows), columns.shape[0], dtype=torch.bool)
        behind = rows + (columns.shape[0] - len(rows)) - columns
        if span.causal:
            seen &= behind >= 0
            if window is not None:
                seen &= behind < window
        found[span.b0 : span.b1, span.q0 : span.q1, span.k0 : span.k1] += seen.long()
    return found


def positions(split, rank=None):
    """The place in the sequence of each of a rank's tokens."""
    return torch.cat([torch.arange(n * split.chunk, (n + 1) * split.chunk) for n in split.chunks(rank)])


@st.composite
def patterns(draw, windows=True):
    size = draw(st.integers(1, 4))
    tokens = 2 * size * draw(st.integers(1, 6))
    samples = draw(st.integers(1, 3))
    documents = ()
    if draw(st.booleans()):
        documents = tuple(
            (0, *sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=6)))) if tokens > 1 else (0,) for _ in range(samples)
        )
    window = draw(st.none() | st.integers(1, tokens)) if windows else None
    return Pattern(tokens, documents=documents).with_window(window), samples, size


@settings(deadline=None)
@given(patterns())
def test_a_chunk_and_those_before_it_are_every_pair_once(case):
    pattern, samples, size = case
    wanted = pattern.mask(samples, torch.device("cpu"))[:, 0]
    for rank in range(size):
        split = Split(rank, size, pattern.tokens)
        own = positions(split)
        found = torch.zeros(samples, len(own), pattern.tokens, dtype=torch.int64)
        found[:, :, own] += pairs(diagonal(pattern, samples, split), len(own), len(own), samples, pattern.window)
        for plan in earlier(pattern, samples, split):
            if plan is not None:
                keys = slice(plan.low * split.chunk, plan.high * split.chunk)
                assert plan.high <= 2 * size
                found[:, :, keys] += pairs(plan.spans, len(own), keys.stop - keys.start, samples, pattern.window)
        assert torch.equal(found, wanted[:, own].long())


@settings(deadline=None)
@given(patterns(windows=False))
def test_a_ring_meets_every_pair_once(case):
    pattern, samples, size = case
    wanted = pattern.mask(samples, torch.device("cpu"))[:, 0]
    for rank in range(size):
        split = Split(rank, size, pattern.tokens)
        own = positions(split)
        for source in range(size):
            theirs = positions(split, source)
            found = pairs(ring(pattern, samples, split, source), len(own), len(theirs), samples)
            assert torch.equal(found, wanted[:, own][:, :, theirs].long())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_has_as_many_pairs(size):
    pattern = Pattern(2 * size * 8)
    counts = set()
    for rank in range(size):
        split = Split(rank, size, pattern.tokens)
        plans = [plan.spans for plan in earlier(pattern, 1, split) if plan is not None]
        spans = [*diagonal(pattern, 1, split), *(span for found in plans for span in found)]
        counts.add(sum(pairs([span], 16, pattern.tokens, 1).sum().item() for span in spans))
    assert len(counts) == 1


def test_neighbouring_rectangles_are_one_call():
    four = [Span(0, 2, q, q + 4, k, k + 4, False) for q in (0, 4) for k in (0, 4)]
    rows = merged(four)
    assert rows == [Span(0, 2, 0, 4, 0, 8, False), Span(0, 2, 4, 8, 0, 8, False)]
    assert merged(rows) == [Span(0, 2, 0, 8, 0, 8, False)]
    assert merged([Span(0, 1, 0, 4, 0, 4, True), Span(0, 1, 0, 4, 4, 8, False)])[0].causal


def test_positions_and_padding_make_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]])
    assert pattern_of(positions, None, 2, 6).documents == ((0, 3, 5), (0,))
    assert pattern_of(positions[1:], None, 1, 6) == Pattern(6)
    padding = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    assert pattern_of(None, padding, 2, 6).documents == ((0, 2, 5), (0,))
    assert pattern_of(positions, padding, 2, 6).documents == ((0, 2, 3, 5), (0,))
    assert pattern_of(None, None, 2, 6, padded_to=8).documents == ((0, 6, 7), (0, 6, 7))


def test_positions_and_padding_cost_one_copy_to_the_host(monkeypatch):
    copies, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x.shape) or cpu(x))
    positions, padding = torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1]])
    for pair in ((positions, padding), (positions, None), (None, padding)):
        pattern_of(*pair, 2, 6)
        assert copies.pop()
        assert not copies


@pytest.mark.parametrize("row", [[1, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 1]])
def test_padding_inside_a_sequence_is_no_interval(row):
    real = torch.tensor([row])
    pattern = pattern_of(None, real, 1, 4)
    mask = pattern.mask(1, torch.device("cpu"))[0, 0]
    wanted = torch.ones(4, 4).tril().bool() & (real.bool() | torch.eye(4).bool())
    assert torch.equal(mask, wanted)
