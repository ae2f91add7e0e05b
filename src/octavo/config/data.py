"""[data]: the text, its tokens and its sequences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from octavo.config.section import Section


class DataConfig(Section):
    """The training text and its sequences."""

    source: str | list[str] = Field(
        description='"python:docstrings", "python:packages", local .txt, .jsonl or .parquet files (globs), or a Hugging Face '
        "data set."
    )
    text_field: str = Field("text", description="Column or JSON key that holds the text.")
    subset: str | None = Field(
        None, description='Configuration of a Hugging Face data set that has several, such as "wikitext-2-raw-v1".'
    )
    split: str = Field("train", description="Split of a Hugging Face data set.")
    tokenizer: str = Field(
        "train", description='A Hugging Face folder or id, or "train": a byte-level BPE trained on the corpus.'
    )
    vocab_size: int = Field(8192, ge=257, description='Vocabulary of a tokenizer = "train".')
    sequence_length: int = Field(description="Tokens in a sequence.")
    packing: Literal["join", "documents"] = Field(
        "join", description='"join": one stream cut in sequences; "documents": attention and loss stay within a document.'
    )
    max_documents: int | None = Field(None, ge=1, description="Documents to take, sampled by `seed`; all when absent.")
    max_tokens: int | None = Field(None, ge=2, description="Tokens to take; all when absent.")
    validation_fraction: float = Field(
        0.05, ge=0.0, lt=1.0, description="Share of the documents that is held out for validation."
    )
    seed: int = Field(0, ge=0, description="Seed of the sampled documents, the validation split and the order of samples.")
    workers: int = Field(
        0, ge=0, le=64, description="Threads that prefetch the sequences of coming steps; 0: each step reads its own."
    )
    folder: str = Field(
        "runs/data", description="Folder of tokenised corpora, with one folder for each distinct [data] section."
    )

    @property
    def sources(self) -> list[str]:
        """`source` as a list."""
        return [self.source] if isinstance(self.source, str) else self.source

    @field_validator("sequence_length")
    @classmethod
    def _check_length(cls, value: int) -> int:
        if value < 2:
            raise ValueError("a sequence must have at least 2 tokens, since the first is never predicted: use 2 or more")
        return value
