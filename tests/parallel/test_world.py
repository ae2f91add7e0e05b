"""Which network interface ranks are joined over, as far as the environment says where they are."""

import pytest

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
    assert world._on_one_host() is here
