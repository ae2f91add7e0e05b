"""Corpus: the sources in `data.source` and `data.validation_source`, resolved before anything is read.

Most mistakes are in the name: they are reported here in milliseconds, with the nearest existing name, before a folder is
created. `readers` reports faults inside a file, with the line. Local files and folders take precedence over the Hugging Face
Hub. No code from the Hub is executed.
"""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import takewhile
from pathlib import Path

from octavo.config.data import DataConfig, kind_of
from octavo.data import folders, python_source, readers
from octavo.data.columns import ShiftedLabels
from octavo.data.documents import Document
from octavo.data.forms import Form
from octavo.errors import InputError, nearest, some, unknown
from octavo.storage import names_a_path, path_of, taken_for_a_path

_KEY, _VALIDATION_KEY = "data.source", "data.validation_source"
_PYTHON = {
    "python:docstrings": (python_source.stdlib_files, python_source.docstrings),
    "python:packages": (python_source.package_files, python_source.packages),
}


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `data.source`.

    Attributes:
        files: lists its files in order; empty for a Hub data set, whose files `datasets` manages.
        documents: starts a new iteration over its documents.
        split: the split of a data set; empty for python: sources and files.
        text: True for text; None until the first document is read; False if a data set would have to be loaded.
        in_parts: True if `data.split` and `data.subset` apply to it.
        notices: messages about skipped files; for a data set only after its documents are read.
    """

    files: Callable[[], Sequence[Path]]
    documents: Callable[[], Iterator[Document]]
    text: bool | None = False
    split: str = ""
    in_parts: bool = False
    notices: list[str] = field(default_factory=list)


class Corpus:
    """All sources of a `[data]` section, in order.

    Attributes:
        sources: those of `data.source`.
        validation: those of `data.validation_source`.
        form: the form of a row in all of them.

    Raises:
        InputError: a file is missing or named twice, a glob matches nothing, or a kind of file is not supported.
    """

    def __init__(self, config: DataConfig) -> None:
        names, held_out = source_names(config), config.of_validation
        # If one name is used for training and validation splits, its training text is a split too.
        in_splits = set() if config.split or not config.validation_split else {*config.validation_sources}
        self.form = Form(config)
        self.sources = _found(names, config, self.form, _KEY, in_splits)
        self.validation: list[Source] = []
        if held_out is not None:
            names = [*names, *source_names(held_out, _VALIDATION_KEY)]
            self.validation = _found(held_out.sources, held_out, self.form, _VALIDATION_KEY)
        _check_distinct([*self.sources, *self.validation], names, len(self.sources))
        _check_in_parts(config, self.sources, self.validation)
        if config.format not in (None, "text"):
            for name, source in zip(names, (*self.sources, *self.validation), strict=True):
                if source.text:
                    raise InputError(
                        f"{name!r} is text, and has no columns for data.format = {config.format!r}. Remove it, or name "
                        "a .jsonl, .csv or .parquet file, or a data set."
                    )

    @property
    def files(self) -> list[Path]:
        """The files of all sources, in order, without duplicates."""
        return list(dict.fromkeys(path for source in (*self.sources, *self.validation) for path in source.files()))

    @property
    def notices(self) -> list[str]:
        """Messages about the form of the sources and skipped files, as far as known."""
        form = [self.form.notice] if self.form.notice else []
        return [*form, *(notice for source in (*self.sources, *self.validation) for notice in source.notices)]

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


def check_sets(config: DataConfig) -> None:
    """Check that the sets of `data.validation` exist, without reading them.

    Raises:
        InputError: as for `Corpus`, with the set's name.
    """
    for name in config.validation:
        with naming_set(name):
            Corpus(config.of_set(name, None))


@contextlib.contextmanager
def naming_set(name: str) -> Iterator[None]:
    """Inside, messages name this set of `data.validation` instead of data.source."""
    try:
        yield
    except InputError as error:
        raise InputError(re.sub(r"(the )?\bdata\.source\b", f"data.validation.{name}", str(error))) from None


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


def _check_in_parts(config: DataConfig, sources: Sequence[Source], validation: Sequence[Source]) -> None:
    """Refuse `data.split`, `data.subset` and `data.validation_split` if no source has parts, since they would be ignored."""
    asked = (
        ("data.split", config.split, (*sources, *(() if config.validation_split else validation))),
        ("data.subset", config.subset, (*sources, *validation)),
        ("data.validation_split", config.validation_split, validation),
    )
    for key, value, of in asked:
        if value is None or any(source.in_parts and (key != "data.subset" or source.split) for source in of):
            continue
        if any(
            kind_of(name) not in readers.KINDS and name not in _PYTHON for name in (*config.sources, *config.validation_sources)
        ):
            what = "data set" if key == "data.subset" else "data set or folder"
            raise InputError(f"{key} = {value!r} has no effect: no source is a {what} (a pattern names files). Remove {key}.")


def _named_twice(read: str, first: str, second: str, across: bool) -> InputError:
    if across:
        file = Path(read).is_file() and not Path(first).expanduser().is_dir()
        other_split = "" if file else " or set data.validation_split to another split than data.split,"
        return InputError(
            f"{_KEY} = {first!r} and {_VALIDATION_KEY} = {second!r} both read {read!r}: the model would be trained on its "
            f"validation text. Use it in one of the two,{other_split} or use data.validation_fraction."
        )
    by = f"by {first!r} and by {second!r}" if first != second else f"by {second!r}"
    return InputError(
        f"data.source has {read!r} twice, {by}: its documents would be trained twice, and be in training and validation at "
        "once. Give it once in data.source."
    )


def identity(name: str) -> str:
    """A name of a source that does not depend on the current folder; part of the key of prepared data."""
    if name in _PYTHON:
        return f"{name}@{python_source.interpreter()}"  # interpreters that share a data folder may differ
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() or glob.has_magic(name) or names_a_path(name) else name


def source_names(config: DataConfig, key: str = "data.source") -> list[str]:
    """The names in `source`, at least one; `key` is its name in the run file."""
    if not config.sources:
        raise InputError(f'{key} = []: give at least one source, such as "python:docstrings".')
    return config.sources


def _found(names: Sequence[str], config: DataConfig, form: Form, key: str, in_splits: Collection[str] = ()) -> list[Source]:
    """The sources with these names; for those `in_splits` the training split."""
    sources = []
    for name in names:
        config_of_set = config.model_copy(update={"split": readers.DEFAULT_SPLIT}) if name in in_splits else config
        with path_of(key, name):
            source = _find(name, config_of_set, form, key)
            sources.append(replace(source, documents=partial(_unshifted, source.documents)))
    return sources


def _unshifted(documents: Callable[[], Iterator[Document]]) -> Iterator[Document]:
    """The documents of a source; an InputError if their labels are shifted already."""
    labels = ShiftedLabels()
    for document in documents():
        if document.input_ids is not None:
            labels.check(document.labels, document.input_ids, document.origin)
        yield document


def _find(name: str, config: DataConfig, form: Form, key: str) -> Source:
    if name.startswith("python:"):
        if name not in _PYTHON:
            raise unknown("data source", name, _PYTHON, key=key)
        find, read = _PYTHON[name]
        python_files = cache(find)
        return Source(python_files, lambda: read(python_files()), text=True)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, config, form, key)
    if path.exists():
        return _files(name, [path], form, key)
    if glob.has_magic(name):
        matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute patterns)
        files = sorted(match for match in matches if not match.is_dir())
        if not files:
            raise _no_match(name, path, key)
        return _files(name, files, form, key)
    hint = _similar(path)
    if names_a_path(name):
        raise InputError(f"{key} = {name!r}: there is no such file{taken_for_a_path(name)}.{hint} Change {key}.")
    notices: list[str] = []
    split = config.split or readers.DEFAULT_SPLIT
    read_hub = partial(readers.from_hub, name, config, form, hint, key, notices.append)
    return Source(list, read_hub, split=split, in_parts=True, notices=notices)


def _files(name: str, files: Sequence[Path], form: Form, key: str) -> Source:
    for path in files:
        folders.check_regular(path)
        if readers.reader_of(path) is None:
            raise InputError(
                f"{key} = {name!r}: cannot read {str(path)!r}, a {''.join(path.suffixes[-2:]) or 'nameless'} file. "
                f"Known: {readers.KNOWN}."
            )
    text = True if kind_of(files[0].name) == ".txt" else None
    return Source(lambda: files, lambda: readers.read_files(files, form), text=text)


def _folder(path: Path, config: DataConfig, form: Form, key: str) -> Source:
    """A data set by its card or as saved; for other folders all files of known kinds, or those of `data.split`."""
    name, prepared = f"{key} = {str(path)!r}", Path(config.folder).expanduser()
    with path_of("data.folder", config.folder):
        within = prepared.resolve() == path.resolve()
    if within:
        raise InputError(f"{name} is also data.folder, which prepared data is written to. Set data.folder to another folder.")
    files = folders.files_of(path, prepared)
    if not files:
        raise InputError(f"{name} is an empty folder. Put files in it: {readers.KNOWN}.")
    notices: list[str] = []
    saved = folders.is_saved(path)
    if saved or folders.has_card(path):
        split = config.split or readers.DEFAULT_SPLIT
        read = partial(readers.from_saved, path, config, form, key, notices.append)
        if not saved:
            read = partial(readers.from_card, path, config, form, key, files, notices.append)
        return Source(lambda: files, read, split=split, in_parts=True, notices=notices)
    known = [file for file in files if readers.reader_of(file)]
    if not known:
        kinds = some(sorted({file.suffix or file.name for file in files}))
        raise InputError(f"{name} holds no file of a known kind, only {kinds}. Known: {readers.KNOWN}.")
    chosen = known
    if config.split is not None:
        chosen = folders.of_split(known, path, config.split)
        if not chosen:
            splits = ", ".join(map(repr, folders.splits_in(known, path)))
            raise InputError(
                f"{name}: no file or folder in it has the name of the split {config.split!r}; "
                f"{f'there is {splits}' if splits else 'no name is of any split'}. Change data.split, or leave it out to read "
                "every file."
            )
    source = _files(str(path), chosen, form, key)
    return replace(source, in_parts=True, notices=folders.left_out(name, path, files, chosen, config.split))


def _similar(path: Path) -> str:
    """A hint: the nearest existing name, and the first missing folder; may be empty."""
    existing = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(existing).parts[0]
    if (existing / missing).exists() or (existing / missing).is_symlink():  # exists but is not a folder
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
        detail = f"; {str(fixed)!r} {holds}.{hint}"
    else:
        detail = f".{_similar(fixed)}"
    return InputError(f"{key} = {name!r}: the pattern matches no file{detail} Change {key}.")
