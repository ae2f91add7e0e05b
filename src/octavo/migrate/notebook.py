"""The Python of a notebook or a script, as text; lines of Jupyter's own become statements that do nothing."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from octavo.errors import InputError

_COMMAND = re.compile(r"^(\s*)(?:[%!?]|[\w, ]+=\s*[%!]|[\w.]+\?\??\s*$).*$")
"""A line of a notebook that is no Python."""
_PYTHON_CELLS = ("time", "timeit", "capture", "prun", "debug", "python", "python3")
"""Magics (`%%name`) of cells that are Python."""


def content(path: Path) -> bytes:
    """The content of a script.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"script {str(path)!r} cannot be read: {error.strerror or error}. Give a .py file.") from None


def notebook(path: Path, notes: list[str], first: list[int]) -> str:
    """The Python of a notebook's cells, line for line. Adds cells left out to `notes`, the first line of each to `first`."""
    whole = content(path)
    try:
        cells = json.loads(whole.decode("utf-8-sig"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{str(path)!r} is no notebook. Give a .py file, or an .ipynb file that Jupyter has written."
        ) from None
    found: list[str] = []
    for number, source in enumerate(sources, start=1):
        lines = source.splitlines()
        first.append(len(found) + 1)
        if source.startswith("%%"):
            magic = lines[0][2:].split()
            if not magic or magic[0] not in _PYTHON_CELLS:
                notes.append(f"code cell {number} is not read: {lines[0].strip()}")
                found += [""] * len(lines)
                continue
            lines[0] = ""
        if not _parses("\n".join(lines)):
            lines = [_COMMAND.sub(_in_python, line) for line in lines]
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            notes.append(
                f"code cell {number} is not read, line {error.lineno}: {error.msg}: {(error.text or '').strip()[:80]!r}"
            )
            lines = [""] * len(lines)
        found += lines
    return "\n".join(found)


def _in_python(command: re.Match[str]) -> str:
    """A statement in place of a line of the notebook's own: names that it sets are known only at run time."""
    names, _, rest = command[0].strip().partition("=")
    if rest.strip()[:1] in ("%", "!") and rest:
        return f"{command[1]}{names.strip()} = __command__()"
    stored = names.split()
    if stored[:2] == ["%store", "-r"] and len(stored) > 2 and all(name.isidentifier() for name in stored[2:]):
        return f"{command[1]}{' = '.join(stored[2:])} = __command__()"
    return f"{command[1]}pass"


def no_python(place: str, error: SyntaxError) -> InputError:
    """The error for a script with a fault of syntax."""
    line = (error.text or "").strip()[:80]
    return InputError(f"{place}, line {error.lineno}: {error.msg}: {line!r}. Mend it, and run migrate again.")


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True
