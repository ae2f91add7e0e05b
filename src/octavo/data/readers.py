"""Readers of documents: text, JSON lines, CSV, Parquet, and data sets that `datasets` loads; text also in .gz and .zst.

Each reader streams, so that a file may be larger than memory (a .txt file is one document and is read whole). A fault is an
error with the file and the line or row: skipping bad lines silently would train on other data than requested. Left out: other
delimiters and encodings, archives of several files.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from octavo import hub
from octavo.config.data import COMPRESSED, DataConfig, kind_of
from octavo.errors import InputError, first_line, is_unreachable, nearest, unreachable

_ROWS = 1024
_BUFFER = 2**16
_DELIMITERS = (";", "\t", "|")
"""Delimiters of other files called CSV, which are told from commas by their number in the line of names."""
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or one list of token ids; `origin` is the file and line, for messages."""

    text: str | None
    input_ids: npt.NDArray[np.uint32] | None
    origin: str


def read_text(path: Path, text_field: str) -> Iterator[Document]:
    """The whole file as one document, without a byte order mark; line ends are unchanged."""
    data = bytearray()
    for line in _lines(path):
        data += line
    yield Document(_decode(data, str(path)), None, str(path))


def read_json_lines(path: Path, text_field: str) -> Iterator[Document]:
    """One JSON object a line: the text under `text_field`, else the token ids under `input_ids`."""
    for number, line in enumerate(_lines(path), start=1):
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


def read_csv(path: Path, text_field: str) -> Iterator[Document]:
    """The column `text_field` of comma-separated rows under a line of names; quoted values may have several lines."""
    csv.field_size_limit(2**31 - 1)  # of the process; 131,072 characters by default, and documents are longer
    lines = (_decode(line, str(path), first_line=number) for number, line in enumerate(_lines(path), start=1))
    rows = csv.reader(lines, strict=True)
    names: list[str] = []
    while True:
        origin = f"{path}, line {rows.line_num + 1}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            if not names:
                _check_delimiter(path, text_field, origin)
            raise InputError(f"{origin} is not CSV: {error}. Correct or remove the row.") from None
        if row is None:
            return
        if not row:
            continue
        if not names:
            if text_field not in row:
                _check_delimiter(path, text_field, origin)
            names, column = row, _csv_column(row, text_field, origin)
        elif len(row) != len(names):
            raise InputError(
                f"{origin}: the row has {len(row)} values, and there are {len(names)} columns. Quote values with commas or "
                "line ends in them."
            )
        else:
            yield Document(row[column], None, origin)


def _check_delimiter(path: Path, text_field: str, origin: str) -> None:
    """Refuse a file whose line of names is divided by another delimiter than the comma."""
    line = next((text for each in _lines(path) if (text := _decode(each, str(path)).strip("\r\n"))), "")
    for delimiter in _DELIMITERS:
        if line.count(delimiter) > line.count(","):
            try:
                (names,) = csv.reader([line], delimiter=delimiter, strict=True)
            except csv.Error:
                continue
            field = "" if text_field in names else ", and set data.text_field to one of them"
            raise InputError(
                f"{origin}: the delimiter seems to be {delimiter!r}, with the columns {', '.join(map(repr, names))}. Save the "
                f"file with commas between values{field}."
            )


def _csv_column(names: list[str], text_field: str, origin: str) -> int:
    if names.count(text_field) != 1:
        _column([name for name in names if name != "input_ids"], text_field, origin)
        raise InputError(f"{origin}: {names.count(text_field)} columns are named {text_field!r}. Rename all but one of them.")
    return names.index(text_field)


