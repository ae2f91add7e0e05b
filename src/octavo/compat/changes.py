"""Patches to classes, modules and functions of other packages that can be undone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

_ABSENT = object()


class Changes:
    """Replaced attributes, to be restored."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def redirect(self, function: Any, to: Callable[..., Any]) -> None:
        """Redirect every call of a function to another one, also calls by names that a script imported earlier.

        Its code is replaced: `to` calls the original through `copy_of`. function: without a closure.
        """
        self.set(function, "__signature__", inspect.signature(to, follow_wrapped=False))
        for name, value in (("__defaults__", None), ("__kwdefaults__", {"_octavo": to}), ("__code__", _call.__code__)):
            self._before.append((function, name, getattr(function, name)))
            setattr(function, name, value)

    def undo(self) -> None:
        """Restore all attributes."""
        for owner, name, value in reversed(self._before):
            if value is not _ABSENT:
                setattr(owner, name, value)
            elif name == "__new__":  # Python never reverts to object's, which then refuses the arguments of __init__
                setattr(owner, name, staticmethod(_plain_new))
            else:
                delattr(owner, name)
        self._before.clear()


def copy_of(function: Any) -> Any:
    """A function with the same code, unaffected by `Changes.redirect` of the original."""
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _call(*args: Any, _octavo: Callable[..., Any], **kwargs: Any) -> Any:
    return _octavo(*args, **kwargs)


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)
