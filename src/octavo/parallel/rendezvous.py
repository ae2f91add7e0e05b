"""A key-value store without the entries of earlier rendezvous.

torchrun restarts all ranks when one has failed, but its agent serves one store for all rounds. Process groups would read the
addresses of dead ranks there, and fail or hang (gloo of torch 2.11 to 2.13, with either rendezvous backend). So the ranks of a
round first agree on a random name, the prefix of all their keys. torchrun's restart count does not suffice: agents of several
hosts count differently.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from octavo.errors import OctavoError
from octavo.process import process

_POLL_SECONDS = 0.02
_KEY = "octavo-rendezvous"


def round_store(rank: int, world: int, timeout: float) -> Store | None:
    """The store of torchrun's agent with a prefix of this round; None for PyTorch's store.

    Without an agent every rendezvous but the first has a prefix too: remains of earlier process groups (a sharded model has its
    mesh) reference rank 0's store, which still holds the old addresses, so new ranks would hang.

    Raises:
        OctavoError: not all ranks came within `timeout` seconds.
    """
    host, port, number = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), next(process.rendezvous)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if number == 0:
            return None
        wait = datetime.timedelta(seconds=timeout)
        return PrefixStore(
            f"{_KEY}-{number}", TCPStore(host, port, world, is_master=rank == 0, timeout=wait, multi_tenant=True)
        )
    store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))
    return PrefixStore(f"{_KEY}-{round_name(store, rank, world, timeout)}", store)


def round_name(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name that the ranks of this round agree on, with the errors of `round_store`.

    Rank 0 draws the name. Every other rank answers with the name that it read and a random token. Once every answer has this
    round's name, rank 0 publishes the tokens under it; a rank that finds its token there is in the same round.
    """
    token, answered = secrets.token_hex(8), ""  # rank 0's is the name, another rank's its token
    deadline = time.monotonic() + timeout
    if rank == 0:
        store.set(_KEY, token)
    while True:
        name = _read(store, _KEY) or ""
        if rank == 0:
            answers = [json.loads(_read(store, f"{_KEY}-answer-{other}") or '["", ""]') for other in range(1, world)]
            if all(name == token for name, _ in answers):
                store.set(f"{_KEY}-{token}-tokens", json.dumps([answer for _, answer in answers]))
                return token
        elif name:
            if name != answered:
                store.set(f"{_KEY}-answer-{rank}", json.dumps([name, token]))
                answered = name
            if token in json.loads(_read(store, f"{_KEY}-{name}-tokens") or "[]"):
                return name
        if time.monotonic() > deadline:
            raise OctavoError(f"rank {rank} of {world} has waited {timeout:g} s for the others to start.")
        time.sleep(_POLL_SECONDS)


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
