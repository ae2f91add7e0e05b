"""Token files of the two splits: encoded documents, concatenated.

Token files are raw little-endian uint16 or uint32 with a file of document offsets, to be read by memory map; documents are
stored unpacked. If not every token is a target, a label file has the same positions: the token, or IGNORED. Memory is
bounded by a batch of text and 8 bytes per document.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from octavo.config.data import DataConfig
from octavo.data.columns import IGNORED
from octavo.data.document_store import DocumentNumbers, DocumentStore
from octavo.data.manifest import SPLITS, Counts, Split
from octavo.data.tokenizer import Encoder
from octavo.errors import InputError

NOTICE: dict[str, Any] = {"style": "yellow", "highlight": False, "soft_wrap": True, "markup": False}

LABEL_FILES = {"int32": "<i4", "int64": "<i8"}
"""Dtypes of label files → NumPy's."""

_Chunk = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64] | None, bool]
"""Token ids of a document or of a part of it, their labels, and True if the document ends there."""

_UNKNOWN_SHARE = 0.01
"""Share of unknown tokens above which a notice is printed."""


@dataclass(frozen=True)
class Part:
    """Documents of one source, of all sources without weights, or of data.validation_source.

    Attributes:
        name: the source in words, for messages.
        train, validation: documents of the two splits. Without `validation` the tokens of `train`, one document, are split.
        needed: splits that must not be empty.
        limit: most tokens.
    """

    name: str
    documents: DocumentStore
    train: DocumentNumbers
    validation: DocumentNumbers | None
    needed: tuple[Split, ...]
    limit: int | None = None


@dataclass(frozen=True)
class Written:
    """The token files of both splits.

    Attributes:
        splits: sizes.
        parts: sizes of each part, in order.
        max_id: largest token id, labels included.
        labels: dtype of the label files; None without.
        targets: number of targets by split; not counted without label files.
    """

    splits: dict[Split, Counts]
    parts: dict[Split, list[Counts]]
    max_id: int
    dtype: Literal["uint16", "uint32"]
    labels: Literal["int32", "int64"] | None
    targets: dict[Split, int]


def write_tokens(
    config: DataConfig, parts: Sequence[Part], encoder: Encoder | None, folder: Path, progress: Progress
) -> Written:
    """Encode the parts, one after another, into `folder`.

    Raises:
        InputError: a part has too few tokens, too low a limit, or no target, for a split that needs it.
    """
    for part in parts:
        if part.limit is not None and part.limit < 2 * len(part.needed):
            shared = f", {part.limit} of them for {part.name}," if len(config.weights) > 1 else ""
            raise InputError(
                f"data.max_tokens = {config.max_tokens}{shared} leaves no two tokens for each of {' and '.join(part.needed)}: "
                f"use {'more' if shared else 'at least 4'}" + (", or data.validation_fraction = 0." if config.held_out else ".")
            )
    total = sum(len(part.train) + (0 if part.validation is None else len(part.validation)) for part in parts)
    task = progress.add_task("tokenising", total=total)

    def chunks(part: Part, numbers: DocumentNumbers) -> Iterator[_Chunk]:
        if part.documents.tokenised or encoder is None:
            encoded: Iterator[_Chunk] = ((*each, True) for each in part.documents.token_ids(numbers))
        else:
            encoded = ((ids, None, ends) for ids, ends in encoder.stream(part.documents.texts(numbers)))
        unknown = written = 0
        for ids, labels, ends in encoded:
            progress.advance(task, int(ends))
            written += len(ids)
            if encoder is not None and len(ids) and ids.max() >= vocabulary:
                raise InputError(
                    f"data.tokenizer = {config.tokenizer!r} produces token id {ids.max()}, but its vocabulary has ids 0 … "
                    f"{vocabulary - 1}. Correct it, or use another tokenizer."
                )
            if encoder is not None and encoder.unknown is not None:
                unknown += int((ids == encoder.unknown).sum())
            yield ids, labels, ends
        if unknown > _UNKNOWN_SHARE * written:
            share = f"{unknown:,} of {written:,} tokens are the unknown token"
            progress.console.print(f"{share}: data.tokenizer = {config.tokenizer!r} does not cover this text.", **NOTICE)

    vocabulary = encoder.vocab_size if encoder else max(part.documents.max_id for part in parts) + 1
    dtype: Literal["uint16", "uint32"] = "uint16" if vocabulary <= 2**16 else "uint32"
    labels: Literal["int32", "int64"] | None = None
    if any(part.documents.labelled for part in parts):
        labels = "int32" if vocabulary <= 2**31 else "int64"
    by_document = config.packing == "documents"
    sizes: dict[Split, list[Counts]] = {name: [] for name in SPLITS}
    targets: dict[Split, list[int]] = {name: [] for name in SPLITS}
    with ExitStack() as opened:
        writers: dict[Split, _Writer] = {
            name: opened.enter_context(_Writer(folder, name, dtype, labels, by_document)) for name in SPLITS
        }
        for part in parts:
            before = {name: writer.counts for name, writer in writers.items()}
            earlier = {name: writer.targets for name, writer in writers.items()}
            if part.validation is None:
                read = list(chunks(part, part.train))
                whole = np.concatenate([ids for ids, _, _ in read])[: part.limit]
                marks = np.concatenate([_labels_of(*each) for each in read])[: part.limit]
                tail = held_out(len(whole), config, least=2)
                if tail >= 2:  # otherwise both would be too short
                    writers["train"].write([(whole[:-tail], marks[:-tail], True)], None)
                    writers["validation"].write([(whole[-tail:], marks[-tail:], True)], None)
            else:
                tail = 0 if part.limit is None else held_out(part.limit, config, least=2)
                writers["train"].write(chunks(part, part.train), None if part.limit is None else part.limit - tail)
                writers["validation"].write(chunks(part, part.validation), None if part.limit is None else tail)
            for name, writer in writers.items():
                sizes[name].append(_difference(writer.counts, before[name]))
                targets[name].append(writer.targets - earlier[name])
    for number, part in enumerate(parts):
        for name in part.needed:
            if (tokens := sizes[name][number].tokens) < 2:
                remedy = ", or set data.validation_fraction = 0." if config.held_out else "."
                raise InputError(
                    f"{part.name} gives {tokens} tokens for {name}, and a sequence needs at least 2. Give more text{remedy}"
                )
            if labels is not None and not targets[name][number]:
                raise InputError(
                    f"{part.name} gives {tokens:,} tokens for {name}, and no target: 'labels' are {IGNORED} (or 'loss_mask' 0) "
                    "at all but first tokens of documents. Mark the tokens to predict, or remove the column to predict every "
                    "token."
                )
    max_id = max(writer.max_id for writer in writers.values())
    counts: dict[Split, Counts] = {name: writer.counts for name, writer in writers.items()}
    trained: dict[Split, int] = {name: writer.targets for name, writer in writers.items()}
    return Written(counts, sizes, max_id, dtype, labels, trained)


