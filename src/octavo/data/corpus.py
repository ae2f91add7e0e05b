"""Corpus: the sources that `data.source` and `data.validation_source` name, resolved before anything is read.

Most mistakes are in the name: they are reported here in milliseconds, with the nearest existing name, before a folder is made.
Faults inside a file are reported by `readers`, with the line. Local files and folders come before the Hugging Face Hub. No code
from the Hub is executed.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from octavo.config.data import DataConfig, kind_of
from octavo.data import python_source, readers
from octavo.data.readers import Document
from octavo.errors import InputError, nearest, unknown
from octavo.storage import names_a_path, path_of, taken_for_a_path

_KEY, _VALIDATION_KEY = "data.source", "data.validation_source"
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
        split: the split of a data set; empty for Python's text and for files.
        text: True for text; None if the first document has to be read; False if a data set would have to be loaded.
    """

    files: Callable[[], Sequence[Path]]
    documents: Callable[[], Iterator[Document]]
    text: bool | None = False
    split: str = ""


class Corpus:
    """All sources of a `[data]` section, in the order given.

    Attributes:
        sources: those of `data.source`.
        validation: those of `data.validation_source`.

    Raises:
        InputError: a file is missing or named twice, a glob matches nothing, or a kind of file is not supported.
    """

    def __init__(self, config: DataConfig) -> None:
        names, held_out = source_names(config), config.of_validation
        self.sources = _found(names, config, _KEY)
        self.validation: list[Source] = []
        if held_out is not None:
            names = [*names, *source_names(held_out, _VALIDATION_KEY)]
            self.validation = _found(held_out.sources, held_out, _VALIDATION_KEY)
        _check_distinct([*self.sources, *self.validation], names, len(self.sources))

    @property
    def files(self) -> list[Path]:
        """The files of all sources, in order, without duplicates."""
        return list(dict.fromkeys(path for source in (*self.sources, *self.validation) for path in source.files()))

    def __iter__(self) -> Iterator[Document]:
        for source in self.sources:
            yield from source.documents()

    def holds_text(self) -> bool:
        """True if the first document is known to be text rather than token ids; loads no data set.

        Raises:
            InputError: the first document is invalid.
        """
        source = self.sources[0]
        if source.text is not None:
            return source.text
        first = next(source.documents(), None)
        return first is not None and first.text is not None


def _check_distinct(sources: Sequence[Source], names: Sequence[str], training: int) -> None:
    """Refuse a file, or a split of a data set, named twice: its documents would be in training and in validation.

    The first `training` sources are those of data.source.
    """
    readers_of: dict[str, list[int]] = {}
    for number, (name, source) in enumerate(zip(names, sources, strict=True)):
        files = () if name in _PYTHON else source.files()
        for read in [str(path.resolve()) for path in files] or [name]:
            for other in readers_of.setdefault(read, []):
                if source.split == sources[other].split or not (source.split and sources[other].split):
                    raise _named_twice(read, names[other], name, (other < training) != (number < training))
            readers_of[read].append(number)


def _named_twice(read: str, first: str, second: str, across: bool) -> InputError:
    if across:
        other_split = "" if Path(read).is_file() else " or set data.validation_split to another split,"
        return InputError(
            f"{_KEY} = {first!r} and {_VALIDATION_KEY} = {second!r} both read {read!r}: the model would be trained on its "
            f"validation text. Name it in one of the two,{other_split} or use data.validation_fraction."
        )
    by = f"by {first!r} and by {second!r}" if first != second else f"by {second!r}"
    return InputError(
        f"data.source names {read!r} twice, {by}: its documents would be trained twice and stand in training and "
        "validation at once. Name it once in data.source."
    )


def identity(name: str) -> str:
    """A name of a source that does not depend on the current folder; part of the key of prepared data."""
    if name in _PYTHON:
        return f"{name}@{python_source.interpreter()}"  # interpreters that share a data folder differ
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() or glob.has_magic(name) or names_a_path(name) else name


