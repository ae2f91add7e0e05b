"""Tokenise a corpus into a folder: document store, split, tokenizer, token files, manifest.

Weighted sources are split separately and concatenated in the token files. Memory is bounded by the longest document, one batch
of text, and a few numbers per document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo._version import __version__
from octavo.config.data import DataConfig
from octavo.data import manifest, rng, tokenizer
from octavo.data.chats import ExampleEncoder
from octavo.data.corpus import Corpus
from octavo.data.document_store import DocumentNumbers, DocumentStore, Ranges, collect
from octavo.data.documents import Document
from octavo.data.forms import Format
from octavo.data.manifest import Counts, ExampleRecord, Manifest, Split
from octavo.data.order import Mixture
from octavo.data.token_files import NOTICE, Part, Written, held_out, write_tokens
from octavo.data.tokenizer import Encoder
from octavo.errors import InputError
from octavo.storage import write_atomic

_LONGEST_TOKEN = 32
"""With `max_tokens`, reading stops at this many bytes per token: more than the average of any real text."""

_EXCERPTS, _EXCERPT = 64, 4096
"""Number of pieces of each part, and characters of each, that are also encoded by transformers for comparison."""


def build(config: DataConfig, corpus: Corpus, folder: Path, console: Console) -> Manifest:
    """Tokenise the corpus into `folder`, an existing empty folder; progress bars on a terminal.

    Raises:
        InputError: the corpus has a fault, or too little text.
    """
    sources = [manifest.record(path) for path in manifest.source_files(config, corpus.files)]
    named = tokenizer.load(config.tokenizer) if config.tokenizer != "train" else None  # first, since the name may be wrong
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    store_files = [folder / "documents", folder / "validation-documents"]
    bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    with bars as progress, DocumentStore(store_files[0]) as documents, DocumentStore(store_files[1]) as validation:
        said = corpus.notices
        examples = ExampleEncoder(config, named)
        parts = _parts(config, corpus, documents, progress, examples)
        if corpus.validation:
            parts.append(_validation_part(config, corpus, validation, progress, examples))
            _check_alike(documents, validation)
            _check_apart(parts, partial(console.print, **NOTICE))
        _check_effect(config, kind := corpus.form.format or "text")
        if config.packing is None:
            config = config.model_copy(update={"packing": "join" if kind == "text" else "documents"})
        for notice in (*corpus.notices, *examples.notices):
            if notice not in said:  # about a data set, whose splits are known only now
                console.print(notice, **NOTICE)
        encoder = _encoder(config, named, parts, progress)
        if encoder is not None:
            encoder.save(folder / "tokenizer")
            say = partial(progress.console.print, **NOTICE)
            encoder = tokenizer.proven(encoder, folder / "tokenizer", _excerpts(parts, config.seed), say)
        if config.chat_template is not None and examples.template_used is not None:
            tokenizer.with_chat_template(folder / "tokenizer", examples.template_used)
        written = write_tokens(config, parts, encoder, folder, progress)
    record = _record(config, corpus, examples, written)
    for store_file in store_files:
        store_file.unlink()
    _check_unchanged(sources)
    files = manifest.prepared_files(folder)
    tokenizer_sha256 = _tokenizer_sha256(files)
    by_source: dict[Split, list[Counts]] = {}
    if config.weights:
        of_sources = slice(len(corpus.sources))
        by_source = {name: counts[of_sources] for name, counts in written.parts.items() if name == "train" or config.held_out}
    result = Manifest(
        format=manifest.FORMAT,
        octavo=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        key=manifest.key(config),
        sources=sources,
        files=files,
        splits=written.splits,
        parts=by_source,
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=encoder.vocab_size if encoder else written.max_id + 1,
        max_token_id=written.max_id,
        end_token_id=encoder.end if encoder else None,
        dtype=written.dtype,
        labels=written.labels,
        examples=record,
        fingerprint=manifest.fingerprint(files, tokenizer_sha256, by_source),
    )
    write_atomic(folder / manifest.FILE, result.model_dump_json(indent=1) + "\n")
    return result


def split(documents: DocumentNumbers, config: DataConfig) -> tuple[DocumentNumbers, DocumentNumbers | None]:
    """The documents of training and of validation: round(validation_fraction · documents), chosen by the seed.

    Each side has at least one. A corpus of one document has None for validation: its tokens are split, and the last part is
    held out.
    """
    count = len(documents)
    if config.held_out == 0:
        return documents, documents[:0]
    if count == 1:
        return documents, None
    order = rng.generator(config.seed, rng.SPLIT).permutation(count)
    mask = np.zeros(count, bool)
    mask[order[: held_out(count, config, least=1)]] = True
    return documents[~mask], documents[mask]


def _check_effect(config: DataConfig, kind: Format) -> None:
    """Refuse keys without effect for the format that the columns have shown."""
    of_templates = ("chat_template", "chat_template_variables")
    keys = {"text": (*of_templates, "train_on", "faulty_rows"), "prompt": of_templates, "chat": ()}[kind]
    for key in keys:
        value = getattr(config, key)
        if value != DataConfig.model_fields[key].get_default(call_default_factory=True):
            held = "text or token ids" if kind == "text" else "prompts and completions"
            raise InputError(f"data.{key} = {value!r} has no effect: data.source holds {held}. Remove data.{key}.")


def _record(config: DataConfig, corpus: Corpus, examples: ExampleEncoder, written: Written) -> ExampleRecord | None:
    """Counts of examples. Refuses data in which every token is trained, unless that was requested."""
    if not examples.counts.read or corpus.form.format in (None, "text"):
        return None
    counts = written.splits.values()
    possible = sum(each.tokens - each.documents for each in counts)  # a document's first token is not predicted
    if config.train_on != "all" and sum(written.targets.values()) >= possible:
        raise InputError(
            "every token of the data would be trained (a trained share of 1), including the users'. Set "
            'data.train_on = "all" if that is intended; otherwise correct the chat template.'
        )
    template = examples.template_used
    return ExampleRecord(
        format="chat" if corpus.form.format == "chat" else "prompt",
        read=examples.counts.read,
        dropped=dict(sorted(examples.counts.dropped.items())),
        turns_by=examples.by,
        turn_ends=examples.turn_ends,
        template_sha256=None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    )


def _parts(
    config: DataConfig, corpus: Corpus, documents: DocumentStore, progress: Progress, examples: ExampleEncoder
) -> list[Part]:
    """Read and split the sources: together, or each separately with its share of the limits by weight."""
    read: list[tuple[str, Iterable[Document]]] = [(f"data.source = {config.source!r}", corpus)]
    if config.weights:
        read = [(f"data.source {name!r}", at.documents()) for name, at in zip(config.sources, corpus.sources, strict=True)]
    shares = Mixture(config.weights or [1])
    counts, limits = (None if n is None else shares.counts(n) for n in (config.max_documents, config.max_tokens))
    needed: tuple[Split, ...] = ("train", "validation") if config.held_out else ("train",)
    parts = []
    for number, (name, source) in enumerate(read):
        limit = None if limits is None else limits[number]
        if counts is not None and counts[number] == 0:
            raise InputError(
                f"data.max_documents = {config.max_documents} leaves no document of {name}, by its weight of "
                f"{config.weights[number]:g}. Raise data.max_documents, or remove the source."
            )
        selected = collect(
            documents,
            progress.track(examples(source), total=None, description="reading documents"),
            count=None if counts is None else counts[number],
            seed=config.seed,
            max_bytes=None if limit is None else limit * _LONGEST_TOKEN,
        )
        if not len(selected):
            raise _holds_nothing(name, "data.source", examples)
        train, validation = split(selected, config)
        if validation is None and examples.counts.read:
            raise InputError(
                f"{name} has one conversation or completion, which cannot be split: set data.validation_fraction = 0, or set a "
                "data.validation_source."
            )
        parts.append(Part(name, documents, train, validation, needed, limit))
    documents.seal()
    return parts


def _holds_nothing(name: str, key: str, examples: ExampleEncoder) -> InputError:
    if dropped := examples.counts.dropped:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in dropped.most_common())
        return InputError(f'{name}: all rows are dropped: {reasons}. Set data.faulty_rows = "refuse" to see the first one.')
    return InputError(f"{name} holds no text: every document is empty. Change {key}.")


def _validation_part(
    config: DataConfig, corpus: Corpus, documents: DocumentStore, progress: Progress, examples: ExampleEncoder
) -> Part:
    """Read data.validation_source."""
    name = f"data.validation_source = {config.validation_source!r}"
    read = (document for source in corpus.validation for document in source.documents())
    tracked = progress.track(examples(read), total=None, description="reading validation documents")
    collected = collect(documents, tracked, count=None, seed=config.seed, max_bytes=None)
    if not len(collected):
        raise _holds_nothing(name, "data.validation_source", examples)
    documents.seal()
    return Part(name, documents, collected[:0], collected, ("validation",))


def _check_alike(documents: DocumentStore, validation: DocumentStore) -> None:
    if validation.tokenised != documents.tokenised:
        train, held = ("token ids" if store.tokenised else "text" for store in (documents, validation))
        raise InputError(f"data.source holds {train}, but data.validation_source {held}. Give both in the same form.")


def _check_apart(parts: Sequence[Part], say: Callable[[str], None]) -> None:
    """Refuse a validation source whose documents are all in the training set, in any file; report overlaps otherwise."""
    *training, validation = parts
    assert validation.validation is not None
    trained = np.concatenate([part.documents.digests(part.train) for part in training])
    count = len(validation.validation)
    both = int(np.isin(validation.documents.digests(validation.validation), trained).sum())
    if both == count:
        raise InputError(
            f"{validation.name}: all of its documents ({count:,}) are also in data.source, so the model would be trained on "
            "its validation text. Use other text in one of the two, or data.validation_fraction."
        )
    if both:
        say(f"{validation.name}: {both:,} of its {count:,} documents are also in the training data (data.source).")


def _encoder(config: DataConfig, named: Encoder | None, parts: Sequence[Part], progress: Progress) -> Encoder | None:
    """The named tokenizer, else one trained on the text; None for a corpus of token ids without a named one."""
    for part in parts:
        if named is not None and part.documents.max_id >= named.vocab_size:
            key, largest = part.name.split()[0], part.documents.max_id
            raise InputError(
                f"{key} holds token id {largest}, but data.tokenizer = {config.tokenizer!r} ends at {named.vocab_size - 1}. "
                "Name the tokenizer that produced the ids."
            )
    documents = parts[0].documents
    if documents.tokenised:
        return named
    say = partial(progress.console.print, **NOTICE)
    if named is not None:
        if config.vocab_size != DataConfig.model_fields["vocab_size"].default:
            say(f'data.vocab_size = {config.vocab_size} has no effect: it applies only to data.tokenizer = "train".')
        if named.end is None and not named.suffix:
            say(f"data.tokenizer = {config.tokenizer!r} has no end token (eos_token): documents are not separated.")
        return named
    sample = _sample(documents.pieces(np.concatenate([part.train for part in parts])), config.seed, say)
    texts = progress.track(documents.text_pieces(sample), total=len(sample), description="training the tokenizer")
    return tokenizer.train(texts, config.vocab_size)


def _excerpts(parts: Sequence[Part], seed: int) -> list[str]:
    """The beginnings of random pieces of all parts; empty for token ids."""
    excerpts: list[str] = []
    for part in parts:
        if part.documents.tokenised:
            continue
        splits = [documents for documents in (part.train, part.validation) if documents is not None]
        generator = rng.generator(seed, rng.TOKENIZER)
        pieces = part.documents.pieces(np.sort(_some(np.concatenate(splits), generator)))
        excerpts += [text[:_EXCERPT] for text in part.documents.text_pieces(_some(pieces, generator))]
    return excerpts


def _some(rows: npt.NDArray[np.int64], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    return generator.choice(rows, min(len(rows), _EXCERPTS), replace=False)


def _sample(pieces: Ranges, seed: int, say: Callable[[str], None]) -> Ranges:
    """All pieces of the training documents, or a random sample of at most TRAINING_BYTES, with a notice."""
    sizes = pieces[:, 1] - pieces[:, 0]
    if sizes.sum() <= tokenizer.TRAINING_BYTES:
        return pieces
    order = rng.generator(seed, rng.TOKENIZER).permutation(len(pieces))
    fitting = max(int(np.searchsorted(np.cumsum(sizes[order]), tokenizer.TRAINING_BYTES, side="right")), 1)
    chosen = np.sort(order[:fitting])
    taken, whole = sizes[chosen].sum() / 1e6, sizes.sum() / 1e6
    say(f"The tokenizer is trained on a random sample of the text: {taken:,.1f} of {whole:,.1f} MB.")
    return pieces[chosen]


def _check_unchanged(sources: Sequence[manifest.SourceFile]) -> None:
    for source in sources:
        path = Path(source.path)
        status = path.stat() if path.exists() else None
        if status is None or (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
            raise InputError(f"{source.path} changed while it was read. Wait until it is written, and run again.")


def _tokenizer_sha256(files: dict[str, manifest.PreparedFile]) -> str | None:
    """SHA-256 of tokenizer.json, or of all tokenizer files if there is none."""
    digests = {name: file.sha256 for name, file in files.items() if name.startswith("tokenizer/")}
    if not digests:
        return None
    whole = digests.get("tokenizer/tokenizer.json")
    return (
        whole or hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(digests.items())).encode()).hexdigest()
    )
