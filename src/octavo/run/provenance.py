"""Versions of packages and of Octavo's code, for the records of runs and benchmarks."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The git commit of Octavo's source; None for an installed package, also within another repository."""
    tracked = _git("ls-files", "--error-unmatch", "__init__.py") is not None
    return _git("rev-parse", "HEAD") if tracked else None


def code_version() -> str | None:
    """The commit, with "+changes" if files of the source differ from it."""
    known, changes = commit(), _git("status", "--porcelain", "--", ".")
    if known is None or changes is None:
        return None
    return known + ("+changes" if changes else "")


def _git(*arguments: str) -> str | None:
    """The output of git in the source's folder; None if it fails."""
    source = Path(__file__).parent.parent
    try:
        done = subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
