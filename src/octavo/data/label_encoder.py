"""Encodes texts with trained parts as token ids and labels.

Each border of a trained part must be a border of two tokens, and the tokens of the text before it must be the first tokens of
the whole text; otherwise the example is faulty, so that no label is a guess. To check this, the text before each border is
encoded too, from the last special token on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.data.chat_tokenizer import ChatTokenizer
from octavo.data.columns import IGNORED
from octavo.data.documents import Document, Span
from octavo.data.example_faults import ExampleFault

_TRIED = 16
"""Number of examples for which the text before each border is also encoded from its beginning."""


@dataclass(frozen=True)
class WrittenText:
    """A text to encode, and its trained parts."""

    text: str
    spans: list[Span]
    around: tuple[Sequence[int], Sequence[int]] = ((), ())  # ids before and after; those after are trained


@dataclass(frozen=True)
class _Before:
    """Tokens of the text before a border, from token `first` on, encoded without the text after it."""

    first: int
    ids: list[int]

    @property
    def count(self) -> int:
        """Tokens before the border."""
        return self.first + len(self.ids)

    def fits(self, whole: list[int]) -> bool:
        """True if they are the tokens of the whole text at these positions."""
        return whole[self.first : self.count] == self.ids


class LabelEncoder:
    """Encodes texts and labels the tokens of their trained parts.

    Args:
        tokenizer: the one of `data.tokenizer`.
        train_on: `data.train_on`.
    """

    def __init__(self, tokenizer: ChatTokenizer, train_on: str) -> None:
        self._tokenizer, self._train_on = tokenizer, train_on
        self._tried = False
        self._use_anchors = True

    def encode(self, written: dict[int, WrittenText]) -> dict[int, tuple[list[int], list[Span], dict[int, _Before]]]:
        """For each text: its ids, their offsets, and the ids of the text before each border in it.

        The text before a border is encoded from its last special token on, which gives the same tokens with all usual
        tokenizers. For the first texts it is also encoded from the beginning; if that differs, it is done for all texts.
        """
        if not written:
            return {}
        whole = self._tokenizer([each.text for each in written.values()], return_offsets_mapping=True)
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
        befores = self._befores(written, encoded, places, self._tokenizer.anchors if self._use_anchors else frozenset())
        by_number: dict[int, tuple[list[int], list[Span], dict[int, _Before]]] = {
            number: (ids, offsets, {}) for number, (ids, offsets) in encoded.items()
        }
        for (number, at), before in zip(places, befores, strict=True):
            by_number[number][2][at] = before
        return by_number

    def _try(
        self,
        written: dict[int, WrittenText],
        encoded: dict[int, tuple[list[int], list[Span]]],
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Compare encoding from the last special token with encoding from the beginning; if they differ, use the second."""
        both = (self._befores(written, encoded, places, anchors) for anchors in (self._tokenizer.anchors, frozenset[int]()))
        for (number, _), short, long in zip(places, *both, strict=True):
            ids, _ = encoded[number]
            if short.fits(ids) != long.fits(ids) or (long.fits(ids) and short.count != long.count):
                self._use_anchors = False
                return

    def _befores(
        self,
        written: dict[int, WrittenText],
        encoded: dict[int, tuple[list[int], list[Span]]],
        places: Sequence[tuple[int, int]],
        anchors: frozenset[int],
    ) -> list[_Before]:
        """The ids of the text before each place (text number, character), from the last anchor on."""
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
        ids = self._tokenizer(texts)["input_ids"] if texts else []
        return [_Before(index, each) for (index, _), each in zip(starts, ids, strict=True)]

    def label(
        self, document: Document, written: WrittenText, ids: list[int], offsets: list[Span], before: dict[int, _Before]
    ) -> Document:
        """Ids of an example, and as labels the tokens between the borders of its trained parts."""

        def border(at: int) -> int:
            if at in (0, len(written.text)):
                return 0 if at == 0 else len(ids)
            count = before[at].count
            fits = before[at].fits(ids)  # otherwise the text before may have more tokens than the whole
            end = offsets[count - 1][1] if count and fits else at
            # Some tokens absorb the white space after them, which then is no token in either text.
            if fits and (end <= at or written.text[at:end].isspace()) and (count == len(ids) or offsets[count][0] >= at):
                return count
            crossing = next((place for place in offsets if place[0] < at < place[1]), (max(at - 5, 0), at + 5))
            shown = written.text[crossing[0] : crossing[1]]
            left, right = written.text[max(at - 10, 0) : at], written.text[at : at + 10]
            raise ExampleFault(
                "inexact mask",
                f"where {left!r} ends and {right!r} begins, the tokens of the text before differ when it is encoded alone "
                f"(around {shown!r}), so trained tokens cannot be separated from others",
                "Move white space at this border, or remove it",
            )

        labels = np.full(len(ids), IGNORED, np.int64)
        earlier = 0
        for start, end in written.spans:
            first, last = border(start), border(end)
            if not earlier <= first < last:
                raise ExampleFault("inexact mask", "the chat template has turns without a token, or nested turns")
            earlier = last
            labels[first:last] = ids[first:last]
        prefix, suffix = written.around
        everything = self._train_on == "all"
        around = (np.asarray(prefix if everything else [IGNORED] * len(prefix), np.int64), np.asarray(suffix, np.int64))
        whole = np.asarray([*prefix, *ids, *suffix], np.uint32)
        labels = np.concatenate([around[0], labels, around[1]])
        return Document(None, whole, document.origin, None if everything else labels)
