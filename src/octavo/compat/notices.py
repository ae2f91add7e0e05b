"""Messages logged once: names of the replaced libraries without effect in Octavo, or with a different one."""

from __future__ import annotations

import os

from octavo.errors import warn
from octavo.parallel.world import state
from octavo.process import process


def say_once(key: str, message: str) -> None:
    """Log a message once, on the first rank. key: identifies it."""
    if key not in process.said:
        process.said.add(key)
        if state.rank == 0 and os.environ.get("RANK", "0") == "0":
            warn(message)
