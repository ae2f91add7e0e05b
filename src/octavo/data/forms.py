"""The form of a row of a data set: a conversation, a prompt with its completion, or text or token ids.

`data.format` sets it, else the column names of the first row; columns of several kinds, and preference pairs, are refused. All
sources of a section have one form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from octavo.config.data import DataConfig
from octavo.data import columns, conversations
from octavo.data.columns import INPUT_IDS
from octavo.data.documents import Document
from octavo.errors import InputError, nearest

MESSAGES = ("messages", "conversations", "conversation")
"""Columns of conversations."""
_PROMPT = ("prompt", "completion")
_PAIR = ("chosen", "rejected")
_BESIDE = ("tools", "functions", "system", "chat_template_kwargs")
"""Columns that belong to a conversation, besides its messages."""
_EXCLUSIVE = ("instruction", "output")

Format = Literal["chat", "prompt", "text"]
_SAID: dict[Format, str] = {"chat": "conversations", "prompt": "prompts and completions", "text": "text or token ids"}


class Form:
    """Columns of rows, and how a row becomes a document.

    Attributes:
        format: format of the documents; None until the first row if `data.format` does not set it.
        notice: the format derived from the columns, as a sentence; empty for text, or if `data.format` sets it.
    """

    def __init__(self, config: DataConfig) -> None:
        self.text_field = config.text_field
        self.format: Format | None = config.format
        self.notice = ""
        self._given = config.format is not None
        self._is_named = config.text_field != DataConfig.model_fields["text_field"].default
        self._known: set[tuple[str, ...]] = set()

    def fits(self, names: Collection[str]) -> bool:
        """True if a known column is among the names."""
        return bool(self._kinds(names)) or self.text_field in names

    def column(self, names: Collection[str], where: str) -> str:
        """The column of the documents; "prompt" for prompts.

        Raises:
            InputError: there is none, or the columns are of several kinds.
        """
        form = self._settle(names, where)
        if form == "text":
            return self._text_column(names, where)
        needed = self._messages(names, where) if form == "chat" else _PROMPT
        missing = [name for name in needed if name not in names]
        if missing or not needed:
            of = " or ".join(map(repr, MESSAGES)) if form == "chat" else " and ".join(map(repr, missing))
            listed = ", ".join(map(repr, names)) or "nothing"
            raise InputError(
                f"{where}: there is no {of} for data.format = {form!r}, only {listed}. Rename the column"
                f"{', name it in data.text_field,' if form == 'chat' else ''} or change data.format."
            )
        return needed[0]

    def wanted(self, names: Collection[str], lists: Collection[str], where: str) -> list[str]:
        """The columns of a table that `document` reads; lists: columns with a list in each row."""
        column = self.column(names, where)
        if self.format == "text":
            return columns.wanted(names, self.text_field, lists)
        columns_of_form = (column,) if self.format == "chat" else _PROMPT
        return [
            *columns_of_form,
            *(name for name in names if name not in columns_of_form and (name in _BESIDE or columns.is_of_tokens(name))),
        ]

    def text_columns(self) -> list[str]:
        """Columns that always hold text."""
        return [self.text_field, *_PROMPT]

    def is_plain(self, read: Collection[str]) -> bool:
        """True if these columns are only a text, so that no other column needs a check."""
        return self.format == "text" and list(read) == [self.text_field]

    def document(self, row: Mapping[str, Any], origin: str) -> Document:
        """The document of a row.

        Raises:
            InputError: a missing column, one that cannot be used exactly, or text that is not a string.
        """
        column = self.column(row, origin)
        if self.format == "text":
            return self._text(row, column, origin)
        columns.check_examples(row, origin)
        if self.format == "chat":
            return Document(None, None, origin, example=conversations.conversation(row, column))
        return Document(None, None, origin, example=conversations.completion(row))

    def _text(self, row: Mapping[str, Any], column: str, origin: str) -> Document:
        if column == INPUT_IDS:
            ids, labels = columns.tokens_of(row, origin)
            return Document(None, ids, origin, labels)
        value = row[column]
        if not isinstance(value, str):
            raise InputError(f"{origin}: {column!r} is {kind(value)}, not a string. Correct the row or change data.text_field.")
        columns.check_text(row, self.text_field, origin)
        return Document(value, None, origin)

    def _text_column(self, names: Collection[str], where: str) -> str:
        column = columns.column_of(names, self.text_field)
        mistyped = column != self.text_field and self._is_named and nearest(self.text_field, set(names) - {INPUT_IDS})
        if column is not None and not mistyped:
            return column
        if all(name in names for name in _PAIR):
            raise _pairs(where)
        raise self._absent(names, where)

    def _absent(self, names: Collection[str], where: str) -> InputError:
        """The error for a row without the column that `data.text_field` names."""
        guess = nearest(self.text_field, names)
        hint = f" Did you mean {guess!r}?" if guess else ""
        if all(name in names for name in _EXCLUSIVE):
            hint = " For answers to instructions name the columns 'prompt' and 'completion'."
        listed = ", ".join(map(repr, names)) or "nothing"
        return InputError(f"{where}: there is no {self.text_field!r}, only {listed}.{hint} Change data.text_field.")

    def _messages(self, names: Collection[str], where: str) -> tuple[str, ...]:
        """The column of the messages, if any."""
        if self._is_named and self.text_field in names:
            return (self.text_field,)
        if self._is_named and self.format == "chat":
            raise self._absent(names, where)
        present = tuple(name for name in MESSAGES if name in names)
        if len(present) > 1:
            raise InputError(f"{where} has both {' and '.join(map(repr, present))}. Set data.text_field to one of them.")
        return present

    def _kinds(self, names: Collection[str]) -> dict[Format, str]:
        """Format → its columns among these names."""
        kinds: dict[Format, str] = {}
        if messages := [name for name in MESSAGES if name in names]:
            kinds["chat"] = repr(messages[0])
        if all(name in names for name in _PROMPT):
            kinds["prompt"] = " and ".join(map(repr, _PROMPT))
        if (column := columns.column_of(names, self.text_field)) is not None and column not in MESSAGES:
            kinds["text"] = repr(column)
        return kinds

    def _settle(self, names: Collection[str], where: str) -> Format:
        """The configured format, or the columns' format."""
        if self.format is not None and (self._given or tuple(names) in self._known):
            return self.format
        kinds = self._kinds(names)
        if self._is_named:
            kind_of_named: Format = "chat" if self.text_field in MESSAGES else "text"
            kinds = {name: shown for name, shown in kinds.items() if name == kind_of_named}
        if len(kinds) > 1:
            both = "; ".join(f"{_SAID[name]} ({shown})" for name, shown in kinds.items())
            one_of = " or ".join(f'"{name}"' for name in kinds)
            raise InputError(f"{where} has columns of several kinds: {both}. Set data.format = {one_of}.")
        if kinds and all(name in names for name in _PAIR):
            (name,) = kinds
            raise InputError(
                f"{where} has {_SAID[name]} ({kinds[name]}) and preference pairs ('chosen' and 'rejected'), for which Octavo "
                f'has no loss. Set data.format = "{name}" to train on {kinds[name]} only.'
            )
        form: Format = next(iter(kinds), "text")
        if self.format is None:
            self.format = form
            if form != "text":
                self.notice = (
                    f"{where.split(', ')[0]}: {_SAID[form]}, by the column{'s' if form == 'prompt' else ''} {kinds[form]} "
                    f'(data.format = "{form}").'
                )
        elif kinds and form != self.format:
            first = self.notice or "The rows before it are text or token ids."
            by = f"by the column{'s' if form == 'prompt' else ''} {kinds[form]}"
            raise InputError(f"{where} has {_SAID[form]}, {by}. {first} Use one form in all sources.")
        self._known.add(tuple(names))
        return self.format


def _pairs(where: str) -> InputError:
    return InputError(
        f"{where} has preference pairs ('chosen' and 'rejected'), which need a loss that compares two answers, and Octavo has "
        "none. To train on the chosen answers alone, write them as 'messages', or as 'prompt' and 'completion'."
    )


def kind(value: object) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
