"""Tokenise a corpus into a folder: document store, split, tokenizer, token files, manifest.

The folder is temporary: `prepared` locks it and renames it when it is whole. Token files are raw little-endian uint16 or uint32
with a file of document offsets, to be read by memory map; documents are stored unpacked. Memory is bounded by a batch of text
and a few numbers a document.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo._version import __version__
from octavo.config.data import DataConfig
from octavo.data import document_store, manifest, rng, tokenizer
from octavo.data.corpus import Corpus
from octavo.data.document_store import DocumentNumbers, DocumentStore
from octavo.data.manifest import Counts, Manifest, Split
from octavo.data.tokenizer import Encoder
from octavo.errors import InputError
from octavo.storage import write_atomic

_LONGEST_TOKEN = 32
"""With `max_tokens`, reading stops at this many bytes a token: more than the average of any real text."""

Chunk = tuple[npt.NDArray[np.uint32], bool]
"""Tokens of a document or of a part of it, and whether the document ends there."""


@dataclass(frozen=True)
class SplitPlan:
    """Documents of each split; with `cut`, both splits are parts of one document's tokens."""

    train: DocumentNumbers
    validation: DocumentNumbers
    cut: bool


def build(config: DataConfig, corpus: Corpus, folder: Path, *, show: bool, console: Console) -> Manifest:
    """Tokenise the corpus into `folder`, which exists and is empty.

    Raises:
        InputError: the corpus has a fault, or too little text.
    """
    sources = [manifest.record(path) for path in manifest.source_files(config, corpus.files)]
    named = tokenizer.load(config.tokenizer) if config.tokenizer != "train" else None  # first: the name may be wrong
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    store_file = folder / "documents"
    bars = Progress(*columns, console=console, disable=not show, transient=True)
    with bars as progress, DocumentStore(store_file) as documents:
        selected = document_store.collect(
            documents,
            progress.track(corpus, total=None, description="reading documents"),
            count=config.max_documents,
            seed=config.seed,
            max_bytes=config.max_tokens * _LONGEST_TOKEN if config.max_tokens else None,
        )
        if not len(selected):
            raise InputError(f"data.source = {config.source!r} holds no text: every document is empty. Change data.source.")
        plan = split(selected, config)
        encoder = _encoder(config, named, documents, plan, progress)
        tokens = _write_tokens(config, documents, plan, encoder, folder, progress)
    store_file.unlink()
    _check_unchanged(sources)
    if encoder is not None:
        encoder.save(folder / "tokenizer")
    files = manifest.own_files(folder)
    tokenizer_sha256 = _tokenizer_sha256(files)
    result = Manifest(
        format=manifest.FORMAT,
        octavo=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        key=manifest.key(config),
        sources=sources,
        files=files,
        splits=tokens.splits,
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=encoder.vocab_size if encoder else tokens.max_id + 1,
        max_token_id=tokens.max_id,
        end_token_id=encoder.end if encoder else None,
        dtype="uint16" if tokens.dtype.itemsize == 2 else "uint32",
        fingerprint=manifest.fingerprint(files, tokenizer_sha256),
    )
    write_atomic(folder / manifest.FILE, result.model_dump_json(indent=1) + "\n")
    return result


def split(documents: DocumentNumbers, config: DataConfig) -> SplitPlan:
    """Hold out round(validation_fraction · documents) of them, chosen by the seed, and at least one on each side.

    A corpus of one document has its tokens split instead: the last part is held out.
    """
    count, fraction = len(documents), config.validation_fraction
    if fraction == 0:
        return SplitPlan(documents, documents[:0], cut=False)
    if count == 1:
        return SplitPlan(documents, documents, cut=True)
    held_out = min(max(round(count * fraction), 1), count - 1)
    order = rng.generator(config.seed, rng.SPLIT).permutation(count)
    mask = np.zeros(count, bool)
    mask[order[:held_out]] = True
    return SplitPlan(documents[~mask], documents[mask], cut=False)


def _encoder(
    config: DataConfig, named: Encoder | None, documents: DocumentStore, plan: SplitPlan, progress: Progress
) -> Encoder | None:
    """The named tokenizer, else one trained on the text; None for a corpus of token ids without a named one."""
    if named is not None and documents.max_id >= named.vocab_size:
        raise InputError(
            f"data.source holds token id {documents.max_id}, but data.tokenizer = {config.tokenizer!r} ends at "
            f"{named.vocab_size - 1}. Name the tokenizer that made the ids."
        )
    if named is not None or documents.tokenised:
        return named
    sample = _sample(documents, plan.train, config.seed)
    texts = progress.track(documents.texts(sample), total=len(sample), description="training the tokenizer")
    return tokenizer.train(texts, config.vocab_size)


def _sample(documents: DocumentStore, numbers: DocumentNumbers, seed: int) -> DocumentNumbers:
    """All training documents, or a random sample of TRAINING_BYTES at most (at least one document)."""
    sizes = np.fromiter((documents.size(number) for number in numbers), np.int64, len(numbers))
    if sizes.sum() <= tokenizer.TRAINING_BYTES:
        return numbers
    order = rng.generator(seed, rng.TOKENIZER).permutation(len(numbers))
    fitting = max(int(np.searchsorted(np.cumsum(sizes[order]), tokenizer.TRAINING_BYTES, side="right")), 1)
    return numbers[np.sort(order[:fitting])]


