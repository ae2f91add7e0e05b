"""Prepared data: token files on disk, written once and shared by every rank and run with the same [data] section.

A folder appears by rename once it is complete. Work in progress is under `.preparing`, behind a lock: a second process waits,
then reads the result. Sources are compared with the manifest each time: after a change a new run prepares the data again, and a
resumed run is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

from octavo.config.data import DataConfig
from octavo.data import manifest
from octavo.data.build import build
from octavo.data.chats import check_packing
from octavo.data.corpus import Corpus, naming_set, source_names
from octavo.data.manifest import SPLITS, Manifest, Split
from octavo.data.special_tokens import SpecialTokens
from octavo.data.token_files import LABEL_FILES, NOTICE
from octavo.errors import InputError, OctavoError
from octavo.storage import FolderLock, free_bytes, fsync_folder, fsync_tree, path_of, write_atomic

_WAIT_SECONDS = 24 * 3600.0
"""Longest wait for another process that prepares the same data; the kernel releases a dead process's lock."""


@dataclass(frozen=True)
class PreparedData:
    """A corpus as token files, in a folder with a manifest."""

    folder: Path
    manifest: Manifest
    sets: Mapping[str, PreparedData] = field(default_factory=dict)
    """The sets of `data.validation`, by name."""

    @property
    def tokenizer_folder(self) -> Path | None:
        """A folder for `transformers.AutoTokenizer.from_pretrained`; None for a corpus of token ids without a tokenizer."""
        return self.folder / "tokenizer" if self.manifest.tokenizer_sha256 else None

    def packing(self, config: DataConfig) -> Literal["join", "documents"]:
        """`data.packing` of a prepared section, or its default: conversations and prompts are packed separately."""
        return config.packing or ("join" if self.manifest.examples is None else "documents")

    @property
    def vocabulary(self) -> int:
        """One more than the largest id in the data or its tokenizer."""
        return max(self.manifest.max_token_id + 1, self.manifest.vocab_size if self.tokenizer_folder else 0)

    @property
    def of_chats(self) -> bool:
        """True if the data are conversations formatted by the tokenizer's chat template."""
        return self.manifest.examples is not None and self.manifest.examples.format == "chat"

    @property
    def turn_ends(self) -> list[int]:
        """Special tokens that end the trained turns of conversations, other than the end token."""
        examples, folder = self.manifest.examples, self.tokenizer_folder
        others = [] if examples is None else [end for end in examples.turn_ends if end != self.manifest.end_token_id]
        special = SpecialTokens.of(folder).all if others and folder is not None else frozenset()
        return [end for end in others if end in special]

    def tokens(self, split: Split) -> npt.NDArray[np.unsignedinteger]:
        """[N] token ids of a split, documents one after another, as a read-only memory map."""
        return self._map(f"{split}.bin", "<u2" if self.manifest.dtype == "uint16" else "<u4")

    def offsets(self, split: Split) -> npt.NDArray[np.uint64]:
        """[D + 1] start of each document in `tokens(split)`, and the end of the last."""
        return self._map(f"{split}.offsets.bin", "<u8")

    def labels(self, split: Split) -> npt.NDArray[np.signedinteger] | None:
        """[N] labels of a split: the token at each position, or -100 if it is not a target; None if every token is one."""
        return None if self.manifest.labels is None else self._map(f"{split}.labels.bin", LABEL_FILES[self.manifest.labels])

    def _map(self, name: str, dtype: str) -> npt.NDArray:
        path = self.folder / name
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def prepare(
    config: DataConfig, *, on_change: Literal["rebuild", "error"] = "rebuild", console: Console | None = None
) -> PreparedData:
    """The prepared data of a `[data]` section; tokenises the corpus if it does not exist.

    Args:
        config: the section; the data is in `<config.folder>/<name of the source>-<hash of the section>`.
        on_change: what to do if a source file changed: prepare the data again, or raise (on resume).
        console: for notices, and for progress bars on a terminal; standard error by default.

    Raises:
        InputError: the corpus or the tokenizer is missing or invalid, or has changed and `on_change` is "error". Nothing is
            left on disk.
        OctavoError: the disk is full, or the folder cannot be written.
    """
    console = console or Console(stderr=True)
    corpus = Corpus(config)
    for notice in corpus.notices:
        console.print(notice, **NOTICE)
    target = folder_of(config)
    current = _current(config, corpus, target, on_change, console)
    if current is not None:
        if current.manifest.examples is not None:
            check_packing(config)
        return current
    with path_of("data.folder", config.folder):
        created = [folder for folder in target.parents if not folder.exists()]
    work = target.parent / ".preparing" / target.name
    try:
        with FolderLock(work, wait_seconds=_WAIT_SECONDS):
            try:
                current = _current(config, corpus, target, on_change, Console(quiet=True))
                return current or _build_folder(config, corpus, target, work / "partial", console)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise _explain(error, target) from error
    finally:
        for folder in (work.parent, *created):  # created here and still empty, innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()


