"""Base class of all sections, and the error message for invalid keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.errors import InputError, nearest


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
        try:
            return cls.model_validate(dict(values), context=context)
        except ValidationError as error:
            raise InputError(f"{where}: {_explain(cls, error)}") from None


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    """All faults of a validation in one line, each with key, value and the nearest known key."""
    return "; ".join(_explain_one(cls, fault["loc"], fault["type"], fault["msg"], fault["input"]) for fault in _distinct(error))


def _distinct(error: ValidationError) -> list[Any]:
    """One fault a key: pydantic reports one for each member of a union."""
    found: dict[tuple[str, ...], Any] = {}
    for fault in error.errors(include_url=False):
        first = found.setdefault(tuple(str(part) for part in fault["loc"][:2]), fault)
        if fault["msg"] not in first["msg"]:
            first["msg"] += f", or {fault['msg'][0].lower()}{fault['msg'][1:]}"
    return list(found.values())


def _explain_one(cls: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    name = ".".join(str(part) for part in loc[:2])
    if kind == "extra_forbidden":
        section = cls.model_fields.get(str(loc[0]))
        keys = list(cls.model_fields) if len(loc) == 1 or section is None else list(_fields(section.annotation))
        elsewhere = next((key for key in keys_of(cls) if len(loc) > 1 and key.endswith(f".{loc[-1]}")), None)
        guess = elsewhere or nearest(str(loc[-1]), keys)
        prefix = f"{loc[0]}." if len(loc) > 1 and guess and "." not in guess else ""
        hint = f" Did you mean {prefix}{guess}?" if guess else ""
        what = "section" if len(loc) == 1 and any(keys_of(cls)) else "key"
        return f"unknown {what} {name}.{hint} Known: {', '.join(keys)}"
    if kind == "missing" and len(loc) == 1:
        return f"{name} is missing: add a [{name}] section"
    if kind == "missing" and len(loc) == 2:
        section = cls.model_fields[str(loc[0])]
        return f"{name} is missing: {_fields(section.annotation)[str(loc[1])].description}"
    message = message.removeprefix("Value error, ")
    return f"{name} = {value!r}: {message}" if loc and not isinstance(value, dict) else message


def keys_of(cls: type[BaseModel]) -> list[str]:
    """Every `section.key` of a model of sections, in order; empty for a model of plain keys."""
    return [f"{section}.{key}" for section, field in cls.model_fields.items() for key in _fields(field.annotation)]


def _fields(annotation: Any) -> dict[str, Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {field.alias or name: field for name, field in annotation.model_fields.items()}
    return {}
