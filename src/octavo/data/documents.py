"""A document of a reader: text, token ids with labels, or an example that is still to be rendered by a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Message = dict[str, Any]
"""`role`, `content` and other keys that a chat template reads, as in Hugging Face's files."""

Span = tuple[int, int]
"""First character and end of a part of a text."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in Hugging Face's form.

    Attributes:
        asked: for each message, False if its row excludes it from training.
        tools: JSON schemas of functions; None without.
        variables: template variables of this conversation only.
    """

    messages: list[Message]
    asked: list[bool]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion; only the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Faulty:
    """A row that is no example: the reason in a few words, for counts, and a sentence."""

    reason: str
    sentence: str


Example = Conversation | Completion | Faulty


@dataclass(frozen=True, slots=True)
class Document:
    """One text, one list of token ids, or one example; `origin` is the file and line, for messages.

    Attributes:
        labels: the token at each position, or -100 where it is no target; None where every token is a target.
        example: becomes token ids and labels once the tokenizer is there.
    """

    text: str | None
    input_ids: npt.NDArray[np.uint32] | None
    origin: str
    labels: npt.NDArray[np.int64] | None = None
    example: Example | None = None
