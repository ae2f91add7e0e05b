"""Errors for absent names of the replaced libraries; each says what to use instead.

They are an ImportError and an AttributeError, so that `try: import …` and `hasattr` work as with any absent name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.errors import InputError, nearest

TABLE = "docs/migrating.md has the table of names."


class MissingModule(InputError, ModuleNotFoundError):
    """An import of a name that the shim does not have."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.msg, self.name = message, name


class MissingName(InputError, AttributeError):
    """A name that a module of the shim does not have."""


def way_of(name: str, ways: Mapping[str, str], known: Iterable[str] = ()) -> str:
    """The message for an absent dotted name: its remedy in `ways`, or that of an enclosing name, and a similar known name."""
    last = name.rpartition(".")[2]
    way = ways.get(last)
    around = name
    while way is None and around:
        way = ways.get(around)
        around = around.rpartition(".")[0]
    guess = nearest(last, known)
    general = way is not None and way == ways.get(name.partition(".")[0])  # of the whole package
    hint = f" Did you mean {guess}?" if guess and (way is None or general) else ""
    return f"{name} is not in Octavo's compatibility layer.{hint} {way + ' ' if way else ''}{TABLE}"
