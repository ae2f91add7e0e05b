"""The trained parts of a conversation, as character ranges of the rendered text.

A model is trained on the text that it has to generate when served: from the end of the prompt for a turn to the end-of-turn
token, inclusive. The borders come from the template's generation marks; otherwise from prefixes: a turn begins where
`template(messages before it, add_generation_prompt)` ends, and ends where `template(messages with it)` ends, without white
space after its last token. A conversation whose rendered text does not begin with these prefixes is faulty.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from octavo.config.data import DataConfig
from octavo.data.chat_template import ChatTemplate, check_parts, check_written
from octavo.data.chat_tokenizer import ChatTokenizer
from octavo.data.documents import Conversation, Message, Span
from octavo.data.example_faults import SHOWN, ExampleFault, left_out, shortened
from octavo.data.label_encoder import WrittenText

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHT_END = "</think>"


class TurnSpans:
    """Renders conversations and finds their trained parts.

    Args:
        config: the data section.
        template: renders a conversation.
        tokenizer: the one of `data.tokenizer`.

    Attributes:
        by: "marks" or "prefixes", how turns are found; empty before the first conversation.
        template_used: the template of the first conversation; None before it.
        ends: the end-of-turn tokens so far.
    """

    def __init__(self, config: DataConfig, template: ChatTemplate, tokenizer: ChatTokenizer) -> None:
        self._config = config
        self._template = template
        self._tokenizer = tokenizer
        self.by = ""
        self.template_used: str | None = None
        self.ends: set[str] = set()
        self._tried_turns: dict[str, tuple[bool, str]] = {}

    def write(self, example: Conversation) -> WrittenText:
        """The rendered conversation with its trained parts.

        Raises:
            ExampleFault: they are not exact.
        """
        template = self._template.template(bool(example.tools))
        marked = _MARK.search(template) is not None
        self.template_used = self.template_used or template
        whole, marks = self._template.render(example, len(example.messages), marked=marked)
        bos = self._tokenizer.tokenizer.bos_token
        if bos and whole.startswith(bos * 2):
            sentence = f"the chat template writes {bos!r} twice at the beginning"
            raise ExampleFault("two BOS tokens", sentence, "Correct the template")
        check_written(example, whole)
        if example.tools and self._template.writes_no_tools(example, whole):
            raise left_out("the tools")
        if self._config.train_on == "all":
            if not all(example.asked):
                raise ExampleFault(
                    "weights", 'a message has the weight 0, but data.train_on = "all" trains each', "Set another data.train_on"
                )
            return WrittenText(whole, [(0, len(whole))])
        turns = [number for number, message in enumerate(example.messages) if message["role"] == "assistant"]
        chosen = [number for number in turns[-1 if self._config.train_on == "last" else 0 :] if example.asked[number]]
        if not chosen:
            raise ExampleFault("nothing to train", "the weights of the messages exclude every assistant's turn")
        self.by = "marks" if marked else "prefixes"
        if not marked:
            return WrittenText(whole, [self._span(example, turn, whole) for turn in chosen])
        joined = _joined(marks)
        if len(joined) != len(turns):
            raise ExampleFault(
                "inexact mask",
                f"the generation marks of the chat template mark {len(joined)} parts, but there are {len(turns)} assistant's "
                "turns",
                "Put one {% generation %} around each turn with its end-of-turn token, or remove all marks",
            )
        spans = dict(zip(turns, joined, strict=True))
        return WrittenText(whole, [self._checked_mark(example, turn, whole, spans[turn]) for turn in chosen])

    def _checked_mark(self, example: Conversation, turn: int, whole: str, span: Span) -> Span:
        """Check that a mark covers a whole turn with its end-of-turn token, without the prompt for the turn."""
        start, end = span
        text = whole[start:end]
        message = example.messages[turn]
        where = f"the generation mark of message {turn + 1}"
        if (needle := _needle(message)) not in text:
            raise ExampleFault("inexact mask", f"{where} does not cover its text ({shortened(needle)})", "Correct the template")
        check_parts(message, turn, whole)
        token = self._tokenizer.end_token(text)
        if token is None:
            raise ExampleFault(
                "inexact mask",
                f"{where} ends with {shortened(text[-SHOWN:])}, without the end-of-turn token, so a model would not "
                "learn to end its turn",
                "Put {% endgeneration %} after that token in the chat template",
            )
        self.ends.add(token)
        try:
            before, _ = self._template.render(example, turn, prompt=True)
            there, _ = self._template.render(example, turn + 1)
        except ExampleFault:  # the template refuses a part of the conversation: use the mark unchecked
            return span
        if end > len(there) and whole.startswith(there.rstrip()):
            raise ExampleFault(
                "inexact mask",
                f"{where} extends beyond its turn, with {shortened(whole[len(there.rstrip()) : end])}",
                "Put {% endgeneration %} after the end-of-turn token in the chat template",
            )
        if whole.startswith(before) and start < len(before):
            raise ExampleFault(
                "inexact mask",
                f"{where} begins with {shortened(whole[start : len(before)])}, the end of the prompt for a turn, which "
                "a model never generates",
                "Put {% generation %} after it in the chat template",
            )
        return span

    def _span(self, example: Conversation, turn: int, whole: str) -> Span:
        """The trained part of a turn, from the rendered texts before it and with it."""
        before, _ = self._template.render(example, turn, prompt=True)
        there, _ = self._template.render(example, turn + 1)
        self._check_prefix(example, turn, whole, before, "before")
        ended = there.rstrip()
        # A tool call may end with a token that does not end the turn, such as </tool_call>.
        token = self._tokenizer.end_token(ended, special=bool(example.messages[turn].get("tool_calls")))
        if token is None or len(ended) <= len(before):
            raise ExampleFault(
                "inexact mask",
                f"the chat template ends message {turn + 1} with {shortened(ended[-SHOWN:])}, which is not a token of the "
                "tokenizer that ends a turn",
                "Use the tokenizer that belongs to the template, or set data.chat_template",
            )
        self._check_prefix(example, turn, whole, ended, "to")
        self._check_turn(example, turn, ended[len(before) : -len(token)], before)
        self.ends.add(token)
        return len(before), len(ended)

    def _check_prefix(self, example: Conversation, turn: int, whole: str, before: str, what: str) -> None:
        """Refuse a template that renders a part of the conversation differently if later messages follow."""
        if whole.startswith(before):
            return
        at = next((at for at, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
        start = max(at - SHOWN // 2, 0)
        last = max(number for number, message in enumerate(example.messages) if message["role"] == "assistant")
        if turn == len(example.messages) - 1:
            raise ExampleFault(
                "inexact mask",
                f"the prompt for message {turn + 1} ends differently from its rendering with the turn: "
                f"{before[start : at + SHOWN]!r} becomes {whole[start : at + SHOWN]!r}",
                "Change data.chat_template_variables or data.chat_template",
            )
        remedy = 'Set data.train_on = "last", which trains only the last turn'
        if turn == last:
            remedy = "Remove the messages after the assistant's last turn"
        raise ExampleFault(
            "stripped turns",
            f"the chat template renders the messages {what} message {turn + 1} differently once others follow: "
            f"{before[start : at + SHOWN]!r} becomes {whole[start : at + SHOWN]!r}, so the tokens of its turn are not "
            "those that a model would generate",
            f"{remedy}, or a data.chat_template that does not change earlier turns",
        )

    def _check_turn(self, example: Conversation, turn: int, text: str, before: str) -> None:
        """Refuse a turn (without its end-of-turn token) that is more than its message, or less."""
        message = example.messages[turn]
        needle = _needle(message)
        if needle not in text:
            raise ExampleFault(
                "changed text",
                f"the chat template does not render the text of message {turn + 1}, which begins {shortened(needle)}",
            )
        check_parts(message, turn, text)
        plain = not message.get("tool_calls")
        lead = text[: text.rindex(needle)] if needle else text
        rest = text[text.rindex(needle) + len(needle) :].strip() if plain else ""
        header = False
        if lead.strip() or not plain:
            header, behind = self._around_turns(example, turn, before)
            rest = rest or behind
        if rest:
            raise ExampleFault(
                "inexact mask",
                f"the chat template writes {shortened(rest)} after the text of message {turn + 1}, before the last token of "
                "its turn, so the end of the turn is ambiguous",
                "Set data.chat_template",
            )
        if header:
            raise ExampleFault(
                "inexact mask",
                f"the chat template begins message {turn + 1} with {shortened(lead or text)}, but does not end the prompt "
                "for a turn with it (add_generation_prompt has no effect)",
                "Set data.chat_template",
            )

    def _around_turns(self, example: Conversation, turn: int, before: str) -> tuple[bool, str]:
        """The template's text around an assistant's turn, found once with a test word.

        Returns:
        True if a turn begins with more than white space that the prompt for the turn lacks; and the text between the
        assistant's text and the last token of the turn.
        """
        template = self._template.template(bool(example.tools))
        if template not in self._tried_turns:
            word = "octavo"
            messages = [*example.messages[:turn], {"role": "assistant", "content": word}]
            text, _ = self._template.render(replace(example, messages=messages), turn + 1)
            unasked = self._template.render(example, turn)[0] == before
            lead, _, behind = text[len(before) :].rpartition(word) if text.startswith(before) else (text, "", "")
            token = self._tokenizer.end_token(behind) or ""
            self._tried_turns[template] = unasked and bool(lead.strip()), behind.strip().removesuffix(token).strip()
        return self._tried_turns[template]


def _needle(message: Message) -> str:
    """The text that a message's turn must contain, after any reasoning, whose white space templates change."""
    content = str(message.get("content", ""))
    return content.rpartition(_THOUGHT_END)[2].strip() or content.strip()


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Adjacent marks merged into one, without empty ones."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return joined
