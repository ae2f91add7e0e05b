"""Cuts long texts into pieces, so that a tokenizer's memory and time do not grow with the document.

Training a tokenizer only counts words, so its sample is cut near any separator; endless words (base64, DNA, a language without
spaces) are cut too, since training is quadratic in their length. An encoded document must keep its tokens: it is cut where the
tokenizer gives the same ids for the two sides as for the whole.

"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator

PIECE = 2**20
"""Size of a piece: bytes, or characters of an encoded document."""

LONGEST_WORD = 1024
"""Most characters of a word in training: with 4,096 it took up to three times as long, with 32 no less."""

_ENDLESS = re.compile(rf"(?<!\S)\S++(?<=\S{{{LONGEST_WORD + 1}}})|(?<!\s)\s++(?<=\s{{{LONGEST_WORD + 1}}})")
_WORD_END = re.compile(r"(?<=\w)(?=\W)")
_SEPARATOR_BYTES = 4096
_TRIED = 64
_CONTEXT = 256


def piece_ends(stored: mmap.mmap, start: int, end: int) -> Iterator[int]:
    """Ends of the pieces of the UTF-8 text at bytes start to end, each after a line, else a space, near the target size."""
    at = start + PIECE
    while at < end:
        near = min(at + _SEPARATOR_BYTES, end)
        cut = stored.find(b"\n", at, near) + 1 or stored.find(b" ", at, near) + 1 or at
        while cut < end and stored[cut] & 0xC0 == 0x80:  # inside a character
            cut += 1
        yield cut
        at = cut + PIECE
    yield end


def bounded_words(text: str) -> Iterator[str]:
    """The text, cut at words, or runs of white space, of more than LONGEST_WORD characters."""
    start = 0
    for run in _ENDLESS.finditer(text):
        for cut in range(run.start() + LONGEST_WORD, run.end(), LONGEST_WORD):
            yield text[start:cut]
            start = cut
    yield text[start:]


def encodable(text: str, encode_batch: Callable[[list[str]], list[list[int]]]) -> Iterator[tuple[str, bool, bool]]:
    """(piece, is it the first, is it the last) of a document."""
    start = 0
    while len(text) - start > PIECE:
        end, following = _cut(text, start + PIECE, encode_batch)
        yield text[start:end], start == 0, False
        start = following
    yield text[start:], start == 0, True


def _cut(text: str, limit: int, encode_batch: Callable[[list[str]], list[list[int]]]) -> tuple[int, int]:
    """End of a piece and start of the next that preserve the ids; otherwise a line end, else `limit`."""
    # Candidates are the last ends of words, then the last characters. The next piece may begin after a space, for a tokenizer
    # that adds one before each text.
    first = limit - PIECE // 2
    ends = [first + match.start() for match in _WORD_END.finditer(text[first:limit])][-_TRIED:]
    for end in (*reversed(ends), *range(limit, max(limit - _TRIED, first), -1)):
        before = text[max(end - _CONTEXT, 0) : end]
        for following in (end, end + 1) if text[end] == " " else (end,):
            whole = before + text[end : end + _CONTEXT]
            ids, *parts = encode_batch([whole, before, text[following : end + _CONTEXT]])
            if ids == parts[0] + parts[1]:
                return end, following
    line = text.rfind("\n", first, limit) + 1 or limit
    return line, line
