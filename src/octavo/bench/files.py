"""Files that the tools of benchmarks read and write: each fault is one message, found before any work.

Loads no torch: the tables and plots of results are made where nothing is measured.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import InputError, OctavoError, warn
from octavo.storage import describe_fault, folder_fault, why_unusable


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
    """A document that `octavo bench SUITE` has written.

    Args:
        rate: the key of a row's speed, which a row without "error" must have.
        keys: of the document, beside "suite" and "rows".

    Raises:
        InputError: the file is no document, is of another suite, has no rows, or has a row without its keys.
    """
    what, give = "a file of octavo bench", f"the JSON files of octavo bench {suite}"
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


def check_file(path: Path, option: str, suffix: str) -> None:
    """Refuse the path of a file that has another suffix, or could not be written.

    Raises:
        InputError: names the option.
    """
    if path.suffix.lower() != suffix:
        other = path.with_suffix(suffix) if path.name else f"file{suffix}"
        raise InputError(f"{option} {path}: the name does not end in {suffix}. Use {other}.")
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder: give the name of a file in it.")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {str(path.parent)!r}. Make it first, or give another path.")
    check_writable(path, option)


def check_writable(path: Path, option: str) -> None:
    """Refuse the path of a file that could not be written, in a folder that need not exist.

    Raises:
        InputError: names the option, the file and its folder.
    """
    if fault := _unwritable(path.absolute().parent, path.name):
        raise InputError(f"{option}: {path.name} cannot be written in {str(path.parent)!r}: {fault}")


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder that could not be made or written to.

    Raises:
        InputError: names the option.
    """
    if fault := _unwritable(folder.absolute(), ""):
        raise InputError(f"{option} {folder} cannot be written to: {fault}")


def _unwritable(folder: Path, name: str) -> str:
    """The reason, with the remedy, for a folder that could not hold a file of this name; empty if it could. Leaves nothing."""
    if fault := folder_fault(folder):
        return fault
    above = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        # Permissions do not tell of /proc, a quota, or root on a network's disk: a file is made. Its name is as long as the
        # temporary one of `write_atomic`.
        with tempfile.NamedTemporaryFile(dir=above, prefix=f".{name}.", suffix=f"-{os.getpid()}.tmp"):
            return ""
    except FileNotFoundError:
        return f"{str(above)!r} takes no new file. Give another path."
    except OSError as error:
        return why_unusable(error)