def read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    """The rows of one column, in batches: `text_field`, else `input_ids`."""
    import pyarrow  # heavy
    import pyarrow.parquet

    try:
        with readable(path), pyarrow.parquet.ParquetFile(path) as file:
            column = _column(file.schema_arrow.names, text_field, str(path))
            batches = file.iter_batches(batch_size=_ROWS, columns=[column])
            yield from _from_column((batch.column(0).to_pylist() for batch in batches), column, text_field, str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{str(path)!r} is not a readable Parquet file: {first_line(error)}. Replace it.") from None


def from_hub(name: str, config: DataConfig, hint: str, key: str) -> Iterator[Document]:
    """The documents of a data set of the Hub, identified by name and split: `datasets` verifies its files in its own cache.

    Raises:
        InputError: it does not exist, cannot be reached, has no such split, or needs code; `hint` is added to the message,
            which names the `key` of the run file.
    """
    import datasets  # heavy; executes no code from a data set

    try:
        with hub.bounded():
            data = datasets.load_dataset(name, config.subset, split=config.split)
    except Exception as error:
        if is_unreachable(error):
            raise unreachable(key, name, "data set", 'a local file or "python:docstrings"', hint=hint) from None
        raise InputError(
            f"{key} = {name!r} is no local file, and the Hugging Face data set {name!r}, split {config.split!r}, cannot "
            f"be loaded: {first_line(error)}.{hint} Check the name, data.subset, data.split and the network, or give a local "
            f'file or "python:docstrings" as {key}.'
        ) from None
    yield from _from_data_set(data, config.text_field, f"data set {name!r}")


def from_folder(path: Path, config: DataConfig, key: str) -> Iterator[Document]:
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
            f"{key} = {str(path)!r}: the folder cannot be loaded as a data set, split {split!r}: {first_line(error)}. "
            "Check data.subset and data.split, or name the files themselves (a pattern such as 'folder/*.jsonl')."
        ) from None
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise InputError(f"{key} = {str(path)!r} has no split {split!r}, only {', '.join(data)}. Change data.split.")
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


def _decode(data: bytes | bytearray, where: str, *, first_line: int = 1) -> str:
    """Text of UTF-8, without a byte order mark."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        suffix = next((suffix for magic, suffix in _MAGIC.items() if data.startswith(magic)), None)
        remedy = f"It begins as a {suffix} file: add {suffix} to its name." if suffix else "Save the file as UTF-8."
        raise InputError(
            f"{where}, line {line}: byte {column} of the line, 0x{data[error.start]:02x}, is not UTF-8. {remedy}"
        ) from None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises an InputError if the system cannot read a source file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not of the system: gzip and pyarrow report damaged content so
            raise
        raise InputError(f"data: cannot read {str(path)!r}: {error.strerror or error}. Check its permissions.") from None


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of text, decompressed."""
    number = 0
    try:
        with readable(path), path.open("rb") as stored, _decompressed(stored, path.suffix) as file:
            if path.suffix in COMPRESSED and not path.stat().st_size:
                raise EOFError("it has 0 bytes")
            for number, line in enumerate(file, start=1):  # noqa: B007
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}, after line {number}: the {path.suffix} file is damaged or incomplete: {str(error).rstrip('.')}. "
            "Replace it."
        ) from None


@contextmanager
def _decompressed(stored: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    if suffix == ".gz":
        with gzip.open(stored) as unzipped:
            yield cast("IO[bytes]", unzipped)
    elif suffix == ".zst":
        import pyarrow  # heavy

        if not pyarrow.Codec.is_available("zstd"):
            raise InputError(
                f"data: {stored.name!r} needs Zstandard, which this build of pyarrow {pyarrow.__version__} lacks. Run "
                "`pip install --force-reinstall pyarrow`, whose wheels have it, or decompress the file by `zstd -d`."
            )
        with pyarrow.CompressedInputStream(stored, "zstd") as raw, io.BufferedReader(raw, _BUFFER) as file:
            yield file
    else:
        yield stored


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


Reader = Callable[[Path, str], Iterator[Document]]
"""(path, text_field) → documents."""

_BY_KIND: dict[str, Reader] = {
    ".txt": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json_lines,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
KNOWN = f"{', '.join(_BY_KIND)}; all but .parquet also as {' or '.join(COMPRESSED)}, such as .jsonl.gz"


def reader_of(path: Path) -> Reader | None:
    """The reader of a file by its name; None for an unknown kind."""
    kind = kind_of(path.name)
    return None if kind == ".parquet" and path.suffix != kind else _BY_KIND.get(kind)
