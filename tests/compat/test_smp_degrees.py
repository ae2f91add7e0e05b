"""Degrees: one checkpoint in several folders, as SMP's examples write it with experts over ranks; refusals in SMP's names."""

import re

import expert_ranks
import pytest

import octavo
import ranks


@pytest.fixture(autouse=True)
def one_rank():
    yield
    octavo.shutdown()


@pytest.mark.long
def test_a_folder_for_each_rank_of_experts_loads_at_the_same_and_other_degrees(tmp_path):
    results = ranks.run(4, expert_ranks.by_the_script, str(tmp_path))
    assert results[0]["files"] == [
        "ep2-0/.metadata", "ep2-0/__0_0.distcp", "ep2-0/__2_0.distcp",
        "ep2-1/.metadata", "ep2-1/__1_0.distcp", "ep2-1/__3_0.distcp",
    ]  # fmt: skip
    for found in results:
        for name in ("same", "without", "four", "replicas"):
            same, difference = found[name]
            assert same, name
            assert difference < 1e-5, name
        assert found["same"][1] == 0
        assert "of process_group hold some rows of a model" in found["some"]
        assert len(found["own"]) == 2
        assert all("give the folders" in text and "ep2-0" in text and "ep2-1" in text for text in found["own"])
        assert (tmp_path / "ep2" / ".metadata").is_file()
        assert f"has shards in {str(tmp_path / 'ep2-1')!r}" in found["missing"]


def test_a_degree_that_does_not_fit_is_refused_by_the_key_that_the_script_has():
    for found in ranks.run(2, expert_ranks.refusals, ""):
        assert len(found) == 11
        for name, text in found.items():
            assert name.partition(" ")[0] in text, name
            assert not re.search(r"(?<!octavo\.)parallel\.[a-z]|--ranks|octavo\.init|a2a", text), text
        assert (
            "Change expert_parallel_degree to 2. Degrees are keys of torch.sagemaker.init; "
            in found["expert_parallel_degree 3"]
        )
        assert "--nproc-per-node" in found["hybrid_shard_degree 3"]
