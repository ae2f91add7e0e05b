"""Failpoints: a test kills the process at a chosen point of a save.

With `OCTAVO_FAILPOINT=<name>` in the environment the process sends itself SIGKILL at that point: no handler, no `finally`, no
flushed buffer, as when a machine is lost. `OCTAVO_FAILPOINT_STEP=<n>` waits for the checkpoint of that step.
"""

from __future__ import annotations

import os
import signal

FAILPOINTS = (
    "within-shard",  # half of a tensor file is written
    "after-shards",  # all tensors are on disk, the scalars are not
    "before-manifest",  # all files but the manifest
    "before-rename",  # whole, under its temporary name
    "after-rename",  # in place, older ones not yet removed
    "while-pruning",  # an older one is half removed
)


def failpoint(name: str, step: int | None = None) -> None:
    """Kill this process if the environment requests it at this point; `step`: the checkpoint's step, if it has one."""
    if os.environ.get("OCTAVO_FAILPOINT") != name:
        return
    wanted = os.environ.get("OCTAVO_FAILPOINT_STEP")
    if wanted is None or wanted == str(step):
        os.kill(os.getpid(), signal.SIGKILL)
