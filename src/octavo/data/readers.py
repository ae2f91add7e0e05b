"""Readers of documents: text, JSON lines, Parquet.

Each reader streams, so that a file may be larger than memory (a .txt file is one document and is read whole). A fault is an
error with the file and the line or row: skipping bad lines silently would train on other data than requested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import InputError, first_line, nearest

_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or one list of token ids; `origin` is the file and line, for messages."""

    text: str | None
    input_ids: npt.NDArray[np.uint32] | None
    origin: str


def read_text(path: Path, text_field: str) -> Iterator[Document]:
    """The whole file as one document, without a byte order mark; line ends are unchanged."""
    yield Document(_decode(_bytes(path), str(path)).removeprefix("\ufeff"), None, str(path))


def read_json_lines(path: Path, text_field: str) -> Iterator[Document]:
    """One JSON object a line: the text under `text_field`, else the token ids under `input_ids`."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                origin = f"{path}, line {number}"
                text = _decode(line, f"{path}", first_line=number).removeprefix("\ufeff")
                try:
                    row = json.loads(text)
                except json.JSONDecodeError as error:
                    raise InputError(
                        f"{origin} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}. Correct or remove it."
                    ) from None
                if not isinstance(row, dict):
                    raise InputError(f"{origin} is {_kind(row)}, not an object: write one object a line (JSON lines).")
                yield from_row(row, text_field, origin)
    except OSError as error:
        raise unreadable(path, error) from None


def read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    """The rows of one column, in batches: `text_field`, else `input_ids`."""
    import pyarrow  # heavy
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            column = _column(file.schema_arrow.names, text_field, str(path))
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield from_row({column: value}, text_field, f"{path}, row {row}")
    except pyarrow.ArrowException as error:
        raise InputError(f"{str(path)!r} is not a readable Parquet file: {first_line(error)}. Replace it.") from None
    except OSError as error:
        raise unreadable(path, error) from None


def read_data_set(data: Any, text_field: str, name: str) -> Iterator[Document]:
    """The rows of one column of a `datasets.Dataset`, in batches, as `read_parquet`."""
    column = _column(data.column_names, text_field, name)
    row = 0
    for batch in data.select_columns([column]).iter(batch_size=_ROWS):
        for value in batch[column]:
            row += 1
            yield from_row({column: value}, text_field, f"{name}, row {row}")


def from_row(row: Mapping[str, Any], text_field: str, origin: str) -> Document:
    """A document from one row: `text_field`, else `input_ids`.

    Raises:
        InputError: the row has neither, or a value of another type.
    """
    if text_field in row:
        text = row[text_field]
        if not isinstance(text, str):
            raise InputError(
                f"{origin}: {text_field!r} is {_kind(text)}, not a string. Correct the row or change data.text_field."
            )
        return Document(text, None, origin)
    if "input_ids" in row:
        return Document(None, _token_ids(row["input_ids"], origin), origin)
    raise InputError(f"{origin}: {_no_field(text_field, row)}")


def _token_ids(value: object, origin: str) -> npt.NDArray[np.uint32]:
    try:
        ids = np.asarray(value if isinstance(value, list) else None)
    except ValueError:  # lists within lists, of several lengths
        ids = np.asarray(None)
    if ids.size == 0 and isinstance(value, list):
        return np.empty(0, np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{origin}: 'input_ids' must be a list of whole numbers. Correct the row, or change data.text_field.")
    if ids.min() < 0 or ids.max() >= 2**32:
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(f"{origin}: token id {bad} in 'input_ids' is outside 0 … {2**32 - 1}. Tokenise the text again.")
    return ids.astype(np.uint32)


def _column(names: list[str], text_field: str, where: str) -> str:
    if text_field in names:
        return text_field
    if "input_ids" in names:
        return "input_ids"
    raise InputError(f"{where}: {_no_field(text_field, names)}")


def _no_field(text_field: str, names: Mapping[str, Any] | list[str]) -> str:
    present = list(names)
    guess = nearest(text_field, present)
    hint = f" Did you mean {guess!r}?" if guess else ""
    found = ", ".join(repr(name) for name in present) or "nothing"
    return f"there is no {text_field!r}, only {found}.{hint} Change data.text_field."


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def _decode(data: bytes, where: str, *, first_line: int = 1) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise InputError(
            f"{where}, line {line}: byte {column} of the line, 0x{data[error.start]:02x}, is not UTF-8. Save the file as UTF-8."
        ) from None


def unreadable(path: Path, error: OSError) -> InputError:
    """The InputError of a source file that the system cannot read."""
    return InputError(f"data.source: cannot read {str(path)!r}: {error.strerror or error}. Check its permissions.")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


BY_SUFFIX: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json_lines,
    ".parquet": read_parquet,
}
"""Readers by suffix: (path, text_field) → documents."""