@dataclass(frozen=True)
class _Tokens:
    """Sizes and dtype of the token files."""

    splits: dict[Split, Counts]
    max_id: int
    dtype: np.dtype


def _write_tokens(
    config: DataConfig, documents: DocumentStore, plan: SplitPlan, encoder: Encoder | None, folder: Path, progress: Progress
) -> _Tokens:
    vocabulary = encoder.vocab_size if encoder else documents.max_id + 1
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    limits = _limits(config)
    task = progress.add_task("tokenising", total=len(plan.train) + (0 if plan.cut else len(plan.validation)))

    def chunks(numbers: DocumentNumbers) -> Iterator[Chunk]:
        if documents.tokenised or encoder is None:
            found: Iterator[Chunk] = ((ids, True) for ids in documents.token_ids(numbers))
        else:
            found = encoder.stream(documents.texts(numbers))
        for ids, ends in found:
            progress.advance(task, int(ends))
            yield ids, ends

    writers = {name: _Writer(folder, name, dtype) for name in manifest.SPLITS}
    if plan.cut:
        _cut_document(chunks(plan.train), writers, config, folder / "whole", dtype)
    else:
        writers["train"].write(chunks(plan.train), limits["train"])
        writers["validation"].write(chunks(plan.validation), limits["validation"])
    counts = {name: writer.finish() for name, writer in writers.items()}
    _check_size(config, counts)
    return _Tokens(counts, max(writer.max_id for writer in writers.values()), dtype)


def _limits(config: DataConfig) -> dict[Split, int | None]:
    """Token limits of the splits: `max_tokens` divided by `validation_fraction`, at least 2 each."""
    total = config.max_tokens
    if total is None:
        return {"train": None, "validation": None}
    if config.validation_fraction == 0:
        return {"train": total, "validation": 0}
    if total < 4:
        raise InputError(
            f"data.max_tokens = {total} leaves no two tokens for each of training and validation: use at least 4, or "
            "data.validation_fraction = 0."
        )
    held_out = min(max(round(total * config.validation_fraction), 2), total - 2)
    return {"train": total - held_out, "validation": held_out}


class _Writer:
    """Writes the two files of a split: tokens and document offsets."""

    def __init__(self, folder: Path, name: Split, dtype: np.dtype) -> None:
        self._tokens = (folder / f"{name}.bin").open("wb")
        self._starts = folder / f"{name}.offsets.bin"
        self._dtype = dtype
        self._offsets = array("Q", [0])
        self._at = 0
        self.max_id = -1

    def write(self, chunks: Iterable[Chunk], limit: int | None) -> None:
        for chunk, ends in chunks:
            ids = chunk if limit is None else chunk[: limit - self._at]
            if len(ids):
                self.max_id = max(self.max_id, int(ids.max()))
                self._tokens.write(ids.astype(self._dtype).tobytes())
                self._at += len(ids)
            full = limit is not None and self._at >= limit
            if (ends or full) and self._at > self._offsets[-1]:
                self._offsets.append(self._at)
            if full:
                return

    def finish(self) -> Counts:
        self._tokens.close()
        np.asarray(self._offsets, "<u8").tofile(self._starts)
        return Counts(documents=len(self._offsets) - 1, tokens=self._at)


def _cut_document(
    chunks: Iterable[Chunk], writers: dict[Split, _Writer], config: DataConfig, scratch: Path, dtype: np.dtype
) -> None:
    """Split the tokens of the only document, through a file: their number is known at the end."""
    whole = 0
    with scratch.open("wb") as file:
        for ids, _ in chunks:
            ids = ids if config.max_tokens is None else ids[: config.max_tokens - whole]
            file.write(ids.astype(dtype).tobytes())
            whole += len(ids)
    held_out = min(max(round(whole * config.validation_fraction), 2), whole - 2)
    if held_out >= 2:
        tokens = np.memmap(scratch, dtype, mode="r")
        writers["train"].write([(tokens[: whole - held_out].astype(np.uint32), True)], None)
        writers["validation"].write([(tokens[whole - held_out :].astype(np.uint32), True)], None)
    scratch.unlink()


def _check_size(config: DataConfig, counts: dict[Split, Counts]) -> None:
    for name in manifest.SPLITS if config.validation_fraction > 0 else manifest.SPLITS[:1]:
        if counts[name].tokens < 2:
            raise InputError(
                f"data.source = {config.source!r} gives {counts[name].tokens} tokens for {name}, and a sequence needs at "
                "least 2. Give more text" + (", or set data.validation_fraction = 0." if config.validation_fraction else ".")
            )


def _check_unchanged(sources: Sequence[manifest.SourceFile]) -> None:
    for source in sources:
        path = Path(source.path)
        status = path.stat() if path.exists() else None
        if status is None or (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
            raise InputError(f"{source.path} changed while it was read. Wait until it is written, and run again.")


def _tokenizer_sha256(files: dict[str, manifest.OwnFile]) -> str | None:
    """SHA-256 of tokenizer.json, or of all tokenizer files if there is none."""
    own = {name: file.sha256 for name, file in files.items() if name.startswith("tokenizer/")}
    if not own:
        return None
    whole = own.get("tokenizer/tokenizer.json")
    return whole or hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(own.items())).encode()).hexdigest()
