"""The versions of PyTorch, Triton and transformers with which every test of Octavo has passed.

Octavo uses private parts of them, which `tests/contract` lists: another version can lack one, or change what it does. pip
refuses versions out of these ranges; an environment that was put together by other means may have one.
"""

from __future__ import annotations

import importlib.metadata
import re

TESTED = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 8)), "transformers": ((5, 14), (5, 24))}
"""Package → the first and the last minor version of the range."""


def requirement(package: str) -> str:
    """Requirement of pip for a tested version, such as "torch>=2.11,<2.15"."""
    first, (major, minor) = TESTED[package]
    return f"{package}>={_text(first)},<{major}.{minor + 1}"


def untested(package: str) -> str | None:
    """The sentence about an installed version out of the range, with the command for one within; None within or without one."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    first, last = TESTED[package]
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or first <= (int(found[1]), int(found[2])) <= last:
        return None
    return f"{package} {version} was not tested with Octavo; versions {_text(first)} to {_text(last)} were"


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
