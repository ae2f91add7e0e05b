"""Readers of documents: text, JSON lines, CSV, Parquet, and data sets that `datasets` loads; text also in .gz and .zst.

Each reader streams, so that a file may be larger than memory (a .txt file is one document and is read whole). Any fault is an
error with the file and the line or row: skipping bad lines silently would train on other data than requested. Left out: other
delimiters and encodings, archives of several files.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, cast

from octavo import hub
from octavo.config.data import COMPRESSED, DataConfig, counted, kind_of
from octavo.data.columns import INPUT_IDS
from octavo.data.documents import Document
from octavo.data.forms import Form, kind
from octavo.data.json_objects import RepeatedKey, Repeating, check_keys, decode, decode_any
from octavo.errors import InputError, OctavoError, first_line, is_unreachable, some, unreachable
from octavo.storage import is_lfs_pointer

_ROWS = 1024
_BUFFER = 2**16
_DELIMITERS = (";", "\t", "|")
"""Other delimiters of files called CSV, recognised by their count in the header."""
DEFAULT_SPLIT = "train"
"""The default split of a data set."""
CARDS = ("README.md", "dataset_infos.json")
"""Files of a data set that describe it."""
Say = Callable[[str], None]
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")  # no expressions such as train[:10%]
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


def read_text(path: Path, form: Form) -> Iterator[Document]:
    """The whole file as one document, without a byte order mark; line ends are unchanged."""
    data = bytearray()
    for line in _lines(path):
        data += line
    yield Document(decoded(data, str(path)), None, str(path))


def read_json_lines(path: Path, form: Form) -> Iterator[Document]:
    """One JSON object per line: the text under `data.text_field`, the token ids under `input_ids`, or an example."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        # Concatenated files may each have a byte order mark.
        row, repeats = _parsed(decoded(line, str(path), first_line=number).removeprefix("\ufeff"), origin)
        yield _from_object(row, form, origin, repeats)


def _parsed(text: str, origin: str) -> tuple[Any, bool]:
    """The value of a line of JSON, or of a file; True if some object in it has a key twice."""
    try:
        try:
            return decode(text), False
        except RepeatedKey:
            return decode_any(text), True
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        fault = f"is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{line}"
    except RecursionError:
        fault = "has lists or objects nested deeper than Python reads"
    except ValueError as error:  # digits beyond sys.get_int_max_str_digits
        fault = f"has a number that Python does not read: {str(error).split(';')[0].rstrip('.')}"
    raise InputError(f"{origin} {fault}. Correct or remove it.")


def read_json_array(path: Path, form: Form) -> Iterator[Document]:
    """The objects of one JSON array, which is read whole: each like a line of JSON lines."""
    data = bytearray()
    for line in _lines(path):
        data += line
    values, repeats = _parsed(decoded(data, str(path)), str(path))
    if not isinstance(values, list):
        raise InputError(f"{path} is {kind(values)}, not a list of objects. Correct or remove it.")
    for number, row in enumerate(values, start=1):
        yield _from_object(row, form, f"{path}, row {number}", repeats)


def _from_object(row: Any, form: Form, origin: str, repeats: bool) -> Document:
    if not isinstance(row, dict):
        raise InputError(f"{origin} is {kind(row)}, not an object: write one object per line (JSON lines).")
    if repeats:
        _check_keys(row, form, origin)
    return form.document(row, origin)


def _check_keys(row: dict[str, Any], form: Form, origin: str) -> None:
    """Refuse a key that occurs twice among or within the columns that are read."""
    others = row.repeated if isinstance(row, Repeating) else []
    try:
        lists = [name for name, value in row.items() if isinstance(value, list) or name in others]
        for name in form.wanted(list(row), lists, origin):
            if name in others:
                raise RepeatedKey(name)
            check_keys(row[name])
    except RepeatedKey as error:
        raise InputError(f"{origin}: {error}. Remove one of the two.") from None


