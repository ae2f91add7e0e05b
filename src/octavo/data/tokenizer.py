"""Tokenizer: a byte-level BPE trained on the corpus, or one of Hugging Face's.

transformers takes seconds to import, so a folder is read by `tokenizers` alone unless transformers would change the result (own
classes, tokens added by its configuration). No code from a tokenizer's folder is executed. A document is encoded as the
tokenizer's prefix (a BOS, for some), the text, its suffix, and the end token (EOS) if the suffix does not end in it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo import hub
from octavo.data.pieces import bounded_words, encodable
from octavo.data.special_tokens import for_texts
from octavo.errors import InputError, first_line, is_unreachable, nearest, unreachable
from octavo.storage import names_a_path, path_of, taken_for_a_path

END_OF_DOCUMENT = "<|endoftext|>"
TRAINING_BYTES = 50_000_000
"""Largest sample for training a BPE: merges settle long before, and time and memory of training grow with the text."""

_BATCH_CHARACTERS = 2**20
_GENERIC_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
_CHANGING_KEYS = ("add_bos_token", "add_eos_token", "split_special_tokens", "auto_map", "extra_special_tokens")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_PATTERNS = ("*token*.json", "vocab.*", "merges.txt", "*.model", "chat_template.*")

Chunk = tuple[npt.NDArray[np.uint32], bool]
"""Token ids of a document or of a part of it; True if the document ends there."""


@dataclass(frozen=True)
class Encoder:
    """The functions of a tokenizer that prepare data.

    Attributes:
        vocab_size: one more than the largest id.
        end: id of the end token; None if there is none.
        unknown: id of the token for text outside of the vocabulary; None if there is none, or if it is the end token.
        prefix, suffix: ids around every document; the suffix includes the end token.
        encode_batch: texts → ids, without special tokens.
        save: write a folder for `transformers.AutoTokenizer.from_pretrained`.
    """

    vocab_size: int
    end: int | None
    unknown: int | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    encode_batch: Callable[[list[str]], list[list[int]]]
    save: Callable[[Path], None]

    def stream(self, texts: Iterable[str]) -> Iterator[Chunk]:
        """The chunks of each text, in order.

        Texts of more than a million characters are cut to bound memory, at a place without a change of ids. Without such a
        place they are cut at a line end, or anywhere, and the tokens at the cut differ. The first piece has the prefix, the
        last one the suffix.
        """
        batch: list[tuple[str, bool, bool]] = []
        size = 0
        for piece in chain.from_iterable(encodable(text, self.encode_batch) for text in texts):
            batch.append(piece)
            size += len(piece[0])
            if size >= _BATCH_CHARACTERS:
                yield from self._encode(batch)
                batch, size = [], 0
        if batch:
            yield from self._encode(batch)

    def _encode(self, batch: list[tuple[str, bool, bool]]) -> Iterator[Chunk]:
        for (_, first, last), ids in zip(batch, self.encode_batch([piece[0] for piece in batch]), strict=True):
            whole = [*(self.prefix if first else ()), *ids, *(self.suffix if last else ())]
            yield np.array(whole, dtype=np.uint32), last


def train(texts: Iterable[str], vocab_size: int) -> Encoder:
    """Train a byte-level BPE with at most `vocab_size` tokens, the end token included; fewer if the text has fewer merges.

    The caller bounds all texts (TRAINING_BYTES) and each of them (PIECE); long words are cut here. The same texts give the
    same tokenizer. The end token's name in a text is encoded as ordinary characters, so that a text cannot end its own
    document.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain.from_iterable(map(bounded_words, texts)), trainer=trainer)

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_DOCUMENT,
            "eos_token": END_OF_DOCUMENT,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    return _from_backend(tokenizer, END_OF_DOCUMENT, None, [END_OF_DOCUMENT], save)


def load(name: str) -> Encoder:
    """A Hugging Face tokenizer from a folder or by its id.

    Raises:
        InputError: it does not exist or cannot be loaded.
    """
    folder = check(name)
    if folder and (encoder := _load_without_transformers(folder)):
        return encoder
    try:
        from transformers import AutoTokenizer

        # False, not absent: otherwise transformers asks on stdin whether to run the folder's code, and a pipe may say yes
        with nullcontext() if folder else hub.bounded():
            tokenizer = AutoTokenizer.from_pretrained(str(folder or name), trust_remote_code=False)
        if not tokenizer.is_fast:
            return _from_python(tokenizer)
    except Exception as error:
        if is_unreachable(error):
            raise unreachable("data.tokenizer", name, "tokenizer", '"train"') from None
        fault = f"cannot be loaded: {first_line(error)}"
        if "trust_remote_code" in str(error):
            fault = "needs Python code of its own, which Octavo never runs"
        raise InputError(
            f"data.tokenizer = {name!r} {fault}. Give a folder with a tokenizer.json, a tokenizer of the Hugging Face Hub "
            'without code of its own, or "train".'
        ) from None
    named = tokenizer.all_special_tokens
    return _from_backend(
        tokenizer.backend_tokenizer, tokenizer.eos_token, tokenizer.unk_token, named, tokenizer.save_pretrained
    )


