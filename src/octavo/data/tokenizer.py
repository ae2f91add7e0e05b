"""Tokenizer: a byte-level BPE trained on the corpus, or a Hugging Face tokenizer.

transformers' AutoTokenizer is the reference: it alone reads all files of a tokenizer (special_tokens_map.json,
added_tokens.json, the model's config.json). Texts are encoded by a copy of its backend without names of special tokens; first,
a sample of the corpus is encoded by both and compared. No code from a tokenizer's folder is executed. A document is encoded as
the tokenizer's prefix (for some, a BOS), the text, its suffix, and the end token (EOS) if the suffix does not end with it.

"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
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
from octavo.errors import InputError, first_line, is_unreachable, nearest, some, unreachable
from octavo.storage import is_lfs_pointer, names_a_path, path_of, taken_for_a_path

END_OF_DOCUMENT = "<|endoftext|>"
TRAINING_BYTES = 50_000_000
"""Largest sample for training a BPE: merges converge earlier, and time and memory grow with the text."""

_BATCH_CHARACTERS = 2**20
_PATTERNS = ("*token*.json", "vocab.*", "merges.txt", "*.model", "tekken.json", "*.tiktoken", "chat_template.*")
_GENERIC_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's named chat templates."""
_TEXT = 2**32 - 1
"""Placeholder of a text between special tokens: an id outside any vocabulary."""
_SHOWN = 60
"""Most characters of a text in a message."""

Chunk = tuple[npt.NDArray[np.uint32], bool]
"""Token ids of a document or of a part of it; True if the document ends there."""


@dataclass(frozen=True)
class Encoder:
    """The functions of a tokenizer that prepare data.

    Attributes:
        name: `data.tokenizer`, for messages.
        vocab_size: one more than the largest id.
        end: id of the end token; None if there is none.
        unknown: id of the unknown token; None if there is none, or if it is the end token.
        prefix, suffix: ids around every document; the suffix includes the end token.
        encode_batch: texts → ids, without special tokens.
        save: write a folder for `transformers.AutoTokenizer.from_pretrained`.
    """

    name: str
    vocab_size: int
    end: int | None
    unknown: int | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    encode_batch: Callable[[list[str]], list[list[int]]]
    save: Callable[[Path], None]

    def stream(self, texts: Iterable[str]) -> Iterator[Chunk]:
        """The chunks of each text, in order.

        Texts of more than a million characters are cut to bound memory, at a place that preserves the ids. Without such a place
        they are cut at a line end, or anywhere, and the tokens at the cut differ. The first piece gets the prefix, the last one
        the suffix.
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

    The caller bounds the total (TRAINING_BYTES) and each text (PIECE); long words are cut here. The same texts give the same
    tokenizer. The name of the end token inside a text is encoded as ordinary characters, so that a text cannot end its
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

    return _from_backend(tokenizer, "train", tokenizer.token_to_id(END_OF_DOCUMENT), None, [END_OF_DOCUMENT], save)


def load(name: str) -> Encoder:
    """A Hugging Face tokenizer from a folder or by its id.

    Raises:
        InputError: it does not exist, cannot be loaded, or does more than add tokens before and after a text.
    """
    folder = check(name)
    theirs = _theirs(name, folder)
    if not hasattr(theirs, "is_fast"):
        raise InputError(
            f"data.tokenizer = {name!r} is {type(theirs).__name__}, which does not encode a single text. Use another."
        )
    encoder = _of_backend(theirs, name) if theirs.is_fast else _of_python(theirs, name)
    _check_around(encoder, theirs)
    return replace(encoder, save=partial(_save, theirs, name, folder))


def proven(encoder: Encoder, folder: Path, texts: Sequence[str], say: Callable[[str], None]) -> Encoder:
    """The encoder, if its ids equal those of transformers' AutoTokenizer; else one that calls that for each text.

    Args:
        folder: where it was saved.
        texts: a sample of the corpus. Names of special tokens are removed: in documents they are plain text.
        say: called with notices about a slower encoder, and about lost characters.

    Raises:
        InputError: neither gives its ids, the saved tokenizer has another end token, or a text produces special tokens.
    """
    theirs = _theirs(encoder.name, folder)
    if theirs.eos_token_id != encoder.end:
        raise InputError(
            f"data.tokenizer = {encoder.name!r}: its end token has id {encoder.end}; transformers reads "
            f"{theirs.eos_token_id} in its copy. Save it by save_pretrained of this transformers, and use that folder."
        )
    encoder = like_transformers(encoder, theirs, texts, say)
    _check_names(encoder, theirs)
    if lost := _lost(encoder, theirs, texts):
        shown = some([repr(one) for one in sorted(lost)], 5)
        say(
            f"data.tokenizer = {encoder.name!r} has no token for {shown}, and no unknown token: documents are trained without "
            "these characters, as AutoTokenizer encodes them."
        )
    return encoder


def like_transformers(encoder: Encoder, theirs: Any, texts: Sequence[str], say: Callable[[str], None]) -> Encoder:
    """As `proven`, with transformers' tokenizer alone."""
    names = sorted(_special(theirs), key=len, reverse=True)
    sample = [text for text in (_without(text, names) for text in texts) if text]
    encoder.encode_batch(sample)  # raises the error of a text that it refuses
    expected = [_call(theirs, encoder.name, text, split_special_tokens=True)["input_ids"] for text in sample]

    def fits(candidate: Encoder) -> bool:
        encoded = candidate.encode_batch(sample)
        return all(
            [*candidate.prefix, *ids] == whole[: len(ids) + len(candidate.prefix)]
            and whole[len(ids) + len(candidate.prefix) :] in (list(candidate.suffix), list(candidate.suffix[:-1]))
            for ids, whole in zip(encoded, expected, strict=True)
        )

    if fits(encoder):
        return encoder
    inner = _call(theirs, encoder.name, sample[0], split_special_tokens=True, add_special_tokens=False)["input_ids"]
    ways = [_by_call(theirs, encoder.name, around) for around in _prefixes_and_suffixes(expected[0], inner, encoder.end)]
    slower = next(filter(fits, ways), None)
    if slower is None:
        if any(
            _call(theirs, encoder.name, text, split_special_tokens=True)["input_ids"] != ids
            for text, ids in zip(sample, expected, strict=True)
        ):
            raise _random(encoder.name, "its model samples ids")
        raise InputError(
            f"data.tokenizer = {encoder.name!r} changes the ids of a text when it puts its special tokens around it: no "
            "document can be encoded as transformers does. Give token ids (input_ids) in data.source."
        )
    say(f"data.tokenizer = {encoder.name!r} has Python code that changes ids: texts are encoded by it, which is slower.")
    return slower


