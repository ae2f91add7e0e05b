"""What the ranks of a group hold of a parameter: every element is found, counted once, and nothing else is."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from octavo.collectives.blocks import (
    BlockTensor,
    Indices,
    declare,
    fill,
    indices,
    parameters_of,
    part_of,
    share_out,
    with_block,
)  # fmt: skip
from octavo.errors import InputError
from octavo.parallel.shards import LocalShard, local_shard


@st.composite
def held_by_ranks(draw):
    """(shape, of each rank the indices of each dimension): ranges in any order, shared ones, padding, ranks without any."""
    dims, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 7)) for _ in range(dims))
    split = draw(st.integers(0, dims - 1))
    edges = sorted({0, shape[split], *draw(st.lists(st.integers(0, shape[split]), max_size=5))})
    ranges = list(itertools.pairwise(edges))
    owners = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in ranges]
    held = []
    for rank in range(ranks):
        own = draw(st.permutations([each for each, who in zip(ranges, owners, strict=True) if rank in who]))
        padding = draw(st.integers(0, 2))
        held.append([indices(*own, padding=padding) if d == split else indices((0, size)) for d, size in enumerate(shape)])
    return shape, held


def places(part):
    """By hand: the number in the flattened whole of each number of the rank's tensor, -1 for padding."""
    of_dims = [[i for each in one.ranges for i in each] + [-1] * one.padding for one in part.indices]
    found = np.full(part.local_shape, -1)
    for local in np.ndindex(*part.local_shape):
        whole = [of_dim[i] for of_dim, i in zip(of_dims, local, strict=True)]
        if min(whole) >= 0:
            found[local] = np.ravel_multi_index(whole, part.shape)
    return torch.from_numpy(found)


@st.composite
def slabs(draw, shape):
    starts = [draw(st.integers(0, size)) for size in shape]
    return starts, [draw(st.integers(0, size - start)) for start, size in zip(starts, shape, strict=True)]


@settings(max_examples=60, deadline=None)
@given(held_by_ranks(), st.data())
def test_every_element_is_in_its_place_and_counted_by_one_rank(case, data):
    shape, held = case
    whole = torch.randn(shape)
    counted = torch.zeros(math.prod(shape), dtype=torch.int64)
    for rank in range(len(held)):
        part = share_out(shape, held, rank=rank).local
        starts, sizes = data.draw(slabs(part.local_shape))
        slab = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        for piece, wanted in ((part, places(part)), (part.cut(starts, sizes), places(part)[slab])):
            shard = LocalShard(torch.full(piece.local_shape, torch.nan), piece)
            assert piece.local_shape == tuple(wanted.shape)
            assert torch.equal(shard.numbers(0, wanted.numel()), wanted.flatten())
            values = torch.where(wanted < 0, 0.0, whole.flatten()[wanted])
            shard.copy_from(whole)
            assert torch.equal(shard.local, values)
            shard.local.fill_(torch.nan)
            shard.load(lambda out, start: out.copy_(whole[start : start + len(out)]))
            assert torch.equal(shard.local, values)
            shard.local.fill_(1)
            shard.clear_padding()
            assert torch.equal(shard.local, (wanted >= 0).float())
            for box in piece.chunks:
                assert torch.equal(wanted[box.in_local], torch.arange(whole.numel()).view(shape)[box.in_whole])
            assert len({box.whole for box in piece.chunks}) == len(piece.chunks)
            assert sum(math.prod(box.sizes) for box in piece.chunks) == (wanted >= 0).sum()
            assert set(piece.counted) <= set(piece.chunks)
        for box in part.counted:
            counted[places(part)[box.in_local].flatten()] += 1
        # A cut counts what the part counts there.
        marks = torch.zeros(part.local_shape)
        for box in part.counted:
            marks[box.in_local] = 1
        of_cut = torch.zeros(sizes)
        for box in part.cut(starts, sizes).counted:
            of_cut[box.in_local] += 1
        assert torch.equal(of_cut, marks[slab])
    assert counted.tolist() == [1] * whole.numel()


def test_shared_ranges_of_rows_and_columns_are_counted_by_the_first_rank_that_has_an_element():
    held = [[indices((0, 4)), indices((0, 3))], [indices((2, 6)), indices((1, 5))], [indices((0, 6)), indices((0, 5))]]
    found = torch.full((6, 5), -1)
    for rank in range(3):
        for box in share_out((6, 5), held, rank=rank).local.counted:
            assert found[box.in_whole].eq(-1).all()
            found[box.in_whole] = rank
    by_hand = torch.full((6, 5), 2)
    by_hand[2:6, 1:5] = 1
    by_hand[0:4, 0:3] = 0
    assert torch.equal(found, by_hand)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[Indices((range(3), range(2, 6)))]], r"rank 0 of 1: range\(0, 3\) and range\(2, 6\) in dimension 0 overlap"),
        ([[indices((0, 7))]], r"range\(0, 7\) in dimension 0 is not a range of the 6 indices of shape \[6\]"),
        ([[Indices((range(0, 6, 2),))]], "is not a range"),
        ([[indices((0, 6), padding=-1)]], "padding -1 in dimension 0 is below 0"),
        ([[indices((0, 6)), indices((0, 1))]], r"indices of 2 dimensions for the shape \[6\]"),
        ([[indices((0, 2))], [indices((3, 6))]], r"no rank holds \[2:3\] of \[6\]: of 6 elements 5 are held"),
        ([[indices()], [indices()]], r"no rank holds \[0:6\]"),
    ],
)
def test_ranges_that_cannot_be_are_refused(held, message):
    with pytest.raises(InputError, match=message):
        share_out((6,), held, rank=0)


