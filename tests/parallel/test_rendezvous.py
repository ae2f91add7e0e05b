"""Ranks of an attempt agree on a name although earlier attempts left theirs in the same store."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from octavo.errors import OctavoError
from octavo.parallel.rendezvous import meet, store_of_attempt


def attempt(store, world, ranks):
    """What each of these ranks, started in this order, gets: a name or its error."""

    def one(rank):
        try:
            return meet(store, rank, world, timeout=5 if len(ranks) == world else 0.3)
        except OctavoError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, ranks))


def test_ranks_of_an_attempt_agree_and_attempts_differ():
    store = dist.HashStore()
    first, second = attempt(store, 3, [0, 1, 2]), attempt(store, 3, [2, 1, 0])
    assert len(set(first)) == len(set(second)) == 1
    assert set(first).isdisjoint(second)


@pytest.mark.parametrize("came", [[0, 1], [1, 2], [0]])
def test_an_attempt_to_which_not_all_came_misleads_nobody(came):
    store = dist.HashStore()
    assert all("has waited 0.3 s for the others" in str(said) for said in attempt(store, 3, came))
    assert len(set(attempt(store, 3, [1, 0, 2]))) == 1


def test_a_rank_that_is_early_waits_for_the_name_of_its_own_attempt():
    store = dist.HashStore()
    old = attempt(store, 2, [0, 1])[0]
    found = []
    early = threading.Thread(target=lambda: found.append(meet(store, 1, 2, timeout=5)))
    early.start()
    early.join(0.1)
    assert not found
    new = meet(store, 0, 2, timeout=5)
    early.join()
    assert found == [new]
    assert new != old


def test_one_rank_and_no_agent(monkeypatch):
    assert meet(dist.HashStore(), 0, 1, timeout=0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert store_of_attempt(0, 2, timeout=1) is None
