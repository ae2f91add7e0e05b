"""The tokenizer of conversations: transformers' tokenizer, its special tokens, and checks of texts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from octavo.config.data import DataConfig
from octavo.data.example_faults import ExampleFault
from octavo.data.tokenizer import Encoder, transformers_tokenizer
from octavo.errors import InputError, first_line


class ChatTokenizer:
    """The tokenizer that `data.tokenizer` names, loaded on first use.

    Args:
        config: the data section.
        encoder: the one of `data.tokenizer`; None for one that would be trained.
    """

    def __init__(self, config: DataConfig, encoder: Encoder | None) -> None:
        self._config = config
        self._encoder = encoder
        self._loaded: Any = None

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, which alone defines the ids of a conversation."""
        if self._loaded is None:
            if self._encoder is None:
                raise InputError(
                    'data.tokenizer = "train" has no chat template and no end-of-turn token: for conversations, or '
                    "prompts with completions, name the model's tokenizer in data.tokenizer."
                )
            self._loaded = transformers_tokenizer(self._config.tokenizer)
            if not self._loaded.is_fast:
                raise InputError(
                    f"data.tokenizer = {self._config.tokenizer!r} does not return the offsets of tokens in a text "
                    f"({type(self._loaded).__name__} is not a tokenizer of `tokenizers`). Use another, or give token ids with "
                    "a loss_mask."
                )
        return self._loaded

    def end_token(self, text: str, *, special: bool = False) -> str | None:
        """The longest added token at the end of a text, ignoring white space; None if there is none."""
        ended = text.rstrip()
        known = (token for token, is_special in self.added.items() if token.strip() and (is_special or not special))
        return max((token for token in known if ended.endswith(token)), key=len, default=None)

    @cached_property
    def added(self) -> dict[str, bool]:
        """The added tokens, which the tokenizer matches first; True for special ones."""
        added = {token.content: token.special for token in self.tokenizer.added_tokens_decoder.values()}
        return added | dict.fromkeys(self.tokenizer.all_special_tokens, True)

    @cached_property
    def _special(self) -> dict[str, list[str]]:
        """Names of special tokens by first character. One of a single character is left out: a text may contain it."""
        by_first: dict[str, list[str]] = {}
        for name, special in sorted(self.added.items()):
            if special and len(name) > 1 and name.strip():
                by_first.setdefault(name[0], []).append(name)
        return by_first

    def check_texts(self, texts: Iterable[str]) -> None:
        """Refuse texts with names of special tokens, or without a UTF-8 form."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = hex(ord(text[error.start]))
                raise ExampleFault(
                    "no UTF-8", f"character {error.start} of a text is half of a surrogate pair, {half}"
                ) from None
            for name in (name for first, names in self._special.items() if first in text for name in names if name in text):
                raise ExampleFault(
                    "special token in a text",
                    f"a text has {name!r}, the name of a special token: encoded as that token it could end a turn",
                    "Rewrite it, or remove the row",
                )

    @cached_property
    def anchors(self) -> frozenset[int]:
        """Special tokens that the tokenizer matches first: the tokens after one do not depend on the text before it."""
        return frozenset(
            number
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.special and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        )

    def __call__(self, texts: list[str], **options: bool) -> Any:
        """Encode texts without special tokens around them.

        Raises:
            InputError: the tokenizer cannot.
        """
        try:
            return self.tokenizer(texts, add_special_tokens=False, verbose=False, **options)
        except Exception as error:  # tokenizers raises plain Exception
            raise InputError(
                f"data.tokenizer = {self._config.tokenizer!r} cannot encode a conversation: {first_line(error)}."
            ) from None
