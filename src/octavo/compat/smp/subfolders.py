"""SMP's `limit_num_subdirs`: removes the oldest checkpoints of a folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

from octavo.compat.smp.utils import get_logger
from octavo.storage import local_path


def SORT_BY_LAST_INT(name: str) -> int:
    """The last whole number in a name, such as a step; −1 without one."""
    numbers = re.findall(r"\d+", str(name))
    return int(numbers[-1]) if numbers else -1


def limit_num_subdirs(
    root: str,
    max_num_subdirs: int,
    sort_fn: Callable[[str], Any] = SORT_BY_LAST_INT,
    regex: str | None = None,
    log: bool = True,
) -> list[str]:
    """Remove the first subfolders of `root` by `sort_fn`, so that the last `max_num_subdirs` stay; 0 or less removes none.

    regex: subfolders with other names are neither counted nor removed. log: True on the one rank that removes and logs them.
    Returns the removed names.
    """
    folder = local_path(root, "limit_num_subdirs: root")
    if not log or max_num_subdirs <= 0 or not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    matched = sorted((name for name in names if regex is None or re.match(regex, name)), key=sort_fn)
    removed = matched[: max(0, len(matched) - max_num_subdirs)]
    for name in removed:
        get_logger().info("Removing %s: %d checkpoints are kept.", folder / name, max_num_subdirs)
        shutil.rmtree(folder / name)
    return removed
