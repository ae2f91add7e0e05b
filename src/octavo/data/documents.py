"""A document of a reader: text, token ids with labels, or an example that a template has yet to render."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Message = dict[str, Any]
"""`role`, `content` and other keys that a chat template reads, as in Hugging Face's files."""

Span = tuple[int, int]
"""(start, end) of a part of a text, in characters."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in Hugging Face's form.

    Attributes:
        asked: per message, False if its row excludes it from training.
        tools: JSON schemas of functions; None without.
        variables: template variables for this conversation only.
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
    """A row that is not an example: a short reason, for counts, and a sentence."""

    reason: str
    sentence: str


Example = Conversation | Completion | Faulty


@dataclass(frozen=True, slots=True)
class Document:
    """One text, one list of token ids, or one example; origin: file and line, for messages.

    Attributes:
        labels: the token at each position, or -100 if it is not a target; None if every token is a target.
        example: converted to token ids and labels once the tokenizer is known.
    """

    text: str | None
    input_ids: npt.NDArray[np.uint32] | None
    origin: str
    labels: npt.NDArray[np.int64] | None = None
    example: Example | None = None
