"""Uncaught errors of a job's ranks, in one file: the first is the job's reason; an error of several ranks is printed once.

A rank that fails because another rank has ended is recorded, but not printed. Errors of other processes that a script starts
are not recorded, nor is the output of a script before `sys.exit`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

NAME = "faults.jsonl"
VARIABLE = "OCTAVO_LAUNCH_FAULTS"
"""Environment variable of a job's command: the path of its file. A script's process hides it from its children."""
_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Socket closed|remote process exited|ncclRemoteError|"
    r"failed to recv, got 0 bytes"
)
"""Errors of a rank whose peer has ended."""


class Faults:
    """The errors that the ranks of one job did not catch."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank

    def record(self, text: str, reason: str) -> bool:
        """Record an error of this rank; True if it should be printed.

        text: as it would be printed. reason: in one line.
        """
        try:
            with self._path.open("a+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                before = _parsed(file.read())
                file.write(json.dumps({"rank": self._rank, "reason": reason, "text": text}) + "\n")
        except OSError:  # the job's folder was removed
            return True
        return not any(one["text"] == text for one in before) and not (before and _LOST.search(reason))


def of_this_process() -> Faults | None:
    """The file of this process's job; None outside a job, and on a second call."""
    path = os.environ.pop(VARIABLE, "")
    return Faults(Path(path), int(os.environ.get("RANK", "0"))) if path else None


def first(path: Path) -> str:
    """The reason of the first error, preferably not that of a lost peer; empty without one."""
    try:
        faults = _parsed(path.read_text(encoding="utf-8"))
    except OSError:
        return ""
    causes = [one["reason"] for one in faults if not _LOST.search(one["reason"])]
    return str(next(iter(causes or [one["reason"] for one in faults]), ""))


def _parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
