"""Packing against a slow, independent restatement of what it promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
        assert [len(array) for array in sequence] == [T] * 3
        expected_labels = []
        for run in _unpack(sequence):
            if run[0] == 0:
                padded += len(run)
                expected_labels += [IGNORED] * len(run)
            else:
                found.append(run)
                expected_labels += [IGNORED, *run[1:]]
        assert sequence.labels.tolist() == expected_labels
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
        input_ids, labels, positions = (array.tolist() for array in _row(sequences, index))
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
    empty = batch._replace(labels=torch.full_like(batch.labels, IGNORED))  # of a rank without a sequence
    assert not empty.real().any()