def read_csv(path: Path, form: Form, delimiter: str = ",") -> Iterator[Document]:
    """The text columns of rows under a header; quoted values may span lines."""
    csv.field_size_limit(2**31 - 1)  # process-wide; the default of 131,072 characters is too short for documents
    lines = (decoded(line, str(path), first_line=number) for number, line in enumerate(_lines(path), start=1))
    rows = csv.reader(lines, strict=True, delimiter=delimiter)
    names: list[str] = []
    columns: dict[str, int] = {}
    while True:
        origin = f"{path}, line {rows.line_num + 1}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            if not names:
                _check_delimiter(path, form, origin, delimiter)
            if "new-line character" in str(error):
                raise InputError(
                    f"{origin} has a carriage return (CR) without a line feed. Save the file with LF or CRLF as line ends, or "
                    "quote the value."
                ) from None
            raise InputError(f"{origin} is not CSV: {error}. Correct or remove the row.") from None
        if row is None:
            return
        if not row:
            continue
        if not names:
            if not form.fits(row):
                _check_delimiter(path, form, origin, delimiter)
            names, columns = row, _csv_columns(row, form, origin)
        elif len(row) != len(names):
            raise InputError(
                f"{origin}: the row has {len(row)} values for {len(names)} columns. Quote values with commas or "
                "line ends in them."
            )
        else:
            yield form.document({name: row[column] for name, column in columns.items()}, origin)


def _check_delimiter(path: Path, form: Form, origin: str, expected: str) -> None:
    """Refuse a file whose header uses another delimiter than the expected one (a comma, unless the card names one)."""
    if expected != ",":
        return
    line = next((text for each in _lines(path) if (text := decoded(each, str(path)).strip("\r\n"))), "")
    for delimiter in _DELIMITERS:
        if line.count(delimiter) > line.count(","):
            try:
                (names,) = csv.reader([line], delimiter=delimiter, strict=True)
            except csv.Error:
                continue
            field = "" if form.fits(names) else ", and set data.text_field to one of them"
            raise InputError(
                f"{origin}: the delimiter seems to be {delimiter!r}, with the columns {', '.join(map(repr, names))}. Save the "
                f"file with commas between values{field}."
            )


def _csv_columns(names: list[str], form: Form, origin: str) -> dict[str, int]:
    """The columns to read, by name; token ids are refused."""
    text = [name for name in names if name != INPUT_IDS]
    if INPUT_IDS in names and not form.fits(text):
        raise InputError(
            f"{origin}: there is no {form.text_field!r}, and {INPUT_IDS!r} of CSV would be text. Write token ids as JSON lines "
            "or Parquet, or set data.text_field to a column of text."
        )
    columns = form.wanted(text, (), origin)
    _check_once(columns, names, origin)
    return {name: names.index(name) for name in columns}


def read_parquet(path: Path, form: Form) -> Iterator[Document]:
    """The rows, in batches, of the columns of the form."""
    import pyarrow  # slow to import
    import pyarrow.parquet

    done = ""
    try:
        with readable(path), pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            lists = [each.name for each in schema if pyarrow.types.is_nested(each.type)]
            columns = form.wanted(schema.names, lists, str(path))
            _check_once(columns, schema.names, str(path))
            batches = file.iter_batches(batch_size=_ROWS, columns=columns)
            for document in _from_batches((_values(batch, columns) for batch in batches), columns, form, str(path)):
                done = f" behind {document.origin.removeprefix(str(path)).lstrip(', ')}"
                yield document
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{str(path)!r} is not a readable Parquet file{done}: {first_line(error)}. Replace it.") from None


def _values(batch: Any, columns: Sequence[str]) -> dict[str, Iterable[Any]]:
    columns_of_batch = {name: batch.column(batch.schema.get_field_index(name)) for name in columns}
    try:
        return {name: values.to_pylist() for name, values in columns_of_batch.items()}
    except ValueError:  # one by one, so that the error has its row number
        return {name: (each.as_py() for each in values) for name, values in columns_of_batch.items()}


def from_hub(name: str, config: DataConfig, form: Form, hint: str, key: str, say: Say) -> Iterator[Document]:
    """The documents of a data set of the Hub, identified by name and split: `datasets` verifies its files in its cache.

    Raises:
        InputError: it does not exist, cannot be reached, has no such split, or needs code; `hint` is added to the message,
            which names the `key` of the run file.
    """
    import datasets  # slow to import; runs no code of a data set

    split = config.split or DEFAULT_SPLIT
    try:
        with hub.bounded():
            data = datasets.load_dataset(name, config.subset, split=split)
    except Exception as error:
        if is_unreachable(error):
            raise unreachable(key, name, "data set", 'a local file or "python:docstrings"', hint=hint) from None
        raise InputError(
            f"{key} = {name!r} is not a local file, and the Hugging Face data set {name!r}, split {split!r}, cannot be "
            f"loaded: {first_line(error.__cause__ or error)}.{hint} Check the name, data.subset, data.split and the network, "
            f'or give a local file or "python:docstrings" as {key}.'
        ) from None
    _say_other_splits(f"{key} = {name!r}", split, _rows_of_splits(data), say)
    yield from _from_data_set(data, form, f"data set {name!r}")


