"""Base class of all sections, and the error message for invalid keys and values."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from octavo.config.synonyms import hint
from octavo.errors import InputError, nearest
from octavo.storage import path_fault

_LARGEST = 2**63 - 1
"""Largest integer of TOML, and of counters in PyTorch and NumPy."""
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")


def refuse_addresses(value: Any, *, hub: bool = False) -> Any:
    """Return a path or a list of paths unchanged, if valid. hub: also accept ids of the Hugging Face Hub.

    Raises:
        ValueError: one is an address such as s3://…, or blank.
    """
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str) and (fault := path_fault(each, hub=hub)):
            raise ValueError(f"{each!r}: {fault}" if isinstance(value, list) else fault)
    return value


def several(description: str) -> Any:
    """A field of a list, by default without elements."""
    return Field(default_factory=list, description=description)


OnDisk = AfterValidator(refuse_addresses)
"""Validator of a field with a path or a list of paths."""
OnDiskOrHub = AfterValidator(functools.partial(refuse_addresses, hub=True))
"""Validator of a field with a path or Hub id, or a list of them."""


class Section(BaseModel):
    """A table of the run file: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        strict=True,
        allow_inf_nan=False,
        str_min_length=1,
        serialize_by_alias=True,
    )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "configuration", context: Any = None) -> Self:
        """Validate a table; one InputError reports all faults. context: for validators."""
        if faults := "; ".join(_beyond_toml(values)):
            raise InputError(f"{where}: {faults}.")
        try:
            return cls.model_validate(dict(values), context=context)
        except ValidationError as error:
            raise InputError(f"{where}: {_explain(cls, error)}") from None


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    """All faults of a validation in one line, each with key, value and the nearest known key."""
    return "; ".join(
        _explain_one(cls, fault["loc"], fault["type"], fault["msg"], fault["input"], fault.get("ctx", {}))
        for fault in _distinct(cls, error)
    )


def _distinct(cls: type[BaseModel], error: ValidationError) -> list[Any]:
    """One fault per key: pydantic reports one for each member of a union."""
    by_key: dict[tuple[str, ...], Any] = {}
    for fault in error.errors(include_url=False):
        if not keys_of(cls):  # plain keys: the rest of the path is a member of a union
            fault["loc"] = fault["loc"][:1]
        first = by_key.setdefault(tuple(str(part) for part in fault["loc"][:2]), fault)
        if fault["msg"] not in first["msg"]:
            first["msg"] += f", or {fault['msg'][0].lower()}{fault['msg'][1:]}"
    return list(by_key.values())


def _explain_one(cls: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str, value: object, limits: Any) -> str:
    name = ".".join(str(part) for part in loc[:2])
    if kind == "extra_forbidden":
        return _explain_unknown(cls, name, value)
    if kind == "missing" and len(loc) == 1:
        return f"{name} is missing: add a [{name}] section"
    if kind == "missing" and len(loc) == 2:
        section = cls.model_fields[str(loc[0])]
        return f"{name} is missing: {_fields(section.annotation)[str(loc[1])].description}"
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{name} = {shorten(value)}: {message}" if loc and not isinstance(value, dict) else message
    if isinstance(value, list) and kind == "model_type":
        return f"{name} is a list of tables: write [{name}], not [[{name}]]"
    limit = limits.get({"greater_than_equal": "ge", "less_than_equal": "le"}.get(kind, ""))
    remedy = _remedy(kind, value) if limit is None else f"nearest: {limit}"
    return f"{name} = {shorten(value)}: {message}" + (f" ({remedy})" if remedy else "")


def _explain_unknown(cls: type[BaseModel], name: str, value: object) -> str:
    first, _, key = name.partition(".")
    known = keys_of(cls)
    if not known:
        guess = nearest(name, cls.model_fields)
        return f"unknown key {name}.{f' Did you mean {guess}?' if guess else ''} Known: {', '.join(cls.model_fields)}"
    if key:
        return f"unknown key {name}.{hint(name, known)} Known: {', '.join(_fields(cls.model_fields[first].annotation))}"
    guess = nearest(name.lower(), cls.model_fields)
    if not isinstance(value, dict):
        suggestion = hint(name, known)
        return f"unknown key {name} outside of all sections.{suggestion} Sections: {', '.join(cls.model_fields)}"
    inner = next(filter(None, (hint(f"{name}.{each}", known) for each in value)), "")
    misspelt = guess and (not inner or any(f"{guess}.{each}" in known for each in value))
    suggestion = f" Did you mean {guess}?" if misspelt else inner
    return f"unknown section {name}.{suggestion} Known: {', '.join(cls.model_fields)}"


def _remedy(kind: str, value: object) -> str:
    """A hint at the accepted form of the value; empty if unknown."""
    if isinstance(value, dict):
        return "it is a table here; the key has one value"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind in ("list_type", "tuple_type") and not isinstance(value, list):
        return f"write a list: [{shorten(value, json.dumps)}]"
    if not isinstance(value, str) or kind not in ("int_type", "float_type", "bool_type"):
        return ""
    text = value.strip(" \t,;'\"").lower()
    if text in ("none", "null", "nil", "undefined"):
        return "leave the key out"
    if text in ("true", "false"):
        return f"write {text}, in small letters and without quotes" if kind == "bool_type" else ""
    try:
        number = float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    except ValueError:
        return ""
    if kind == "bool_type" or not math.isfinite(number) or (kind == "int_type" and not number.is_integer()):
        return ""
    return f"write {int(number) if number.is_integer() and abs(number) < 2**53 else number}"


def _beyond_toml(values: Mapping[str, Any]) -> Iterator[str]:
    """Messages about integers of a table beyond TOML's range."""
    left: list[tuple[str, Any]] = [("", values)]
    while left:  # iterative: a file may be nested deeper than Python's stack
        name, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [(name, inner) for inner in value]
        elif isinstance(value, int) and not -_LARGEST - 1 <= value <= _LARGEST:
            yield f"{name} = {shorten(value)}: a whole number is at most {_LARGEST}"


def shorten(value: object, text_of: Any = repr) -> str:
    """A value for a message, with the middle of a long one omitted."""
    text: str = text_of(value)
    return text if len(text) <= 200 else f"{text[:120]} … {text[-40:]}"


def keys_of(cls: type[BaseModel]) -> list[str]:
    """Every `section.key` of a model of sections, in order; empty for a model of plain keys."""
    return [f"{section}.{key}" for section, field in cls.model_fields.items() for key in _fields(field.annotation)]


def _fields(annotation: Any) -> dict[str, Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {field.alias or name: field for name, field in annotation.model_fields.items()}
    return {}
