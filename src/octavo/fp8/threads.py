"""State per training thread, shared with the thread's backwards: two threads may each train a model.

Autograd runs a backward on a separate thread for each GPU. PyTorch passes a thread's objects on to these, as it does with
gradient mode and autocast. A new thread starts with separate state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch

from octavo.fp8.checkpoints import graph_task

T = TypeVar("T")


class _Stashed:
    """Holder of a thread's state, from which autograd takes it; removed with the thread's other objects.

    PyTorch would free it later, outside any Python thread: a process that exits at that moment aborts.
    """

    def __init__(self, key: str, state: Any) -> None:
        self._key, self._thread = key, threading.get_ident()
        torch._C._stash_obj_in_tls(key, state)

    def __del__(self) -> None:
        remove = getattr(torch._C, "_remove_obj_from_tls", None)  # not in every release; without it that abort is possible
        if remove is not None and threading.get_ident() == self._thread:
            remove(self._key)


class _Local(threading.local):
    """`.state`: of this thread, created on first use, in the attributes that autograd passes on."""

    def __init__(self, key: str, make: Callable[[], Any]) -> None:
        self.state = make()
        self.stashed = _Stashed(key, self.state)


class OfThread(Generic[T]):
    """One state per thread, under a key."""

    def __init__(self, key: str, make: Callable[[], T]) -> None:
        self._key = f"octavo.{key}"
        self.local = _Local(self._key, make)
        """`.state`: of this thread. Every cast reads it, and a call costs the host more than an attribute."""

    def here(self) -> T:
        """The state of this thread; in a backward, of the thread that called it."""
        if graph_task() != -1 and torch._C._is_key_in_tls(self._key):
            return cast(T, torch._C._get_obj_in_tls(self._key))
        return cast(T, self.local.state)
