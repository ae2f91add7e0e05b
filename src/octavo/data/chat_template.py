"""Chat templates: lookup, rendering, and a check that the rendered text contains the whole conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.config.data import DataConfig
from octavo.data.builtin_templates import BUILTIN, TOKENS
from octavo.data.chat_tokenizer import ChatTokenizer
from octavo.data.documents import Conversation, Message, Span
from octavo.data.example_faults import ExampleFault, left_out, shortened
from octavo.errors import InputError, first_line, nearest
from octavo.storage import names_a_path, path_of

RESERVED = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversations", "chat_template"),
    "return_assistant_tokens_mask",
}
"""Template variables that a user may not set."""


class ChatTemplate:
    """Renders conversations by `data.chat_template`, or by the tokenizer's template.

    Args:
        config: the data section.
        tokenizer: the one of `data.tokenizer`.
    """

    def __init__(self, config: DataConfig, tokenizer: ChatTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._templates: dict[bool, str] = {}
        check_variables(config.chat_template_variables)

    def template(self, tools: bool = False) -> str:
        """The template of conversations with or without tools.

        Raises:
            InputError: there is none, or `data.chat_template` does not exist.
        """
        if tools not in self._templates:
            name = self._config.chat_template
            if name in BUILTIN:
                self._check_tokens(name)
            template = chat_template(name) if name is not None else self._tokenizer_template(tools)
            self._check_syntax(template)
            self._templates[tools] = template
        return self._templates[tools]

    def _check_tokens(self, name: str) -> None:
        """Refuse a built-in template whose tokens the tokenizer lacks."""
        absent = [token for token in TOKENS[name] if token not in self._tokenizer.added]
        if not absent:
            return
        others = [f'"{other}"' for other, tokens in TOKENS.items() if self._tokenizer.added.keys() >= {*tokens}]
        way = (
            f"data.chat_template = {' or '.join(others)}, whose tokens it has"
            if others
            else "a template with tokens that it has"
        )
        raise InputError(
            f"data.chat_template = {name!r} uses {', '.join(absent)}, but data.tokenizer = {self._config.tokenizer!r} has "
            f"no such token. Set {way}; or use a tokenizer with these tokens, such as one to which "
            f"tokenizer.add_special_tokens({{'additional_special_tokens': {[*absent]!r}}}) has added them, with "
            "model.resize = true."
        )

    def _check_syntax(self, template: str) -> None:
        """Refuse a template with invalid Jinja syntax, before any row is read."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render_jinja_template(conversations=[], chat_template=template)  # only compiled
        except TemplateSyntaxError as error:
            name = self._config.chat_template
            owner = f"data.tokenizer = {self._config.tokenizer!r}" if name is None else f"data.chat_template = {name!r}"
            way = "" if name is not None else ", or set data.chat_template"
            raise InputError(
                f"{owner}: line {error.lineno} of the chat template is not Jinja: {(error.message or '').rstrip('.')}. Correct "
                f"it there{way}."
            ) from None

    def _tokenizer_template(self, tools: bool) -> str:
        key = f"data.tokenizer = {self._config.tokenizer!r}"
        try:
            template: str = self._tokenizer.tokenizer.get_chat_template(tools=[{}] if tools else None)
        except ValueError as error:
            fault = "has no chat template"
            if self._tokenizer.tokenizer.chat_template is not None:
                fault = f"has several chat templates and no default: {first_line(error)}"
            raise InputError(
                f"{key} {fault}. Use the tokenizer of a chat model, or set data.chat_template to a Jinja file or one of "
                f"{', '.join(map(repr, BUILTIN))}."
            ) from None
        return template

    def render(
        self, example: Conversation, count: int, *, prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        """The first `count` messages as rendered by the template, and its generation marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer.tokenizer
        variables = {**tokenizer.special_tokens_map, **self._config.chat_template_variables, **example.variables}
        messages = [_with_reasoning(message) for message in example.messages[:count]]
        try:
            rendered, marks = render_jinja_template(
                conversations=[messages],
                tools=example.tools,
                chat_template=self.template(bool(example.tools)),
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **variables,
            )
        except InputError:
            raise
        except Exception as error:  # from Jinja, and from Python in expressions
            part = "" if count == len(example.messages) else f" the first {count} messages of"
            raise ExampleFault(
                "refused by the template", f"the chat template refuses{part} this conversation: {first_line(error).rstrip('.')}"
            ) from None
        return rendered[0], [tuple(mark) for mark in marks[0]] if marked else []

    def writes_no_tools(self, example: Conversation, whole: str) -> bool:
        """True if the text `whole` is also rendered without the tools."""
        try:
            return self.render(replace(example, tools=None), len(example.messages))[0] == whole
        except ExampleFault:  # the template requires schemas for tool calls
            return False


def chat_template(name: str) -> str:
    """The template that `data.chat_template` names: a built-in one, or the text of a file.

    Raises:
        InputError: there is neither.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    with path_of("data.chat_template", name):
        path = Path(name).expanduser()
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(
                    f"data.chat_template = {name!r} cannot be read: {error}. Give a Jinja file in UTF-8."
                ) from None
    near = None if names_a_path(name) else nearest(name, BUILTIN)
    hint = f" Did you mean {near!r}?" if near else ""
    raise InputError(
        f"data.chat_template = {name!r} is neither a file nor built in.{hint} Built in: {', '.join(BUILTIN)}. Change "
        "data.chat_template."
    )


def check_variables(variables: Mapping[str, Any]) -> None:
    """Refuse `data.chat_template_variables` with names that Octavo sets."""
    if named := RESERVED.intersection(variables):
        raise InputError(f"data.chat_template_variables sets {', '.join(sorted(named))}, which Octavo sets. Remove it.")


def check_written(example: Conversation, whole: str) -> None:
    """Refuse a template that omits a message or a tool."""
    for number, message in enumerate(example.messages, start=1):
        text = str(message.get("content", "")).strip()
        if message["role"] in ("system", "developer", "user") and text not in whole:
            raise left_out(f"message {number} ({message['role']}), or changes it: {shortened(text)}")
    for tool in example.tools or ():
        if (name := tool["function"]["name"]) not in whole:
            raise left_out(f"the tool {name!r}")


def check_parts(message: Message, turn: int, text: str) -> None:
    """Refuse a text without a message's reasoning, or without the functions that it calls."""
    for name, part in (("reasoning_content", _reasoning(message)), *(("tool_calls", name) for name in _called(message))):
        if part.strip() not in text:
            raise ExampleFault(
                "left out by the template",
                f"the chat template does not render {name!r} of message {turn + 1}",
                "Set data.chat_template to one that renders it",
            )


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or message.get("thinking") or message.get("reasoning") or "")


def _with_reasoning(message: Message) -> Message:
    """A message with its reasoning under the name that most templates read."""
    reasoning = _reasoning(message)
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _called(message: Message) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]