def source_names(config: DataConfig, key: str = "data.source") -> list[str]:
    """The names in `source`, at least one; `key` is its name in the run file."""
    if not config.sources:
        raise InputError(f'{key} = []: name at least one source, such as "python:docstrings".')
    return config.sources


def _found(names: Sequence[str], config: DataConfig, key: str) -> list[Source]:
    sources = []
    for name in names:
        with path_of(key, name):
            sources.append(_find(name, config, key))
    return sources


def _find(name: str, config: DataConfig, key: str) -> Source:
    if name.startswith("python:"):
        if name not in _PYTHON:
            raise unknown("data source", name, _PYTHON, key=key)
        find, read = _PYTHON[name]
        python_files = cache(find)
        return Source(python_files, lambda: read(python_files()), text=True)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, config, key)
    if path.exists():
        return _files(name, [path], config, key)
    if glob.has_magic(name):
        matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute patterns)
        files = sorted(match for match in matches if match.is_file())
        if not files:
            raise _no_match(name, path, key)
        return _files(name, files, config, key)
    hint = _similar(path)
    if names_a_path(name):
        raise InputError(f"{key} = {name!r}: there is no such file{taken_for_a_path(name)}.{hint} Change {key}.")
    return Source(list, lambda: readers.from_hub(name, config, hint, key), split=config.split)


def _files(name: str, files: list[Path], config: DataConfig, key: str) -> Source:
    read: dict[Path, readers.Reader] = {}
    for path in files:
        reader = readers.reader_of(path)
        if reader is None:
            raise InputError(
                f"{key} = {name!r}: cannot read {str(path)!r}, a {''.join(path.suffixes[-2:]) or 'nameless'} file. "
                f"Known: {readers.KNOWN}."
            )
        read[path] = reader

    def documents() -> Iterator[Document]:
        for path, reader in read.items():
            yield from reader(path, config.text_field)

    return Source(lambda: files, documents, text=True if kind_of(files[0].name) in (".txt", ".csv") else None)


def _folder(path: Path, config: DataConfig, key: str) -> Source:
    """Read a folder of plain files here; `datasets` reads one with splits, subfolders or other formats."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if not entries:
        raise InputError(f"{key} = {str(path)!r} is an empty folder. Put files in it: {readers.KNOWN}.")
    plain = all(entry.is_file() and readers.reader_of(entry) for entry in entries)
    if plain and not any(_SPLIT_NAME.search(entry.stem) for entry in entries):
        return _files(str(path), entries, config, key)
    files = sorted(entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith("."))
    return Source(lambda: files, lambda: readers.from_folder(path, config, key), split=config.split)


def _similar(path: Path) -> str:
    """A hint: the nearest existing name, and the first missing folder; may be empty."""
    existing = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(existing).parts[0]
    if (existing / missing).exists() or (existing / missing).is_symlink():  # but is no folder
        return ""
    guess = nearest(missing, [entry.name for entry in existing.iterdir()])
    hint = f" Did you mean {str(existing / guess)!r}?" if guess else ""
    return hint if existing == path.parent else f" There is no folder {str(existing / missing)!r}.{hint}"


def _no_match(name: str, pattern: Path, key: str) -> InputError:
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))
    if fixed.is_dir():
        found_files = [entry for entry in fixed.rglob("*") if entry.is_file() and readers.reader_of(entry)]
        suffixes = sorted({entry.name[entry.name.rindex(kind_of(entry.name)) :] for entry in found_files})
        holds = f"holds {', '.join(suffixes)} files" if suffixes else f"holds no file of a known kind ({readers.KNOWN})"
        hint = f" Did you mean {str(fixed / '**' / f'*{suffixes[0]}')!r}?" if suffixes else ""
        found = f"; {str(fixed)!r} {holds}.{hint}"
    else:
        found = f".{_similar(fixed)}"
    return InputError(f"{key} = {name!r}: the pattern matches no file{found} Change {key}.")