def from_saved(path: Path, config: DataConfig, form: Form, key: str, say: Say) -> Iterator[Document]:
    """The documents of one split of a folder that `save_to_disk` wrote."""
    import datasets

    name = f"{key} = {str(path)!r}"
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:
        file = _damaged(path)
        where = f", {str(file.relative_to(path))!r} is damaged" if file else ""
        raise InputError(f"{name}: the data set cannot be loaded{where}: {first_line(error)}. Save it again.") from None
    if isinstance(data, datasets.DatasetDict):
        split = config.split or DEFAULT_SPLIT
        if split not in data:
            raise InputError(f"{name} has no split {split!r}, only {', '.join(data)}. Change data.split.")
        _say_other_splits(name, split, {other: len(rows) for other, rows in data.items()}, say)
        data = data[split]
    elif config.split is not None and config.split != str(data.split):
        raise InputError(f"{name} was saved without splits, so that it has no split {config.split!r}. Remove data.split.")
    yield from _from_data_set(data, form, str(path))


def _damaged(folder: Path) -> Path | None:
    """The first file of a saved data set that cannot be read."""
    import pyarrow

    for path in sorted(folder.rglob("*")):
        try:
            if path.suffix == ".json":
                json.loads(path.read_bytes())
            elif path.suffix == ".arrow":
                with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
                    for _ in batches:
                        pass
        except Exception:
            return path
    return None


def from_card(path: Path, config: DataConfig, form: Form, key: str, files: Sequence[Path], say: Say) -> Iterator[Document]:
    """The documents of one split of a local data set, whose card assigns files to splits.

    `datasets` reads the card, files with reader options in the card, and files of other kinds; other files are read here.

    Args:
        files: all files of the folder.
    """
    import datasets

    # A separate cache: `datasets` caches facts such as the number of rows by the folder's name.
    root = Path(datasets.config.HF_DATASETS_CACHE)
    with readable(root):
        root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="octavo-", dir=root) as cache:
        yield from _from_card(path, config, form, key, files, say, cache)


def _from_card(
    path: Path, config: DataConfig, form: Form, key: str, files: Sequence[Path], say: Say, cache: str
) -> Iterator[Document]:
    """`from_card`, with a folder for the files of `datasets`."""
    import datasets

    split, name = config.split or DEFAULT_SPLIT, f"{key} = {str(path)!r}"
    try:
        builder = datasets.load_dataset_builder(str(path), config.subset, cache_dir=cache)
        of_split = {str(each): list(names) for each, names in (builder.config.data_files or {}).items()}
        chosen = [Path(each) for each in of_split.get(split, ())]
        if of_split and split not in of_split and _SPLIT_NAME.fullmatch(split):
            raise InputError(f"{name} has no split {split!r}, only {', '.join(of_split)}. Change data.split.")
        find = partial(_reader_of_card, config=builder.config)
        complete = bool(chosen) and all(each.is_file() and find(each) for each in chosen)
        if complete:
            data, expected = None, _rows_of_splits(builder).get(split)
        else:
            data, expected = _loaded(path, config, form, split, builder.config, cache), None
    except InputError:
        raise
    except Exception as error:
        fault = first_line(error.__cause__ or error)  # the message of `datasets` says only that it failed
        cast_error = next((each for each in (error, error.__cause__) if isinstance(each, datasets.table.CastError)), None)
        if cast_error is not None:
            details = cast_error.details().rstrip(".")
            fault = f"its columns differ from those of the card, or of other files of the split: {details}"
        elif "Schema at index" in fault:  # the following lines name the difference
            fault = " ".join(str(error.__cause__ or error).split())
        if isinstance(error, datasets.exceptions.NonMatchingSplitsSizesError):
            fault = "the number of rows or bytes in its files differs from the card's (dataset_info)"
        if (mark := getattr(error, "problem_mark", None)) is not None:  # in YAML, after the first line of the card
            fault += f" in README.md, line {mark.line + 2}"
        raise InputError(
            f"{name}: the folder cannot be loaded as a data set, split {split!r}: {fault}. "
            "Check data.subset, data.split and its card, or name the files themselves (a pattern such as 'folder/*.jsonl')."
        ) from None
    taken = {each.resolve() for each in chosen}
    others = [str(each.relative_to(path)) for each in files if each.resolve() not in taken and each.name not in CARDS]
    if others and chosen:
        say(
            f"{name}: by its card the split {split!r} is {counted(len(chosen), 'file')}; {counted(len(others), 'file')} left "
            f"out: {some(others)}."
        )
    if data is None:
        rows = 0
        for rows, document in enumerate(read_files(chosen, form, find), start=1):  # noqa: B007
            yield document
        if expected not in (None, rows) and all(kind_of(each.name) != ".txt" for each in chosen):
            say(f"{name}: its card (dataset_info) gives the split {split!r} {expected:,} rows, but its files have {rows:,}.")
        return
    if not chosen:
        _say_other_splits(name, split, _rows_of_splits(data), say)
    yield from _from_data_set(data, form, str(path))


