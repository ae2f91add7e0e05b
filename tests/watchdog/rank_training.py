"""Functions of the ranks of `test_watchdog.py`, in a module that their processes can import."""

import time

import torch.distributed as dist

from octavo.errors import InputError, RunStopped
from octavo.parallel import world
from octavo.watchdog.watchdog import Watchdog


def in_watchdog(act, timeout=100.0):
    """Train two steps under a watchdog and call `act(rank)`; class, text, `reported` and exit code of the exception."""
    world.init()
    try:
        with Watchdog(timeout=timeout, grace=16) as watchdog:
            watchdog.start()
            for step in (1, 2):
                watchdog.step(step)
                watchdog.phase("forward")
                dist.barrier()
            act(world.state.rank)
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "reported", False), getattr(error, "exit_code", None)
    return None


def nothing(rank):
    pass


def raises_after_its_consequence(rank):
    if rank == 1:
        time.sleep(0.5)
        raise ValueError("the first failure")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")


def all_find_the_same(rank):
    raise InputError("data.source is missing: name one.")


def stops(rank):
    raise RunStopped("stopped, saved.")


def one_stops_alone(rank):
    if rank == 0:
        raise RunStopped("stopped by SIGTERM before the first step: nothing to save.")
    time.sleep(0.5)
    raise RuntimeError("Connection closed by peer")


def consequences_without_a_failure(rank):
    raise RuntimeError(f"rank {rank}: connection reset by peer")


def one_ends_early(rank):
    if rank != 2:
        time.sleep(0.5)
        raise RuntimeError("Connection closed by peer")