def layer_of(block):
    layer = nn.Linear(3, 5, bias=False)
    declare(layer, "weight", block)
    return layer


BLOCK = share_out(
    (9, 3), [[indices((0, 2), (4, 6), padding=1), indices((0, 3))], [indices((2, 5), (6, 9)), indices((0, 3))]], rank=0
)


def test_a_parameter_of_another_shape_is_refused():
    with pytest.raises(InputError, match=r"Linear.weight is \[6, 3\], .* this rank's ranges of \[9, 3\] are \[5, 3\]"):
        declare(nn.Linear(3, 6), "weight", BLOCK)
    with pytest.raises(AttributeError):
        declare(nn.Linear(3, 5), "scale", BLOCK)
    layer = layer_of(BLOCK)
    layer.weight = nn.Parameter(torch.zeros(9, 3))  # whole, behind the declaration
    with pytest.raises(InputError, match=r"is \[9, 3\], .* this rank's ranges of \[9, 3\] are \[5, 3\]"):
        local_shard(with_block(layer.weight, parameters_of(layer)[layer.weight]))


def test_a_declaration_stays_with_a_parameter_that_is_replaced():
    layer = nn.Sequential(layer_of(BLOCK))
    for other in (
        copy.deepcopy(layer), layer.to("meta"), layer.to_empty(device="cpu"), layer.double(),
    ):  # fmt: skip
        assert parameters_of(other) == {other[0].weight: BLOCK}
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert parameters_of(layer) == {layer[0].weight: BLOCK}
    assert torch.equal(layer[0].weight, state["0.weight"].held)


def test_tied_parameters_have_one_block():
    one, other = layer_of(BLOCK), nn.Linear(3, 5, bias=False)
    other.weight = one.weight
    assert parameters_of(nn.Sequential(other, one)) == {one.weight: BLOCK}
    declare(other, "weight", copy.copy(BLOCK))
    with pytest.raises(InputError, match="weight of Linear is tied, with two blocks"):
        parameters_of(nn.Sequential(one, other))


def test_state_dicts_have_tensors_of_the_whole_s_shape_and_load_whole_ones():
    layer = layer_of(BLOCK)
    state = layer.state_dict()
    found = state["weight"]
    assert isinstance(found, BlockTensor)
    assert (found.shape, found.dtype, found.requires_grad) == ((9, 3), torch.float32, False)
    assert found.held.data_ptr() == layer.weight.data_ptr()
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight
    whole = torch.randn(9, 3)
    layer.load_state_dict({"weight": whole})
    assert torch.equal(layer.weight, torch.cat([whole[0:2], whole[4:6], torch.zeros(1, 3)]))
    other = layer_of(BLOCK)
    other.load_state_dict(state)
    assert torch.equal(other.weight, layer.weight)
    with pytest.raises(InputError, match=r"weight is \[5, 3\], .* this rank needs its ranges of \[9, 3\]"):
        layer.load_state_dict({"weight": torch.zeros(5, 3)})  # a part of which rank?
    with pytest.raises(InputError, match=r"weight is \[9, 3\], .* this rank needs"):
        layer.load_state_dict(
            {"weight": with_block(torch.zeros(6, 3), share_out((9, 3), [part.indices for part in BLOCK.parts], rank=1))}
        )


def test_a_tensor_of_a_block_copies_and_does_nothing_else(tmp_path):
    held = torch.randn(5, 3)
    tensor = with_block(held, BLOCK)
    assert torch.equal(tensor.clone().held, held)
    assert torch.equal(tensor.to(torch.float64).held, held.double())
    assert torch.empty_like(tensor, dtype=torch.bfloat16).held.shape == (5, 3)
    assert not torch.zeros_like(tensor).held.any()
    empty = torch.empty_like(tensor)
    empty.copy_(tensor)
    assert torch.equal(empty.held, held)
    whole = torch.randn(9, 3)
    fill(empty, whole)
    tensor.copy_(whole)
    assert torch.equal(tensor.held, empty.held)
    assert part_of(tensor) == BLOCK.local
    for wrong in (lambda: tensor + 1, lambda: tensor[0], lambda: whole.copy_(tensor), tensor.sum):
        with pytest.raises(InputError, match=r"a part on each rank: octavo\.export"):
            wrong()
    with pytest.raises(InputError, match=r"octavo\.save\(path, model\)"):
        torch.save({"weight": tensor}, tmp_path / "file")
    with pytest.raises(InputError, match=r"\[5, 3\] is not the whole of a tensor of \[9, 3\]"):
        tensor.copy_(torch.zeros(5, 3))
