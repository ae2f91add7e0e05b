"""SMP's state dicts and checkpoints of parameters that ranks hold by ranges."""

import pytest
import smp_blocks

import block_ranks
import ranks

pytestmark = ranks.alone


@pytest.fixture(scope="module")
def one_rank():
    return block_ranks.state_of(*block_ranks.trained(1))


@pytest.mark.parametrize(("world", "tensor"), [(2, 2), (4, 2)])
def test_state_dicts_of_each_type_load_again(world, tensor, one_rank):
    for found in ranks.run(world, smp_blocks.round_trips, tensor, one_rank):
        assert found == {kind.name: [] for kind in smp_blocks.KINDS}


def test_a_state_of_other_ranges_of_the_same_shape_is_laid_out_anew(one_rank):
    assert ranks.run(4, smp_blocks.exchanged, 2, one_rank) == [[]] * 4


@pytest.mark.parametrize("background", [False, True])
def test_a_sharded_state_of_ranges_loads_at_other_layouts(tmp_path, one_rank, background):
    ranks.run(4, smp_blocks.save, tmp_path / "four", 2, background=background)
    for world, tensor in ((4, 4), (2, 2), (2, 1)):
        assert ranks.run(world, smp_blocks.load, tmp_path / "four", tensor, one_rank) == [[]] * world


def test_a_save_over_some_of_the_ranks_is_refused(tmp_path):
    said = ranks.run(4, smp_blocks.refused, tmp_path / "some", 2)
    assert said[2:] == [None, None]
    assert all("has parts on ranks of several meshes" in each for each in said[:2])