def prepare_all(
    config: DataConfig,
    *,
    on_change: Literal["rebuild", "error"] = "rebuild",
    console: Console | None = None,
    compare: bool = True,
) -> PreparedData:
    """`prepare`, with the sets of `data.validation`, each by the run's tokenizer.

    compare: compare with the training documents, which may not contain a whole set.

    Raises:
        InputError: as in `prepare`; or a set shares all its documents with the training data, or is text although the run has
            no tokenizer.
    """
    prepared = prepare(config, on_change=on_change, console=console)
    sets = {}
    for name in config.validation:
        key = f"data.validation.{name}"
        folder = prepared.tokenizer_folder
        config_of_set = config.of_set(name, None if folder is None else str(folder))
        with naming_set(name):
            sets[name] = prepare(config_of_set, console=console)
        if folder is None and sets[name].tokenizer_folder is not None:
            raise InputError(
                f"{key} is text, but data.source holds token ids without a tokenizer: give token ids of the same tokenizer, or "
                "name it as data.tokenizer."
            )
        same, held = (documents_in(sets[name], prepared, split) if compare else 0 for split in SPLITS)
        if same and same + held >= sets[name].manifest.splits["train"].documents:
            raise InputError(
                f"{key}: all of its documents ({same + held:,}) are also in data.source, so the model would be trained on its "
                f"validation text. Use other text in one of the two."
            )
        if same and console is not None:
            total = sets[name].manifest.splits["train"].documents
            console.print(f"{key}: {same:,} of its {total:,} documents are also in the training data (data.source).", **NOTICE)
    return replace(prepared, sets=sets)


_HEAD = 16  # leading tokens that are compared first
_ROWS = 1 << 20  # documents whose first tokens are read at a time


def documents_in(text: PreparedData, corpus: PreparedData, split: Split) -> int:
    """Documents of a prepared text that also occur in a split of the corpus, token by token."""
    wanted: dict[tuple[int, bytes], list[bytes]] = {}
    tokens, offsets = text.tokens("train"), text.offsets("train").astype(np.int64)
    digests = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        ids = np.asarray(tokens[start:end], np.uint32)
        digests.append(hashlib.sha256(ids.tobytes()).digest())
        wanted.setdefault((end - start, ids[:_HEAD].tobytes()), []).append(digests[-1])
    lengths = np.array(sorted({length for length, _ in wanted}), np.int64)
    theirs, starts = corpus.tokens(split), corpus.offsets(split).astype(np.int64)
    seen: set[bytes] = set()
    for first in range(0, len(starts) - 1, _ROWS):
        part = starts[first : first + _ROWS + 1]
        sizes = np.diff(part)
        for row in np.flatnonzero(np.isin(sizes, lengths)).tolist():
            start, size = int(part[row]), int(sizes[row])
            if (size, np.asarray(theirs[start : start + min(size, _HEAD)], np.uint32).tobytes()) in wanted:
                seen.add(hashlib.sha256(np.asarray(theirs[start : start + size], np.uint32).tobytes()).digest())
    return sum(digest in seen for digest in digests)


