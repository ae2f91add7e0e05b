"""The network interface of one host or several, and generators beside the default one."""

import os
from unittest import mock

import pytest
import torch
from llamas import llama
from torch.distributed.tensor import DTensor, Replicate, Shard

import octavo
import ranks
from octavo.errors import InputError, OctavoError
from octavo.parallel import world


@pytest.mark.parametrize(
    ("environment", "here"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-1"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-1"}, False),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "node-1"}, False),  # as started by srun
        ({"MASTER_ADDR": "localhost"}, True),  # as in mp.spawn
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, True),
        ({}, False),
    ],
)
def test_the_loopback_serves_where_all_ranks_are_on_one_host(monkeypatch, environment, here):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert world.on_one_host() is here


def test_a_tracked_generator_continues_its_own_stream_and_leaves_the_default_one():
    tracker = world.RngStateTracker(torch.device("cpu"))
    tracker.add("own", 3)
    torch.manual_seed(5)
    draws = []
    for _ in range(2):
        with tracker.fork("own"):
            draws.append(torch.rand(4))
    default = torch.rand(4)
    assert torch.equal(torch.cat(draws), torch.rand(8, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(default, torch.rand(4, generator=torch.Generator().manual_seed(5)))
    with pytest.raises(InputError, match="there is a random generator 'own' already"):
        tracker.add("own", 4)
    with pytest.raises(InputError, match="no random generator 'other': known are own"), tracker.fork("other"):
        pass


def test_tokens_in_fp8_without_expert_ranks_are_refused_and_nothing_starts():
    with pytest.raises(InputError, match="expert_dispatch_fp8 = True has no effect with expert_parallel_degree = 1"):
        world.init({"expert_dispatch_fp8": True})
    assert world.state.mesh is None


def test_ranks_that_do_not_meet_leave_the_state_of_one(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in world._INTERFACES:  # which `init` sets
        monkeypatch.setenv(name, "lo")
    monkeypatch.setattr(world, "round_store", mock.Mock(side_effect=OctavoError("rank 0 of 2 has waited")))
    with pytest.raises(OctavoError, match="has waited"):
        world.init({})
    assert (world.state.world_size, world.state.mesh) == (1, None)


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(InputError, match="GLOO_SOCKET_IFNAME = nosuch0: this host has no network interface"), world._met(0, 2):
        raise RuntimeError("[enforce fail at device.cc] ifa != nullptr. Unable to find address for: nosuch0")


def end_of_a_script(failed, shut):
    """Whether groups are left once Python's exit functions have run, of ranks that octavo.init has joined."""
    import atexit
    import sys

    import torch.distributed as dist

    octavo.init()
    assert dist.is_initialized()
    if failed:
        sys.last_type = KeyError
    if shut:
        octavo.shutdown()
        assert not dist.is_initialized()
    atexit._run_exitfuncs()
    left = dist.is_initialized()
    assert left == (failed and not shut)
    os._exit(3)


@pytest.mark.parametrize(("failed", "shut"), [(False, False), (False, True), (True, False), (True, True)])
def test_groups_are_destroyed_at_the_end_of_a_script_that_has_not_failed(failed, shut):
    assert ranks.exit_codes(2, end_of_a_script, failed, shut) == [3, 3]


def other_configs():
    """What `octavo.init` says where the last rank has another seed, or another degree, and the degree behind one that fits."""
    rank, said = int(os.environ["RANK"]), []
    for own in ({"random_seed": 3 + rank}, {"tensor_parallel_degree": 1 + rank}):
        with pytest.raises(InputError) as error:
            octavo.init(own)
        said.append(str(error.value))
    assert not octavo.state.initialised
    octavo.init({"tensor_parallel_degree": 2})
    return said, octavo.state.tp_size


def test_ranks_are_given_the_same():
    for said, degree in ranks.run(2, other_configs):
        assert "random_seed = 3 on rank 0, and 4 on rank 1" in said[0]
        assert "tensor_parallel_degree = 1 on rank 0, and 2 on rank 1" in said[1]
        assert degree == 2


def transformed_first():
    """What models say that were transformed before the ranks were known, in training and in evaluation."""
    own = torch.nn.Sequential(torch.nn.Linear(16, 16))
    models = [octavo.transform(model, dtype=torch.float32) for model in (llama(), own)]
    octavo.init()
    ids = torch.arange(8)[None]
    given, said = ({"input_ids": ids, "labels": ids}, {"input": torch.ones(1, 16)}), []
    for model, arguments in zip(models, given, strict=True):
        with torch.no_grad():
            model(**arguments)  # for a comparison, as a rank alone may
        with pytest.raises(InputError) as error:
            model(**arguments)
        said.append(str(error.value))
    return said


def test_a_model_of_one_rank_is_not_trained_on_several():
    for said in ranks.run(2, transformed_first):
        for text, name in zip(said, ("Decoder", "Sequential"), strict=True):
            assert text.startswith(f"octavo.transform created this {name} before octavo.init")
            assert text.endswith("Call octavo.init first.")


def _mesh_of_an_operation(tensor_ranks):
    """Whether a tensor behind an operation has the mesh of today's groups, and its whole."""
    degrees = {"hybrid_shard_degree": 4 // tensor_ranks, "tensor_parallel_degree": tensor_ranks, "expert_parallel_degree": 2}
    octavo.init(degrees)
    placements = [Replicate(), Shard(0), Shard(0)]
    own = torch.full((2, 3), float(octavo.state.rank))
    held = DTensor.from_local(own, octavo.state.expert_mesh, placements, run_check=False).detach()
    found = held.device_mesh is octavo.state.expert_mesh, held.full_tensor()[:, 0].tolist()
    octavo.shutdown()
    return found


def _meshes_of_equal_shape():
    return [_mesh_of_an_operation(tensor_ranks) for tensor_ranks in (4, 2)]


def test_groups_that_have_ended_are_not_taken_for_those_of_an_equal_mesh():
    wanted = True, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert ranks.run(4, _meshes_of_equal_shape) == [[wanted, wanted]] * 4
