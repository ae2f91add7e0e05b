"""Models that were never transformed keep PyTorch's FSDP, over the ranks of torch.sagemaker.init."""

import plain_ranks
import pytest

import ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's FSDP1 and its checkpoints

ALL, HOSTS = [[0], [1], [2], [3]], [[0, 2], [1, 3]]


@pytest.mark.long(
    lambda degree, strategy, hosts: (degree, strategy, hosts) not in ((2, "HYBRID_SHARD", 4), (0, "HYBRID_SHARD", 1))
)
@pytest.mark.parametrize(
    ("degree", "strategy", "hosts", "group", "kept", "replicas"),
    [
        (2, "HYBRID_SHARD", 4, 2, "HYBRID_SHARD", HOSTS),
        (2, "_HYBRID_SHARD_ZERO2", 4, 2, "_HYBRID_SHARD_ZERO2", HOSTS),
        (2, "FULL_SHARD", 4, 2, "HYBRID_SHARD", HOSTS),
        (4, "HYBRID_SHARD", 2, 4, "HYBRID_SHARD", ALL),
        (0, "HYBRID_SHARD", 2, 2, "HYBRID_SHARD", HOSTS),
        (0, "HYBRID_SHARD", 1, 4, "NO_SHARD", ALL),
        (0, "SHARD_GRAD_OP", 2, 4, "SHARD_GRAD_OP", ALL),
    ],
)
def test_all_ranks_train_as_one_and_resume_to_the_bit(tmp_path, degree, strategy, hosts, group, kept, replicas):
    wanted = plain_ranks.alone()
    results = ranks.run(4, plain_ranks.train_and_resume, str(tmp_path), degree, strategy, hosts)
    for rank, found in enumerate(results):
        for (loss, norm), (alone, its_norm) in zip(found["rows"], wanted, strict=True):
            assert loss == pytest.approx(alone, rel=2e-5)
            assert norm == pytest.approx(its_norm, rel=2e-4)
        assert found["resumed"]
        first = rank // group * group
        assert found["group"] == found["replica"] == list(range(first, first + group))
        assert found["strategy"] == kept
        assert found["replicas"] == (rank // group, replicas)


@pytest.mark.long(lambda strategy: strategy == "FULL_SHARD")
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "FULL_SHARD"])
def test_a_transformed_model_without_a_degree_is_saved_by_one_replica(tmp_path, strategy):
    group = 2 if strategy == "HYBRID_SHARD" else 4
    results = ranks.run(4, plain_ranks.train_and_resume, str(tmp_path), 0, strategy, 2, transformed=True)
    for rank, found in enumerate(results):
        assert found["resumed"]
        assert found["rows"] == results[0]["rows"]
        first = rank // group * group
        assert found["group"] == found["replica"] == list(range(first, first + group))
        assert found["replicas"] == (rank // group, HOSTS if group == 2 else ALL)


def test_a_group_of_the_script_stays():
    for rank, found in enumerate(ranks.run(4, plain_ranks.groups)):
        assert found["given"] == ("FULL_SHARD", [0, 3] if rank in (0, 3) else [1, 2])
        assert found["after"] == ("HYBRID_SHARD", [0, 1] if rank < 2 else [2, 3])