def _lost(encoder: Encoder, theirs: Any, texts: Sequence[str]) -> set[str]:
    """Characters of texts, without white space, that the tokenizer drops: a BPE without an unknown token does."""
    if not theirs.is_fast or encoder.unknown is not None:
        return set()
    lost: set[str] = set()
    for text in texts:
        options = {"add_special_tokens": False, "split_special_tokens": True, "return_offsets_mapping": True}
        covered = bytearray(len(text))
        for start, end in _call(theirs, encoder.name, text, **options)["offset_mapping"]:
            covered[start:end] = bytes([1]) * (end - start)
        lost.update(character for character, there in zip(text, covered, strict=True) if not there)
    return {character for character in lost if not character.isspace()}


def transformers_tokenizer(name: str) -> Any:
    """transformers' tokenizer of a folder or an id, accepted by `load`."""
    return _theirs(name, check(name))


def _theirs(name: str, folder: Path | None) -> Any:
    """transformers' tokenizer of a folder, or of an id of the Hub."""
    try:
        from transformers import AutoTokenizer

        # False, not absent: otherwise transformers asks on stdin whether to run the folder's code
        with nullcontext() if folder else hub.bounded():
            return AutoTokenizer.from_pretrained(str(folder or name), trust_remote_code=False)
    except Exception as error:
        if is_unreachable(error):
            raise unreachable("data.tokenizer", name, "tokenizer", '"train"') from None
        fault = f"cannot be loaded: {first_line(error)}"
        if "trust_remote_code" in str(error):
            fault = "needs custom Python code, which Octavo never runs"
        raise InputError(
            f"data.tokenizer = {name!r} {fault}. Give a folder with a tokenizer.json, a tokenizer of the Hugging Face Hub "
            'without custom code, or "train".'
        ) from None


