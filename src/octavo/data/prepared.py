"""Prepared data: token files on disk, made once and shared by every rank and run with the same [data] section.

    data = prepare(config.data)         # the second call takes milliseconds
    data.tokens("train")                # a memory map

A folder appears by rename once it is whole. Work in progress is under `.preparing`, behind a lock: a second process waits, then
finds the result. Sources are compared with the manifest each time. After a change a new run prepares the data again; a resumed
run is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

from octavo.config.data import DataConfig
from octavo.data import manifest
from octavo.data.build import build
from octavo.data.corpus import Corpus
from octavo.data.manifest import Manifest, Split
from octavo.data.packing import Sequences
from octavo.errors import InputError, OctavoError
from octavo.storage import FolderLock, free_bytes, fsync_folder, fsync_tree, write_atomic

_WORK = ".preparing"
_WAIT_SECONDS = 24 * 3600.0
"""Longest wait for another process that prepares the same data; the kernel releases the lock of a dead one."""


@dataclass(frozen=True)
class PreparedData:
    """A corpus as token files.

    Attributes:
        folder: path of the token files.
        manifest: the folder's manifest.
        sequence_length, packing: defaults of `sequences`.
    """

    folder: Path
    manifest: Manifest
    sequence_length: int
    packing: Literal["join", "documents"]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the token files and the tokenizer: equal if and only if the data is."""
        return self.manifest.fingerprint

    @property
    def vocab_size(self) -> int:
        """One more than the tokenizer's largest id; without a tokenizer, than the largest id in the data."""
        return self.manifest.vocab_size

    @property
    def max_token_id(self) -> int:
        """The largest id in the data."""
        return self.manifest.max_token_id

    @property
    def end_token_id(self) -> int | None:
        """The token at the end of every document; None if there is none."""
        return self.manifest.end_token_id

    @property
    def tokenizer_folder(self) -> Path | None:
        """A folder for `transformers.AutoTokenizer.from_pretrained`; None for a corpus of token ids without a tokenizer."""
        return self.folder / "tokenizer" if self.manifest.tokenizer_sha256 else None

    @property
    def documents(self) -> dict[Split, int]:
        """Documents in each split."""
        return {name: counts.documents for name, counts in self.manifest.splits.items()}

    @property
    def token_counts(self) -> dict[Split, int]:
        """Tokens in each split."""
        return {name: counts.tokens for name, counts in self.manifest.splits.items()}

    def tokens(self, split: Split) -> npt.NDArray[np.unsignedinteger]:
        """[N] token ids of a split, documents one after another, as a read-only memory map."""
        return self._map(f"{split}.bin", "<u2" if self.manifest.dtype == "uint16" else "<u4")

    def offsets(self, split: Split) -> npt.NDArray[np.uint64]:
        """[D + 1] start of each document in `tokens(split)`, and the end of the last."""
        return self._map(f"{split}.offsets.bin", "<u8")

    def sequences(
        self, split: Split, *, sequence_length: int | None = None, packing: Literal["join", "documents"] | None = None
    ) -> Sequences:
        """The sequences of a split, by number."""
        return Sequences(
            self.tokens(split),
            self.offsets(split),
            sequence_length=sequence_length or self.sequence_length,
            packing=packing or self.packing,
            pad_id=self.end_token_id or 0,
        )

    def _map(self, name: str, dtype: str) -> npt.NDArray:
        path = self.folder / name
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def prepare(
    config: DataConfig,
    *,
    on_change: Literal["rebuild", "error"] = "rebuild",
    progress: bool | None = None,
    console: Console | None = None,
) -> PreparedData:
    """The prepared data of a `[data]` section; tokenises the corpus if there is none.

    Args:
        config: the section; the data is in `<config.folder>/<name of the source>-<hash of the section>`.
        on_change: after a change of a source file, prepare again, or raise (on resume).
        progress: whether to show bars; by default on a terminal only.
        console: for bars and notices; by default standard error.

    Raises:
        InputError: the corpus or the tokenizer is missing or invalid, or has changed and `on_change` is "error". Nothing is
            left on disk.
        OctavoError: the disk is full, or the folder cannot be written.
    """
    console = console or Console(stderr=True)
    corpus = Corpus(config)
    target = folder_of(config)
    found = _current(config, corpus, target, on_change, console)
    if found is not None:
        return found
    made = _missing_folders(Path(config.folder))
    work = target.parent / _WORK / target.name
    try:
        with FolderLock(work, wait_seconds=_WAIT_SECONDS):
            try:
                found = _current(config, corpus, target, on_change, None)
                if found is None:
                    show = console.is_terminal if progress is None else progress
                    found = _build_folder(config, corpus, target, work / "partial", show=show, console=console)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise _explain(error, target) from error
    finally:
        for folder in (work.parent, *made):  # created here and still empty, innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()
    return found


