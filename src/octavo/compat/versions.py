"""Parts of distutils (`LooseVersion`, `StrictVersion`, `strtobool`) for scripts on Python 3.12, which no longer has it."""

from __future__ import annotations

import functools
import re

_PARTS = re.compile(r"\d+|[a-z]+")
_STRICT = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:([ab])(\d+))?")
_WORDS = dict.fromkeys(("y", "yes", "t", "true", "on", "1"), 1) | dict.fromkeys(("n", "no", "f", "false", "off", "0"), 0)


@functools.total_ordering
class LooseVersion:
    """A version as a list of its numbers and words, which compares as that list: 1.10 is newer than 1.9.

    A number and a word in the same place raise a TypeError, as in distutils.
    """

    def __init__(self, vstring: str | None = None) -> None:
        self.version: list[int | str] = []
        if vstring:
            self.parse(vstring)

    def parse(self, vstring: str) -> None:
        """Set the version from its text."""
        self.vstring = vstring
        self.version = [int(part) if part.isdigit() else part for part in _PARTS.findall(vstring)]

    def __str__(self) -> str:
        return self.vstring

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self}')"

    def _other(self, other: object) -> LooseVersion | None:
        return type(self)(other) if isinstance(other, str) else other if isinstance(other, LooseVersion) else None

    def __eq__(self, other: object) -> bool:
        other_version = self._other(other)
        return NotImplemented if other_version is None else self.version == other_version.version

    def __lt__(self, other: object) -> bool:
        other_version = self._other(other)
        return NotImplemented if other_version is None else self.version < other_version.version

    __hash__ = None  # type: ignore[assignment]


class StrictVersion(LooseVersion):
    """Two or three numbers, and for a pre-release a or b with a number: 1.2b3 is older than 1.2."""

    def parse(self, vstring: str) -> None:
        """Set the version from its text; a ValueError for another form."""
        match = _STRICT.fullmatch(vstring)
        if match is None:
            raise ValueError(f"invalid version number '{vstring}'")
        major, minor, patch, letter, number = match.groups()
        self.vstring = vstring
        self.version = [int(major), int(minor), int(patch or 0), letter or "c", int(number or 0)]


def strtobool(val: str) -> int:
    """1 for y, yes, t, true, on and 1; 0 for n, no, f, false, off and 0; a ValueError for any other word."""
    if val.lower() not in _WORDS:
        raise ValueError(f"invalid truth value {val!r}")
    return _WORDS[val.lower()]