def check(name: str) -> Path | None:
    """The folder of a local tokenizer; None for an id of the Hub. Any other name is an InputError."""
    with path_of("data.tokenizer", name):
        path = Path(name).expanduser()
        if path.is_dir():
            if not tokenizer_files(name):
                raise InputError(
                    f"data.tokenizer = {name!r}: the folder holds no tokenizer.json. Give the folder that a tokenizer was "
                    "saved in."
                )
            return path
        if not path.exists() and not names_a_path(name):
            return None
        siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        guess = path.parent if path.is_file() else path.parent / near if near else None
        hint = f" Did you mean {str(guess)!r}?" if guess else ""
        why = "" if path.is_file() else taken_for_a_path(name)
        raise InputError(
            f'data.tokenizer = {name!r} is not a folder{why}.{hint} Give a tokenizer\'s folder, an id of the Hub, or "train".'
        )


def local_vocab_size(name: str) -> int | None:
    """One more than the largest id of a local tokenizer that needs no transformers; None for any other name."""
    folder = None if name == "train" else check(name)
    encoder = _load_without_transformers(folder) if folder else None
    return encoder.vocab_size if encoder else None


def tokenizer_files(name: str) -> list[Path]:
    """The files of a local tokenizer, sorted; none for "train" and for ids of the Hub."""
    folder = Path(name).expanduser()
    if name == "train" or not folder.is_dir():
        return []
    return sorted({path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})


def _load_without_transformers(folder: Path) -> Encoder | None:
    """Read tokenizer.json by `tokenizers`; None if transformers reads the folder as another tokenizer."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # tokenizers raises plain Exception; transformers then reads it, or reports the fault
        return None
    if config.get("tokenizer_class") not in _GENERIC_CLASSES or any(map(config.get, _CHANGING_KEYS)):
        return None
    named = [value for key, value in config.items() if key.endswith("_token") and value and not isinstance(value, bool)]
    names = [_content(token) for token in named]
    listed = [_content(token) for token in config.get("added_tokens_decoder", {}).values()]
    if any(tokenizer.token_to_id(name) is None for name in (*names, *listed)):
        return None

    def save(target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)

    eos, unknown = (_content(config[key]) if config.get(key) else None for key in ("eos_token", "unk_token"))
    return _from_backend(tokenizer, eos, unknown, names, save)


def _from_python(tokenizer: Any) -> Encoder:
    """A tokenizer that `tokenizers` does not implement."""

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    prefix, suffix = _prefix_and_suffix(tokenizer("a")["input_ids"], encode(["a"])[0], tokenizer.eos_token_id)
    size = max(tokenizer.get_vocab().values()) + 1
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id != tokenizer.eos_token_id else None
    return Encoder(size, tokenizer.eos_token_id, unknown, prefix, suffix, encode, tokenizer.save_pretrained)


def _from_backend(
    tokenizer: Any, eos: str | None, unk: str | None, named: Collection[str], save: Callable[[Path], None]
) -> Encoder:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise InputError("data.tokenizer: the tokenizer has no tokens. Give the folder of a trained one.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    copy = cache(partial(for_texts, tokenizer, named))  # on use: a second for a large vocabulary, and a check encodes nothing

    def encode(texts: list[str]) -> list[list[int]]:
        # `fast` computes no offsets.
        return [encoding.ids for encoding in copy().encode_batch_fast(texts, add_special_tokens=False)]

    end = tokenizer.token_to_id(eos) if eos else None
    with_special, without = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    prefix, suffix = _prefix_and_suffix(with_special, without, end)
    unknown = tokenizer.token_to_id(unk) if unk and unk != eos else None
    return Encoder(max(vocabulary.values()) + 1, end, unknown, prefix, suffix, encode, save)


def _prefix_and_suffix(whole: list[int], inner: list[int], end: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Special tokens before and after a text's own ids, the end token last."""
    width = len(inner)
    start = next((i for i in range(len(whole) - width + 1) if whole[i : i + width] == inner), None)
    if start is None:  # special tokens change the text's own ids: leave documents without them
        start, whole = 0, inner
    suffix = tuple(whole[start + width :])
    if end is not None and suffix[-1:] != (end,):
        suffix = (*suffix, end)
    return tuple(whole[:start]), suffix


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