def _loaded(path: Path, config: DataConfig, form: Form, split: str, card: Any, cache: str) -> Any:
    """A split of a folder with a card, by `datasets`."""
    import datasets

    options: dict[str, Any] = {}
    csv_file = type(card).__name__ == "CsvConfig"
    if csv_file:  # otherwise pandas reads 007 as a number; NA stays empty, which is refused with its row
        options["converters"] = dict.fromkeys(form.text_columns(), str)
        if card.index_col is None:  # otherwise extra values become row names, and the others shift
            options["index_col"] = False
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of header or names does not match")
        data = datasets.load_dataset(str(path), config.subset, split=split, cache_dir=cache, **options)
    for name in form.text_columns() if csv_file else ():
        if f"{name}.1" in data.column_names:
            raise InputError(f"{path}: two columns are named {name!r}, or one {name + '.1'!r}. Rename or remove one.")
    return data


def _reader_of_card(path: Path, config: Any) -> Reader | None:
    """This module's reader for a file of a card, if the card sets at most its split and delimiter."""
    kind, said = type(config).__name__, {"name", "version", "data_dir", "data_files", "description", "features"}
    if kind == "CsvConfig" and len(config.sep or "") == 1:
        said |= {"sep", "delimiter"}
    if kind not in ("CsvConfig", "JsonConfig", "TextConfig", "ParquetConfig"):
        return None
    if any(
        each.name not in said and each.default is not MISSING and getattr(config, each.name) != each.default
        for each in fields(config)
    ):
        return None
    if kind == "CsvConfig":
        return partial(read_csv, delimiter=config.sep) if kind_of(path.name) in (".csv", ".tsv") else None
    reader = reader_of(path)
    return _json_reader(path) if reader is read_json_lines else reader


def _json_reader(path: Path) -> Reader | None:
    """The reader of JSON lines or of one array; None for one object over several lines, which `datasets` reads."""
    stripped = (line.removeprefix(codecs.BOM_UTF8).strip() for line in _lines(path))
    first = next(filter(None, stripped), b"{}")
    if first.startswith(b"["):
        return read_json_array
    try:
        return read_json_lines if isinstance(json.loads(first), dict) else None
    except (ValueError, RecursionError):
        return read_json_lines if first.startswith(b"{") and len(first) > 1 else None


def _rows_of_splits(data: Any) -> dict[str, int | None]:
    return {str(split): each.num_examples for split, each in (data.info.splits or {}).items()}


def _say_other_splits(name: str, split: str, rows: Mapping[str, int | None], say: Say) -> None:
    """Report the splits that are not read, with their rows."""
    others = [f"{each} ({'unknown' if n is None else counted(n, 'row')})" for each, n in rows.items() if each != split]
    if others and split in rows:
        say(f"{name}: the split {split!r} is read; left out: {', '.join(others)}.")


def read_files(files: Sequence[Path], form: Form, find: Callable[[Path], Reader | None] | None = None) -> Iterator[Document]:
    """The documents of files of known kinds, one file after another.

    Args:
        find: the reader of a file, by default by its name.

    Raises:
        InputError: any fault of a file, with its name and the line or row.
    """
    for path in files:
        reader = (find or reader_of)(path)
        assert reader is not None
        origin = ""
        if is_lfs_pointer(path):
            raise InputError(f"{path} is a Git LFS pointer, not the file itself. Run git lfs pull in its repository.")
        try:
            for document in reader(path, form):
                origin = document.origin
                yield document
        except OctavoError:
            raise
        except Exception as error:
            raise _unreadable(str(path), origin, error) from error


