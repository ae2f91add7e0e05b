"""Messages logged once when an old name has no effect in Octavo, or a different one."""

from __future__ import annotations

import os

from octavo.errors import warn
from octavo.parallel.world import state
from octavo.process import process


def say_once(key: str, message: str) -> None:
    """A line for the user, once, on the first rank."""
    if key not in process.said:
        process.said.add(key)
        if state.rank == 0 and os.environ.get("RANK", "0") == "0":
            warn(message)
