"""Files that the tools of benchmarks read and write: each fault is one message, found before any work.

Loads no torch: tables and plots of results are drawn on machines without a GPU too.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import InputError, OctavoError, warn
from octavo.storage import describe_fault


def exit_code_of(rewrite: Callable[[], None]) -> int:
    """Rewrite a page, and say its fault: a wrong call, or a page that cannot be read or written."""
    try:
        rewrite()
    except OctavoError as error:
        warn(str(error))
        return error.exit_code
    except OSError as error:
        message, code = describe_fault(error)
        warn(message)
        return code
    return 0


def read_json(path: Path, what: str, give: str) -> Any:
    """The content of a JSON file, also of a compressed one.

    Args:
        what, give: the expected file and the files to give, for the message.

    Raises:
        InputError: the file cannot be read, is damaged, or is not JSON.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}. Give {give}.") from None
    try:
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error):
        fault = "it is damaged, a compressed file without its end or with other bytes"
    except (ValueError, RecursionError):  # also of bytes that are no text
        fault = "it is not JSON"
    raise InputError(f"{path} is not {what}: {fault}. Give {give}.")


def read_results(path: Path, suite: str, rate: str, *keys: str) -> dict[str, Any]:
    """A document that `python -m benchmarks SUITE` has written.

    Args:
        rate: the key of a row's speed, which a row without "error" must have.
        keys: of the document, beside "suite" and "rows".

    Raises:
        InputError: the file is no document, is of another suite, has no rows, or has a row without its keys.
    """
    what, give = "a file of python -m benchmarks", f"the JSON files of python -m benchmarks {suite}"
    found = read_json(path, what, give)
    if isinstance(found, dict) and isinstance(found.get("suite"), str) and found["suite"] != suite:
        raise InputError(f"{path} is of the suite {found['suite']}. Give {give}.")
    if fault := _fault(found, rate, ("suite", *keys)):
        raise InputError(f"{path} is not {what}: {fault}. Give {give}.")
    document: dict[str, Any] = found
    return document


def _fault(found: Any, rate: str, keys: tuple[str, ...]) -> str:
    """The fault of a document in words; empty if there is none."""
    if not isinstance(found, dict):
        return "it is no JSON object"
    if missing := [key for key in keys if key not in found]:
        return f"it has no {' and no '.join(missing)}"
    rows = found.get("rows")
    if not isinstance(rows, list) or not rows:
        return "it has no rows"
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            return f"row {number} is no JSON object"
        if missing := [key for key in ("workload", "entry") if not isinstance(row.get(key), str)]:
            return f"row {number} has no {' and no '.join(missing)}"
        if not isinstance(row.get("error"), str) and not isinstance(row.get(rate), int | float):
            return f"row {number} has neither {rate} nor error"
    return ""


def does_not_fit(row: Mapping[str, Any]) -> bool:
    """True for a row of an entry that ran out of memory."""
    return "out of memory" in row.get("error", "").lower()
