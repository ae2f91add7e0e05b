"""JSON with unique keys in each object: Python's reader silently takes the last of two equal keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class RepeatedKey(ValueError):
    """An object, at any depth, has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} occurs twice")


class Repeating(dict[str, Any]):
    """An object of `decode_any` with the last value of each key.

    Attributes:
        repeated: keys that occur more than once.
    """

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.repeated = [key for key in self if keys.count(key) > 1]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise RepeatedKey(Repeating(pairs).repeated[0])
    return result


def _any_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    return result if len(result) == len(pairs) else Repeating(pairs)


_JSON = json.JSONDecoder(object_pairs_hook=_object)  # json.loads would create a decoder per call
_ANY_JSON = json.JSONDecoder(object_pairs_hook=_any_object)


def decode(text: str) -> Any:
    """The value of a text.

    Raises:
        RepeatedKey: an object has a key twice.
        json.JSONDecodeError, RecursionError, ValueError: as from json.loads.
    """
    return _JSON.decode(text)


def decode_any(text: str) -> Any:
    """The value of a text, in which objects with a key twice are `Repeating`; raises as json.loads."""
    return _ANY_JSON.decode(text)


def check_keys(value: object) -> None:
    """Refuse a value of `decode_any` in which a key occurs twice, at any depth.

    Raises:
        RepeatedKey: see there.
    """
    if isinstance(value, Repeating):
        raise RepeatedKey(value.repeated[0])
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for each in inner:
        check_keys(each)
