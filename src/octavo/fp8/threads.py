"""State of a thread that trains, which its backwards have too.

Autograd runs a backward on this GPU's or that one's thread of its own. PyTorch hands a thread's objects on to them, as it does
with gradient mode and autocast, so that two threads may each train a model. A thread begins with a state of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch

from octavo.fp8.checkpoints import graph_task

T = TypeVar("T")


class _Own(threading.local):
    """`.state`: of this thread, made at its first use and left where autograd takes it from."""

    def __init__(self, key: str, make: Callable[[], Any]) -> None:
        self.state = make()
        torch._C._stash_obj_in_tls(key, self.state)


class OfThread(Generic[T]):
    """A state for each thread, by a key of its own."""

    def __init__(self, key: str, make: Callable[[], T]) -> None:
        self._key = f"octavo.{key}"
        self.own = _Own(self._key, make)
        """`.state`: of this thread. Each cast asks, and a call costs the host more than an attribute."""

    def here(self) -> T:
        """The state of this thread; in a backward, of the thread that has called it."""
        if graph_task() != -1 and torch._C._is_key_in_tls(self._key):
            return cast(T, torch._C._get_obj_in_tls(self._key))
        return cast(T, self.own.state)
