"""Faults of examples: conversations and completions that cannot be trained on exactly."""

from __future__ import annotations

import json

SHOWN = 30
"""Most characters of a text that messages quote."""


class ExampleFault(Exception):
    """An example that cannot be used exactly: a reason for counts, a sentence, and its remedy."""

    def __init__(self, reason: str, sentence: str, remedy: str = "") -> None:
        super().__init__(sentence)
        self.reason = reason
        self.remedy = remedy


def left_out(part: str) -> ExampleFault:
    """The fault of a chat template that omits a part of a conversation."""
    return ExampleFault(
        "left out by the template",
        f"the chat template leaves out {part}",
        "Set data.chat_template to one that renders the whole conversation",
    )


def shortened(text: str) -> str:
    """The text in quotes, cut to `SHOWN` characters."""
    return json.dumps(text if len(text) <= SHOWN else f"{text[:SHOWN]}…", ensure_ascii=False)