def held_out(count: int, config: DataConfig, *, least: int) -> int:
    """Number of held-out documents or tokens; at least `least` on each side if anything is held out."""
    fraction = config.held_out
    return min(max(round(count * fraction), least), count - least) if fraction else 0


def _labels_of(ids: npt.NDArray[np.uint32], labels: npt.NDArray[np.int64] | None, ends: bool) -> npt.NDArray[np.int64]:
    return ids.astype(np.int64) if labels is None else labels


def _difference(now: Counts, before: Counts) -> Counts:
    return Counts(documents=now.documents - before.documents, tokens=now.tokens - before.tokens)


class _Writer:
    """Writes the files of a split: tokens, labels if any and, on exit, document offsets.

    Attributes:
        targets: number of labels that are targets; for separately packed documents, without each first token.
    """

    def __init__(
        self,
        folder: Path,
        name: Split,
        dtype: Literal["uint16", "uint32"],
        labels: Literal["int32", "int64"] | None,
        by_document: bool,
    ) -> None:
        self._by_document = by_document
        self._stored = np.dtype(dtype).newbyteorder("<")
        self._tokens = (folder / f"{name}.bin").open("wb")
        self._labels = None if labels is None else (folder / f"{name}.labels.bin").open("wb")
        self._labels_stored = LABEL_FILES.get(labels or "")
        self.targets = 0
        self._starts = folder / f"{name}.offsets.bin"
        self._offsets = array("Q", [0])
        self._at = 0
        self.max_id = -1

    def write(self, chunks: Iterable[_Chunk], limit: int | None) -> None:
        """Append documents with at most `limit` tokens in total."""
        end = None if limit is None else self._at + limit
        for chunk, marks, ends in chunks:
            ids = chunk if end is None else chunk[: end - self._at]
            if len(ids):
                self.max_id = max(self.max_id, int(ids.max()))
                self._tokens.write(ids.astype(self._stored).tobytes())
                if self._labels is not None:
                    self._write_labels(_labels_of(ids, None if marks is None else marks[: len(ids)], ends))
                self._at += len(ids)
            full = end is not None and self._at >= end
            if (ends or full) and self._at > self._offsets[-1]:
                self._offsets.append(self._at)
            if full:
                return

    def _write_labels(self, labels: npt.NDArray[np.int64]) -> None:
        assert self._labels is not None
        alone = self._by_document and self._at == self._offsets[-1]  # a document's first token, which is not predicted
        self.targets += int((labels[alone:] != IGNORED).sum())
        self.max_id = max(self.max_id, int(labels.max()))
        self._labels.write(labels.astype(self._labels_stored).tobytes())

    @property
    def counts(self) -> Counts:
        return Counts(documents=len(self._offsets) - 1, tokens=self._at)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._tokens.close()
        if self._labels is not None:
            self._labels.close()
        if kind is None:
            np.asarray(self._offsets, "<u8").tofile(self._starts)