def other_beside(folder: Path, config: Any) -> str:
    """A sentence if transformers loads another tokenizer when the folder has the model's config.json; else empty.

    For some model types transformers uses its built-in tokenizer class and ignores the tokenizer's files.
    """
    name = str(folder)
    with tempfile.TemporaryDirectory() as temporary:
        together = Path(temporary)
        for path in tokenizer_files(name):
            shutil.copyfile(path, together / path.name)
        (together / "config.json").write_text(config.to_json_string(), encoding="utf-8")
        try:
            beside = _theirs(name, together)
        except InputError as error:
            return f"Beside a config.json of {config.model_type} transformers cannot load the tokenizer: {error}"
        original = _theirs(name, folder)
        if _identity(original, name) == _identity(beside, name):
            return ""
    return (
        f"AutoTokenizer reads a tokenizer next to a config.json of {config.model_type} as {type(beside).__name__}, which may "
        "give other ids than the run's. Load the tokenizer of an export by "
        f"transformers.{type(original).__name__}.from_pretrained(FOLDER), or use one of that family as data.tokenizer."
    )


def check(name: str) -> Path | None:
    """The folder of a local tokenizer; None for a Hub id; an InputError for any other name."""
    with path_of("data.tokenizer", name):
        path = Path(name).expanduser()
        if path.is_dir():
            if not tokenizer_files(name):
                raise InputError(
                    f"data.tokenizer = {name!r}: the folder holds no tokenizer.json. Give the folder that a tokenizer was "
                    "saved in."
                )
            if pointers := [file.name for file in tokenizer_files(name) if is_lfs_pointer(file)]:
                raise InputError(
                    f"data.tokenizer = {name!r}: {some(pointers)} is a Git LFS pointer, not the file itself. "
                    "Run git lfs pull in its repository."
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
    """One more than the largest id of a local tokenizer; None for "train" and for ids of the Hub."""
    folder = None if name == "train" else check(name)
    if folder is None:
        return None
    files = [*tokenizer_files(name), *folder.glob("config.json")]
    return _vocab_size(name, tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@cache
def _vocab_size(name: str, files: tuple[tuple[str, int, int], ...]) -> int:
    """Cached by the files' state: reading a large tokenizer takes seconds."""
    return load(name).vocab_size


def tokenizer_files(name: str) -> list[Path]:
    """The files of a local tokenizer, sorted; none for "train" and for ids of the Hub."""
    folder = Path(name).expanduser()
    if name == "train" or not folder.is_dir():
        return []
    return sorted({path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})


def with_chat_template(folder: Path, template: str) -> None:
    """Set the chat template of a saved tokenizer, so that serving uses the template of training.

    Raises:
        InputError: transformers would read another template from the folder.
    """
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if _theirs(str(folder), folder).get_chat_template() != template:
        raise InputError(
            "data.chat_template: transformers reads another chat template from the tokenizer of the run. Remove the "
            "templates from the folder of data.tokenizer."
        )


def _save(theirs: Any, name: str, folder: Path | None, target: Path) -> None:
    """Write a tokenizer so that transformers loads the same one from `target`.

    Files of a class without custom code are copied, so that older versions of transformers load them too; others are saved by
    transformers. If the result loads as a different tokenizer, the other method is tried: the class may depend on the model's
    config.json, which is not copied.
    """
    identity = _identity(theirs, name)
    copied = tokenizer_files(str(folder)) if folder else []
    ways = (copied, None) if type(theirs).__name__ in _GENERIC_CLASSES else (None, copied)
    # Finally without a comparison of parts: `proven` compares ids.
    for files, parts in [*((way, len(identity)) for way in ways), *((way, len(identity) - 1) for way in ways)]:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        if files is None:
            _theirs(name, folder).save_pretrained(target)  # not `theirs`, whose truncation and padding are off
        elif files:
            for path in files:
                shutil.copyfile(path, target / path.name)
            if folder and (templates := folder / ADDITIONAL_TEMPLATES).is_dir():
                shutil.copytree(templates, target / ADDITIONAL_TEMPLATES)
        else:
            continue
        with suppress(InputError):
            if _identity(_theirs(name, target), name)[:parts] == identity[:parts]:
                return
    raise InputError(
        f"data.tokenizer = {name!r}: transformers saves it differently than it loads it, so an export would have another "
        "tokenizer. Save it by save_pretrained to a new folder, compare the two, and use the intended one."
    )


def _identity(theirs: Any, name: str) -> tuple[Any, ...]:
    """A value that is equal for two transformers tokenizers with the same ids and the same special tokens in each role."""
    if theirs.is_fast:
        theirs.backend_tokenizer.no_truncation()
        theirs.backend_tokenizer.no_padding()
    special = _special(theirs)
    return (
        theirs.get_vocab(),
        theirs.special_tokens_map,
        special,
        [_call(theirs, name, one)["input_ids"] for one in sorted(special)],
        theirs.backend_tokenizer.to_str() if theirs.is_fast else type(theirs),
    )


def _call(theirs: Any, name: str, text: str, **options: bool) -> Any:
    """Ids of a text by transformers' tokenizer; an InputError if it refuses plain text, or this text."""
    try:
        return theirs(text, verbose=False, **options)
    except Exception as error:  # tokenizers raises plain Exception, transformers many types
        raise InputError(
            f"data.tokenizer = {name!r}: transformers cannot encode the text {_shortened(text)!r} by it: "
            f"{first_line(error).rstrip('.')}. Remove such text, or use another tokenizer."
        ) from None


def _special(theirs: Any) -> dict[str, int]:
    """Special tokens of transformers' tokenizer → ids."""
    added = {token.content: number for number, token in theirs.added_tokens_decoder.items() if token.special}
    return dict(zip(theirs.all_special_tokens, theirs.all_special_ids, strict=True)) | added


def _without(text: str, names: Sequence[str]) -> str:
    """A text without names of special tokens; empty if removal creates others."""
    for name in names:
        text = text.replace(name, " ") if name.strip() else text
    return "" if any(name in text for name in names if name.strip()) else text


def _check_names(encoder: Encoder, theirs: Any) -> None:
    """Refuse a tokenizer that encodes the name of a special token as that token: such a text would end its document."""
    ids_of = {name: theirs.convert_tokens_to_ids(name) for name in _special(theirs)}
    usable = [name for name, one in ids_of.items() if one != encoder.unknown and (len(name) > 1 or one == encoder.end)]
    for name in usable:
        try:
            ids = encoder.encode_batch([name])[0]
        except InputError:  # it has no tokens for these characters
            continue
        if ids_of[name] in ids:
            raise InputError(
                f"data.tokenizer = {encoder.name!r} encodes {name!r} in a text as the special token {name!r}, not as "
                "characters: a text could end its document. Give token ids (input_ids) in data.source, or another tokenizer."
            )


def _of_python(theirs: Any, name: str) -> Encoder:
    """A tokenizer that `tokenizers` does not implement."""
    return _by_call(theirs, name, _around(theirs.build_inputs_with_special_tokens([_TEXT]), theirs.eos_token_id, name))


def _by_call(theirs: Any, name: str, around: tuple[tuple[int, ...], tuple[int, ...]]) -> Encoder:
    """Encodes by calling transformers' tokenizer."""

    def encode(texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return theirs(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    size = max(theirs.get_vocab().values()) + 1
    unknown = theirs.unk_token_id if theirs.unk_token_id != theirs.eos_token_id else None
    return Encoder(name, size, theirs.eos_token_id, unknown, *around, _explained(encode, name), theirs.save_pretrained)


def _of_backend(theirs: Any, name: str) -> Encoder:
    """A tokenizer that `tokenizers` implements."""
    backend = theirs.backend_tokenizer
    if not backend.get_vocab(with_added_tokens=True):
        raise InputError(f"data.tokenizer = {name!r}: the tokenizer has no tokens. Give the folder of a trained one.")
    if dropout := getattr(backend.model, "dropout", None):
        raise _random(name, f"its model has dropout = {dropout:g}")
    unknown = theirs.unk_token_id if theirs.unk_token_id != theirs.eos_token_id else None
    return _from_backend(backend, name, theirs.eos_token_id, unknown, theirs.all_special_tokens, theirs.save_pretrained)


def _from_backend(
    backend: Any, name: str, end: int | None, unknown: int | None, named: Collection[str], save: Callable[[Path], None]
) -> Encoder:
    copy = cache(partial(for_texts, backend, named))  # on first use: it may take a second

    def encode(texts: list[str]) -> list[list[int]]:
        # `fast` computes no offsets.
        return [encoding.ids for encoding in copy().encode_batch_fast(texts, add_special_tokens=False)]

    # A one-token vocabulary: the post-processor's additions do not depend on the text.
    whole = [_TEXT]
    if backend.post_processor is not None:
        text = Tokenizer(models.WordLevel({"text": _TEXT})).encode("text")
        whole = backend.post_processor.process(text).ids
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return Encoder(name, size, end, unknown, *_around(whole, end, name), _explained(encode, name), save)


def _around(whole: list[int], end: int | None, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Special tokens before and after the text in a document, the end token last."""
    if whole.count(_TEXT) != 1:
        raise InputError(
            f"data.tokenizer = {name!r} puts {whole.count(_TEXT)} copies of a text into a document (its post_processor), but"
            " Octavo supports only tokens around one copy. Correct the post_processor in its tokenizer.json."
        )
    return next(_prefixes_and_suffixes(whole, [_TEXT], end))


def _prefixes_and_suffixes(
    whole: Sequence[int], inner: Sequence[int], end: int | None
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Special tokens before and after the ids of a text, the end token last: for each place of `inner` in `whole`."""
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            suffix = tuple(whole[start + len(inner) :])
            if end is not None and suffix[-1:] != (end,):
                suffix = (*suffix, end)
            yield tuple(whole[:start]), suffix


def _check_around(encoder: Encoder, theirs: Any) -> None:
    """Refuse tokens around a text that are not in the vocabulary, or are not the tokens named by the post-processor.

    A post-processor stores ids: `train_new_from_iterator` may leave those of the old vocabulary there.
    """
    ids = theirs.get_vocab()
    tokens = {number: token for token, number in ids.items()}
    special = set(_special(theirs).values())
    processor = theirs.backend_tokenizer.post_processor if theirs.is_fast else None
    named = dict(_named(json.loads(processor.__getstate__()))) if processor is not None else {}
    for one in (*encoder.prefix, *encoder.suffix):
        name = named.get(one)
        if one not in tokens:
            fault = f"which its vocabulary does not have (0 … {encoder.vocab_size - 1})"
        elif name is not None and name != tokens[one] and (name in ids or one not in special):
            fault = f"{tokens[one]!r} in its vocabulary, where {name!r} {f'is {ids[name]}' if name in ids else 'is no token'}"
        else:
            continue
        as_name = "" if name is None else f" as {name!r}"
        raise InputError(
            f"data.tokenizer = {encoder.name!r} puts token id {one}{as_name} around a text (its post_processor), {fault}. "
            "Correct the post_processor in its tokenizer.json: it may belong to another vocabulary."
        )


def _named(processor: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """The special tokens that a post-processor may put around a text: id and name."""
    for inner in processor.get("processors", ()):
        yield from _named(inner)
    for token in (processor.get("special_tokens") or {}).values():
        yield from zip(token["ids"], token["tokens"], strict=True)
    for role in ("cls", "sep"):
        if role in processor:
            name, one = processor[role]
            yield one, name


def _random(name: str, why: str) -> InputError:
    return InputError(
        f"data.tokenizer = {name!r} gives different ids in each call ({why}), so a run could not be reproduced. Set "
        '"dropout": null in the model of its tokenizer.json, or turn its sampling off.'
    )


def _explained(encode: Callable[[list[str]], list[list[int]]], name: str) -> Callable[[list[str]], list[list[int]]]:
    """`encode`, with an InputError for a text that the tokenizer refuses."""

    def explained(texts: list[str]) -> list[list[int]]:
        try:
            return encode(texts)
        except InputError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            if len(texts) > 1:
                return [explained([text])[0] for text in texts]
            raise InputError(
                f"data.tokenizer = {name!r} cannot encode the text {_shortened(texts[0])!r}: {first_line(error).rstrip('.')}. "
                "Add an unknown token to it (unk_token), remove such text, or use another tokenizer."
            ) from None

    return explained


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
