"""Packing against a slow, independent restatement of what it promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.data import packing as packing_module
from octavo.data.packing import IGNORED, Batch, Sequences, join, pack_documents

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=25)


def _corpus(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<u8")
    return np.arange(1, offsets[-1] + 1, dtype="<u2"), offsets  # every token is its place in the corpus, plus 1


def _sequences(lengths, T, packing):
    tokens, offsets = _corpus(lengths)
    return Sequences(tokens, join(len(tokens), T) if packing == "join" else pack_documents(offsets, T), T, pad_id=0)


def _row(sequences, index):
    return Batch(*(array[0] for array in sequences.batch([index])))


def _pieces(lengths, T):
    """Documents cut every T tokens, as lists of tokens; pieces of one token say nothing and are left out."""
    found, at = [], 1
    for length in lengths:
        document = list(range(at, at + length))
        found += [document[cut : cut + T] for cut in range(0, length, T)]
        at += length
    return [piece for piece in found if len(piece) > 1]


def _unpack(sequence):
    """Runs of rising positions, as lists of tokens."""
    found = []
    for token, position in zip(sequence.input_ids.tolist(), sequence.position_ids.tolist(), strict=True):
        if position == 0:
            found.append([])
        assert position == len(found[-1])
        found[-1].append(token)
    return found


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(2, 17))
def test_documents_hold_every_piece_once_and_apart(lengths, T):
    sequences = _sequences(lengths, T, "documents")
    found, padded = [], 0
    for index in range(len(sequences)):
        sequence = _row(sequences, index)
        assert [len(array) for array in sequence[:3]] == [T] * 3
        expected_labels = []
        for run in _unpack(sequence):
            if run[0] == 0:
                padded += len(run)
                expected_labels += [IGNORED] * len(run)
            else:
                found.append(run)
                expected_labels += [IGNORED, *run[1:]]
        assert sequence.labels.tolist() == expected_labels
        assert sequence.lengths == sum(label != 0 for label in sequence.input_ids.tolist())
    assert sorted(found) == _pieces(lengths, T)
    assert int(sequences.packing.length_P.sum()) == len(sequences) * T - padded


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(2, 17))
def test_documents_are_packed_by_best_fit_in_decreasing_length(lengths, T):
    """As many sequences, filled alike, as the textbook algorithm that looks at every bin."""
    bins = []
    for piece in sorted(map(len, _pieces(lengths, T)), reverse=True):
        fitting = [room for room in bins if room >= piece]
        if fitting:
            bins.remove(min(fitting))
            bins.append(min(fitting) - piece)
        else:
            bins.append(T - piece)
    packing = pack_documents(_corpus(lengths)[1], T)
    filled = [int(packing.length_P[a:b].sum()) for a, b in zip(packing.first_S, packing.first_S[1:], strict=False)]
    assert sorted(T - fill for fill in filled) == sorted(bins)


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.integers(2, 17))
def test_joined_sequences_are_the_stream_cut_in_order(lengths, T):
    sequences = _sequences(lengths, T, "join")
    stream = list(range(1, sum(lengths) + 1))
    if len(stream) < T:
        expected = [stream + [0] * (T - len(stream))] if len(stream) > 1 else []
    else:
        expected = [stream[at : at + T] for at in range(0, len(stream) - T + 1, T)]
    assert [_row(sequences, i).input_ids.tolist() for i in range(len(sequences))] == expected
    for index in range(len(sequences)):
        input_ids, labels, positions = (array.tolist() for array in _row(sequences, index)[:3])
        real = T - input_ids.count(0)
        assert positions == [*range(real), *range(T - real)]
        assert labels == [IGNORED, *input_ids[1:real], *[IGNORED] * (T - real)]


def test_sequences_come_in_the_order_of_their_first_token():
    packing = pack_documents(_corpus([3, 9, 20, 2, 5, 8, 7])[1], 10)
    firsts = packing.start_P[packing.first_S[:-1]].tolist()
    assert firsts == sorted(firsts)
    for a, b in zip(packing.first_S, packing.first_S[1:], strict=False):
        assert packing.start_P[a:b].tolist() == sorted(packing.start_P[a:b].tolist())


def test_nothing_is_padded_where_documents_fit():
    sequences = _sequences([6, 4, 7, 3, 25], 10, "documents")
    assert (len(sequences), int(sequences.packing.length_P.sum())) == (5, 45)


@pytest.mark.parametrize("packing", ["join", "documents"])
def test_an_empty_split_has_no_sequences(packing):
    assert len(_sequences([], 8, packing)) == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(2, 16))
def test_real_tokens_are_those_of_documents(lengths, T):
    offsets = np.cumsum([0, *lengths])
    packing = pack_documents(offsets, T)
    if not len(packing):
        return
    batch = Sequences(np.full(offsets[-1], 5), packing, T, pad_id=7).batch(range(len(packing)))
    real = batch.real()
    assert torch.equal(batch.input_ids == 5, torch.ones_like(batch.labels).bool() if real is None else real)
    empty = batch._replace(lengths=torch.zeros_like(batch.lengths))  # of a rank without a sequence
    assert not empty.real().any()
    masked = batch._replace(labels=torch.full_like(batch.labels, IGNORED))  # tokens without a target are no padding
    assert (masked.real() is None) if real is None else torch.equal(masked.real(), real)


def _targets(batch):
    """(document's token, label) of every target."""
    real = batch.labels != IGNORED
    return sorted(zip(batch.input_ids[real].tolist(), batch.labels[real].tolist(), strict=True))


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(2, 17), st.sampled_from(["join", "documents"]), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_labels_stay_at_their_tokens_and_sequences_without_a_target_are_left_out(lengths, T, packing, seed, share):
    tokens, offsets = _corpus(lengths)
    draw = np.random.default_rng(seed)
    labels = np.where(draw.random(len(tokens)) < share, draw.integers(100, 10_000, len(tokens)), IGNORED)
    packed = join(len(tokens), T) if packing == "join" else pack_documents(offsets, T)
    every = Sequences(tokens, packed, T, pad_id=0, labels=labels)
    kept = Sequences(tokens, packed.with_targets(labels), T, pad_id=0, labels=labels)
    rows = [every.batch([index]) for index in range(len(every))]
    expected = [row for row in rows if (row.labels != IGNORED).any()]
    found = [kept.batch([index]) for index in range(len(kept))]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    first = {piece[0] for piece in _pieces(lengths, T)} if packing == "documents" else set(range(1, len(tokens) + 1, T))
    held = {token for row in rows for token in row.input_ids[0, : row.lengths].tolist()}
    marked = [(int(token), int(labels[token - 1])) for token in held - first if labels[token - 1] != IGNORED]
    assert sorted(pair for row in rows for pair in _targets(row)) == sorted(marked)


def test_targets_are_counted_over_parts_of_the_labels(monkeypatch):
    monkeypatch.setattr(packing_module, "_LABELS_AT_ONCE", 3)
    labels = np.array([5, IGNORED, 5, 5, IGNORED, IGNORED, 5, 5, 5, IGNORED])
    positions = np.array([10, 0, 3, 7, 6, 3, 9, 2])
    expected = [int((labels[:position] != IGNORED).sum()) for position in positions]
    assert packing_module._targets_before(labels, positions).tolist() == expected
