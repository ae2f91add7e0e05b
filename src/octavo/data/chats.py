"""Conversations to token ids and labels: the chat template, and which of its tokens the model is trained to write.

A conversation is written whole by the template (in transformers' Jinja sandbox) and encoded whole, as `apply_chat_template`
does. Trained is what the model has to write when it is served: from the end of the prompt for a turn, with what asks for the
turn, to the end-of-turn token with that token. The places come from the template's generation marks; else from the prompts
themselves: a turn begins where `template(messages before it, add_generation_prompt)` ends, if the whole begins so, and it ends
where `template(messages with it)` ends, without the white space behind its last token.

Each place has to be the border of two tokens, with the tokens of the text before it as the first ones of the whole. A
conversation for which anything of this does not hold is faulty: no label is a guess. The price is to write the beginning of
each conversation twice for each turn, and to encode what stands before each border, from the last special token on.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config.data import DataConfig
from octavo.data.builtin_templates import BUILTIN
from octavo.data.columns import IGNORED
from octavo.data.conversations import strings
from octavo.data.documents import Completion, Conversation, Document, Faulty, Message
from octavo.data.tokenizer import Encoder, transformers_tokenizer
from octavo.errors import InputError, first_line, nearest
from octavo.storage import names_a_path, path_of

_AT_ONCE = 256
"""Examples that are encoded together."""
_TRIED = 16
"""Examples that are encoded before each border from their beginning too."""
_SHOWN = 30
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHT_END = "</think>"
_RESERVED = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversations", "chat_template"),
    "return_assistant_tokens_mask",
}
"""Variables of a template that are not the user's."""

Span = tuple[int, int]
"""First character and end of a trained part of a text."""


class _Fault(Exception):
    """Why an example cannot be used exactly: a reason for counts, a sentence, and its remedy."""

    def __init__(self, reason: str, sentence: str, remedy: str = "") -> None:
        super().__init__(sentence)
        self.reason = reason
        self.remedy = remedy


