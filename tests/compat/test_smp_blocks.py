"""SMP's state dicts and checkpoints of parameters that ranks hold by ranges."""

import pytest
import smp_blocks
import torch
from torch import nn

import block_ranks
import octavo
import ranks
from octavo.collectives.blocks import declare, indices, share_out
from octavo.compat.smp.utils import clip_grad_norm_
from octavo.errors import InputError


@pytest.fixture(scope="module")
def one_rank():
    return block_ranks.state_of(*block_ranks.trained(1))


@pytest.mark.long(lambda world: world == 2)
@pytest.mark.parametrize(("world", "tensor"), [(2, 2), (4, 2)])
def test_state_dicts_of_each_type_load_again(world, tensor, one_rank):
    for found in ranks.run(world, smp_blocks.round_trips, tensor, one_rank):
        assert found == {kind.name: [] for kind in smp_blocks.KINDS}


def test_a_state_of_other_ranges_of_the_same_shape_is_laid_out_anew(one_rank):
    assert ranks.run(4, smp_blocks.exchanged, 2, one_rank) == [[]] * 4


@pytest.mark.long(lambda background: not background)
@pytest.mark.parametrize("background", [False, True])
def test_a_sharded_state_of_ranges_loads_at_other_layouts(tmp_path, one_rank, background):
    ranks.run(4, smp_blocks.save, tmp_path / "four", 2, background=background)
    for world, tensor in ((4, 4), (2, 2), (2, 1)):
        assert ranks.run(world, smp_blocks.load, tmp_path / "four", tensor, one_rank) == [[]] * world


def test_a_save_over_some_of_the_ranks_is_refused(tmp_path):
    said = ranks.run(4, smp_blocks.refused, tmp_path / "some", 2)
    assert said[2:] == [None, None]
    assert all("has parts on ranks of several meshes" in each for each in said[:2])


def test_a_norm_of_each_rank_s_tensors_alone_is_refused():
    layer = nn.Linear(3, 4, bias=False)
    declare(
        layer, "weight", share_out((8, 3), [[indices((0, 4)), indices((0, 3))], [indices((4, 8)), indices((0, 3))]], rank=0)
    )
    layer.weight.grad = torch.ones(4, 3)
    with pytest.raises(InputError, match=r"max_norm=1.0, norm_type=inf\): ranks hold ranges .* octavo\.clip_grad_norm_"):
        clip_grad_norm_(layer, 1.0, float("inf"))
    with pytest.raises(InputError, match=r"\[8, 3\] has parts on 2 ranks without a process group"):
        octavo.clip_grad_norm_(layer, 1.0)
