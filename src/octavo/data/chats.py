"""Conversations and completions to token ids and labels.

A conversation is rendered as a whole by the chat template (in transformers' Jinja sandbox) and encoded as a whole, like
`apply_chat_template`. `turn_spans` finds the trained characters, `label_encoder` the trained tokens. An example for which
either is not exact is faulty: it is refused, or dropped and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from octavo.config.data import DataConfig
from octavo.data.chat_template import RESERVED, ChatTemplate
from octavo.data.chat_tokenizer import ChatTokenizer
from octavo.data.conversations import strings
from octavo.data.documents import Completion, Conversation, Document, Faulty
from octavo.data.example_faults import ExampleFault
from octavo.data.label_encoder import LabelEncoder, WrittenText
from octavo.data.tokenizer import Encoder
from octavo.data.turn_spans import TurnSpans
from octavo.errors import InputError

_AT_ONCE = 256
"""Number of examples that are encoded together."""


@dataclass
class ExampleCounts:
    """Numbers of examples: read, and dropped by reason."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class ExampleEncoder:
    """Encodes the examples among documents; other documents pass.

    Args:
        config: the data section.
        encoder: the one of `data.tokenizer`; None for one that would be trained.

    Attributes:
        counts: counts of the examples so far.
    """

    def __init__(self, config: DataConfig, encoder: Encoder | None) -> None:
        self._config = config
        self._encoder = encoder
        self.counts = ExampleCounts()
        self._tokenizer = ChatTokenizer(config, encoder)
        self._template = ChatTemplate(config, self._tokenizer)
        self._turns = TurnSpans(config, self._template, self._tokenizer)
        self._labels = LabelEncoder(self._tokenizer, config.train_on)

    @property
    def by(self) -> str:
        """ "marks" or "prefixes": how turns are found; empty before the first conversation."""
        return self._turns.by

    @property
    def template_used(self) -> str | None:
        """The template of the first conversation; None before it."""
        return self._turns.template_used

    def template(self, tools: bool = False) -> str:
        """The template of conversations with or without tools.

        Raises:
            InputError: there is none, or `data.chat_template` does not exist.
        """
        return self._template.template(tools)

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents in order, with examples as token ids and labels, without dropped ones.

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
        """Notices about the template."""
        notices = []
        if "strftime_now" in (self.template_used or "") and "date_string" not in self._config.chat_template_variables:
            notices.append(
                "the chat template can write today's date into each conversation: data prepared on another day will differ. "
                'Set it, for templates that read it so: data.chat_template_variables = { date_string = "01 Jan 2026" }.'
            )
        end = self._tokenizer.tokenizer.eos_token if self._turns.ends else None
        if self._turns.ends and end not in self._turns.ends:
            way = "a server must stop there too, so set it as eos_token_id in generation_config.json"
            if all(self._tokenizer.added[each] for each in self._turns.ends):
                way = "the run's generation_config.json has both, and a server must stop at both"
            notices.append(
                f"turns end in {' or '.join(map(repr, sorted(self._turns.ends)))}, and the end token of data.tokenizer is "
                f"{end!r}: {way}."
            )
        return notices

    @property
    def turn_ends(self) -> list[int]:
        """Ids of the tokens that end the trained turns so far."""
        return sorted(map(self._tokenizer.tokenizer.convert_tokens_to_ids, self._turns.ends)) if self._turns.ends else []

    def _encoded(self, batch: Sequence[Document]) -> Iterator[Document]:
        check_packing(self._config)
        written: dict[int, WrittenText] = {}
        for number, document in enumerate(batch):
            if document.example is not None:
                self.counts.read += 1
                try:
                    written[number] = self._written(document)
                except ExampleFault as fault:
                    self._refuse_or_count(document, fault)
        encoded = self._labels.encode(written)
        for number, document in enumerate(batch):
            if document.example is None:
                yield document
            elif number in written:
                try:
                    yield self._labels.label(document, written[number], *encoded[number])
                except ExampleFault as fault:
                    self._refuse_or_count(document, fault)

    def _refuse_or_count(self, document: Document, fault: ExampleFault) -> None:
        if self._config.faulty_rows == "drop":
            self.counts.dropped[fault.reason] += 1
            return
        remedy = fault.remedy or "Correct or remove the row"
        raise InputError(f'{document.origin}: {fault}. {remedy}, or set data.faulty_rows = "drop" to drop and count such rows.')

    def _written(self, document: Document) -> WrittenText:
        example = document.example
        if isinstance(example, Faulty):
            raise ExampleFault(example.reason, example.sentence)
        if isinstance(example, Completion):
            self._tokenizer.check_texts((example.prompt, example.completion))
            return self._written_completion(example)
        assert isinstance(example, Conversation)
        self._tokenizer.check_texts((*strings(example.messages), *strings(example.tools or [])))
        if named := RESERVED.intersection(example.variables):
            raise ExampleFault(
                "chat_template_kwargs", f"'chat_template_kwargs' has {', '.join(sorted(named))}, which Octavo sets"
            )
        return self._turns.write(example)

    def _written_completion(self, example: Completion) -> WrittenText:
        assert self._encoder is not None
        if self._encoder.end is None and not self._encoder.suffix:
            raise InputError(
                f"data.tokenizer = {self._config.tokenizer!r} has no end token (eos_token), so a model would never learn "
                "to end a completion. Set its eos_token, or use another tokenizer."
            )
        whole = example.prompt + example.completion
        first = 0 if self._config.train_on == "all" else len(example.prompt)
        return WrittenText(whole, [(first, len(whole))], (self._encoder.prefix, self._encoder.suffix))


def check_packing(config: DataConfig) -> None:
    """Refuse joined conversations: a conversation would attend to the previous one.

    Raises:
        InputError: the key to set.
    """
    if config.packing == "join":
        raise InputError(
            'data.packing = "join" is for text: a conversation would see the previous one. Set data.packing = "documents".'
        )
