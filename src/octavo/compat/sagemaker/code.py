"""Code of a job: `source_dir` and dependencies, copied into the job's folder.

Version control, caches and folders of jobs are left out; the latter contain links to data.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from octavo.errors import InputError
from octavo.launch.addresses import expanded

_MOST_CODE = 512 * 2**20
"""Limit of `source_dir` in bytes: every job copies it."""
_NOT_CODE = (".git", ".hg", ".venv", "__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache")


def files_of(folder: Path, jobs: Path, ignored: Sequence[str] = ()) -> list[Path]:
    """Files of a folder of code, without version control, caches and jobs. ignored: patterns of further names to leave out.

    Raises:
        InputError: the files have more than 512 MiB.
    """
    files, total, skipped = [], 0, jobs.absolute()
    seen: set[Path] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := Path(place).resolve()) in seen:  # a link to an enclosing folder
            folders.clear()
            continue
        seen.add(real)
        if "job.json" in names and "code" in folders:  # another folder of jobs
            folders.clear()
            continue
        folders[:] = [name for name in folders if not _is_ignored(name, ignored) and Path(place, name) != skipped]
        for name in names:
            if any(fnmatch(name, pattern) for pattern in ignored):
                continue
            path = Path(place, name)
            if path.is_file():
                total += path.stat().st_size
                files.append(path)
        if total > _MOST_CODE:
            raise InputError(
                f"source_dir = {str(folder)!r} has more than {_MOST_CODE >> 20} MiB, and every job copies it: give a folder of "
                "code alone, and data as inputs."
            )
    return files


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return name in _NOT_CODE or any(fnmatch(name, pattern) for pattern in patterns)


def copy(paths: Iterable[Path], root: Path, target: Path) -> None:
    """Copy files of `root` to `target`."""
    for path in paths:
        to = target / path.relative_to(root)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)


def check_dependencies(names: Sequence[str]) -> None:
    """Check that dependencies exist.

    Raises:
        InputError: one does not exist.
    """
    for name in names:
        if not expanded(name, "dependencies").exists():
            raise InputError(f"dependencies: {name!r} does not exist.")


def copy_dependencies(names: Sequence[str], target: Path) -> None:
    """Copy files and folders beside the script.

    Raises:
        InputError: the job's code already has a file of this name.
    """

    def copy_new(source: str, to: str) -> None:
        if Path(to).exists():
            inside = Path(to).relative_to(target).as_posix()
            raise InputError(f"dependencies: {source!r} would replace {inside!r} of the job's code. Rename one of the two.")
        shutil.copy2(source, to)

    for name in names:
        path = expanded(name, "dependencies").resolve()
        if path.is_dir():
            ignored = shutil.ignore_patterns(*_NOT_CODE)
            shutil.copytree(path, target / path.name, ignore=ignored, copy_function=copy_new, dirs_exist_ok=True)
        else:
            copy_new(str(path), str(target / Path(name).name))
