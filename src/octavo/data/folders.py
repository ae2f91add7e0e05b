"""Folders as sources: every file of a known kind, or those of a named split.

A folder is a data set only if it says so: by the card of a Hugging Face data set, or because `save_to_disk` wrote it. Otherwise
a name such as train.jsonl has no special meaning. Skipped files are counted and named.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.config.data import counted, kind_of
from octavo.data import readers
from octavo.errors import InputError, first_line, some

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits → their names in paths, as in the `datasets` library."""
_CARD_KEYS = re.compile(rb"""^["']?(configs|dataset_info)["']?\s*:""", re.MULTILINE)


def files_of(folder: Path, prepared: Path) -> list[Path]:
    """All files below a folder, sorted, links followed, without hidden files and folders.

    Args:
        prepared: the folder of prepared data, skipped if it is inside.

    Raises:
        InputError: a broken link, a file that is not regular, or an unreadable folder.
    """
    return sorted(_walk(folder, frozenset({prepared.resolve()})))


def _walk(folder: Path, closed: frozenset[Path]) -> Iterator[Path]:
    """The files below; closed: folders that are not entered."""
    closed |= {folder.resolve()}
    with readers.readable(folder):
        entries = list(folder.iterdir())
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if entry.resolve() not in closed:  # such as a link to a parent folder
                yield from _walk(entry, closed)
        else:
            check_regular(entry)
            yield entry


def check_regular(path: Path) -> None:
    """Refuse broken links, pipes, devices, and names that are not UTF-8."""
    if not path.is_file():
        fault = "is a broken symbolic link" if path.is_symlink() and not path.exists() else "is not a regular file"
        raise InputError(f"data: {str(path)!r} {fault}. Remove it, or put the file there.")
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"data: the name {str(path)!r} is not UTF-8. Rename the file.") from None


def is_saved(folder: Path) -> bool:
    """True if `save_to_disk` of `datasets` wrote the folder."""
    saved = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return saved or (folder / "dataset_dict.json").is_file()


def has_card(folder: Path) -> bool:
    """True if the folder is declared a data set: `configs` or `dataset_info` at the top of README.md, or an infos file."""
    infos, card = folder / "dataset_infos.json", folder / "README.md"
    with readers.readable(infos):
        stored = infos.read_bytes() if infos.is_file() else None
    if stored is not None:
        text = readers.decoded(stored, str(infos))
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{infos} is not JSON: {first_line(error)}. Correct or remove it.") from None
        return True
    with readers.readable(card):
        stored = card.read_bytes() if card.is_file() else b""
    front = re.match(rb"(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", stored, re.MULTILINE | re.DOTALL)
    if front is None or _CARD_KEYS.search(front[1]) is None:
        return False
    readers.decoded(stored, str(card))
    return True


def of_split(files: Sequence[Path], folder: Path, split: str) -> list[Path]:
    """The files of a folder whose name, or whose parent folder's name, contains the split."""
    return [path for path in files if _names(path.relative_to(folder), split)]


def splits_in(files: Sequence[Path], folder: Path) -> list[str]:
    """The usual splits whose names occur in these files' names."""
    return [split for split in _SPLITS if of_split(files, folder, split)]


def _names(path: Path, split: str) -> bool:
    """True if a part of the path has the split's name; the last such part decides between training and held-out text."""
    aliases = next((names for known, names in _SPLITS.items() if split == known or split in names), (split,))
    held_out = (*_SPLITS["validation"], *_SPLITS["test"])
    others = held_out if "train" in aliases else _SPLITS["train"] if aliases[0] in held_out else ()
    for part in reversed(path.parts):
        words = re.split(r"[-._ 0-9]+", part.lower())
        if split.lower() == part.lower() or any(alias in words for alias in aliases) or _spells(part, split):
            return True
        if any(other in words for other in others):
            return False
    return False


def _spells(part: str, split: str) -> bool:
    """True if a part contains the split's name between separators; the name may contain them too ("en-2020")."""
    return re.search(rf"(^|[-._ ]){re.escape(split)}([-._ ]|$)", part, re.IGNORECASE) is not None


def left_out(name: str, folder: Path, files: Sequence[Path], chosen: Sequence[Path], split: str | None) -> list[str]:
    """Messages about files of a folder that are skipped, and about splits that are read."""
    taken = set(chosen)
    others = [str(path.relative_to(folder)) for path in files if path not in taken]
    messages = []
    if others:
        what = "" if split is None else f" of the split {split!r}"
        messages.append(
            f"{name}: {counted(len(chosen), 'file')}{what} {'is' if len(chosen) == 1 else 'are'} read; "
            f"{counted(len(others), 'file')} left out: {some(others)}."
        )
    twins = _twins([path.relative_to(folder) for path in chosen])
    if twins:
        messages.append(
            f"{name}: several files with the same name are all read, and a copy in another format would be trained twice: "
            f"{some(twins)}. Give the files to read, such as 'folder/*.jsonl'."
        )
    if split is None and len(splits := splits_in(chosen, folder)) > 1:
        messages.append(
            f"{name}: all {counted(len(chosen), 'file')} are read, but some are named like splits ({', '.join(splits)}). Set "
            f"data.split to read one of them."
        )
    return messages


def _twins(paths: Sequence[Path]) -> list[str]:
    """Names that several files share except for suffixes: a.jsonl and a.jsonl.gz, or a.csv and a.parquet."""
    names: dict[Path, list[str]] = {}
    for path in paths:
        names.setdefault(path.parent / path.name[: path.name.lower().rindex(kind_of(path.name))], []).append(str(path))
    return [" and ".join(group) for group in names.values() if len(group) > 1]
