"""Readers of documents: text, JSON lines, Parquet, and data sets that `datasets` loads.

Each reader streams, so that a file may be larger than memory (a .txt file is one document and is read whole). A fault is an
error with the file and the line or row: skipping bad lines silently would train on other data than requested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.config.data import DataConfig
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
    with readable(path):
        data = path.read_bytes()
    yield Document(_decode(data, str(path)), None, str(path))


def read_json_lines(path: Path, text_field: str) -> Iterator[Document]:
    """One JSON object a line: the text under `text_field`, else the token ids under `input_ids`."""
    with readable(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            origin = f"{path}, line {number}"
            try:
                row = json.loads(_decode(line, str(path), first_line=number))
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{origin} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}. Correct or remove it."
                ) from None
            if not isinstance(row, dict):
                raise InputError(f"{origin} is {_kind(row)}, not an object: write one object a line (JSON lines).")
            yield _from_row(row, text_field, origin)


def read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    """The rows of one column, in batches: `text_field`, else `input_ids`."""
    import pyarrow  # heavy
    import pyarrow.parquet

    try:
        with readable(path), pyarrow.parquet.ParquetFile(path) as file:
            column = _column(file.schema_arrow.names, text_field, str(path))
            batches = file.iter_batches(batch_size=_ROWS, columns=[column])
            yield from _from_column((batch.column(0).to_pylist() for batch in batches), column, text_field, str(path))
    except pyarrow.ArrowException as error:
        raise InputError(f"{str(path)!r} is not a readable Parquet file: {first_line(error)}. Replace it.") from None


def from_hub(name: str, config: DataConfig, hint: str) -> Iterator[Document]:
    """The documents of a data set of the Hub, identified by name and split: `datasets` verifies its files in its own cache.

    Raises:
        InputError: it does not exist, cannot be reached, has no such split, or needs code; `hint` is added to the message.
    """
    import datasets  # heavy; executes no code from a data set

    try:
        data = datasets.load_dataset(name, config.subset, split=config.split)
    except Exception as error:
        raise InputError(
            f"data.source = {name!r} is no local file, and the Hugging Face data set {name!r}, split {config.split!r}, cannot "
            f"be loaded: {first_line(error)}.{hint} Check the name, data.subset, data.split and the network, or give a local "
            'file or "python:docstrings" as data.source.'
        ) from None
    yield from _from_data_set(data, config.text_field, f"data set {name!r}")


def from_folder(path: Path, config: DataConfig) -> Iterator[Document]:
    """The documents of one split of a local folder, in any layout that `load_dataset` or `load_from_disk` understands."""
    import datasets

    split = config.split
    try:
        if any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(str(path), config.subset, split=split)
    except Exception as error:
        raise InputError(
            f"data.source = {str(path)!r}: the folder cannot be loaded as a data set, split {split!r}: {first_line(error)}. "
            "Check data.subset and data.split, or name the files themselves (a pattern such as 'folder/*.jsonl')."
        ) from None
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise InputError(f"data.source = {str(path)!r} has no split {split!r}, only {', '.join(data)}. Change data.split.")
        data = data[split]
    yield from _from_data_set(data, config.text_field, str(path))


def _from_data_set(data: Any, text_field: str, name: str) -> Iterator[Document]:
    column = _column(data.column_names, text_field, name)
    batches = data.select_columns([column]).iter(batch_size=_ROWS)
    yield from _from_column((batch[column] for batch in batches), column, text_field, name)


def _from_column(batches: Iterable[Iterable[Any]], column: str, text_field: str, name: str) -> Iterator[Document]:
    for row, value in enumerate(chain.from_iterable(batches), start=1):
        yield _from_row({column: value}, text_field, f"{name}, row {row}")


def _from_row(row: Mapping[str, Any], text_field: str, origin: str) -> Document:
    column = _column(row, text_field, origin)
    value = row[column]
    if column != text_field:
        return Document(None, _token_ids(value, origin), origin)
    if not isinstance(value, str):
        raise InputError(f"{origin}: {column!r} is {_kind(value)}, not a string. Correct the row or change data.text_field.")
    return Document(value, None, origin)


def _token_ids(value: object, origin: str) -> npt.NDArray[np.uint32]:
    try:
        ids = np.asarray(value)
    except ValueError:  # lists within lists, of several lengths
        ids = np.asarray(None)
    if ids.size == 0:
        return np.empty(0, np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{origin}: 'input_ids' must be a list of whole numbers. Correct the row, or change data.text_field.")
    if ids.min() < 0 or ids.max() >= 2**32:
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(f"{origin}: token id {bad} in 'input_ids' is outside 0 … {2**32 - 1}. Tokenise the text again.")
    return ids.astype(np.uint32)


def _column(names: Collection[str], text_field: str, where: str) -> str:
    """The column of the documents: `text_field`, else `input_ids`."""
    for column in (text_field, "input_ids"):
        if column in names:
            return column
    guess = nearest(text_field, names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    found = ", ".join(map(repr, names)) or "nothing"
    raise InputError(f"{where}: there is no {text_field!r}, only {found}.{hint} Change data.text_field.")


def _decode(data: bytes, where: str, *, first_line: int = 1) -> str:
    """Text of UTF-8, without a byte order mark."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise InputError(
            f"{where}, line {line}: byte {column} of the line, 0x{data[error.start]:02x}, is not UTF-8. Save the file as UTF-8."
        ) from None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises an InputError if the system cannot read a source file."""
    try:
        yield
    except OSError as error:
        raise InputError(f"data.source: cannot read {str(path)!r}: {error.strerror or error}. Check its permissions.") from None


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
