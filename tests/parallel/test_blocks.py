"""Parameters that ranks hold by ranges, some shared, sharded by FSDP2 too: values, weights in and norms are one rank's."""

import collections
import math

import pytest

import block_ranks
import ranks

pytestmark = ranks.alone

LAYOUTS = [(2, 2), (4, 4), (4, 2), (3, 3)]
"""(ranks, of which hold parts of a parameter): with and without FSDP2 around."""


@pytest.mark.parametrize(("world", "tensor"), LAYOUTS)
def test_the_ranks_hold_every_element_and_count_each_once(world, tensor):
    of_ranks = ranks.run(world, block_ranks.layout, tensor)
    shared = set()
    for name, shape in block_ranks.SHAPES.items():
        counted = collections.Counter(element for found in of_ranks for element in found[name][1])
        there = collections.Counter(element for found in of_ranks for element in found[name][0])
        assert sorted(counted) == list(range(math.prod(shape)))
        assert set(counted.values()) == {1}
        shared |= {name} if max(there.values()) > 1 else set()
    assert shared == {"norm.weight", "proj.bias", "router.weight"} | ({"qkv.weight", "qkv.bias"} if tensor > 2 else set())
    if world > tensor:  # FSDP2's shards are uneven, and some are empty
        assert len({len(found["proj.weight"][0]) for found in of_ranks}) > 1
        assert any(not found["router.weight"][0] for found in of_ranks)


@pytest.mark.parametrize(("world", "tensor"), LAYOUTS)
def test_initial_values_are_those_of_one_rank(world, tensor):
    assert ranks.run(world, block_ranks.initialised, tensor, block_ranks.initial(1)) == [[]] * world


@pytest.mark.parametrize(("world", "tensor"), LAYOUTS)
def test_weights_are_read_to_their_places(world, tensor):
    assert ranks.run(world, block_ranks.loaded, tensor) == [[]] * world


@pytest.mark.parametrize(("world", "tensor"), LAYOUTS)
def test_the_norm_counts_each_element_once_and_clips_by_it(world, tensor):
    for seed in (3, 4):
        for ratio, wrong in ranks.run(world, block_ranks.clipped, tensor, seed):
            assert ratio == pytest.approx(1, abs=1e-6)
            assert wrong == []
