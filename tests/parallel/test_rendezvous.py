"""Ranks of a rendezvous round agree on a name although earlier rounds left theirs in the same store."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import ranks
from octavo.errors import OctavoError
from octavo.parallel import world
from octavo.parallel.rendezvous import round_name, round_store
from octavo.process import process


def run_round(store, world, ranks):
    """The result of each of these ranks, started in this order: a name or an error."""

    def one(rank):
        try:
            return round_name(store, rank, world, timeout=100 if len(ranks) == world else 0.3)
        except OctavoError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, ranks))


def test_ranks_of_a_round_agree_and_rounds_differ():
    store = dist.HashStore()
    first, second = run_round(store, 3, [0, 1, 2]), run_round(store, 3, [2, 1, 0])
    assert len(set(first)) == len(set(second)) == 1
    assert set(first).isdisjoint(second)


@pytest.mark.parametrize("came", [[0, 1], [1, 2], [0]])
def test_an_incomplete_round_does_not_mislead_the_next(came):
    store = dist.HashStore()
    assert all("has waited 0.3 s for the others" in str(said) for said in run_round(store, 3, came))
    assert len(set(run_round(store, 3, [1, 0, 2]))) == 1


def test_an_early_rank_waits_for_the_name_of_its_own_round():
    store = dist.HashStore()
    old = run_round(store, 2, [0, 1])[0]
    found = []
    early = threading.Thread(target=lambda: found.append(round_name(store, 1, 2, timeout=100)))
    early.start()
    early.join(0.1)
    assert not found
    new = round_name(store, 0, 2, timeout=100)
    early.join()
    assert found == [new]
    assert new != old


def test_one_rank_and_no_agent(monkeypatch):
    assert round_name(dist.HashStore(), 0, 1, timeout=0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(process, "rendezvous", itertools.count())
    assert round_store(0, 2, timeout=1) is None


def again():
    """Three groups by other degrees, while meshes of those before live, as of a sharded model."""
    kept = []
    for degrees in ({}, {"hybrid_shard_degree": 1}, {"context_parallel_degree": 2}):
        world.init(degrees, timeout=60)
        kept.append((world.state.mesh, world.state.world_process_group))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        world.shutdown()


def test_other_degrees_after_a_shutdown_while_a_model_of_the_first_lives():
    assert ranks.exit_codes(2, again) == [0, 0]
