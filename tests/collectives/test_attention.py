"""Attention over ranks equals attention written out in float64: output and every gradient, each exchange, each pattern."""

import pytest
import split_attention
import torch

import ranks
from octavo.collectives.attention import check_heads
from octavo.collectives.context import ContextGroup
from octavo.collectives.schedule import Split
from octavo.errors import InputError


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_exchange_computes_every_pattern(world):
    for errors in ranks.run(world, split_attention.cells, torch.float64):
        assert len(errors) == 3 * (8 + 8 + 4)
        for cell, error in errors.items():
            assert error < 1e-12, cell


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_chunk_attends_to_all_its_keys_in_one_call(world):
    for errors in ranks.run(world, split_attention.one_call, torch.float64, (8, 2)):
        for cell, error in errors.items():
            assert error < 1e-12, cell


@pytest.mark.parametrize("world", [2, 4])
def test_a_gather_that_begins_before_attentions_backward_changes_no_bit(world):
    for rank, (same, begun) in enumerate(ranks.run(world, split_attention.ahead)):
        assert same
        calls = ["gradients"] * (4 if rank else 3)
        late = ["result", "gather", *calls]
        assert begun == ["gather", *late, *late, "gather", *["gather", "result", *calls] * 2]


def test_a_backward_that_stops_before_attention_leaves_nothing():
    for freed, same in ranks.run(2, split_attention.unfinished):
        assert freed == [True, True]
        assert same


def test_gathered_keys_are_freed_before_gradients_travel():
    for kept in ranks.run(2, split_attention.kept_at_the_exchange):
        assert kept == [False, False]


def test_half_precision_rounds_at_the_ends_alone():
    for errors in ranks.run(2, split_attention.cells, torch.bfloat16, groups=(2,)):
        assert max(errors.values()) < 8e-3


@pytest.mark.parametrize("world", [2, 4])
def test_only_chunks_that_some_query_sees_travel_and_none_is_kept(world):
    for found in ranks.run(world, split_attention.traffic):
        for name, (forward, backward, wanted, saved) in found.items():
            assert forward == backward == (2 * world - 2 if name == "causal" else wanted), name
            tokens, heads, dim = split_attention.TOKENS // world, split_attention.HEADS, split_attention.DIM
            # q and the result, k and v, the log-sum-exp: of this rank's tokens alone
            assert saved == split_attention.BATCH * tokens * (2 * heads * dim + 2 * 2 * dim + heads), name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 4), (12, 4), (8, 2), (16, 4), (8, 1)])
def test_auto_is_the_exchange_of_which_fewer_numbers_arrive(world, heads, groups):
    for found, chosen in ranks.run(world, split_attention.moved, heads, groups):
        assert chosen == ("a2a" if found["a2a"] < found["all_gather"] else "all_gather"), found


@pytest.mark.parametrize("world", [1, 3])
def test_a_sequence_is_split_and_joined(world):
    for same, own, gradient, total in ranks.run(world, split_attention.split_and_gather):
        assert (same, gradient, total) == (True, True, True)
        assert own == 24 // world


def group(size, strategy="all_gather"):
    """A context group of which only the numbers are used."""
    context = object.__new__(ContextGroup)
    context.size, context.rank, context.strategy = size, 0, strategy
    return context


def test_what_cannot_be_split_is_refused_with_what_can():
    with pytest.raises(InputError, match="pad it, as to 16 tokens"):
        group(4).split_of(13)
    assert group(4).split_of(16) == Split(0, 4, 16)
    with pytest.raises(InputError, match="context_parallel_degree of 1, 2, or cp_comm_type"):
        check_heads(6, 2, 4)
    with pytest.raises(InputError, match="context_parallel_degree of 1, or cp_comm_type"):
        check_heads(8, 2, 3)
    check_heads(8, 2, 8)
    with pytest.raises(InputError, match="a2a"):
        ContextGroup(None, "a2")