def _unreadable(name: str, origin: str, error: Exception) -> InputError:
    """The error for a fault that no reader expects."""
    where = f"{name}, behind{origin.removeprefix(name).lstrip(',')}" if origin and origin != name else name
    if isinstance(error, MemoryError):
        return InputError(f"{where}: the next document does not fit in memory. Split it.")
    return InputError(f"{where}: cannot be read: {first_line(error)}. Correct or replace it.")


def _from_data_set(data: Any, form: Form, name: str) -> Iterator[Document]:
    names = data.column_names
    lists = [each for each in names if type(data.features[each]).__name__ in ("List", "LargeList", "Sequence", "list")]
    columns = form.wanted(names, lists, name)
    origin = ""
    try:
        for document in _from_batches(data.select_columns(columns).iter(batch_size=_ROWS), columns, form, name):
            origin = document.origin
            yield document
    except OctavoError:
        raise
    except Exception as error:
        raise _unreadable(name, origin, error) from error


def _from_batches(
    batches: Iterable[Mapping[str, Iterable[Any]]], columns: Sequence[str], form: Form, name: str
) -> Iterator[Document]:
    alone = form.is_plain(columns)
    rows = chain.from_iterable(zip(*(batch[column] for column in columns), strict=True) for batch in batches)
    for number in count(1):
        origin = f"{name}, row {number}"
        try:
            values = next(rows, None)
        except UnicodeDecodeError as error:
            raise InputError(f"{origin}: the text is not UTF-8, at byte {error.start + 1}. Rewrite the file.") from None
        if values is None:
            return
        if alone and isinstance(values[0], str):
            yield Document(values[0], None, origin)
        else:
            yield form.document(dict(zip(columns, values, strict=True)), origin)


def _check_once(columns: Sequence[str], names: Sequence[str], where: str) -> None:
    """Refuse two columns of one name among those read."""
    for name in columns:
        if names.count(name) > 1:
            raise InputError(f"{where}: {names.count(name)} columns are named {name!r}. Rename all but one of them.")


def decoded(data: bytes | bytearray, where: str, *, first_line: int = 1) -> str:
    """Text of UTF-8, without the byte order mark of a file."""
    try:
        return data.decode().removeprefix("\ufeff" if first_line == 1 else "")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        suffix = next((suffix for magic, suffix in _MAGIC.items() if data.startswith(magic)), None)
        remedy = f"It begins as a {suffix} file: add {suffix} to its name." if suffix else "Save the file as UTF-8."
        if first_line == 1 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
            remedy = "The file begins as UTF-16: save it as UTF-8."
        raise InputError(
            f"{where}, line {line}: byte {column} of the line, 0x{data[error.start]:02x}, is not UTF-8. {remedy}"
        ) from None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the system's error for a source file into an InputError."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not a system error: gzip and pyarrow report damaged content this way
            raise
        raise InputError(f"data: cannot read {str(path)!r}: {error.strerror or error}. Check its permissions.") from None


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of text, decompressed."""
    number = 0
    try:
        with readable(path), path.open("rb") as stored, _decompressed(stored, path.suffix.lower()) as file:
            if path.suffix.lower() in COMPRESSED and not path.stat().st_size:
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
        import pyarrow  # slow to import

        if not pyarrow.Codec.is_available("zstd"):
            raise InputError(
                f"data: {stored.name!r} needs Zstandard, which this build of pyarrow {pyarrow.__version__} lacks. Run "
                "`pip install --force-reinstall pyarrow`, whose wheels have it, or decompress the file by `zstd -d`."
            )
        with pyarrow.CompressedInputStream(stored, "zstd") as raw, io.BufferedReader(raw, _BUFFER) as file:
            yield file
    else:
        yield stored


Reader = Callable[[Path, Form], Iterator[Document]]
"""(path, form) → documents."""

_BY_KIND: dict[str, Reader] = {
    ".txt": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json_lines,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
KINDS = frozenset(_BY_KIND)
KNOWN = f"{', '.join(_BY_KIND)}; all but .parquet also as {' or '.join(COMPRESSED)}, such as .jsonl.gz"


def reader_of(path: Path) -> Reader | None:
    """The reader of a file by its name; None for an unknown kind."""
    kind = kind_of(path.name)
    return None if kind == ".parquet" and path.suffix.lower() != kind else _BY_KIND.get(kind)
