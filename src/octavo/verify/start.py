"""Starts the ranks of a comparison, and waits for them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

from octavo.errors import OctavoError
from octavo.watchdog.launcher import launch


def start(module: str, *arguments: str, ranks: int, environment: Mapping[str, str]) -> None:
    """Run `python -m module arguments` on `ranks` ranks with these environment variables.

    Raises:
        OctavoError: a rank failed.
    """
    with _with(environment):
        code = launch([sys.executable, "-m", module, *arguments], ranks, timeout=60.0, grace=10.0)
    if code:
        several = "1 rank" if ranks == 1 else f"{ranks} ranks"
        raise OctavoError(f"{several} ended with exit code {code} (above): nothing was verified.")


@contextlib.contextmanager
def _with(environment: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in environment}
    os.environ |= environment
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