def with_packing(config: DataConfig, prepared: PreparedData | None, corpus: Corpus | None = None) -> DataConfig:
    """The section with its packing resolved from the data; unchanged if neither determines the form of rows.

    Raises:
        InputError: `data.overlong` without an effect on text that is joined.
    """
    if config.packing is not None:
        return config
    kind = corpus.form.format if corpus is not None else None
    if prepared is None and kind is None:
        return config
    packing = prepared.packing(config) if prepared is not None else "join" if kind == "text" else "documents"
    if packing == "join" and config.overlong is not None:
        raise InputError(
            f'data.overlong = "{config.overlong}" has no effect: data.source holds text, which is joined. Remove it, or set '
            'data.packing = "documents".'
        )
    return config.model_copy(update={"packing": packing})


def prepared_or_none(config: DataConfig) -> PreparedData | None:
    """The prepared data if it is complete. Checks the folder's files but not the sources; writes nothing."""
    target = folder_of(config)
    stored = manifest.read(target, config)
    return None if stored is None or manifest.damage(target, stored) else PreparedData(target, stored)


def folder_of(config: DataConfig) -> Path:
    """The folder of the prepared data of a section; it need not exist."""
    digest = hashlib.sha256(json.dumps(manifest.key(config), sort_keys=True).encode()).hexdigest()
    first, *others = source_names(config)
    slug = re.sub(r"[^a-z0-9]+", "-", Path(first).name.lower()).strip("-")[:40] or "data"
    more = f"-and-{len(others)}-more" if others else ""
    with path_of("data.folder", config.folder):
        folder = Path(config.folder).expanduser()
    return folder / f"{slug}{more}-{digest[:8]}"


def check_vocabulary(prepared: PreparedData, vocab_size: int, *, load: bool) -> None:
    """Refuse token ids beyond an embedding of `vocab_size` rows; load: with pretrained weights.

    Raises:
        InputError: the largest token id is `vocab_size` or more.
    """
    needed = prepared.vocabulary
    if needed > vocab_size:
        way = f"model.config.vocab_size to at least {needed}"
        if load:
            way = f"model.resize = true, which adds {needed - vocab_size} rows to the weights"
        raise InputError(
            f"the data has token ids up to {needed - 1}, but the model's vocabulary ends at {vocab_size - 1} "
            f"(vocab_size = {vocab_size}). Set {way}, or give the data of another tokenizer (data.tokenizer)."
        )


def _current(
    config: DataConfig, corpus: Corpus, target: Path, on_change: Literal["rebuild", "error"], console: Console
) -> PreparedData | None:
    """The data at `target` if it is valid; otherwise None, with the reason on the console."""
    stored = manifest.read(target, config)
    if stored is None:
        return None
    change, sources = manifest.changes(stored, manifest.source_files(config, corpus.files))
    if change is not None and on_change == "error":
        raise InputError(
            f"the data has changed since this run began: {change}. Restore it to resume, or start a new run (another "
            "train.output) on the changed data."
        )
    fault = change or manifest.damage(target, stored, contents=True)
    if fault is not None:
        console.print(f"{fault}: preparing {target} anew.", style="yellow", highlight=False, soft_wrap=True, markup=False)
        return None
    if sources != stored.sources:
        stored = stored.model_copy(update={"sources": sources})
        with contextlib.suppress(OSError):  # a read-only folder: SHA-256 is computed each time
            write_atomic(target / manifest.FILE, stored.model_dump_json(indent=1) + "\n")
    return PreparedData(target, stored)


def _build_folder(config: DataConfig, corpus: Corpus, target: Path, partial: Path, console: Console) -> PreparedData:
    replaced = partial.with_name("replaced")
    for stale in (partial, replaced):  # left by a killed process
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir()
    manifest = build(config, corpus, partial, console)
    fsync_tree(partial)
    if target.exists():
        target.rename(replaced)  # memory maps of other processes stay valid
    partial.rename(target)
    fsync_folder(target.parent)
    return PreparedData(target, manifest)


def _explain(error: OSError, target: Path) -> OctavoError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(target) / 2**20
        return OctavoError(
            f"no space to prepare data in {str(target.parent)!r}: {free:,.0f} MiB are free. Free some, or change data.folder."
        )
    where = error.filename or target.parent
    return InputError(f"data.folder = {str(target.parent)!r}: {error.strerror or error} ({where}). Change data.folder.")
