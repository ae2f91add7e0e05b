"""The manifest of a folder of prepared data, and checks against it.

The manifest is written last and the folder then renamed into place, so a folder with a manifest is complete. Later its files
are checked by size (truncated copies, full disks). Sources are checked by size and modification time, and by SHA-256 only if
the time differs: a fresh checkout changes all times but no content.

"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.config.data import DataConfig
from octavo.data.builtin_templates import BUILTIN
from octavo.data.chat_template import chat_template
from octavo.data.corpus import identity, source_names
from octavo.data.readers import readable
from octavo.data.tokenizer import ADDITIONAL_TEMPLATES, check, tokenizer_files
from octavo.storage import sha256_file

FORMAT = 3
"""Part of the key, so that data in an older format is not reused."""

FILE = "manifest.json"
Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
_PLAIN_KEYS = {"text_field", "subset", "split", "max_documents", "max_tokens", "validation_fraction", "seed"}


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceFile(_Record):
    """A file of the corpus or of the tokenizer, with its size and digest when it was read."""

    path: str
    size: int
    mtime_ns: int
    sha256: str


class PreparedFile(_Record):
    """A file of the prepared folder."""

    size: int
    sha256: str


class Counts(_Record):
    """Sizes of a split."""

    documents: int
    tokens: int


class ExampleRecord(_Record):
    """Conversations, or prompts with completions, that the data was prepared from.

    Attributes:
        format: "chat" or "prompt".
        read: number of rows; dropped: of them, by reason.
        turns_by: "marks" or "prefixes" of the template; empty if all tokens are trained, and for prompts.
        turn_ends: ids of the tokens that end trained turns.
        template_sha256: of the chat template.
    """

    format: Literal["chat", "prompt"]
    read: int
    dropped: dict[str, int]
    turns_by: str
    turn_ends: list[int]
    template_sha256: str | None


class Manifest(_Record):
    """manifest.json.

    Attributes:
        key: the result of `key(config)`.
        parts: sizes by source if sources have weights.
        dtype, labels: dtypes of the token files, and of label files if not every token is a target.
        examples: set if the data came from rows of chat files.
    """

    format: int
    octavo: str
    created: str
    key: dict[str, Any]
    sources: list[SourceFile]
    files: dict[str, PreparedFile]
    splits: dict[Split, Counts]
    parts: dict[Split, list[Counts]] = {}
    tokenizer_sha256: str | None
    vocab_size: int
    max_token_id: int
    end_token_id: int | None
    dtype: Literal["uint16", "uint32"]
    labels: Literal["int32", "int64"] | None = None
    examples: ExampleRecord | None = None
    fingerprint: str


def key(config: DataConfig) -> dict[str, Any]:
    """The settings that the tokens depend on.

    Not `sequence_length` and `packing`: tokens are stored unpacked, so one preparation serves every length. `weights` only if
    they divide `max_documents` or `max_tokens`: with any, each source is stored as a part.
    """
    folder = None if config.tokenizer == "train" else check(config.tokenizer)
    optional: dict[str, Any] = {}
    if config.weights:
        limited = config.max_documents is not None or config.max_tokens is not None
        optional["weights"] = config.weights if limited else True
    if config.of_validation is not None:
        names = source_names(config.of_validation, "data.validation_source")
        optional |= {"validation_source": [identity(name) for name in names], "validation_split": config.of_validation.split}
    defaults = DataConfig.model_fields
    for name in ("train_on", "faulty_rows"):
        if (value := getattr(config, name)) != defaults[name].default:
            optional[name] = value
    if config.format is not None:
        optional["form"] = config.format
    if config.chat_template is not None:
        optional["chat_template"] = hashlib.sha256(chat_template(config.chat_template).encode()).hexdigest()
    if config.chat_template_variables:
        optional["chat_template_variables"] = config.chat_template_variables
    return {
        "format": FORMAT,
        "source": [identity(name) for name in source_names(config)],
        "tokenizer": str(folder.absolute()) if folder else config.tokenizer,
        "vocab_size": config.vocab_size if config.tokenizer == "train" else None,
        **config.model_dump(include=_PLAIN_KEYS),
        **optional,
    }


def source_files(config: DataConfig, corpus_files: Sequence[Path]) -> list[Path]:
    """All files that the tokens depend on: the corpus, a local tokenizer and its chat templates."""
    further: list[Path] = []
    if config.tokenizer != "train":
        further = sorted((Path(config.tokenizer).expanduser() / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    if config.chat_template is not None and config.chat_template not in BUILTIN:
        further.append(Path(config.chat_template).expanduser())
    return [*corpus_files, *tokenizer_files(config.tokenizer), *further]


def record(path: Path) -> SourceFile:
    """A source file's current size and time, with its SHA-256."""
    status = path.stat()
    with readable(path):
        digest = sha256_file(path)
    return SourceFile(path=str(path.absolute()), size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest)


def prepared_files(folder: Path) -> dict[str, PreparedFile]:
    """The files of a prepared folder except its manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE)
    return {str(path.relative_to(folder)): PreparedFile(size=path.stat().st_size, sha256=sha256_file(path)) for path in paths}


def fingerprint(files: dict[str, PreparedFile], tokenizer_sha256: str | None, parts: Mapping[Split, Sequence[Counts]]) -> str:
    """Identity of the data: SHA-256 over token files, tokenizer and source sizes, without paths and times."""
    lines = [f"{name} {file.sha256}" for name, file in sorted(files.items()) if "/" not in name]
    lines.append(f"tokenizer {tokenizer_sha256}")
    lines += [f"{split} {part.documents} {part.tokens}" for split, sizes in sorted(parts.items()) for part in sizes]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read(folder: Path, config: DataConfig) -> Manifest | None:
    """The manifest of a folder; None without one for this section in this version's format."""
    try:
        stored = Manifest.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return stored if stored.key == key(config) else None


def damage(folder: Path, manifest: Manifest, *, contents: bool = False) -> str | None:
    """A sentence about the first file that is missing or has a wrong size (with `contents` SHA-256); None if all are right."""
    for name, file in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            return f"{path} is missing"
        if size != file.size:
            return f"{path} has {size:,} bytes where its manifest says {file.size:,}"
        if contents and sha256_file(path) != file.sha256:
            return f"{path} has changed since it was prepared"
    return None


def changes(manifest: Manifest, paths: Sequence[Path]) -> tuple[str | None, list[SourceFile]]:
    """Compare the sources with the manifest.

    Returns:
        The first change as a sentence and no sources, or None and all sources with current modification times.
    """
    known = {source.path: source for source in manifest.sources}
    current = {str(path.absolute()): path for path in paths}
    for name in known:
        if name not in current:
            return f"{name} is gone", []
    fresh = []
    for name, path in current.items():
        if name not in known:
            return f"{name} is new", []
        before = known[name]
        status = path.stat()
        if status.st_size != before.size:
            return f"{name} has {status.st_size:,} bytes and had {before.size:,}", []
        now = before if status.st_mtime_ns == before.mtime_ns else record(path)
        if now.sha256 != before.sha256:
            return f"{name} has other content of the same size", []
        fresh.append(now)
    return None, fresh
