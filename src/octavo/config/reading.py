"""Run files and `section.key=value` overrides as tables, before any key is checked.

The value of an override is TOML or, since a shell removes quotes, a bare word: `train.output=runs/two`,
`log.trackers=wandb,trackio`. If both are possible, the key's type decides.
"""

from __future__ import annotations

import glob
import re
import tomllib
import typing
from collections.abc import Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from octavo.config.section import keys_of
from octavo.config.synonyms import closest
from octavo.errors import InputError, nearest

_FORM = "is not section.key=value, as in optimizer.lr=1e-4."


def read_file(path: Path, what: str = "run file") -> dict[str, Any]:
    """The tables of a run file, or of another TOML file, which messages call `what`.

    A run file `presets/NAME.toml` that does not exist in the working directory is the installed one.

    Raises:
        InputError: the file is missing, cannot be read, or is not TOML.
    """
    try:
        if what == "run file" and path.parts[:-1] == ("presets",) and not path.parent.is_dir():
            path = _presets() / path.name
        if not path.is_file():
            raise _missing(path, what)
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows editors write a byte order mark
    except OSError as error:
        raise InputError(
            f"{what} {str(path)!r} cannot be read: {error.strerror or error}. Check its path and its permissions."
        ) from None
    except UnicodeDecodeError as error:
        fault = f"byte {error.start + 1} is not UTF-8. Give a text file, saved as UTF-8"
    except tomllib.TOMLDecodeError as error:
        fault = str(error).rstrip(".")
    except RecursionError:
        fault = "it is nested too deeply"
    except InputError:
        raise
    except ValueError:  # Python's limit for the digits of a number
        fault = "a number has thousands of digits"
    raise InputError(f"{what} {str(path)!r} is not valid TOML: {fault}.")


def _presets() -> Path:
    """The presets of Octavo: next to its modules in a wheel, at the top in a clone."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "presets", package.parents[1] / "presets") if folder.is_dir())


def _missing(path: Path, what: str) -> InputError:
    folder, fault = (path, "is a folder") if path.is_dir() else (path.parent, "does not exist")
    names = sorted(file.name for file in folder.glob("*.toml") if file.is_file())
    inside = next((name for name in names if name != "pyproject.toml"), None)
    guess = inside if path.is_dir() else nearest(path.name, names)
    hint = f" Did you mean {folder / guess}?" if guess else ""
    if path.exists() and not path.is_dir():
        fault, hint = "is a pipe or a device, not a file", ""
    elif path.is_symlink():
        fault = "is a broken symbolic link"
    example = ", such as presets/demo.toml" if what == "run file" else ""
    return InputError(f"{what} {str(path)!r} {fault}.{hint} Give the path of a TOML file{example}.")


def apply_overrides(values: dict[str, Any], overrides: Sequence[str], model: type[BaseModel]) -> None:
    """Apply overrides `section.key=value` to the tables of a run file; the last one for a key wins.

    Raises:
        InputError: an override of another form, without a value, or for a key inside a plain value.
    """
    for index, override in enumerate(overrides):
        name, equals, text = override.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts) or name.lstrip().startswith("-"):
            raise _not_an_override(overrides, index, model)
        if not text.strip():
            following = overrides[index + 1] if index + 1 < len(overrides) and "=" not in overrides[index + 1] else "…"
            raise InputError(f"override {override!r} has no value. Write {name.strip()}={following}, without a space.")
        table = values
        kind = _kind_of(model, parts)
        for depth, part in enumerate(parts[:-1]):
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict) or (depth == 1 and kind is not None and not _takes(kind, dict)):
                raise InputError(f"override {override!r}: {part} is a value, not a table.")
            table = inner
        table[parts[-1]] = _value(text, kind if len(parts) == 2 else None, override)


def as_override(arguments: Sequence[str], model: type[BaseModel]) -> str | None:
    """The override that was probably meant by an argument and the following ones, such as `--lr 3`; None if none is close."""
    first = re.split(r"[=:]", arguments[0].replace("/", "."), maxsplit=1)
    rest = [*first[1:], *(argument for argument in arguments[1:] if argument != "=")]
    key, note = closest(first[0], keys_of(model))
    value = rest[0] if rest and rest[0] and not re.search(r"^--|=|\.toml$", rest[0]) else "…"
    return None if key is None else f"{key}={value}" + (f" ({note})" if note else "")


def _not_an_override(overrides: Sequence[str], index: int, model: type[BaseModel]) -> InputError:
    override = overrides[index]
    name = override.partition("=")[0].strip()
    if name.endswith(".toml"):
        return InputError(f"override {override!r} {_FORM} One command takes one run file: give the other to a second command.")
    if name in model.model_fields:
        keys = [key for key in keys_of(model) if key.startswith(f"{name}.")]
        return InputError(f"override {override!r} {_FORM} {name} is a section. Set one of its keys: {', '.join(keys)}.")
    meant = as_override(overrides[index:], model) if name else None
    return InputError(f"override {override!r} {_FORM}" + (f" Did you mean {meant}?" if meant else ""))


def _kind_of(model: type[BaseModel], parts: Sequence[str]) -> Any:
    """The annotation of `section.key`; None for an unknown key."""
    section = model.model_fields.get(parts[0])
    fields = section.annotation.model_fields if section is not None and section.annotation is not None else {}
    return next((field.annotation for name, field in fields.items() if (field.alias or name) == parts[1]), None)


def _takes(kind: Any, *wanted: type) -> bool:
    """True if an annotation, or a member of its union, is one of these types."""
    members = [member for each in typing.get_args(kind) if each is not type(None) for member in (each,)]
    union = typing.get_origin(kind) is not None and typing.get_origin(kind) not in (list, dict, tuple, typing.Literal)
    return any((typing.get_origin(member) or member) in wanted for member in (members if union else [kind]))


def _value(text: str, kind: Any, override: str) -> Any:
    """A value in TOML, or a bare word; for a list also one entry, or several separated by commas."""
    text = text.strip()
    value: Any
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    lists = _takes(kind, list, tuple)
    if len(parsed) == 1:  # more than one if the text has a line end
        value = parsed["value"]
        word = _takes(kind, str) and isinstance(value, int | float | date | datetime | time) and not isinstance(value, bool)
        value = text if word else value  # such as train.output=2026-01-31
        return [value] if lists and not _takes(kind, str) and not isinstance(value, list) else value
    if text[0] in "'\"" and not (lists and "," in text):
        raise InputError(f"override {override!r}: the quote is not closed, or text follows it. Remove the quotes.")
    bracketed = text[0] == "[" and text[-1] == "]"
    if lists and (bracketed or not _takes(kind, str) or ("," in text and not glob.glob(text))):  # noqa: PTH207 (any pattern)
        return _entries(text[1:-1] if bracketed else text)
    return text  # a bare word is a string: train.output=runs/two


def _entries(text: str) -> list[Any]:
    """The entries of a list: in TOML, or bare words."""
    try:
        return list(tomllib.loads(f"value = [{text}]")["value"])
    except (ValueError, RecursionError):
        return [entry for part in re.split(r",(?![^\[]*\])", text) if (entry := part.strip(" \t'\""))]
