"""Tokenise a corpus into a folder: document store, split, tokenizer, token files, manifest.

Token files are raw little-endian uint16 or uint32 with a file of document offsets, to be read by memory map; documents are
stored unpacked. Memory is bounded by the longest document, a batch of text and a few numbers a document.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo._version import __version__
from octavo.config.data import DataConfig
from octavo.data import manifest, rng, tokenizer
from octavo.data.corpus import Corpus
from octavo.data.document_store import DocumentNumbers, DocumentStore, Ranges, collect
from octavo.data.manifest import Counts, Manifest, Split
from octavo.data.tokenizer import Chunk, Encoder
from octavo.errors import InputError
from octavo.storage import write_atomic

_LONGEST_TOKEN = 32
"""With `max_tokens`, reading stops at this many bytes a token: more than the average of any real text."""

_UNKNOWN_SHARE = 0.01
"""A larger share of unknown tokens is reported."""

_NOTICE: dict[str, Any] = {"style": "yellow", "highlight": False, "soft_wrap": True, "markup": False}


def build(config: DataConfig, corpus: Corpus, folder: Path, console: Console) -> Manifest:
    """Tokenise the corpus into `folder`, which exists and is empty; bars on a terminal.

    Raises:
        InputError: the corpus has a fault, or too little text.
    """
    sources = [manifest.record(path) for path in manifest.source_files(config, corpus.files)]
    named = tokenizer.load(config.tokenizer) if config.tokenizer != "train" else None  # first: the name may be wrong
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    store_file = folder / "documents"
    bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    with bars as progress, DocumentStore(store_file) as documents:
        selected = collect(
            documents,
            progress.track(corpus, total=None, description="reading documents"),
            count=config.max_documents,
            seed=config.seed,
            max_bytes=config.max_tokens * _LONGEST_TOKEN if config.max_tokens else None,
        )
        if not len(selected):
            raise InputError(f"data.source = {config.source!r} holds no text: every document is empty. Change data.source.")
        train, validation = split(selected, config)
        encoder = _encoder(config, named, documents, train, progress)
        writers = _write_tokens(config, documents, train, validation, encoder, folder, progress)
    store_file.unlink()
    _check_unchanged(sources)
    if encoder is not None:
        encoder.save(folder / "tokenizer")
    files = manifest.own_files(folder)
    tokenizer_sha256 = _tokenizer_sha256(files)
    max_id = max(writer.max_id for writer in writers.values())
    result = Manifest(
        format=manifest.FORMAT,
        octavo=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        key=manifest.key(config),
        sources=sources,
        files=files,
        splits={name: writer.counts for name, writer in writers.items()},
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=encoder.vocab_size if encoder else max_id + 1,
        max_token_id=max_id,
        end_token_id=encoder.end if encoder else None,
        dtype=writers["train"].dtype,
        fingerprint=manifest.fingerprint(files, tokenizer_sha256),
    )
    write_atomic(folder / manifest.FILE, result.model_dump_json(indent=1) + "\n")
    return result


def split(documents: DocumentNumbers, config: DataConfig) -> tuple[DocumentNumbers, DocumentNumbers | None]:
    """The documents of training and of validation: round(validation_fraction · documents), chosen by the seed.

    Each side has one at least. A corpus of one document has None for validation: its tokens are split, the last part is held
    out.
    """
    count = len(documents)
    if config.validation_fraction == 0:
        return documents, documents[:0]
    if count == 1:
        return documents, None
    order = rng.generator(config.seed, rng.SPLIT).permutation(count)
    mask = np.zeros(count, bool)
    mask[order[: _held_out(count, config, least=1)]] = True
    return documents[~mask], documents[mask]


def _held_out(count: int, config: DataConfig, *, least: int) -> int:
    """Number of held out documents or tokens; at least `least` on each side, if anything is held out."""
    fraction = config.validation_fraction
    return min(max(round(count * fraction), least), count - least) if fraction else 0


def _encoder(
    config: DataConfig, named: Encoder | None, documents: DocumentStore, train: DocumentNumbers, progress: Progress
) -> Encoder | None:
    """The named tokenizer, else one trained on the text; None for a corpus of token ids without a named one."""
    if named is not None and documents.max_id >= named.vocab_size:
        raise InputError(
            f"data.source holds token id {documents.max_id}, but data.tokenizer = {config.tokenizer!r} ends at "
            f"{named.vocab_size - 1}. Name the tokenizer that made the ids."
        )
    if documents.tokenised:
        return named
    say = partial(progress.console.print, **_NOTICE)
    if named is not None:
        if config.vocab_size != DataConfig.model_fields["vocab_size"].default:
            say(f'data.vocab_size = {config.vocab_size} has no effect: it is for data.tokenizer = "train".')
        if named.end is None and not named.suffix:
            say(f"data.tokenizer = {config.tokenizer!r} has no end token (eos_token): nothing stands between documents.")
        return named
    sample = _sample(documents.pieces(train), config.seed, say)
    texts = progress.track(documents.text_pieces(sample), total=len(sample), description="training the tokenizer")
    return tokenizer.train(texts, config.vocab_size)


def _sample(pieces: Ranges, seed: int, say: Callable[[str], None]) -> Ranges:
    """All pieces of the training documents, or a random sample of TRAINING_BYTES at most; says so."""
    sizes = pieces[:, 1] - pieces[:, 0]
    if sizes.sum() <= tokenizer.TRAINING_BYTES:
        return pieces
    order = rng.generator(seed, rng.TOKENIZER).permutation(len(pieces))
    fitting = max(int(np.searchsorted(np.cumsum(sizes[order]), tokenizer.TRAINING_BYTES, side="right")), 1)
    chosen = np.sort(order[:fitting])
    taken, whole = sizes[chosen].sum() / 1e6, sizes.sum() / 1e6
    say(f"The tokenizer is trained on a random sample of the text: {taken:,.1f} of {whole:,.1f} MB.")
    return pieces[chosen]


def _write_tokens(
    config: DataConfig,
    documents: DocumentStore,
    train: DocumentNumbers,
    validation: DocumentNumbers | None,
    encoder: Encoder | None,
    folder: Path,
    progress: Progress,
) -> dict[Split, _Writer]:
    limit = config.max_tokens
    if limit is not None and config.validation_fraction and limit < 4:
        raise InputError(
            f"data.max_tokens = {limit} leaves no two tokens for each of training and validation: use at least 4, or "
            "data.validation_fraction = 0."
        )
    task = progress.add_task("tokenising", total=len(train) + (0 if validation is None else len(validation)))

    def chunks(numbers: DocumentNumbers) -> Iterator[Chunk]:
        if documents.tokenised or encoder is None:
            found: Iterator[Chunk] = ((ids, True) for ids in documents.token_ids(numbers))
        else:
            found = encoder.stream(documents.texts(numbers))
        unknown = written = 0
        for ids, ends in found:
            progress.advance(task, int(ends))
            written += len(ids)
            if encoder is not None and encoder.unknown is not None:
                unknown += int((ids == encoder.unknown).sum())
            yield ids, ends
        if unknown > _UNKNOWN_SHARE * written:
            share = f"{unknown:,} of {written:,} tokens are the unknown token"
            progress.console.print(f"{share}: data.tokenizer = {config.tokenizer!r} lacks this text.", **_NOTICE)

    vocabulary = encoder.vocab_size if encoder else documents.max_id + 1
    writers = {name: _Writer(folder, name, "uint16" if vocabulary <= 2**16 else "uint32") for name in manifest.SPLITS}
    if validation is None:
        whole = np.concatenate([ids for ids, _ in chunks(train)])[:limit]
        held_out = _held_out(len(whole), config, least=2)
        if held_out >= 2:  # otherwise both are too short
            writers["train"].write([(whole[:-held_out], True)], None)
            writers["validation"].write([(whole[-held_out:], True)], None)
    else:
        held_out = 0 if limit is None else _held_out(limit, config, least=2)
        writers["train"].write(chunks(train), None if limit is None else limit - held_out)
        writers["validation"].write(chunks(validation), None if limit is None else held_out)
    for writer in writers.values():
        writer.close()
    for name, writer in writers.items():
        if writer.counts.tokens < 2 and (name == "train" or config.validation_fraction):
            raise InputError(
                f"data.source = {config.source!r} gives {writer.counts.tokens} tokens for {name}, and a sequence needs at "
                "least 2. Give more text" + (", or set data.validation_fraction = 0." if config.validation_fraction else ".")
            )
    return writers


class _Writer:
    """Writes the two files of a split: tokens and document offsets."""

    def __init__(self, folder: Path, name: Split, dtype: Literal["uint16", "uint32"]) -> None:
        self.dtype = dtype
        self._stored = np.dtype(dtype).newbyteorder("<")
        self._tokens = (folder / f"{name}.bin").open("wb")
        self._starts = folder / f"{name}.offsets.bin"
        self._offsets = array("Q", [0])
        self._at = 0
        self.max_id = -1

    def write(self, chunks: Iterable[Chunk], limit: int | None) -> None:
        for chunk, ends in chunks:
            ids = chunk if limit is None else chunk[: limit - self._at]
            if len(ids):
                self.max_id = max(self.max_id, int(ids.max()))
                self._tokens.write(ids.astype(self._stored).tobytes())
                self._at += len(ids)
            full = limit is not None and self._at >= limit
            if (ends or full) and self._at > self._offsets[-1]:
                self._offsets.append(self._at)
            if full:
                return

    @property
    def counts(self) -> Counts:
        return Counts(documents=len(self._offsets) - 1, tokens=self._at)

    def close(self) -> None:
        self._tokens.close()
        np.asarray(self._offsets, "<u8").tofile(self._starts)


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
