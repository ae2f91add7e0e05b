"""Checkpoints of parameters that ranks hold by ranges: written once, under the same names, and read at any other layout."""

import collections
import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

import block_ranks
import octavo
import ranks
from octavo.checkpoint.opened import OpenFolder
from octavo.checkpoint.stored import read_headers
from octavo.collectives.blocks import declare, indices, share_out
from octavo.errors import InputError, OctavoError

LAYOUTS = [(2, 2), (4, 4), (4, 2), (2, 1), (1, 1)]
"""(ranks, of which hold parts of a parameter): ranges, ranges in shards of FSDP2, plain FSDP2, one rank."""


@pytest.fixture(scope="module")
def one_rank():
    """The whole state, and the one that a further step makes of it."""
    model, optimizer = block_ranks.trained(1)
    before = block_ranks.state_of(model, optimizer)
    block_ranks.give_gradients(model, block_ranks.whole_values(10))
    optimizer.step()
    return before, block_ranks.state_of(model, optimizer)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, one_rank):
    """A checkpoint of each layout."""
    found = {}
    for world, tensor in LAYOUTS:
        found[world, tensor] = path = tmp_path_factory.mktemp("blocks") / f"{world}-{tensor}"
        for state in ranks.run(world, block_ranks.saved, path, tensor):
            assert state is None or block_ranks.differences(state, one_rank[0]) == []
    return found


@pytest.mark.long(
    lambda of, to: (of, to) not in (((2, 2), (4, 2)), ((4, 4), (2, 1)), ((4, 2), (2, 2)), ((4, 2), (1, 1)), ((2, 2), (4, 4)))
)
@pytest.mark.parametrize("to", LAYOUTS, ids=str)
@pytest.mark.parametrize("of", LAYOUTS[:3], ids=str)
def test_a_checkpoint_of_ranges_continues_at_any_layout(folders, one_rank, of, to):
    for wrong, after in ranks.run(to[0], block_ranks.restored, folders[of], to[1], one_rank[0]):
        assert wrong == []
        assert block_ranks.differences(after, one_rank[1]) == []


@pytest.mark.long(lambda of: of == (1, 1))
@pytest.mark.parametrize("of", LAYOUTS[3:], ids=str)
def test_ranges_continue_from_other_checkpoints(folders, one_rank, of):
    for wrong, after in ranks.run(4, block_ranks.restored, folders[of], 2, one_rank[0]):
        assert wrong == []
        assert block_ranks.differences(after, one_rank[1]) == []


def test_names_on_disk_are_those_of_one_rank_and_every_element_is_written_once(folders):
    names, tensors = {}, {}
    for layout, path in folders.items():
        elements = collections.Counter()
        for file in path.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    elements[name] += opened.get_tensor(name).numel()
        names[layout] = {name: size for name, size in elements.items() if not name.startswith("random.")}
        tensors[layout] = json.loads((path / "manifest.json").read_text())["tensors"]
        tensors[layout] = {name: entry for name, entry in tensors[layout].items() if not name.startswith("random.")}
    assert all(found == names[1, 1] for found in names.values())
    assert all(found == tensors[1, 1] for found in tensors.values())
    assert sum(file.name.startswith("shard-00001") for file in folders[2, 2].iterdir()) > 1  # several ranges of a tensor


def test_a_checkpoint_that_lacks_elements_is_refused_by_name(folders):
    with OpenFolder(folders[2, 2]) as folder:
        files = sorted(name for name in folder.names() if name.endswith(".safetensors"))
        assert read_headers(folder, files)
        without = [name for name in files if not name.startswith("shard-00002-model-00002")]
        assert len(without) < len(files)
        for wrong in (without, [*files, files[0]]):
            with pytest.raises(OctavoError, match=r"the pieces of \S+ in \S+ overlap or leave a gap"):
                read_headers(folder, wrong)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.long
@pytest.mark.parametrize(("world", "tensor"), [(4, 2), (2, 2), (2, 1)])
def test_pytorch_s_distributed_checkpoints_write_and_read_ranges(one_rank, tmp_path, world, tensor):
    wanted = {name: one_rank[0][f"model.{name}"] for name in block_ranks.SHAPES}
    ranks.run(world, block_ranks.by_pytorch, tmp_path, tensor)
    for other in ((4, 4), (4, 2), (2, 1)):
        assert ranks.run(other[0], block_ranks.read_by_pytorch, tmp_path, other[1], wanted) == [[]] * other[0]
    whole = {f"model.{name}": torch.full(shape, torch.nan) for name, shape in block_ranks.SHAPES.items()}
    torch.distributed.checkpoint.load(whole, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(whole[f"model.{name}"], value) for name, value in wanted.items())


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    layer = nn.Linear(3, 4, bias=False)
    declare(
        layer, "weight", share_out((8, 3), [[indices((0, 4)), indices((0, 3))], [indices((4, 8)), indices((0, 3))]], rank=0)
    )
    with pytest.raises(InputError, match=r"\[8, 3\] has parts on 2 ranks without a process group"):
        octavo.save(tmp_path / "alone", layer)
    layer = nn.Linear(3, 4, bias=False)
    declare(layer, "weight", share_out((4, 3), [[indices((2, 4), (0, 2)), indices((0, 3))]], rank=0))
    optimizer = torch.optim.Adafactor(layer.parameters())
    layer.weight.grad = torch.ones(4, 3)
    optimizer.step()
    with pytest.raises(InputError, match=r"the optimizer's state 'row_var' of weight is \[4, 1\]"):
        octavo.save(tmp_path / "factors", layer, optimizer)
