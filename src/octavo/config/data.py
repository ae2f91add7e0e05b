"""[data]: the text, its tokens and its sequences."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from octavo.config.section import OnDisk, OnDiskOrHub, Section, refuse_addresses

COMPRESSED = (".gz", ".zst")
"""Suffixes of compressed files of text."""


_NAME_OF_SET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class DataConfig(Section):
    """The training text and its sequences."""

    source: Annotated[str | list[str], OnDiskOrHub] = Field(
        description='"python:docstrings", "python:packages", local .txt, .jsonl, .csv or .parquet files (globs; all but '
        ".parquet also as .gz or .zst), a folder of them, or a Hugging Face data set."
    )
    weights: list[Annotated[float, Field(gt=0)]] = Field(
        [],
        description="Shares of the sources in training, one positive number each, on any scale; without them the sources "
        "are concatenated.",
    )
    validation_source: Annotated[str | list[str] | None, OnDiskOrHub] = Field(
        None, description="Text for validation, in the forms of `source`, instead of `validation_fraction`."
    )
    validation_split: str | None = Field(
        None, description="Split of a data set or a folder in `validation_source`; `split` when absent."
    )
    validation: dict[str, str | list[str] | dict[str, str | list[str]]] = Field(
        default_factory=dict,
        description="Additional validation sets by name, in the forms of `source` or { source, split }; each has a "
        "separate loss.",
    )
    format: Literal["chat", "prompt", "text"] | None = Field(
        None,
        description='"chat": conversations; "prompt": a prompt and its completion; "text": plain text or token ids. '
        "Default: by the names of the columns.",
    )
    text_field: str = Field("text", description="Column or JSON key of the text.")
    chat_template: str | None = Field(
        None, description='A Jinja file, or "chatml", "llama-3" or "qwen3". Default: the tokenizer\'s template.'
    )
    chat_template_variables: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template, such as { enable_thinking = false }."
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="Tokens of a conversation that are trained: the assistant's turns, only the last of them, or all tokens.",
    )
    faulty_rows: Literal["refuse", "drop"] = Field(
        "refuse",
        description='Conversations that cannot be used exactly: "refuse" stops the preparation, "drop" drops and counts them.',
    )
    subset: str | None = Field(
        None, description='Configuration of a Hugging Face data set with several, such as "wikitext-2-raw-v1".'
    )
    split: str | None = Field(
        None, description='Split of a data set, by default "train"; of a folder without a card, by default all files.'
    )
    tokenizer: Annotated[str, OnDiskOrHub] = Field(
        "train", description='A Hugging Face folder or id, or "train": a byte-level BPE trained on the corpus.'
    )
    vocab_size: int = Field(8192, ge=257, description='Vocabulary size of tokenizer = "train".')
    sequence_length: int = Field(description="Tokens in a sequence.")
    packing: Literal["join", "documents"] | None = Field(
        None,
        description='"join": documents are concatenated and cut into sequences (default for text). "documents": attention '
        "and loss stay within a document (default for conversations and prompts).",
    )
    overlong: Literal["truncate", "cut", "drop"] | None = Field(
        None,
        description='Documents longer than a sequence, if packing = "documents": "truncate" uses their first sequence '
        '(default for conversations and prompts), "cut" all of them in sequences (default for text), "drop" '
        "none of them.",
    )
    max_documents: int | None = Field(None, ge=1, description="Number of documents, sampled by `seed`. Default: all.")
    max_tokens: int | None = Field(None, ge=2, description="Number of tokens. Default: all.")
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0, description="Share of the documents held out for validation.")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of document sampling, validation split and order of samples.")
    workers: int = Field(
        0,
        ge=0,
        le=64,
        description="Threads that prefetch the sequences of later steps; 0: each step reads its sequences itself.",
    )
    folder: Annotated[str, OnDisk] = Field(
        "runs/data", description="Folder of tokenised data, with one subfolder for each distinct [data] section."
    )

    @property
    def sources(self) -> list[str]:
        """`source` as a list."""
        return [self.source] if isinstance(self.source, str) else self.source

    @property
    def validation_sources(self) -> list[str]:
        """`validation_source` as a list."""
        return [self.validation_source] if isinstance(self.validation_source, str) else self.validation_source or []

    @property
    def held_out(self) -> float:
        """The share of the documents held out for validation; 0 if `data.validation_source` is set."""
        return 0.0 if self.validation_source is not None else self.validation_fraction

    @property
    def validates(self) -> bool:
        """True if there is text for validation."""
        return self.held_out > 0 or self.validation_source is not None or bool(self.validation)

    @property
    def of_validation(self) -> DataConfig | None:
        """The section for the whole text of `validation_source`; None without one."""
        if self.validation_source is None:
            return None
        changes = {
            "source": self.validation_source,
            "split": self.validation_split or self.split,
            **dict.fromkeys(("validation_source", "validation_split", "max_documents", "max_tokens")),
            "weights": [],
            "validation_fraction": 0.0,
        }
        return self.model_copy(update=changes)

    def of_set(self, name: str, tokenizer: str | None) -> DataConfig:
        """The section for the whole text of a set in `validation`.

        tokenizer: folder of the run's tokenizer, if it has one.
        """
        stated = self.validation[name]
        table = stated if isinstance(stated, dict) else {"source": stated}
        changes = {
            "source": table["source"],
            "split": table.get("split"),
            **dict.fromkeys(("validation_source", "validation_split", "max_documents", "max_tokens")),
            "weights": [],
            "validation": {},
            "validation_fraction": 0.0,
            "tokenizer": tokenizer or self.tokenizer,
            "vocab_size": type(self).model_fields["vocab_size"].default,
        }
        return self.model_copy(update=changes)

    @field_validator("validation")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, entry in value.items():
            if not _NAME_OF_SET.fullmatch(name):
                raise ValueError(
                    f"data.validation: the name {name!r} of a set may have only letters and digits, with _ . - inside"
                )
            if isinstance(entry, dict) and (set(entry) - {"source", "split"} or "source" not in entry):
                raise ValueError(f'data.validation.{name} = {entry!r}: a set is a source, or {{ source = "…", split = "…" }}')
            if isinstance(entry, dict) and not isinstance(entry.get("split", ""), str):
                raise ValueError(f"data.validation.{name}: split = {entry['split']!r} is one text")
            if not (source := entry["source"] if isinstance(entry, dict) else entry):
                raise ValueError(f"data.validation.{name} = {entry!r}: name at least one source")
            refuse_addresses(source, hub=True)
        return value

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        if self.weights and len(self.weights) != len(self.sources):
            count = len(self.sources)
            raise ValueError(
                f"data.weights = {self.weights} has {counted(len(self.weights), 'weight')}, but data.source has "
                f"{counted(count, 'source')}: give one weight per source, in the same order. Change data.weights"
                + (" ([] joins the sources)" if count > 1 else "")
            )
        return self

    @field_validator("sequence_length")
    @classmethod
    def _check_length(cls, value: int) -> int:
        if value < 2:
            raise ValueError("a sequence must have at least 2 tokens, since the first is never predicted: use 2 or more")
        return value


def kind_of(name: str) -> str:
    """The suffix of a file name, in lower case, without a compression suffix: ".jsonl" of "a.jsonl.zst"."""
    path = PurePath(name.lower())
    return PurePath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 file", "2 files"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
