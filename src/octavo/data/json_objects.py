"""JSON whose objects have each key once. Python's reader takes the last of two, so that a value would be lost."""

from __future__ import annotations

import json
import re
from typing import Any


class RepeatedKey(ValueError):
    """An object, at any depth, with a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} stands there twice")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(next(key for key in keys if keys.count(key) > 1))
    return found


_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder(object_pairs_hook=_object)  # json.loads makes one a text, for as long as it reads it


def decode(text: str) -> Any:
    """The value of a text.

    Raises:
        RepeatedKey: see there.
        json.JSONDecodeError, RecursionError, ValueError: as json.loads.
    """
    return _JSON.decode(text)


def repeating_row(text: str) -> int:
    """The number of the first element with a key twice, from 1, in an array that `decode` refused for one."""
    at, number = text.index("[") + 1, 1
    while True:
        try:
            space = _SPACE.match(text, at)
            _, at = _JSON.raw_decode(text, at if space is None else space.end())
        except RepeatedKey:
            return number
        at, number = text.index(",", at) + 1, number + 1