@dataclass
class ExampleCounts:
    """Examples that were read: how many, and those that were dropped, by reason."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Written:
    """A text to encode, and its trained parts."""

    text: str
    spans: list[Span]
    around: tuple[Sequence[int], Sequence[int]] = ((), ())  # ids before and behind; the second is trained


@dataclass(frozen=True)
class _Before:
    """Tokens of a text before a border, from the token with number `first` on; encoded without what follows the border."""

    first: int
    ids: list[int]

    @property
    def count(self) -> int:
        """Tokens before the border."""
        return self.first + len(self.ids)

    def fits(self, whole: list[int]) -> bool:
        """True if they are tokens of the whole."""
        return whole[self.first : self.count] == self.ids


class ExampleEncoder:
    """Encodes the examples among documents; other documents pass.

    Args:
        config: the section.
        encoder: that of `data.tokenizer`; None for one that would be trained.

    Attributes:
        counts: of the examples so far.
        by: "marks" or "prefixes", where the places of turns came from; empty before the first one.
        template_used: the template of the first conversation; None before it.
    """

    def __init__(self, config: DataConfig, encoder: Encoder | None) -> None:
        self._config = config
        self._encoder = encoder
        self.counts = ExampleCounts()
        self.by = ""
        self.template_used: str | None = None
        self._ends: set[str] = set()
        self._tried = False
        self._loaded: Any = None
        self._tried_turns: dict[str, tuple[bool, str]] = {}
        self._templates: dict[bool, str] = {}
        _check_variables(config.chat_template_variables)

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents in their order, with examples as token ids and labels; dropped ones are left out.

        Raises:
            InputError: a faulty example, unless `data.faulty_rows` = "drop"; no template, or no tokenizer for one.
        """
        rows = iter(documents)
        while batch := list(islice(rows, _AT_ONCE)):
            if any(document.example is not None for document in batch):
                yield from self._encoded(batch)
            else:
                yield from batch

    @property
    def notices(self) -> list[str]:
        """Messages about the template."""
        found = []
        if "strftime_now" in (self.template_used or "") and "date_string" not in self._config.chat_template_variables:
            found.append(
                "the chat template can write today's date into each conversation: data prepared on another day differs. "
                'Set it, for templates that read it so: data.chat_template_variables = { date_string = "01 Jan 2026" }.'
            )
        end = self._tokenizer.eos_token if self._ends else None
        if self._ends and end not in self._ends:
            way = "a server has to stop there too, so name it as eos_token_id in generation_config.json"
            if all(self._added[each] for each in self._ends):
                way = "the run's generation_config.json names both, at which a server has to stop"
            found.append(
                f"turns end in {' or '.join(map(repr, sorted(self._ends)))}, and the end token of data.tokenizer is {end!r}: "
                f"{way}."
            )
        return found

    @property
    def turn_ends(self) -> list[int]:
        """Ids of the tokens that end the trained turns so far."""
        return sorted(map(self._tokenizer.convert_tokens_to_ids, self._ends)) if self._ends else []

    def template(self, tools: bool = False) -> str:
        """The template of conversations with or without tools.

        Raises:
            InputError: there is none, or `data.chat_template` names none.
        """
        if tools not in self._templates:
            name = self._config.chat_template
            self._templates[tools] = chat_template(name) if name is not None else self._own_template(tools)
        return self._templates[tools]

    def _own_template(self, tools: bool) -> str:
        key = f"data.tokenizer = {self._config.tokenizer!r}"
        try:
            template: str = self._tokenizer.get_chat_template(tools=[{}] if tools else None)
        except ValueError as error:
            fault = "has no chat template"
            if self._tokenizer.chat_template is not None:
                fault = f"has several chat templates and no default: {first_line(error)}"
            raise InputError(
                f"{key} {fault}. Name the tokenizer of a chat model, or set data.chat_template to a Jinja file or one of "
                f"{', '.join(map(repr, BUILTIN))}."
            ) from None
        return template

    @property
    def _tokenizer(self) -> Any:
        """transformers' tokenizer, which alone defines the ids of a conversation."""
        if self._loaded is None:
            if self._encoder is None:
                raise InputError(
                    'data.tokenizer = "train" has no chat template and no token that ends a turn: for conversations, or '
                    "prompts with completions, name the model's tokenizer in data.tokenizer."
                )
            self._loaded = transformers_tokenizer(self._config.tokenizer)
            if not self._loaded.is_fast:
                raise InputError(
                    f"data.tokenizer = {self._config.tokenizer!r} does not tell the place of a token in a text "
                    f"({type(self._loaded).__name__} is no tokenizer of `tokenizers`). Name another, or give token ids with a "
                    "loss_mask."
                )
        return self._loaded

    def _encoded(self, batch: Sequence[Document]) -> Iterator[Document]:
        check_packing(self._config)
        written: dict[int, _Written] = {}
        for number, document in enumerate(batch):
            if document.example is not None:
                self.counts.read += 1
                try:
                    written[number] = self._written(document)
                except _Fault as fault:
                    self._refuse_or_count(document, fault)
        encoded = self._encode(written)
        for number, document in enumerate(batch):
            if document.example is None:
                yield document
            elif number in written:
                try:
                    yield self._labelled(document, written[number], *encoded[number])
                except _Fault as fault:
                    self._refuse_or_count(document, fault)

    def _refuse_or_count(self, document: Document, fault: _Fault) -> None:
        if self._config.faulty_rows == "drop":
            self.counts.dropped[fault.reason] += 1
            return
        remedy = fault.remedy or "Correct or remove the row"
        raise InputError(
            f'{document.origin}: {fault}. {remedy}, or set data.faulty_rows = "drop" to leave out such rows and count them.'
        )

    def _written(self, document: Document) -> _Written:
        example = document.example
        if isinstance(example, Faulty):
            raise _Fault(example.reason, example.sentence)
        if isinstance(example, Completion):
            self._check_texts((example.prompt, example.completion))
            return self._written_completion(example)
        assert isinstance(example, Conversation)
        self._check_texts((*strings(example.messages), *strings(example.tools or [])))
        if named := _RESERVED.intersection(example.variables):
            raise _Fault("chat_template_kwargs", f"'chat_template_kwargs' has {', '.join(sorted(named))}, which Octavo gives")
        return self._written_conversation(example)

    def _written_completion(self, example: Completion) -> _Written:
        assert self._encoder is not None
        if self._encoder.end is None and not self._encoder.suffix:
            raise InputError(
                f"data.tokenizer = {self._config.tokenizer!r} has no end token (eos_token), so that a model would never learn "
                "to end a completion. Set its eos_token, or name another tokenizer."
            )
        whole = example.prompt + example.completion
        first = 0 if self._config.train_on == "all" else len(example.prompt)
        return _Written(whole, [(first, len(whole))], (self._encoder.prefix, self._encoder.suffix))

    def _written_conversation(self, example: Conversation) -> _Written:
        template = self.template(bool(example.tools))
        marked = _MARK.search(template) is not None
        self.template_used = self.template_used or template
        whole, marks = self._render(example, len(example.messages), marked=marked)
        bos = self._tokenizer.bos_token
        if bos and whole.startswith(bos * 2):
            raise _Fault("two BOS tokens", f"the chat template writes {bos!r} twice at the beginning", "Correct the template")
        _check_written(example, whole)
        if example.tools and self._writes_no_tools(example, whole):
            raise _left_out("the tools")
        if self._config.train_on == "all":
            if not all(example.asked):
                raise _Fault(
                    "weights", 'a message has the weight 0, and data.train_on = "all" trains each', "Set another data.train_on"
                )
            return _Written(whole, [(0, len(whole))])
        turns = [number for number, message in enumerate(example.messages) if message["role"] == "assistant"]
        chosen = [number for number in turns[-1 if self._config.train_on == "last" else 0 :] if example.asked[number]]
        if not chosen:
            raise _Fault("nothing to train", "no assistant's turn is to be trained, by the weights of its messages")
        self.by = "marks" if marked else "prefixes"
        if not marked:
            return _Written(whole, [self._span(example, turn, whole) for turn in chosen])
        joined = _joined(marks)
        if len(joined) != len(turns):
            raise _Fault(
                "inexact mask",
                f"the generation marks of the chat template name {len(joined)} parts, and there are {len(turns)} assistant's "
                "turns",
                "Put one {% generation %} around each turn with its end-of-turn token, or remove all marks",
            )
        spans = dict(zip(turns, joined, strict=True))
        return _Written(whole, [self._checked_mark(example, turn, whole, spans[turn]) for turn in chosen])

    def _render(
        self, example: Conversation, count: int, *, prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        """The first `count` messages as the template writes them, and its generation marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **self._config.chat_template_variables, **example.variables}
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
        except Exception as error:  # of Jinja, and of Python within expressions
            part = "" if count == len(example.messages) else f" the first {count} messages of"
            raise _Fault(
                "refused by the template", f"the chat template refuses{part} this conversation: {first_line(error).rstrip('.')}"
            ) from None
        return rendered[0], [tuple(mark) for mark in marks[0]] if marked else []

    def _checked_mark(self, example: Conversation, turn: int, whole: str, span: Span) -> Span:
        """A marked part, which has to be the turn, with its end-of-turn token and without what asks for it."""
        start, end = span
        text = whole[start:end]
        message = example.messages[turn]
        where = f"the generation mark of message {turn + 1}"
        if (needle := _needle(message)) not in text:
            raise _Fault("inexact mask", f"{where} does not have its text ({_shortened(needle)})", "Correct the template")
        _check_parts(message, turn, whole)
        token = self._end_token(text)
        if token is None:
            raise _Fault(
                "inexact mask",
                f"{where} ends with {_shortened(text[-_SHOWN:])}, without the end-of-turn token, so that a model would not "
                "learn to end its turn",
                "Put {% endgeneration %} behind that token in the chat template",
            )
        self._ends.add(token)
        try:
            before, _ = self._render(example, turn, prompt=True)
            there, _ = self._render(example, turn + 1)
        except _Fault:  # of a part of the conversation: the mark stands
            return span
        if end > len(there) and whole.startswith(there.rstrip()):
            raise _Fault(
                "inexact mask",
                f"{where} goes on behind its turn, with {_shortened(whole[len(there.rstrip()) : end])}",
                "Put {% endgeneration %} behind the end-of-turn token in the chat template",
            )
        if whole.startswith(before) and start < len(before):
            raise _Fault(
                "inexact mask",
                f"{where} begins with {_shortened(whole[start : len(before)])}, which the prompt for a turn ends with, so that "
                "a model is never to write it",
                "Put {% generation %} behind it in the chat template",
            )
        return span

    def _span(self, example: Conversation, turn: int, whole: str) -> Span:
        """The trained part of a turn, by the texts of the conversation before it and with it."""
        before, _ = self._render(example, turn, prompt=True)
        there, _ = self._render(example, turn + 1)
        self._check_prefix(example, turn, whole, before, "before")
        ended = there.rstrip()
        # A call of tools may end with a token of its own that does not end the turn, such as </tool_call>.
        token = self._end_token(ended, special=bool(example.messages[turn].get("tool_calls")))
        if token is None or len(ended) <= len(before):
            raise _Fault(
                "inexact mask",
                f"the chat template ends message {turn + 1} with {_shortened(ended[-_SHOWN:])}, which is no token of the "
                "tokenizer that ends a turn",
                "Name the tokenizer that belongs to the template, or set data.chat_template",
            )
        self._check_prefix(example, turn, whole, ended, "to")
        self._check_turn(example, turn, ended[len(before) : -len(token)], before)
        self._ends.add(token)
        return len(before), len(ended)

    def _check_prefix(self, example: Conversation, turn: int, whole: str, before: str, what: str) -> None:
        """Refuse a template that writes a part of the conversation otherwise where later messages follow."""
        if whole.startswith(before):
            return
        at = next((at for at, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
        start = max(at - _SHOWN // 2, 0)
        last = max(number for number, message in enumerate(example.messages) if message["role"] == "assistant")
        if turn == len(example.messages) - 1:
            raise _Fault(
                "inexact mask",
                f"the prompt for message {turn + 1} ends otherwise than the chat template writes it with its turn: "
                f"{before[start : at + _SHOWN]!r} becomes {whole[start : at + _SHOWN]!r}",
                "Change data.chat_template_variables or data.chat_template",
            )
        remedy = 'Set data.train_on = "last", which trains the last turn alone'
        if turn == last:
            remedy = "Remove the messages behind the last turn of the assistant"
        raise _Fault(
            "stripped turns",
            f"the chat template writes the messages {what} message {turn + 1} otherwise once others follow: "
            f"{before[start : at + _SHOWN]!r} becomes {whole[start : at + _SHOWN]!r}, so that the tokens of its turn are not "
            "those that a model would write",
            f"{remedy}, or a data.chat_template that keeps earlier turns",
        )

    def _check_turn(self, example: Conversation, turn: int, text: str, before: str) -> None:
        """Refuse a turn (without its end-of-turn token) that is more than its message, or less."""
        message = example.messages[turn]
        needle = _needle(message)
        if needle not in text:
            raise _Fault(
                "changed text",
                f"the chat template does not write the text of message {turn + 1}, which begins {_shortened(needle)}",
            )
        _check_parts(message, turn, text)
        plain = not message.get("tool_calls")
        lead = text[: text.rindex(needle)] if needle else text
        rest = text[text.rindex(needle) + len(needle) :].strip() if plain else ""
        header = False
        if lead.strip() or not plain:
            header, behind = self._around_turns(example, turn, before)
            rest = rest or behind
        if rest:
            raise _Fault(
                "inexact mask",
                f"the chat template writes {_shortened(rest)} behind the text of message {turn + 1}, before the last token of "
                "its turn, so that the end of the turn is not known",
                "Set data.chat_template",
            )
        if header:
            raise _Fault(
                "inexact mask",
                f"the chat template begins message {turn + 1} with {_shortened(lead or text)}, and does not end the prompt "
                "for a turn with it (add_generation_prompt has no effect)",
                "Set data.chat_template",
            )

    def _around_turns(self, example: Conversation, turn: int, before: str) -> tuple[bool, str]:
        """The template's text around one of the assistant, tried once with a word.

        Returns:
            True if it begins a turn with more than white space and nothing asks for the turn; and its text between that of the
            assistant and the last token of the turn.
        """
        template = self.template(bool(example.tools))
        if template not in self._tried_turns:
            word = "octavo"
            messages = [*example.messages[:turn], {"role": "assistant", "content": word}]
            text, _ = self._render(replace(example, messages=messages), turn + 1)
            unasked = self._render(example, turn)[0] == before
            lead, _, behind = text[len(before) :].rpartition(word) if text.startswith(before) else (text, "", "")
            token = self._end_token(behind) or ""
            self._tried_turns[template] = unasked and bool(lead.strip()), behind.strip().removesuffix(token).strip()
        return self._tried_turns[template]

    def _writes_no_tools(self, example: Conversation, whole: str) -> bool:
        try:
            return self._render(replace(example, tools=None), len(example.messages))[0] == whole
        except _Fault:  # of a template that takes calls of tools with their schemas alone
            return False

    def _end_token(self, text: str, *, special: bool = False) -> str | None:
        """The token at the end of a text, white space aside, if the tokenizer has it as one; the longest."""
        ended = text.rstrip()
        known = (token for token, is_special in self._added.items() if token.strip() and (is_special or not special))
        return max((token for token in known if ended.endswith(token)), key=len, default=None)

    @cached_property
    def _added(self) -> dict[str, bool]:
        """The tokens that the tokenizer finds in a text before all others; True for special ones."""
        found = {token.content: token.special for token in self._tokenizer.added_tokens_decoder.values()}
        return found | dict.fromkeys(self._tokenizer.all_special_tokens, True)

    @cached_property
    def _special(self) -> dict[str, list[str]]:
        """Names of special tokens by their first character; one of a single character may be a text's own."""
        found: dict[str, list[str]] = {}
        for name, special in sorted(self._added.items()):
            if special and len(name) > 1 and name.strip():
                found.setdefault(name[0], []).append(name)
        return found

    def _check_texts(self, texts: Iterable[str]) -> None:
        """Refuse names of special tokens, and text that has no UTF-8 form."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = hex(ord(text[error.start]))
                raise _Fault("no UTF-8", f"character {error.start} of a text is half of a surrogate pair, {half}") from None
            for name in (name for first, names in self._special.items() if first in text for name in names if name in text):
                raise _Fault(
                    "special token in a text",
                    f"a text has {name!r}, the name of a special token: encoded as that token it could end a turn",
                    "Write it otherwise, or remove the row",
                )

    @cached_property
    def _anchors(self) -> frozenset[int]:
        """Special tokens that a tokenizer finds first, so that the tokens behind one do not depend on the text before it."""
        return frozenset(
            number
            for number, token in self._tokenizer.added_tokens_decoder.items()
            if token.special and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        )

    def _encode(self, written: dict[int, _Written]) -> dict[int, tuple[list[int], list[Span], dict[int, _Before]]]:
        """Of each text its ids and their places, and the ids of the text before each border within it.

        From the last special token before a border on: the text before it is encoded as in the whole, by the way that
        tokenizers work. The first texts are encoded from their beginning too; if that gives anything else, all are.
        """
        if not written:
            return {}
        whole = self._call([each.text for each in written.values()], return_offsets_mapping=True)
        encoded = {
            number: (ids, offsets)
            for number, ids, offsets in zip(written, whole["input_ids"], whole["offset_mapping"], strict=True)
        }
        places = [
            (number, at)
            for number, each in written.items()
            for at in sorted({at for span in each.spans for at in span} - {0, len(each.text)})
        ]
        if not self._tried and places:
            self._tried = True
            self._try(written, encoded, [place for place in places if place[0] in list(written)[:_TRIED]])
        befores = self._befores(written, encoded, places, self._anchors)
        found: dict[int, tuple[list[int], list[Span], dict[int, _Before]]] = {
            number: (ids, offsets, {}) for number, (ids, offsets) in encoded.items()
        }
        for (number, at), before in zip(places, befores, strict=True):
            found[number][2][at] = before
        return found

    def _try(
        self,
        written: dict[int, _Written],
        encoded: dict[int, tuple[list[int], list[Span]]],
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Encode what stands before these places from the beginning too; without anchors from then on if that differs."""
        both = (self._befores(written, encoded, places, anchors) for anchors in (self._anchors, frozenset[int]()))
        for (number, _), short, long in zip(places, *both, strict=True):
            ids, _ = encoded[number]
            if short.fits(ids) != long.fits(ids) or (long.fits(ids) and short.count != long.count):
                vars(self)["_anchors"] = frozenset()
                return

    def _befores(
        self,
        written: dict[int, _Written],
        encoded: dict[int, tuple[list[int], list[Span]]],
        places: Sequence[tuple[int, int]],
        anchors: frozenset[int],
    ) -> list[_Before]:
        """The ids of the text before each place (number of the text, character), from the last anchor on."""
        anchored: dict[int, list[tuple[int, Span]]] = {
            number: [(index, offsets[index]) for index, one in enumerate(ids) if one in anchors]
            for number, (ids, offsets) in encoded.items()
        }
        starts = []
        for number, at in places:
            last = bisect_right(anchored[number], at, key=lambda each: each[1][1]) - 1
            index, (start, _) = anchored[number][last] if last >= 0 else (0, (0, 0))
            starts.append((index, start))
        texts = [written[number].text[start:at] for (number, at), (_, start) in zip(places, starts, strict=True)]
        ids = self._call(texts)["input_ids"] if texts else []
        return [_Before(index, each) for (index, _), each in zip(starts, ids, strict=True)]

    def _call(self, texts: list[str], **options: bool) -> Any:
        try:
            return self._tokenizer(texts, add_special_tokens=False, verbose=False, **options)
        except Exception as error:  # tokenizers raises plain Exception
            raise InputError(
                f"data.tokenizer = {self._config.tokenizer!r} cannot encode a conversation: {first_line(error)}."
            ) from None

    def _labelled(
        self, document: Document, written: _Written, ids: list[int], offsets: list[Span], before: dict[int, _Before]
    ) -> Document:
        """Ids of an example, with the tokens between the borders of its trained parts as labels."""

        def border(at: int) -> int:
            if at in (0, len(written.text)):
                return 0 if at == 0 else len(ids)
            count = before[at].count
            end = offsets[count - 1][1] if count else at
            # Some tokens take the white space behind them, which is then no token in either text.
            fits = before[at].fits(ids) and (end <= at or written.text[at:end].isspace())
            if fits and (count == len(ids) or offsets[count][0] >= at):
                return count
            crossing = next((place for place in offsets if place[0] < at < place[1]), (max(at - 5, 0), at + 5))
            shown = written.text[crossing[0] : crossing[1]]
            left, right = written.text[max(at - 10, 0) : at], written.text[at : at + 10]
            raise _Fault(
                "inexact mask",
                f"where {left!r} ends and {right!r} begins, the text before has other tokens alone than in the whole "
                f"(around {shown!r}), so that trained tokens cannot be told from others",
                "Move white space at this border, or remove it",
            )

        labels = np.full(len(ids), IGNORED, np.int64)
        earlier = 0
        for start, end in written.spans:
            first, last = border(start), border(end)
            if not earlier <= first < last:
                raise _Fault("inexact mask", "the chat template gives turns without a token, or turns within each other")
            earlier = last
            labels[first:last] = ids[first:last]
        prefix, suffix = written.around
        everything = self._config.train_on == "all"
        around = (np.asarray(prefix if everything else [IGNORED] * len(prefix), np.int64), np.asarray(suffix, np.int64))
        whole = np.asarray([*prefix, *ids, *suffix], np.uint32)
        labels = np.concatenate([around[0], labels, around[1]])
        return Document(None, whole, document.origin, None if everything else labels)


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
        f"data.chat_template = {name!r} is no file and no built-in template.{hint} Built in: {', '.join(BUILTIN)}. Change "
        "data.chat_template."
    )


