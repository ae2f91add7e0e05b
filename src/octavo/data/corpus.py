"""Corpus: the sources that `data.source` names, resolved before anything is read.

Most mistakes are in the name: they are reported here in milliseconds, with the nearest existing name, before a folder is made.
Faults inside a file are reported by `readers`, with the line. Local files and folders come before the Hugging Face Hub. No code
from the Hub is executed.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from octavo.config.data import DataConfig
from octavo.data import python_source, readers
from octavo.data.readers import Document
from octavo.errors import InputError, nearest, unknown

_PYTHON = {
    "python:docstrings": (python_source.stdlib_files, python_source.docstrings),
    "python:packages": (python_source.package_files, python_source.packages),
}
_SPLIT_NAME = re.compile(r"(^|[-_. ])(train|training|test|testing|validation|valid|val|dev|eval)([-_. 0-9]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `data.source`.

    Attributes:
        files: lists its files in order; none for a data set of the Hub, since `datasets` manages those files.
        documents: starts a new iteration over its documents.
        text: True for text; None if the first document has to be read; False if a data set would have to be loaded.
    """

    files: Callable[[], Sequence[Path]]
    documents: Callable[[], Iterator[Document]]
    text: bool | None = False


class Corpus:
    """All sources of a `[data]` section, in the order given.

    Raises:
        InputError: a file is missing or named twice, a glob matches nothing, or a kind of file is not supported.
    """

    def __init__(self, config: DataConfig) -> None:
        names = source_names(config)
        self._sources = [_find(name, config) for name in names]
        _check_distinct(dict(zip(names, self._sources, strict=True)), names)

    @property
    def files(self) -> list[Path]:
        """The files of all sources, in order, without duplicates."""
        return list(dict.fromkeys(path for source in self._sources for path in source.files()))

    def __iter__(self) -> Iterator[Document]:
        for source in self._sources:
            yield from source.documents()

    def holds_text(self) -> bool:
        """True if the first document is known to be text rather than token ids; loads no data set.

        Raises:
            InputError: the first document is invalid.
        """
        source = self._sources[0]
        if source.text is not None:
            return source.text
        first = next(source.documents(), None)
        return first is not None and first.text is not None


def _check_distinct(sources: Mapping[str, Source], names: Sequence[str]) -> None:
    """Refuse a file or data set named twice: its documents would be in training and in validation."""
    owner: dict[str, str] = {}
    for name in names:
        files = () if name in _PYTHON else sources[name].files()
        for read in [str(path.resolve()) for path in files] or [name]:
            if read in owner:
                by = f"by {owner[read]!r} and by {name!r}" if owner[read] != name else f"by {name!r}"
                raise InputError(
                    f"data.source names {read!r} twice, {by}: its documents would be trained twice and stand in training and "
                    "validation at once. Name it once in data.source."
                )
            owner[read] = name


def identity(name: str) -> str:
    """A name of a source that does not depend on the current folder; part of the key of prepared data."""
    if name in _PYTHON:
        return f"{name}@{python_source.interpreter()}"  # interpreters that share a data folder differ
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() or glob.has_magic(name) or _looks_local(name) else name


def source_names(config: DataConfig) -> list[str]:
    """The names in `data.source`, at least one."""
    if not config.sources:
        raise InputError('data.source = []: name at least one source, such as "python:docstrings".')
    return config.sources


def _find(name: str, config: DataConfig) -> Source:
    if name.startswith("python:"):
        if name not in _PYTHON:
            raise unknown("data source", name, _PYTHON, key="data.source")
        find, read = _PYTHON[name]
        python_files = cache(find)
        return Source(python_files, lambda: read(python_files()), text=True)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, config)
    if path.exists():
        return _files(name, [path], config)
    if glob.has_magic(name):
        matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute patterns)
        files = sorted(match for match in matches if match.is_file())
        if not files:
            raise _no_match(name, path)
        return _files(name, files, config)
    hint = _similar(path)
    if _looks_local(name):
        raise InputError(f"data.source = {name!r}: there is no such file.{hint} Change data.source.")
    return Source(list, lambda: readers.from_hub(name, config, hint))


def _files(name: str, files: list[Path], config: DataConfig) -> Source:
    for path in files:
        if path.suffix not in readers.BY_SUFFIX:
            known = ", ".join(readers.BY_SUFFIX)
            raise InputError(
                f"data.source = {name!r}: cannot read {str(path)!r}, a {path.suffix or 'nameless'} file. Known: {known}."
            )

    def documents() -> Iterator[Document]:
        for path in files:
            yield from readers.BY_SUFFIX[path.suffix](path, config.text_field)

    return Source(lambda: files, documents, text=True if files[0].suffix == ".txt" else None)


def _folder(path: Path, config: DataConfig) -> Source:
    """Read a folder of plain files here; `datasets` reads one with splits, subfolders or other formats."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if not entries:
        raise InputError(f"data.source = {str(path)!r} is an empty folder. Put .txt, .jsonl or .parquet files in it.")
    plain = all(entry.is_file() and entry.suffix in readers.BY_SUFFIX for entry in entries)
    if plain and not any(_SPLIT_NAME.search(entry.stem) for entry in entries):
        return _files(str(path), entries, config)
    files = sorted(entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith("."))
    return Source(lambda: files, lambda: readers.from_folder(path, config))


def _looks_local(name: str) -> bool:
    """True if a missing name can only be a file: an id of the Hub is `name` or `owner/name`."""
    return Path(name).suffix in readers.BY_SUFFIX or name.startswith(("/", ".", "~")) or name.count("/") > 1


def _similar(path: Path) -> str:
    """A hint: the nearest existing name, and the first missing folder; may be empty."""
    existing = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(existing).parts[0]
    guess = nearest(missing, [entry.name for entry in existing.iterdir()])
    hint = f" Did you mean {str(existing / guess)!r}?" if guess else ""
    return hint if existing == path.parent else f" There is no folder {str(existing / missing)!r}.{hint}"


def _no_match(name: str, pattern: Path) -> InputError:
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))
    if fixed.is_dir():
        suffixes = sorted({entry.suffix for entry in fixed.rglob("*") if entry.is_file() and entry.suffix in readers.BY_SUFFIX})
        holds = f"holds {', '.join(suffixes)} files" if suffixes else f"holds no {', '.join(readers.BY_SUFFIX)} file"
        hint = f" Did you mean {str(fixed / '**' / f'*{suffixes[0]}')!r}?" if suffixes else ""
        found = f"; {str(fixed)!r} {holds}.{hint}"
    else:
        found = f".{_similar(fixed)}"
    return InputError(f"data.source = {name!r}: the pattern matches no file{found} Change data.source.")
