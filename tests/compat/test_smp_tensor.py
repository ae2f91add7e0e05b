"""`tensor_parallel_degree` by SMP's names: the numbers of one rank, and checkpoints that load at every degree."""

import itertools
import random

import pytest
import smp_tensor_ranks
import torch

import octavo
import ranks


@pytest.fixture(autouse=True)
def one_rank():
    yield
    octavo.shutdown()


def test_two_tensor_ranks_train_as_one_rank_does():
    for found in ranks.run(2, smp_tensor_ranks.trained, {"tensor_parallel_degree": 2}):
        rows, difference = found["FULL_SHARD"]
        for one, wanted in zip(rows, found["one rank"], strict=True):
            assert one == pytest.approx(wanted, abs=1e-5)
        assert difference < 1e-5


@pytest.mark.long(lambda degrees: "context_parallel_degree" not in degrees)
@pytest.mark.parametrize(
    ("degrees", "strategies"),
    [
        ({"tensor_parallel_degree": 2}, ("FULL_SHARD", "NO_SHARD")),
        ({"tensor_parallel_degree": 4}, ("FULL_SHARD",)),
        ({"tensor_parallel_degree": 2, "context_parallel_degree": 2}, ("HYBRID_SHARD",)),
    ],
)
def test_four_ranks_train_as_one_rank_does(degrees, strategies):
    tensor = degrees["tensor_parallel_degree"]
    results = ranks.run(4, smp_tensor_ranks.trained, degrees, strategies)
    for rank, found in enumerate(results):
        assert found["state"] == (rank % tensor, tensor, list(range(rank - rank % tensor, rank - rank % tensor + tensor)))
        for name in strategies:
            rows, difference = found[name]
            for one, wanted in zip(rows, found["one rank"], strict=True):
                assert one == pytest.approx(wanted, abs=1e-5), name
            assert difference < 1e-5, name
            assert rows == results[0][name][0], name
            alone = name == "NO_SHARD"
            assert found[f"{name} ranks"] == (
                [rank] if alone else list(range(rank % tensor, 4, tensor)),
                [rank - rank % tensor, rank - rank % tensor + 1] if alone else [0, 1, 2, 3],
            )
            own = (rank // 2, [[0, 2], [1, 3]]) if alone else (0, [[0], [1], [2], [3]])
            assert found[f"{name} replicas"] == own


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "others"),
    [(2, [{"tensor_parallel_degree": 2}, {}]), (4, [{"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 4}, {}])],
)
def test_checkpoints_of_tensor_ranks_load_at_every_degree(tmp_path, number, others):
    for found in ranks.run(number, smp_tensor_ranks.checkpoints, str(tmp_path), {"tensor_parallel_degree": 2}, others):
        assert {path.split("/")[1] for path in found["files"]} == {"tp2-0", "tp2-1"}
        assert found["one"] == (0, 2)
        assert found["util"] == found["raw"] == 0
        rng, raw = found["refused"][:2], found["refused"][2:]
        assert all("rng.model-parallel-rng is not the same on the 2 tensor ranks" in text for text in rng), rng
        assert all("FSDP.optim_state_dict(model, optimizer)" in text and "tp2-{tp_rank}" in text for text in raw), raw
        if number == 4:
            assert found["rows"] == 0
            assert "several tensor ranks give the folder" in found["apart"]
            assert "put tp_rank into its name" in found["apart"]
        for given in map(str, others):
            assert found["full", given] == 0
            for kind in ("sharded", "local"):
                *restored, loss, following = found[kind, given]
                assert restored == [0, 0, 2, True], (kind, given)  # weights and moments, FP8 state, a value, generators
                if given == str(others[0]):
                    assert loss == following
                # Ranks that share key-value heads cast their parts of these heads' gradient.
                assert loss == (pytest.approx(following[0], rel=2e-4), pytest.approx(following[1], rel=1e-2)), (kind, given)


@pytest.mark.long(lambda number, degrees: (number, degrees) not in ((2, {}), (2, {"expert_parallel_degree": 2})))
@pytest.mark.parametrize(
    ("number", "degrees"),
    [(2, {}), (2, {"expert_parallel_degree": 2}), (4, {"expert_parallel_degree": 2}), (4, {"expert_parallel_degree": 4})],
    ids=["slices", "2 of 2", "2 of 4", "4 of 4"],
)
def test_experts_of_tensor_ranks_train_as_on_one_rank(number, degrees):
    strategies = ("FULL_SHARD", "NO_SHARD") if (number, degrees) == (4, {"expert_parallel_degree": 2}) else ("FULL_SHARD",)
    for found in ranks.run(number, smp_tensor_ranks.trained, {"tensor_parallel_degree": 2} | degrees, strategies, experts=True):
        for name in strategies:
            rows, difference = found[name]
            for one, wanted in zip(rows, found["one rank"], strict=True):
                assert one == pytest.approx(wanted, abs=1e-5), name
            assert difference < 1e-5, name


@pytest.mark.parametrize("degrees", [{}, {"expert_parallel_degree": 2}], ids=["slices", "whole"])
def test_weights_of_experts_stay(degrees):
    for found in ranks.run(2, smp_tensor_ranks.weights_of_experts, {"tensor_parallel_degree": 2} | degrees):
        assert found == {"rank 0": 0, "all": 0}


@pytest.mark.long
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize(
    ("experts", "other"), [({"expert_parallel_degree": 2}, {}), ({}, {"expert_parallel_degree": 2})], ids=["whole", "slices"]
)
def test_checkpoints_of_experts_load_as_slices_and_whole(tmp_path, number, experts, other):
    tensor = {"tensor_parallel_degree": 2}
    others = [tensor | experts, tensor | other, {}]
    for found in ranks.run(number, smp_tensor_ranks.checkpoints, str(tmp_path), others[0], others, experts=True):
        assert {path.split("/")[1] for path in found["files"]} == {"tp2-0", "tp2-1"}
        assert found["one"] == (0, 2)
        assert found["util"] == found["raw"] == 0
        for given in map(str, others):
            assert found["full", given] == 0
            for kind in ("sharded", "local"):
                *restored, loss, following = found[kind, given]
                assert restored == [0, 0, 2, True], (kind, given)
                if given == str(others[0]):
                    assert loss == following
                assert loss == (pytest.approx(following[0], rel=2e-4), pytest.approx(following[1], rel=1e-2)), (kind, given)


DENSE = {
    "1": (1, {}),
    "2 shard": (2, {}),
    "2 tensor": (2, {"tensor_parallel_degree": 2}),
    "3 shard": (3, {}),
    "4 tensor": (4, {"tensor_parallel_degree": 4}),
    "4 tensor, context": (4, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
    "4 tensor, replicate": (4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}),
}
EXPERTS = {
    "1": (1, {}),
    "2 expert": (2, {"expert_parallel_degree": 2}),
    "2 tensor": (2, {"tensor_parallel_degree": 2}),
    "2 tensor, expert": (2, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}),
    "4 expert": (4, {"expert_parallel_degree": 4}),
    "4 expert over tensor": (4, {"tensor_parallel_degree": 2, "expert_parallel_degree": 4}),
    "4 expert, replicate": (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}),
}
OTHERS = [
    *((DENSE, "tp", of, to) for of, to in itertools.product(DENSE, DENSE) if "tensor" in of),
    *((EXPERTS, "tp", of, to) for of, to in itertools.product(EXPERTS, EXPERTS) if "tensor" in of),
    *((EXPERTS, "ep", of, to) for of, to in itertools.product(EXPERTS, EXPERTS) if "expert" in of and "tensor" not in of),
]
"""(layouts, whose rank the folders are of, the layout that writes, the one that reads), on other numbers of ranks."""
SHORT = random.Random(50).sample(range(len(OTHERS)), len(OTHERS) // 10)


@pytest.mark.long(lambda number: number not in SHORT)
@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_folders_of_tensor_and_expert_ranks_are_read_by_any_number_of_ranks(tmp_path, number):
    layouts, by, of, to = OTHERS[number]
    experts = layouts is EXPERTS
    ranks.run(layouts[of][0], smp_tensor_ranks.written, str(tmp_path), layouts[of][1], experts, by)
    for found in ranks.run(layouts[to][0], smp_tensor_ranks.read, str(tmp_path), layouts[to][1], experts, by):
        assert found == dict.fromkeys(smp_tensor_ranks.KINDS, (0, 1)), (by, of, to)


@pytest.mark.long
def test_an_optimizer_s_own_rows_are_read_at_their_degrees_by_any_replicas_and_refused_at_others(tmp_path):
    degrees = {"tensor_parallel_degree": 2}
    ranks.run(2, smp_tensor_ranks.written, str(tmp_path), degrees, False, "tp")
    for number, given, fits in (
        (2, degrees, True),
        (4, degrees, True),
        (2, {}, False),
        (4, {"tensor_parallel_degree": 4}, False),
    ):
        for found in ranks.run(number, smp_tensor_ranks.read_rows, str(tmp_path), given, False):
            if fits:
                assert found == 0, (number, given)
            else:
                assert "load only at the degrees that saved them" in found, (number, given)
                assert "FSDP.optim_state_dict(model, optimizer), load at any" in found, (number, given)


def test_wrappers_change_no_number_and_weights_of_one_or_all_ranks_stay():
    for found in ranks.run(2, smp_tensor_ranks.wrapped, ""):
        assert found == {"same": True, "rank 0": 0, "all": 0}


def test_what_tensor_ranks_do_not_share_is_refused_by_the_scripts_key():
    for found in ranks.run(2, smp_tensor_ranks.refusals, ""):
        for name, part in {
            "heads": "= 2: 1 query heads (num_attention_heads) are not divisible. Set tensor_parallel_degree to 1",
            "own code": "Set tensor_parallel_degree = 1",
            "unwrapped": "tensor_parallel_degree = 2: wrap the transformed model in FullyShardedDataParallel",
            "weights": "hold different weights",
            "norm": "octavo.clip_grad_norm_(model, max_norm) counts each element once",
            "samples": "share each sequence (tensor_parallel_degree) were given different ones",
            "degrees": "tensor 3 does not divide the world of 2",
            "both": "an expert group must be a part of a tensor group, or several groups. Set expert_parallel_degree to 2 or 4",
        }.items():
            assert part in found[name], (name, found[name])
            assert "parallel." not in found[name], found[name]
            assert "octavo.init" not in found[name], found[name]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1:UserWarning")
def test_a_script_in_float16_skips_the_same_steps_on_all_ranks():
    """Its losses are those of the script without tensor ranks, and with an infinity on either rank."""
    (wanted,) = ranks.run(1, smp_tensor_ranks.in_float16, {}, {1: 0, 4: 0})
    assert [each[:2] for each in wanted] == [(1024, True), (1024, False), (512, True), (512, True), (1024, False)]
    for world, planted in ((2, {1: 1, 4: 0}), (4, {1: 3, 4: 2})):
        for found in ranks.run(world, smp_tensor_ranks.in_float16, {"tensor_parallel_degree": 2}, planted):
            assert [each[:2] for each in found] == [each[:2] for each in wanted]
            if world == 2:  # the same samples
                assert [each[2] for each in found] == pytest.approx([each[2] for each in wanted], abs=5e-3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_replicas_may_finish_one_folder_at_once(tmp_path, monkeypatch):
    """Each removes `.metadata` and renames `.metadata.tmp`: the second finds that gone, and writes it again."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save

    from octavo.compat.smp.folders import patched

    for name, method in patched().items():
        monkeypatch.setattr(FileSystemWriter, name, method)
    writer = FileSystemWriter(str(tmp_path / "one"))
    rename, calls = writer.fs.rename, []

    def taken(path, new_path):
        calls.append(path)
        if len(calls) < 3 or lost:
            path.unlink()  # the other replica
        rename(path, new_path)

    monkeypatch.setattr(writer.fs, "rename", taken)
    lost = False
    save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert len(calls) == 3
    assert (tmp_path / "one" / ".metadata").is_file()
    lost = True
    (tmp_path / "one" / ".metadata").unlink()  # whose overwriting would be a warning
    with pytest.raises(CheckpointException, match="FileNotFoundError"):
        save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
