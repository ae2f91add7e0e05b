"""A key-value store that knows nothing of the attempts before this one.

torchrun starts all ranks again when one has failed, but its agent keeps one store for all attempts. Process groups would read
there what dead ranks wrote: gloo then connects to ports that nobody listens on any more, or waits for ever (torch 2.11 to
2.13, with either rendezvous). So the ranks of an attempt first agree on a name of their own, and everything they write lies
under it. The number of restarts that torchrun tells cannot be that name: agents of several hosts count differently.
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

_POLL_SECONDS = 0.02
_NAME = "octavo-attempt"


def store_of_attempt(rank: int, world: int, timeout: float) -> Store | None:
    """The store of torchrun's agent, for the ranks of this attempt alone; None where no agent keeps one.

    Raises:
        OctavoError: not all ranks came within `timeout` seconds.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))
    return PrefixStore(f"{_NAME}-{meet(store, rank, world, timeout)}", store)


def meet(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name that the ranks of this attempt agree on, whatever earlier attempts have left in the store.

    Rank 0 makes it up; every other rank answers with the name that it found and a word of its own. Rank 0 takes the answers
    that know its name and writes down their words, and a rank that finds its word there has been in the same attempt.

    Raises:
        OctavoError: not all ranks came within `timeout` seconds.
    """
    own, answered = secrets.token_hex(8), ""
    deadline = time.monotonic() + timeout
    if rank == 0:
        store.set(_NAME, own)
    while True:
        name = _read(store, _NAME) or ""
        if rank == 0:
            answers = [json.loads(_read(store, f"{_NAME}-answer-{other}") or '["", ""]') for other in range(1, world)]
            if all(name == own for name, _ in answers):
                store.set(f"{_NAME}-{own}-words", json.dumps([word for _, word in answers]))
                return own
        elif name:
            if name != answered:
                store.set(f"{_NAME}-answer-{rank}", json.dumps([name, own]))
                answered = name
            if own in json.loads(_read(store, f"{_NAME}-{name}-words") or "[]"):
                return name
        if time.monotonic() > deadline:
            raise OctavoError(f"rank {rank} of {world} has waited {timeout:g} s for the others to start.")
        time.sleep(_POLL_SECONDS)


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
