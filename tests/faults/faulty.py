"""A rank with planted faults: `faulty.py KIND:PHASE:STEP:RANK,… COMMAND …`, started by torchrun.

There is one fault a round: the first start of the ranks has the first, each restart the next, and then they are healthy. A
fault happens as the main thread enters the phase (RANK "*": on every rank). The time is written to $FAULT_FILE just before.
COMMAND is `demo TIMEOUT GRACE`, a loop over the phases of a training with real collectives but without a model, or an `octavo`
command line such as `train run.toml`.

    kill    SIGKILL, as the kernel does when memory is out
    freeze  SIGSTOP
    raise   an exception that is no OctavoError
    input   an InputError
    stall   the main thread does not come back
    term    SIGTERM, to this rank alone
    save    SIGKILL at the failpoint named in place of a phase, in the save of that step
    none    nothing
"""

import os
import signal
import sys
import time
from pathlib import Path

from octavo.errors import InputError, OctavoError, RunStopped
from octavo.watchdog.processes import die_with_launcher, leave
from octavo.watchdog.stopping import StopRequest

STEPS, SAVE_EVERY = 6, 2
ROUND = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def main():
    faults, command, *arguments = sys.argv[1:]
    die_with_launcher()
    fault = dict(enumerate(faults.split(","))).get(ROUND, "none")
    if fault != "none":
        plant(*fault.split(":"))
    if command != "demo":
        from octavo.cli import main as octavo

        return octavo([command, *arguments])
    try:
        demo(*map(float, arguments))
    except OctavoError as error:
        if not getattr(error, "reported", False):
            sys.stderr.write(f"octavo: {error}\n")
        return error.exit_code
    return 0


def plant(kind, phase, step, rank):
    """Have the watchdog of this process commit the fault, or a save meet its failpoint."""
    if kind == "save":
        if rank == os.environ["RANK"]:
            os.environ |= {"OCTAVO_FAILPOINT": phase, "OCTAVO_FAILPOINT_STEP": step}
        return
    from octavo.watchdog.watchdog import Watchdog

    original = Watchdog._advance

    def advance(watchdog, progress):
        original(watchdog, progress)
        reached = progress.training > 0 and (progress.phase, str(progress.step)) == (phase, step)
        here = reached and rank in ("*", str(watchdog.rank))
        if here:
            Path(os.environ["FAULT_FILE"]).write_text(repr(time.time()))
            commit(kind)

    Watchdog._advance = advance


def commit(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "raise":
        raise ValueError("the planted fault")
    elif kind == "input":
        raise InputError("data.source = 'nowhere' does not exist: name another.")
    elif kind == "stall":
        time.sleep(600)


def demo(timeout, grace):
    import torch
    import torch.distributed as dist

    from octavo.parallel.rendezvous import round_store
    from octavo.parallel.world import init, state
    from octavo.watchdog.watchdog import Watchdog

    torch.set_num_threads(1)
    steps = int(os.environ.get("DEMO_STEPS", STEPS))
    with StopRequest() as stop:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=round_store(rank, world, 600), rank=rank, world_size=world)
        init()
        x = torch.ones(1000, device=state.device)
        watchdog = Watchdog(timeout=timeout, grace=grace)
        with watchdog:
            watchdog.start()
            dist.all_reduce(x)
            os.write(1, f"pid {os.getpid()}\n".encode())  # at once: ranks share the file
            stop.training()
            for step in range(1, steps + 1):
                watchdog.step(step)
                time.sleep(0.02)
                watchdog.phase("forward")
                dist.all_reduce(x)
                watchdog.phase("backward")
                dist.all_reduce(x)
                watchdog.phase("optimizer")
                stopped = torch.tensor(float(stop.received is not None))
                dist.all_reduce(stopped, op=dist.ReduceOp.MAX, group=state.control)
                x.fill_(1).sum().item()
                if step % SAVE_EVERY == 0:
                    watchdog.phase("checkpoint")
                    dist.barrier(group=state.control)
                if stopped and step < steps:
                    raise RunStopped(f"stopped after step {step} of {steps}, saved.")


if __name__ == "__main__":
    leave(main())
