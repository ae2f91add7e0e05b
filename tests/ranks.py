"""Several ranks on this machine, joined by gloo on its CPU or by NCCL on its GPUs, for the tests of everything parallel.

Where there are fewer GPUs than ranks, the ranks share the first: each says that it is a host of its own, so that NCCL joins
them over sockets. That is slow, and computes and waits as on many GPUs.

`run(4, function, …)` calls a function of a test module in four processes that are a world of four, and returns what each
returned. The processes are forked from a server that has everything imported already, so a world costs a fraction of a second
and starts from a clean state.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import tempfile
import time
import traceback
from pathlib import Path

import torch

import torchvision_shim  # noqa: F401 - a rank imports this module first

# CUDA does not survive a fork, and what is imported beforehand may have touched it.
context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
multiprocessing.set_forkserver_preload(
    [
        "tests.torchvision_shim",  # before transformers; the server finds it from the root of the repository
        *("torch", "torch.distributed.fsdp", "torch.distributed.launcher.api"),
        *("transformers", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
        *("pytest", "torch.profiler"),  # `ranks` itself imports pytest: 0.1 to 0.5 seconds a rank
        "tests.quick_runs",  # before the trainer
        *("octavo.train.trainer", "octavo.parallel.world", "octavo.cli"),
        *("matplotlib.figure", "mpl_toolkits.mplot3d"),  # of a run's plots
        *("rich._emoji_codes", "encodings.utf_8_sig"),
    ]
)


def run(ranks, function, *arguments, timeout=300, **keywords):
    """`[function(*arguments, **keywords) on rank 0, on rank 1, …]`; all but the function's name is pickled.

    The first rank that raises makes this raise, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_child, args=(rank, ranks, folder, function, arguments, keywords, pipe[1], timeout))
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sending in pipes:
            sending.close()
        try:
            return _gather([receiving for receiving, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def exit_codes(ranks, function, *arguments, timeout=300):
    """Exit codes of processes with torchrun's environment that have not joined yet: for a command, which joins and leaves."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    processes = [context.Process(target=_leave, args=(rank, ranks, port, function, arguments)) for rank in range(ranks)]
    deadline = time.monotonic() + timeout
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _leave(rank, ranks, port, function, arguments):
    gc.freeze()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    function(*arguments)


def _gather(pipes, deadline):
    results, failures = [None] * len(pipes), {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                failed, results[rank] = pickle.loads(waiting.pop(rank).recv_bytes())  # noqa: S301
            except EOFError:
                failed, results[rank] = True, "died"
            if failed:
                failures[rank] = results[rank]
                deadline = min(
                    deadline, time.monotonic() + 1
                )  # for what the others have to say: the first may be a consequence
    if failures or waiting:
        said = [f"rank {rank} of {len(pipes)}:\n{text}" for rank, text in sorted(failures.items())]
        raise AssertionError("\n".join([*said, *(f"rank {rank} has not ended" for rank in waiting)]))
    return results


def _child(rank, ranks, folder, function, arguments, keywords, pipe, timeout):
    # A rank that dies, or that is about to be given up, says where it was: its stderr is shown with the failed test.
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.95 * timeout)
    gc.freeze()  # what the server has imported: a collection would copy all of it from the server, and free nothing
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    if 0 < torch.cuda.device_count() < ranks:
        os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=ranks)
        answer = (False, function(*arguments, **keywords))
    except BaseException:
        answer = (True, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    with contextlib.suppress(Exception):
        dist.barrier()  # one that leaves early would break the connections that others are still making
    os._exit(0)