def check_packing(config: DataConfig) -> None:
    """Refuse joined conversations, of which each would read the one before it.

    Raises:
        InputError: the key to set.
    """
    if config.packing == "join":
        raise InputError(
            'data.packing = "join" is for text: a conversation would read the one before it. Set data.packing = "documents".'
        )


def _check_variables(variables: Mapping[str, Any]) -> None:
    if named := _RESERVED.intersection(variables):
        raise InputError(f"data.chat_template_variables sets {', '.join(sorted(named))}, which Octavo gives. Remove it.")


def _check_written(example: Conversation, whole: str) -> None:
    """Refuse a template that leaves out a message or a tool."""
    for number, message in enumerate(example.messages, start=1):
        text = str(message.get("content", "")).strip()
        if message["role"] in ("system", "developer", "user") and text not in whole:
            raise _left_out(f"message {number} ({message['role']}), or changes it: {_shortened(text)}")
    for tool in example.tools or ():
        if (name := tool["function"]["name"]) not in whole:
            raise _left_out(f"the tool {name!r}")


def _check_parts(message: Message, turn: int, text: str) -> None:
    """Refuse a text without the reasoning of a message, or the functions that it calls."""
    for name, part in (("reasoning_content", _reasoning(message)), *(("tool_calls", name) for name in _called(message))):
        if part.strip() not in text:
            raise _Fault(
                "left out by the template",
                f"the chat template does not write {name!r} of message {turn + 1}",
                "Set data.chat_template to one that writes it",
            )


def _left_out(what: str) -> _Fault:
    return _Fault(
        "left out by the template",
        f"the chat template leaves out {what}",
        "Set data.chat_template to one that writes all of a conversation",
    )


def _needle(message: Message) -> str:
    """Text of a message that its turn has to have: behind reasoning within it, whose white space templates change."""
    content = str(message.get("content", ""))
    return content.rpartition(_THOUGHT_END)[2].strip() or content.strip()


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or message.get("thinking") or message.get("reasoning") or "")


def _with_reasoning(message: Message) -> Message:
    """A message with its reasoning under the name that most templates read."""
    reasoning = _reasoning(message)
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _called(message: Message) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Marks that follow each other without a gap as one; without empty ones."""
    found: list[Span] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def _shortened(text: str) -> str:
    return json.dumps(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…", ensure_ascii=False)
