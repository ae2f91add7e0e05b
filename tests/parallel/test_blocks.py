"""Parameters that ranks hold by ranges, some shared, sharded by FSDP2 too: values, weights in and norms are one rank's."""

import collections
import math
import random
import re

import pytest
import ranges_of_decoders
import torch
from llamas import llama_config
from transformers import AutoModelForCausalLM

import block_ranks
import octavo
import ranks
from octavo.collectives.blocks import declare, declared, indices, parameters_of, share_out
from octavo.errors import InputError
from octavo.models.convert import to_huggingface

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
    assert shared == {"norm.weight", "proj.bias", "router.weight", "overlapping.weight"} | (
        {"qkv.weight", "qkv.bias"} if tensor > 2 else set()
    )
    if world > tensor:  # FSDP2's shards are uneven, and some are empty
        assert len({len(found["proj.weight"][0]) for found in of_ranks}) > 1
        assert any(not found["router.weight"][0] for found in of_ranks)


@pytest.mark.long(lambda world, tensor: world == tensor)
@pytest.mark.parametrize(("world", "tensor"), LAYOUTS)
def test_initial_values_are_those_of_one_rank(world, tensor):
    assert ranks.run(world, block_ranks.initialised, tensor, block_ranks.initial(1)) == [[]] * world


@pytest.mark.long(lambda world, tensor: (world, tensor) in ((2, 2), (4, 4)))
@pytest.mark.parametrize(("world", "tensor"), LAYOUTS)
def test_weights_are_read_to_their_places(world, tensor):
    assert ranks.run(world, block_ranks.loaded, tensor) == [[]] * world


@pytest.mark.long(lambda world, tensor: (world, tensor) in ((2, 2), (4, 4)))
@pytest.mark.parametrize(("world", "tensor"), LAYOUTS)
def test_the_norm_counts_each_element_once_and_clips_by_it(world, tensor):
    for seed in (3, 4):
        for ratio, wrong in ranks.run(world, block_ranks.clipped, tensor, seed):
            assert ratio == pytest.approx(1, abs=1e-6)
            assert wrong == []


@pytest.mark.long(lambda world: world == 4)
@pytest.mark.parametrize(("world", "tensor"), [(2, 2), (4, 2), (4, 4)])
def test_random_ranges(world, tensor, tmp_path):
    for number in range(3):
        seed, folder = random.randrange(2**32), tmp_path / str(number)  # another one in each run: a failure names it
        found = ranks.run(world, block_ranks.random_ranges, seed, tensor, folder)
        for state in block_ranks.random_on_one_rank(seed, folder):
            for wrong, of_ranks in found:
                assert (seed, wrong, block_ranks.differences(of_ranks, state)) == (seed, [], [])


@pytest.mark.long(lambda world: world == 2)
@pytest.mark.parametrize(("world", "tensor"), [(2, 2), (4, 2)])
def test_a_model_in_ranges_is_written_whole_and_read_back(tmp_path, world, tensor):
    model = ranges_of_decoders.decoder()
    wanted, theirs = dict(model.named_parameters()), to_huggingface(model).state_dict()
    for wrong, whole, state in ranks.run(world, ranges_of_decoders.written, tmp_path, tensor):
        assert wrong == []
        assert block_ranks.differences(whole, {name: parameter.detach() for name, parameter in wanted.items()}) == []
        assert block_ranks.differences(state, theirs) == []
    for folder in ("exported", "saved"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).state_dict()
        assert block_ranks.differences(found, theirs) == []


@pytest.mark.parametrize(("world", "tensor"), [(2, 2), (4, 2)])
def test_an_optimizer_of_matrices_sees_whole_ones(world, tensor):
    (wanted,) = ranks.run(1, ranges_of_decoders.stepped, 1)
    for found in ranks.run(world, ranges_of_decoders.stepped, tensor):
        assert block_ranks.differences(found, wanted) == []


def test_ranks_that_begin_with_other_values_of_the_same_elements_are_refused():
    said = ranks.run(4, block_ranks.begun, 2, None)
    assert said == [None] * 4
    for name, element in (("embedding.weight", 0), ("norm.weight", 3)):
        said = ranks.run(4, block_ranks.begun, 2, (name, element))
        assert all(re.fullmatch(rf"ranks \d and \d hold different weights \({name}\).*", each) for each in said)


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_declaration_is_there_after_transform():
    wanted = octavo.transform(Own().to("meta"), dtype=torch.float32).layers[0].weight
    model = Own().to("meta")
    order = [(20, 32), (0, 20)]
    declare(model.layers[0], "weight", share_out((32, 16), [[indices(*order), indices((0, 16))]], rank=0))
    block = parameters_of(model)[model.layers[0].weight]
    model = octavo.transform(model, dtype=torch.float32)
    assert isinstance(model.layers[0], octavo.nn.Linear)
    assert parameters_of(model)[model.layers[0].weight] is block
    assert torch.equal(model.layers[0].weight, torch.cat([wanted[start:stop] for start, stop in order]))
    with pytest.raises(InputError, match=r"layers.0.weight is a rank's ranges of \[32, 16\], and octavo.transform"):
        octavo.transform(model, dtype=torch.float32)


def test_a_model_with_a_declaration_keeps_its_own_code():
    with octavo.delayed_init():
        model = AutoModelForCausalLM.from_config(llama_config())
    layer = model.model.layers[0].mlp.down_proj
    shape = tuple(layer.weight.shape)
    declare(layer, "weight", share_out(shape, [[indices((0, size)) for size in shape]], rank=0))
    model = octavo.transform(model)
    assert [block for block in parameters_of(model).values() if block is not None] == [declared(layer)["weight"]]
