"""The part of a tensor that a rank holds, however its rows and columns are split over a mesh of ranks."""

import itertools

import pytest
import torch
from torch import nn

import ranks
from octavo.models.weight_loader import InMemoryWeights, WeightLoader
from octavo.parallel.deferred_init import CounterInit, Loaded, counter_normal_
from octavo.parallel.shards import local_shard

SHAPES = ((8, 12), (7, 5), (3, 9), (1, 2), (6, 4, 3))


class Holder(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.weight = nn.Parameter(tensor)


def placed(places, shapes=SHAPES):
    """Of each shape: (elements that differ from the whole when copied, loaded, drawn), and the indices that this rank holds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate() if dim is None else Shard(dim) for dim in places]
    found = {}
    for shape in shapes:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        model = Holder(distribute_tensor(torch.zeros(shape), mesh, placements))
        part = local_shard(model.weight)
        numbers = part.numbers(0, part.local.numel())
        wrong = []

        def compare(wanted, part=part, numbers=numbers, wrong=wrong):
            wrong.append(int((part.local.flatten() != wanted.flatten()[numbers]).sum()))
            part.local.zero_()

        part.copy_from(whole)
        compare(whole)
        Loaded(WeightLoader(Holder(torch.empty(shape, device="meta")), InMemoryWeights({"weight": whole}))).fill(
            model, ["weight"]
        )
        compare(whole)
        CounterInit(5, 0.3).fill(model, ["weight"])
        compare(counter_normal_(torch.empty(shape), torch.arange, seed=5, name="weight", std=0.3))
        assert part.local.data_ptr() == model.weight.to_local().data_ptr()
        found[shape] = wrong, numbers.tolist()
    return found


@pytest.mark.parametrize("places", [(0, 1), (1, 0), (None, 1), (1, None), (0, None), (0, 0), (None, None)], ids=str)
def test_what_a_rank_copies_loads_and_draws_is_its_part_of_the_whole(places):
    of_ranks = ranks.run(4, placed, places)
    for shape in SHAPES:
        assert all(found[shape][0] == [0, 0, 0] for found in of_ranks)
        held = sorted(itertools.chain.from_iterable(found[shape][1] for found in of_ranks))
        copies = 2 ** places.count(None)
        assert held == sorted(list(range(torch.Size(shape).numel())) * copies)


@pytest.mark.parametrize("places", [(0, 2), (2, 1), (2, 2)], ids=str)
def test_a_part_in_a_third_dimension(places):
    shape = (6, 4, 3)
    of_ranks = ranks.run(4, placed, places, [shape])
    assert all(found[shape][0] == [0, 0, 0] for found in of_ranks)
    assert sorted(itertools.chain.from_iterable(found[shape][1] for found in of_ranks)) == list(range(6 * 4 * 3))


def test_a_whole_tensor_is_one_part():
    for shape in ((), (3,), *SHAPES):
        part = local_shard(torch.zeros(shape))
        assert part.part.is_consecutive
        assert part.numbers(0, part.local.numel()).tolist() == list(range(part.local.numel()))
