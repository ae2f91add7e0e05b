"""Text to token ids: a tokenizer trained on the corpus, or any of Hugging Face's.

`tokenizer = "train"` learns a byte-level BPE, so that a run needs nothing but text, and every text round-trips exactly. Any
other value is a Hugging Face folder or id. transformers takes seconds to import, so a folder whose tokenizer.json says
everything is read by `tokenizers` alone; where transformers would change something (its own classes, tokens added by its
configuration) it is asked. No code from a tokenizer's folder is executed.

A document becomes: what the tokenizer puts in front (a BOS, for some), the text, what it puts behind, and its end token (EOS)
where it has one and did not put it there itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.errors import InputError, nearest

END_OF_DOCUMENT = "<|endoftext|>"
TRAINING_BYTES = 50_000_000
"""A BPE learns from at most this much text: its merges are settled long before, and training time grows with the text."""

_BATCH_CHARACTERS = 2**20
_PIECE_CHARACTERS = 2**20
_GENERIC_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_PATTERNS = ("*token*.json", "vocab.*", "merges.txt", "*.model", "chat_template.*")


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, reduced to what preparing data needs.

    Attributes:
        vocab_size: one more than the largest id that it can give.
        end: id of the end token, None if the tokenizer has none.
        prefix, suffix: ids around every document; the suffix holds the end token.
        encode_batch: texts → ids, without special tokens.
        save: write a folder that `transformers.AutoTokenizer.from_pretrained` reads.
    """

    vocab_size: int
    end: int | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    encode_batch: Callable[[list[str]], list[list[int]]]
    save: Callable[[Path], None]

    def stream(self, texts: Iterable[str]) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
        """Yield (ids, whether they end the document) for each piece of each text, in order.

        A text of more than a million characters comes in pieces cut at line ends, so that memory stays bounded: a token that
        would span such a cut comes out as two. The prefix and the suffix are in the first and the last piece.
        """
        batch: list[tuple[str, bool, bool]] = []
        size = 0
        for text in texts:
            for piece in _pieces(text):
                batch.append(piece)
                size += len(piece[0])
                if size >= _BATCH_CHARACTERS:
                    yield from self._encode(batch)
                    batch, size = [], 0
        yield from self._encode(batch)

    def _encode(self, batch: list[tuple[str, bool, bool]]) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
        if not batch:
            return
        for (_, first, last), ids in zip(batch, self.encode_batch([piece[0] for piece in batch]), strict=True):
            around = [*(self.prefix if first else ()), *ids, *(self.suffix if last else ())]
            yield np.array(around, dtype=np.uint32), last


def train(texts: Iterable[str], vocab_size: int) -> Encoder:
    """Learn a byte-level BPE with at most `vocab_size` tokens, the end token included.

    It has fewer where the text holds fewer merges. The caller bounds the text (TRAINING_BYTES). The same texts give the same
    tokenizer. The end token's name in a text is encoded as ordinary characters: a text cannot end its own document.
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
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.encode_special_tokens = True

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

    return _from_backend(tokenizer, END_OF_DOCUMENT, save)


def load(name: str) -> Encoder:
    """A Hugging Face tokenizer from a folder or by its id.

    Raises:
        InputError: there is none, or it cannot be loaded.
    """
    folder = check(name)
    if folder is not None:
        light = _load_light(folder)
        if light is not None:
            return light
    try:
        from transformers import AutoTokenizer

        # False, not absent: transformers would otherwise ask on stdin whether to run the folder's code, and a pipe may say yes
        tokenizer = AutoTokenizer.from_pretrained(str(folder or name), trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"data.tokenizer = {name!r} brings Python code of its own, which Octavo never runs. Give a tokenizer that "
                'needs none (a folder with a tokenizer.json), or "train".'
            ) from None
        reason = (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
        raise InputError(
            f"data.tokenizer = {name!r} cannot be loaded: {type(error).__name__}: {reason}. Give a folder with a "
            'tokenizer.json, a tokenizer of the Hugging Face Hub, or "train".'
        ) from None
    if tokenizer.is_fast:
        return _from_backend(tokenizer.backend_tokenizer, tokenizer.eos_token, _saver(tokenizer))

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    prefix, suffix = _around(tokenizer("a")["input_ids"], encode(["a"])[0], tokenizer.eos_token_id)
    size = max(tokenizer.get_vocab().values()) + 1
    return Encoder(size, tokenizer.eos_token_id, prefix, suffix, encode, _saver(tokenizer))


def check(name: str) -> Path | None:
    """The folder of a local tokenizer, None for an id of the Hub; refuses at once what can be neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not tokenizer_files(name):
            raise InputError(
                f"data.tokenizer = {name!r}: the folder holds no tokenizer.json. Give the folder that a tokenizer was saved in."
            )
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        guess = path.parent if path.is_file() else path.parent / near if near else None
        hint = f" Did you mean {str(guess)!r}?" if guess else ""
        raise InputError(
            f'data.tokenizer = {name!r} is not a folder.{hint} Give a tokenizer\'s folder, an id of the Hub, or "train".'
        )
    return None


def local_vocab_size(name: str) -> int | None:
    """One more than the largest id of a local tokenizer, where its tokenizer.json says so; None for every other name."""
    folder = None if name == "train" else check(name)
    light = _load_light(folder) if folder is not None else None
    return light.vocab_size if light is not None else None


def tokenizer_files(name: str) -> list[Path]:
    """The files that make up a local tokenizer, sorted; none for "train" and for ids of the Hub."""
    folder = Path(name).expanduser()
    if name == "train" or not folder.is_dir():
        return []
    return sorted({path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})


def _load_light(folder: Path) -> Encoder | None:
    """Read tokenizer.json without transformers, or None where transformers would make something else of it."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # tokenizers raises plain Exception; transformers then says what is wrong, or copes
        return None
    named = [
        _content(value) for key, value in config.items() if key.endswith("_token") and value and not isinstance(value, bool)
    ]
    named += [_content(value) for value in config.get("added_tokens_decoder", {}).values()]
    changed = config.get("tokenizer_class") not in _GENERIC_CLASSES or any(
        config.get(key)
        for key in ("add_bos_token", "add_eos_token", "split_special_tokens", "auto_map", "extra_special_tokens")
    )
    if changed or any(tokenizer.token_to_id(token) is None for token in named):
        return None

    def save(target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)

    eos = config.get("eos_token")
    return _from_backend(tokenizer, _content(eos) if eos else None, save)


def _from_backend(tokenizer: Any, eos: str | None, save: Callable[[Path], None]) -> Encoder:
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        # `fast` leaves out offsets, which nothing here reads.
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    end = tokenizer.token_to_id(eos) if eos else None
    prefix, suffix = _around(tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids, end)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Encoder(size, end, prefix, suffix, encode, save)


def _around(whole: Sequence[int], inner: Sequence[int], end: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before and after a text's own ids, with the end token behind all of it."""
    width = len(inner)
    matches = (i for i in range(len(whole) - width + 1) if list(whole[i : i + width]) == list(inner))
    start = next(matches, None)
    if start is None:  # the tokenizer does more than to add tokens around: leave documents as they are
        start, whole = 0, inner
    suffix = tuple(whole[start + width :])
    if end is not None and suffix[-1:] != (end,):
        suffix = (*suffix, end)
    return tuple(whole[:start]), suffix


def _pieces(text: str) -> Iterator[tuple[str, bool, bool]]:
    """(piece, is the first, is the last)."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        cut = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:cut], start == 0, False
        start = cut
    yield text[start:], start == 0, True


def _saver(tokenizer: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))

    return save


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
