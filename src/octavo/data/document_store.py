"""Documents on disk between reading and tokenising.

The documents of a split, and the text that a tokenizer learns from, depend on how many documents there are, which is known
only when the last source has been read. Reading may be slow (parsing, decompressing) and is done once: documents go to one
file as they come, and are then taken from it in any order at the speed of a memory map. The price is disk: the corpus' own
size for a while.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from octavo.data import rng
from octavo.data.readers import Document
from octavo.errors import InputError

Numbers = npt.NDArray[np.int64]
"""Documents of a spool, by number."""


class Spool:
    """Documents by number, in one file: text as UTF-8, tokens as little-endian uint32. One kind or the other, never both.

    Use as a context manager; `append` first, then `seal`, then read.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._offsets = array("Q", [0])
        self._map: mmap.mmap | None = None
        self._first: Document | None = None
        self.max_id = -1

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._map is not None:
            self._map.close()
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def stored(self) -> int:
        """Bytes that are stored."""
        return self._offsets[-1]

    @property
    def tokenised(self) -> bool:
        """Whether the documents came as token ids."""
        return self._first is not None and self._first.text is None

    def append(self, document: Document) -> int:
        """Store a document and return its number.

        Raises:
            InputError: it is text where the others are tokens, or the reverse; its text has no UTF-8 form.
        """
        if self._first is None:
            self._first = Document(None if document.text is None else "", document.input_ids, document.origin)
        if (document.text is None) != self.tokenised:
            words, tokens = (document, self._first) if self.tokenised else (self._first, document)
            raise InputError(
                f"data.source mixes text ({words.origin}) with token ids ({tokens.origin}). Make two runs of it, or "
                "tokenise all of it."
            )
        if document.text is not None:
            try:
                payload = document.text.encode()
            except UnicodeEncodeError as error:
                half = hex(ord(document.text[error.start]))
                raise InputError(
                    f"{document.origin}: character {error.start} is half of a surrogate pair, {half}. Correct it."
                ) from None
        else:
            ids = document.input_ids
            assert ids is not None
            self.max_id = max(self.max_id, int(ids.max()))
            payload = ids.astype("<u4").tobytes()
        self._file.write(payload)
        self._offsets.append(self._offsets[-1] + len(payload))
        return len(self) - 1

    def seal(self) -> None:
        """No more documents come."""
        self._file.flush()
        if self.stored:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def size(self, number: int) -> int:
        """Bytes of one document."""
        return self._offsets[number + 1] - self._offsets[number]

    def texts(self, numbers: Numbers) -> Iterator[str]:
        """The texts of these documents."""
        for number in numbers:
            yield self._payload(number).decode()

    def token_ids(self, numbers: Numbers) -> Iterator[npt.NDArray[np.uint32]]:
        """The tokens of these documents."""
        for number in numbers:
            yield np.frombuffer(self._payload(number), "<u4")

    def _payload(self, number: int) -> bytes:
        assert self._map is not None
        return self._map[self._offsets[number] : self._offsets[number + 1]]


def fill(spool: Spool, documents: Iterable[Document], *, count: int | None, seed: int, max_bytes: int | None) -> Numbers:
    """Store documents and return the numbers of those that are taken, in the order of the corpus.

    Empty documents are left out. With `count`, that many are drawn from all of them with equal chance (reservoir sampling:
    every document is read, but only about count · (1 + log(all / count)) are stored). Without it, reading stops once
    `max_bytes` are stored.
    """
    drawn = array("q")
    generator = rng.generator(seed, rng.DOCUMENTS)
    seen = 0
    for document in documents:
        if not document.text and (document.input_ids is None or not len(document.input_ids)):
            continue
        if count is None or seen < count:
            drawn.append(spool.append(document))
        else:
            place = int(generator.integers(0, seen + 1))
            if place < count:
                drawn[place] = spool.append(document)
        seen += 1
        if count is None and max_bytes is not None and spool.stored >= max_bytes:
            break
    spool.seal()
    return np.sort(np.asarray(drawn, np.int64))
