"""Corpus: the sources that `data.source` names, resolved before anything is read.

A source has a list of files (their SHA-256 identifies the data) and an iterator of documents. Most mistakes are in the name:
they are reported here in milliseconds, with the nearest existing name, before a folder is made. Faults inside a file are
reported by `readers`, with the line.

Local files and folders come before the Hugging Face Hub. No code from the Hub is executed.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.config.data import DataConfig
from octavo.data import hub, python_source, readers
from octavo.data.readers import Document
from octavo.errors import InputError, nearest, unknown

_PYTHON = {"python:docstrings": python_source.docstrings, "python:packages": python_source.packages}
_PYTHON_FILES = {"python:docstrings": python_source.stdlib_files, "python:packages": python_source.package_files}
_SPLIT_NAME = re.compile(r"(^|[-_. ])(train|training|test|testing|validation|valid|val|dev|eval)([-_. 0-9]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `data.source`.

    Attributes:
        files: its files in order; empty for a data set of the Hub, since `datasets` manages those files.
        documents: starts a new iteration over its documents.
        plain: whether Octavo's own readers read the files, one after another.
    """

    name: str
    files: tuple[Path, ...]
    documents: Callable[[], Iterator[Document]]
    plain: bool = False


class Corpus:
    """All sources of a `[data]` section, in the order given.

    Raises:
        InputError: a file is missing, a glob matches nothing, or a kind of file is not supported.
    """

    def __init__(self, config: DataConfig) -> None:
        self.sources = [_find(name, config) for name in _names(config)]

    @property
    def files(self) -> list[Path]:
        """The files of all sources, in order, without duplicates."""
        return list(dict.fromkeys(path for source in self.sources for path in source.files))

    def __iter__(self) -> Iterator[Document]:
        for source in self.sources:
            yield from source.documents()


def check_sources(config: DataConfig) -> None:
    """Resolve `data.source` without reading it or listing Python's files: milliseconds.

    Raises:
        InputError: as `Corpus`.
    """
    for name in _names(config):
        if name not in _PYTHON:
            _find(name, config)


def holds_text(config: DataConfig) -> bool | None:
    """Whether the first document is text rather than token ids; None where a data set would have to be loaded.

    Raises:
        InputError: the first document is invalid.
    """
    name = _names(config)[0]
    if name in _PYTHON:
        return True
    source = _find(name, config)
    if not source.plain:
        return None
    if source.files[0].suffix == ".txt":
        return True
    first = next(source.documents(), None)
    return None if first is None else first.text is not None


def identity(name: str) -> str:
    """A name of a source that does not depend on the current folder; part of the key of prepared data."""
    if name in _PYTHON:
        return f"{name}@{python_source.interpreter()}"  # interpreters that share a data folder differ
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() or _is_glob(name) or _looks_local(name) else name


def _names(config: DataConfig) -> list[str]:
    names = [config.source] if isinstance(config.source, str) else config.source
    if not names:
        raise InputError('data.source = []: name at least one source, such as "python:docstrings".')
    return names


def _find(name: str, config: DataConfig) -> Source:
    if name.startswith("python:"):
        if name not in _PYTHON:
            raise unknown("data source", name, _PYTHON, key="data.source")
        files = _PYTHON_FILES[name]()
        return Source(name, tuple(files), lambda: _PYTHON[name](files))
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, config)
    if path.exists():
        return _files(name, [path], config)
    if _is_glob(name):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute patterns)
        files = [match for match in matches if match.is_file()]
        if not files:
            raise InputError(_no_match(name, path))
        return _files(name, files, config)
    if _looks_local(name):
        raise InputError(_missing(name, path))
    hint = _similar(path)
    return Source(name, (), lambda: hub.from_hub(name, config, hint))


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

    return Source(name, tuple(files), documents, plain=True)


def _folder(path: Path, config: DataConfig) -> Source:
    """Read a folder of plain files here; `datasets` reads one with splits, subfolders or other formats."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if not entries:
        raise InputError(f"data.source = {str(path)!r} is an empty folder. Put .txt, .jsonl or .parquet files in it.")
    plain = all(entry.is_file() and entry.suffix in readers.BY_SUFFIX for entry in entries)
    if plain and not any(_SPLIT_NAME.search(entry.stem) for entry in entries):
        return _files(str(path), entries, config)
    files = tuple(sorted(entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith(".")))
    return Source(str(path), files, lambda: hub.from_folder(path, config))


def _is_glob(name: str) -> bool:
    return any(character in name for character in "*?[")


def _looks_local(name: str) -> bool:
    """Whether a missing name can only be a file: an id of the Hub is `name` or `owner/name`."""
    return Path(name).suffix in readers.BY_SUFFIX or name.startswith(("/", ".", "~")) or name.count("/") > 1


def _similar(path: Path) -> str:
    """A hint: the nearest existing file, or the first missing folder; empty if neither helps."""
    parent = path.parent
    if parent.is_dir():
        guess = nearest(path.name, [entry.name for entry in parent.iterdir()])
        return f" Did you mean {str(parent / guess)!r}?" if guess else ""
    existing = next((folder for folder in path.parents if folder.is_dir()), Path())
    missing = path.relative_to(existing).parts[0]
    guess = nearest(missing, [entry.name for entry in existing.iterdir()])
    hint = f" Did you mean {str(existing / guess)!r}?" if guess else ""
    return f" There is no folder {str(existing / missing)!r}.{hint}"


def _missing(name: str, path: Path) -> str:
    return f"data.source = {name!r}: there is no such file.{_similar(path)} Change data.source."


def _no_match(name: str, pattern: Path) -> str:
    fixed = Path(*(part for part in _before_glob(pattern)))
    if not fixed.is_dir():
        return f"data.source = {name!r}: the pattern matches no file.{_similar(fixed)} Change data.source."
    suffixes = sorted({entry.suffix for entry in fixed.rglob("*") if entry.is_file() and entry.suffix in readers.BY_SUFFIX})
    holds = f"holds {', '.join(suffixes)} files" if suffixes else f"holds no {', '.join(readers.BY_SUFFIX)} file"
    hint = f" Did you mean {str(fixed / '**' / f'*{suffixes[0]}')!r}?" if suffixes else ""
    return f"data.source = {name!r}: the pattern matches no file; {str(fixed)!r} {holds}.{hint} Change data.source."


def _before_glob(pattern: Path) -> Iterator[str]:
    for part in pattern.parts[:-1]:
        if _is_glob(part):
            return
        yield part
