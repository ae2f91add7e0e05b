"""Document store: documents on disk between reading and tokenising.

The validation split and the tokenizer's sample depend on the number of documents, which is known only after the last source is
read. Reading may be slow and happens once: documents are appended to one file, then read in any order through a memory map.
The cost is temporary disk space of the corpus' size.
"""

from __future__ import annotations

import hashlib
import mmap
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.data import rng
from octavo.data.documents import Document
from octavo.data.pieces import PIECE, piece_ends
from octavo.errors import InputError

DocumentNumbers = npt.NDArray[np.int64]
"""Documents of a store, by number."""

Ranges = npt.NDArray[np.int64]
"""[P, 2] first byte and end of each text in a store."""


class DocumentStore:
    """Documents by number, in one file: text as UTF-8 or tokens as little-endian uint32, never both.

    Labels of tokens, little-endian int64, follow them. Use as a context manager; `append` first, then `seal`, then read.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._offsets = array("Q", [0])
        self._map: mmap.mmap | None = None
        self._first_origin = ""
        self._has_labels = bytearray()  # 1 or 0 per document
        self.tokenised = False  # True if the documents are token ids
        self.stored = 0  # bytes
        self.max_id = -1  # over tokens and labels

    @property
    def labelled(self) -> bool:
        """True if a document has labels."""
        return 1 in self._has_labels

    def __enter__(self) -> DocumentStore:
        return self

    def __exit__(self, *error: object) -> None:
        if self._map is not None:
            self._map.close()
        self._file.close()

    def append(self, document: Document) -> int:
        """Store a document and return its number.

        Raises:
            InputError: text among token ids, or the reverse; text that has no UTF-8 form.
        """
        if not self.stored:
            self._first_origin = document.origin
            self.tokenised = document.text is None
        if (document.text is None) != self.tokenised:
            first, this = self._first_origin, document.origin
            text, tokens = (this, first) if self.tokenised else (first, this)
            raise InputError(f"data.source mixes text ({text}) with token ids ({tokens}). Use two runs, or tokenise all of it.")
        payload = self._encode(document)
        self._file.write(payload)
        self.stored += len(payload)
        self._offsets.append(self.stored)
        self._has_labels.append(document.labels is not None)
        return len(self._offsets) - 2

    def seal(self) -> None:
        """End writing and begin reading."""
        self._file.flush()
        if self.stored:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def pieces(self, numbers: DocumentNumbers) -> Ranges:
        """[P, 2] first byte and end of the pieces of these documents' texts."""
        assert self._map is not None
        offsets = np.asarray(self._offsets, np.int64)
        whole = np.stack([offsets[numbers], offsets[numbers + 1]], axis=1)
        if (whole[:, 1] - whole[:, 0] <= PIECE).all():
            return whole
        ranges = array("q")
        for start, end in whole.tolist():
            for cut in piece_ends(self._map, start, end):
                ranges.extend((start, cut))
                start = cut
        return np.asarray(ranges, np.int64).reshape(-1, 2)

    def texts(self, numbers: DocumentNumbers) -> Iterator[str]:
        """The texts of these documents."""
        return (payload.decode() for payload in self._payloads(numbers))

    def text_pieces(self, ranges: Ranges) -> Iterator[str]:
        """The texts at these ranges of bytes."""
        assert self._map is not None
        return (self._map[start:end].decode() for start, end in ranges.tolist())

    def token_ids(self, numbers: DocumentNumbers) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64] | None]]:
        """The token ids of these documents, and their labels; None where every token is a target."""
        for number, payload in zip(numbers.tolist(), self._payloads(numbers), strict=True):
            end = self._end_of_ids(number, payload)
            labels = np.frombuffer(payload[end:], "<i8") if self._has_labels[number] else None
            yield np.frombuffer(payload[:end], "<u4"), labels

    def digests(self, numbers: DocumentNumbers) -> npt.NDArray[np.uint64]:
        """A hash of the text or the token ids of each of these documents."""
        both = zip(numbers.tolist(), self._payloads(numbers), strict=True)
        contents = (payload[: self._end_of_ids(number, payload)] for number, payload in both)
        hashes = (int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) for content in contents)
        return np.fromiter(hashes, np.uint64, len(numbers))

    def _end_of_ids(self, number: int, payload: bytes) -> int:
        """End of a document's ids in its payload: a token takes 4 bytes, its label 8 more."""
        return len(payload) // 3 if self._has_labels[number] else len(payload)

    def _encode(self, document: Document) -> bytes:
        ids = document.input_ids
        if ids is not None:
            labels = document.labels
            self.max_id = max(self.max_id, int(ids.max()), -1 if labels is None else int(labels.max()))
            return ids.astype("<u4").tobytes() + (b"" if labels is None else labels.astype("<i8").tobytes())
        assert document.text is not None
        try:
            return document.text.encode()
        except UnicodeEncodeError as error:
            half = hex(ord(document.text[error.start]))
            raise InputError(
                f"{document.origin}: character {error.start} is half of a surrogate pair, {half}. Correct it."
            ) from None

    def _payloads(self, numbers: DocumentNumbers) -> Iterator[bytes]:
        assert self._map is not None
        return (self._map[self._offsets[number] : self._offsets[number + 1]] for number in numbers)


def collect(
    store: DocumentStore, documents: Iterable[Document], *, count: int | None, seed: int, max_bytes: int | None
) -> DocumentNumbers:
    """Store documents and return the numbers of the selected ones, in the order of the corpus; `seal` is left to the caller.

    Empty documents are skipped. With `count`, a uniform sample of that size is selected (reservoir sampling: every document is
    read, but only about count · (1 + log(all / count)) are stored). Without it, reading stops once `max_bytes` more are stored.
    """
    selected = array("q")
    before = store.stored
    generator = rng.generator(seed, rng.DOCUMENTS)
    seen = 0
    for document in documents:
        if not document.text and (document.input_ids is None or not len(document.input_ids)):
            continue
        if count is None or seen < count:
            selected.append(store.append(document))
        else:
            slot = int(generator.integers(0, seen + 1))
            if slot < count:
                selected[slot] = store.append(document)
        seen += 1
        if count is None and max_bytes is not None and store.stored - before >= max_bytes:
            break
    return np.sort(np.asarray(selected, np.int64))
