"""What the ranks of `test_watch.py` do: a module that their processes can import."""

import time

import torch.distributed as dist

from octavo.errors import InputError, RunStopped
from octavo.parallel import world
from octavo.watchdog.watchdog import Watch


def in_watch(act, timeout=5.0):
    """What leaves the watch of a rank that trains two steps and then does `act(rank)`: the error, and whether it was said."""
    world.init()
    try:
        with Watch.of_job(timeout=timeout, grace=6) as watch:
            watch.start()
            for step in (1, 2):
                watch.step(step)
                watch.phase("forward")
                dist.barrier()
            act(world.state.rank)
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "reported", False), getattr(error, "exit_code", None)
    return None


def nothing(rank):
    pass


def raises_after_its_echo(rank):
    if rank == 1:
        time.sleep(0.5)
        raise ValueError("the first cause")
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


def echoes_without_a_cause(rank):
    raise RuntimeError(f"rank {rank}: connection reset by peer")


def one_ends_early(rank):
    if rank != 2:
        time.sleep(0.5)
        raise RuntimeError("Connection closed by peer")
