"""Places where a test may kill the process, so that "at any moment" is tested where it hurts most.

A kill at a random moment seldom lands in the few milliseconds in which a checkpoint is half written. With
`OCTAVO_FAILPOINT=<name>` in the environment the process sends itself SIGKILL when it reaches that place: no handler, no
`finally`, no flushed buffer, exactly what a lost machine leaves behind. `OCTAVO_FAILPOINT_STEP=<n>` waits for the
checkpoint of that step. Without the variable a failpoint is one look at the environment.
"""

from __future__ import annotations

import os
import signal

FAILPOINTS = (
    "within-shard",  # half of a tensor file is written
    "after-shards",  # every tensor is on disk, the scalars are not
    "before-manifest",  # everything but the mark that it is whole
    "before-rename",  # whole, under its temporary name
    "after-rename",  # in place, older ones not yet removed
    "while-pruning",  # an older one is half removed
)


def failpoint(name: str, step: int | None = None) -> None:
    """Kill this process if the environment asks for it here; `step` is the checkpoint being written, if it has one."""
    if os.environ.get("OCTAVO_FAILPOINT") != name:
        return
    wanted = os.environ.get("OCTAVO_FAILPOINT_STEP")
    if wanted is None or wanted == str(step):
        os.kill(os.getpid(), signal.SIGKILL)
