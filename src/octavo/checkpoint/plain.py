"""Tensors, numbers and text in lists, tuples and dicts as bytes and back, exactly and without pickle.

The bytes are a safetensors file. Its metadata holds the structure as JSON, with the tensors numbered.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import safetensors.torch
import torch

_DICTS: dict[type[dict[Any, Any]], str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
KINDS = "tensors, numbers, text, None, and lists, tuples and dicts of them"


def pack(value: Any) -> bytes:
    """The bytes of a value.

    Raises:
        TypeError: an element has another type; the message names type and place.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        structure = json.dumps(_to_json(value, "", tensors), allow_nan=False)
        return bytes(safetensors.torch.save(tensors, {"structure": structure}))
    except RecursionError:
        raise TypeError("it contains itself") from None
    except (KeyError, ValueError, RuntimeError) as error:  # a sparse or a meta tensor
        raise TypeError(f"a tensor in it cannot be stored ({error})") from None


def unpack(content: bytes) -> Any:
    """The value of `pack`, with tensors on the CPU.

    Raises:
        ValueError: the bytes are not from `pack`.
    """
    try:
        (length,) = struct.unpack_from("<Q", content)
        structure = json.loads(content[8 : 8 + length])["__metadata__"]["structure"]
        return _from_json(json.loads(structure), safetensors.torch.load(content))
    except (struct.error, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"not a packed value ({error})") from None


def to_json(value: Any) -> Any:
    """A value without tensors as JSON: non-string keys, tuples, infinities and NaN are marked by their type.

    Raises:
        TypeError: an element has another type, or is a tensor; the message names type and place.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        stored = _to_json(value, "", tensors)
    except RecursionError:
        raise TypeError("it contains itself") from None
    if tensors:
        raise TypeError("it has a tensor: take its numbers by .item() or .tolist()")
    return stored


def from_json(stored: Any) -> Any:
    """The inverse of `to_json`.

    Raises:
        ValueError: `stored` is not from `to_json`.
    """
    try:
        return _from_json(stored, {})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a stored value ({error})") from None


def _to_json(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind in (torch.Tensor, torch.nn.Parameter):
        number = str(len(tensors))
        tensors[number] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": number}
    if kind in (list, tuple):
        items = [_to_json(item, f"{place}[{number}]", tensors) for number, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in _DICTS:
        pairs = [[_to_json(key, place, tensors), _to_json(item, f"{place}[{key!r}]", tensors)] for key, item in value.items()]
        return {_DICTS[kind]: pairs}
    raise TypeError(f"{place or 'it'} is of type {kind.__module__}.{kind.__qualname__}")


def _from_json(stored: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(stored, list):
        return [_from_json(item, tensors) for item in stored]
    if not isinstance(stored, dict):
        return stored
    ((kind, content),) = stored.items()
    if kind == "float":
        return float(content)
    if kind == "tensor":
        return tensors[content]
    items = [_from_json(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(items)
    return {name: of for of, name in _DICTS.items()}[kind](dict(items))