def prepared_or_none(config: DataConfig) -> PreparedData | None:
    """The prepared data if it is whole; checks the folder's own files and not the sources, and writes nothing."""
    target = folder_of(config)
    found = manifest.read(target)
    if found is None or found.key != manifest.key(config) or manifest.damage(target, found):
        return None
    return _prepared(config, target, found)


def folder_of(config: DataConfig) -> Path:
    """The folder of the prepared data of a section, whether or not it exists."""
    digest = hashlib.sha256(json.dumps(manifest.key(config), sort_keys=True).encode()).hexdigest()
    names = [config.source] if isinstance(config.source, str) else config.source
    slug = re.sub(r"[^a-z0-9]+", "-", Path(names[0] if names else "").name.lower()).strip("-")[:40] or "data"
    more = f"-and-{len(names) - 1}-more" if len(names) > 1 else ""
    return Path(config.folder).expanduser() / f"{slug}{more}-{digest[:8]}"


def check_vocabulary(prepared: PreparedData, vocab_size: int) -> None:
    """Refuse token ids beyond an embedding of `vocab_size` rows.

    Raises:
        InputError: the largest token id is `vocab_size` or more.
    """
    largest = max(prepared.max_token_id, prepared.vocab_size - 1 if prepared.tokenizer_folder else -1)
    if largest >= vocab_size:
        raise InputError(
            f"the data has token ids up to {largest}, but the model's vocabulary ends at {vocab_size - 1} "
            f"(vocab_size = {vocab_size}). Set model.config.vocab_size to at least {largest + 1}, or "
            "data.tokenizer to the model's own tokenizer."
        )


def _current(
    config: DataConfig, corpus: Corpus, target: Path, on_change: Literal["rebuild", "error"], console: Console | None
) -> PreparedData | None:
    """The data at `target` if it is valid; otherwise None, with the reason on the console."""
    found = manifest.read(target)
    if found is None or found.key != manifest.key(config):
        return None
    change, sources = manifest.changes(found, manifest.source_files(config, corpus.files))
    if change is not None:
        if on_change == "error":
            raise InputError(
                f"the data has changed since this run began: {change}. Put it back as it was to resume, or start a new run "
                "(another train.output) on the data as it is."
            )
        _say(console, f"{change}: preparing {target} anew.")
        return None
    damaged = manifest.damage(target, found)
    if damaged is not None:
        _say(console, f"{damaged}: preparing {target} anew.")
        return None
    if sources != found.sources:
        found = found.model_copy(update={"sources": sources})
        with contextlib.suppress(OSError):  # a read-only folder: SHA-256 is computed each time
            write_atomic(target / manifest.FILE, found.model_dump_json(indent=1) + "\n")
    return _prepared(config, target, found)


def _build_folder(
    config: DataConfig, corpus: Corpus, target: Path, partial: Path, *, show: bool, console: Console
) -> PreparedData:
    if partial.parent.exists():  # left by a killed process
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    made = build(config, corpus, partial, show=show, console=console)
    fsync_tree(partial)
    replaced = partial.with_name("replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)  # memory maps of other processes stay valid
    partial.rename(target)
    fsync_folder(target.parent)
    return _prepared(config, target, made)


def _prepared(config: DataConfig, target: Path, found: Manifest) -> PreparedData:
    return PreparedData(target, found, config.sequence_length, config.packing)


def _missing_folders(folder: Path) -> list[Path]:
    folder = folder.expanduser()
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _explain(error: OSError, target: Path) -> OctavoError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(target) / 2**20
        return OctavoError(
            f"no room to prepare data in {str(target.parent)!r}: {free:,.0f} MiB are free. Free some, or change data.folder."
        )
    where = error.filename or target.parent
    return InputError(f"data.folder = {str(target.parent)!r}: {error.strerror or error} ({where}). Change data.folder.")


def _say(console: Console | None, message: str) -> None:
    if console is not None:
        console.print(message, style="yellow", highlight=False, soft_wrap=True, markup=False)
