"""Columns of a row besides token ids or text: labels, padding, and columns that would change the training.

A column that says which tokens are predicted is used exactly. One that Octavo does not support, such as token weights, is
refused by name unless it has no effect (weights of 1), instead of being ignored silently. Names, sources and scores are
ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import InputError

INPUT_IDS, LABELS, LOSS_MASK, ATTENTION_MASK = "input_ids", "labels", "loss_mask", "attention_mask"

IGNORED = -100
"""Label of a position without a target (PyTorch's and Hugging Face's)."""

Int64 = npt.NDArray[np.int64]
_Array = npt.NDArray[Any]

_MOST_ID = 2**32 - 1
_EVIDENCE = 8
"""Targets of a row that prove that its labels are shifted: fewer may agree by chance."""

_AS_LOSS_MASK = "name it loss_mask if its ones are the tokens to predict, else remove it"
_AS_PROMPT = "give a loss_mask that is 0 in the prompt and 1 after it, or remove it to predict every token"
_AS_LABELS = 'give the targets as "labels", where labels[i] is the token at i: Octavo shifts them'
_AS_ROWS = 'give each document as a separate row and set data.packing = "documents", or remove it'
_AS_TOKENS = "Octavo trains only on token ids: remove it"
_AS_WEIGHTS = "Octavo weighs all targets alike: remove it; loss_mask excludes tokens, and data.weights weighs sources"

_MASKS = (
    *("completion_mask", "assistant_mask", "assistant_masks", "assistant_tokens_mask", "answer_mask", "response_mask"),
    *("prompt_mask", "label_mask", "labels_mask", "target_mask", "train_mask", "loss_masks", "mask"),
)
_WEIGHTS = (
    *("weight", "weights", "loss_weight", "loss_weights", "sample_weight", "sample_weights", "token_weight", "token_weights"),
    *("label_weight", "label_weights", "target_weight", "target_weights", "example_weight", "example_weights"),
)
_SEGMENTS = (
    *("token_type_ids", "segment_ids", "segments", "document_ids", "doc_ids", "sequence_ids", "sequence_id", "seq_idx"),
    "seq_ids",
)


_PROMPTS = (
    *("prompt_length", "prompt_lengths", "prompt_len", "prompt_lens", "prompt_ids_len", "prompt_ids_lens"),
    *("num_prompt_tokens", "answer_start_idx", "response_start", "response_start_idx"),
)
"""Columns with the position where predicted tokens begin; `labels` and `loss_mask` override them."""


def _is_one(value: _Array) -> bool:
    return value.dtype.kind in "biuf" and bool((value == 1).all())


def _is_constant(value: _Array) -> bool:
    return value.dtype.kind in "biufU" and (value.size == 0 or bool((value == value.flat[0]).all()))


def _counts_up(value: _Array) -> bool:
    return value.ndim == 1 and value.dtype.kind in "iu" and np.array_equal(value, np.arange(len(value)))


def _marks_nothing(value: _Array) -> bool:
    return value.dtype.kind not in "iu" or value.ndim == 0 or not bool((value == IGNORED).any())


def _never(value: _Array) -> bool:
    return False


_REFUSED: dict[str, tuple[Callable[[_Array], bool], str]] = {
    "position_ids": (_counts_up, f"they are not 0, 1, 2, …, which Octavo counts itself: {_AS_ROWS}"),
    **dict.fromkeys(_SEGMENTS, (_is_constant, f"the row has several: {_AS_ROWS}")),
    **dict.fromkeys(_WEIGHTS, (_is_one, _AS_WEIGHTS)),
    **dict.fromkeys(_MASKS, (_is_one, _AS_LOSS_MASK)),
    **dict.fromkeys(
        ("shift_labels", "shifted_labels", "label_ids", "target_ids", "targets", "decoder_input_ids"), (_never, _AS_LABELS)
    ),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_lens", "seqlens", "seq_lengths"),
        (_never, _AS_ROWS),
    ),
    **dict.fromkeys(_PROMPTS, (_never, _AS_PROMPT)),
    **dict.fromkeys(
        ("inputs_embeds", "pixel_values", "image", "images", "audio", "video", "input_features", "encoder_outputs"),
        (_never, _AS_TOKENS),
    ),
}
"""Columns allowed with token ids → a test that the value has no effect, and the remedy otherwise."""
_SAY_NOTHING = frozenset({"special_tokens_mask", "offset_mapping", "length", "overflow_to_sample_mapping"})
"""Columns of Hugging Face's tokenizers that causal language models ignore."""
_BESIDE_TEXT: dict[str, tuple[Callable[[_Array], bool], str]] = {
    **dict.fromkeys(_WEIGHTS, (_is_one, _AS_WEIGHTS)),
    LABELS: (_marks_nothing, f"{IGNORED} in it marks tokens: tokenise the text and give input_ids, or remove it"),
    **dict.fromkeys(
        (LOSS_MASK, "loss_masks", "completion_mask", "assistant_mask", "assistant_masks", "assistant_tokens_mask"),
        (_never, "a token mask needs token ids: tokenise the text and give input_ids, or remove it"),
    ),
}
"""Columns allowed with text → a test that the value has no effect, and the remedy otherwise."""


_BESIDE_EXAMPLES: dict[str, tuple[Callable[[_Array], bool], str]] = {
    **{name: check for name, check in _BESIDE_TEXT.items() if name != LABELS},
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios", "pixel_values"),
        (lambda value: value.size == 0, "Octavo trains only on text: remove it"),
    ),
}
"""Columns allowed with conversations or prompts → a test that the value has no effect, and the remedy."""


def _key(name: str) -> str:
    """A name as in the tables: Loss-Mask becomes loss_mask."""
    return name.lower().replace("-", "_")


def column_of(names: Collection[str], text_field: str) -> str | None:
    """The column of the documents: `text_field`, else `input_ids`; None if there is neither."""
    return text_field if text_field in names else INPUT_IDS if INPUT_IDS in names else None


def wanted(names: Collection[str], text_field: str, lists: Collection[str]) -> list[str]:
    """The columns of a table that `check_text` or `tokens_of` reads; lists: those that hold a list in each row."""
    column = column_of(names, text_field)
    if column is None:
        return []
    if column != INPUT_IDS:
        return [column, *(name for name in names if name != column and (_key(name) in _BESIDE_TEXT or name == INPUT_IDS))]
    known = (*_REFUSED, LABELS, LOSS_MASK, ATTENTION_MASK)
    return [column, *(name for name in names if name != column and (_key(name) in known or name in lists))]


@lru_cache  # most rows of a file have the same columns
def _beside_text(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if _key(name) in _BESIDE_TEXT]


def check_text(row: Mapping[str, Any], text_field: str, origin: str) -> None:
    """Refuse token ids, weights and token masks in a row of text.

    Raises:
        InputError: names the column and the remedy.
    """
    if INPUT_IDS in row and text_field == "text":
        raise InputError(
            f'{origin} holds both {text_field!r} and {INPUT_IDS!r}. Set data.text_field = "{INPUT_IDS}" to train on the token '
            f"ids, or remove {INPUT_IDS!r} to train on the text."
        )
    for name in _beside_text(tuple(row)):
        if name == LABELS and INPUT_IDS in row:  # labels of the token ids, which are not read
            continue
        nothing, remedy = _BESIDE_TEXT[_key(name)]
        if name != text_field and not nothing(_array(_number(row[name]))):
            raise InputError(f"{origin}: {name!r} cannot be used with text: {remedy}.")


def is_of_tokens(name: str) -> bool:
    """True for a column that `check_examples` reads."""
    return _key(name) in _BESIDE_EXAMPLES


def check_examples(row: Mapping[str, Any], origin: str) -> None:
    """Refuse weights, token masks and images in a row with a conversation, or a prompt and its completion.

    Raises:
        InputError: names the column and the remedy.
    """
    for name in row:
        nothing, remedy = _BESIDE_EXAMPLES.get(_key(name), (None, ""))
        if nothing is not None and row[name] is not None and not nothing(_array(_number(row[name]))):
            raise InputError(f"{origin}: {name!r} cannot be used with an example: {remedy}.")


def tokens_of(row: Mapping[str, Any], origin: str) -> tuple[npt.NDArray[np.uint32], Int64 | None]:
    """Token ids of a row, and its labels: the token at each position, or IGNORED; None if every token is a target.

    Labels are `labels`, else the ids; IGNORED if `loss_mask` is 0. Tokens at the ends of the row with `attention_mask` 0 are
    padding and dropped.

    Raises:
        InputError: a column is not a list of numbers for these tokens, or cannot be used exactly.
    """
    ids = _whole_numbers(row[INPUT_IDS], INPUT_IDS, origin)
    if len(ids) and not 0 <= ids.min() <= ids.max() <= _MOST_ID:
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(f"{origin}: token id {bad} in 'input_ids' is outside 0 … {_MOST_ID}. Tokenise the text again.")
    if len(row) == 1:
        return ids.astype(np.uint32), None
    _refuse_others(row, len(ids), origin)
    labels = _labels(row, ids, origin)
    if ATTENTION_MASK in row:
        real = np.flatnonzero(_mask(row, ATTENTION_MASK, len(ids), origin))
        start, end = (real[0], real[-1] + 1) if len(real) else (0, 0)
        if len(real) != end - start:
            raise InputError(
                f"{origin}: 'attention_mask' has a 0 between ones, at {int(np.flatnonzero(np.diff(real) > 1)[0] + start + 1)}: "
                "every token attends to all before it in its document. Remove these tokens, or the column."
            )
        padding = np.concatenate([labels[:start], labels[end:]])
        if (LABELS in row or LOSS_MASK in row) and (padding != IGNORED).any():
            raise InputError(
                f"{origin}: 'attention_mask' is 0 at a target. Set 'labels' to {IGNORED} (or 'loss_mask' to 0) at padding, or "
                "remove 'attention_mask'."
            )
        ids, labels = ids[start:end], labels[start:end]
    return ids.astype(np.uint32), None if np.array_equal(labels, ids) else labels


def _labels(row: Mapping[str, Any], ids: Int64, origin: str) -> Int64:
    labels = ids
    if LABELS in row:
        labels = _whole_numbers(row[LABELS], LABELS, origin)
        _check_length(LABELS, len(labels), len(ids), origin)
        wrong = labels[((labels < 0) & (labels != IGNORED)) | (labels > _MOST_ID)]
        if len(wrong):
            raise InputError(
                f"{origin}: {wrong[0]} in 'labels' is no token id (0 … {_MOST_ID}) and not {IGNORED}, which marks a position "
                "without a target. Correct the row."
            )
        if (shifted_targets(labels, ids) or 0) >= _EVIDENCE:
            raise _shifted(f"{origin}: 'labels'")
    if LOSS_MASK in row:
        labels = np.where(_mask(row, LOSS_MASK, len(ids), origin), labels, IGNORED)
    return labels


def shifted_targets(labels: Int64, ids: Int64) -> int | None:
    """Number of targets if each is the next token; 0 if any is not; None if they are the tokens at their positions."""
    following = (labels != IGNORED)[:-1]
    targets = labels[:-1][following]
    if np.array_equal(targets, ids[:-1][following]):
        return None
    return len(targets) if np.array_equal(targets, ids[1:][following]) else 0


class ShiftedLabels:
    """Detects already shifted labels in rows with few targets: one row may agree by chance, many do not."""

    def __init__(self) -> None:
        self._targets = self._rows = self._others = 0

    def check(self, labels: Int64 | None, ids: npt.NDArray[np.uint32], origin: str) -> None:
        """Check the next row of a source.

        Raises:
            InputError: in this row and most rows before it, the labels differ from the tokens and equal the next tokens.
        """
        targets = None if labels is None else shifted_targets(labels, ids.astype(np.int64))
        if targets is None:
            return
        if not targets:
            self._others += 1
            return
        self._targets += targets
        self._rows += 1
        if self._targets >= _EVIDENCE and self._rows > self._others:
            raise _shifted(f"{origin}: 'labels' of this row, and of earlier rows,")


def _shifted(what: str) -> InputError:
    return InputError(
        f"{what} are the next tokens: they are shifted already, and Octavo shifts them. labels[i] is the token at i. "
        "Shift them back, or remove the column to predict every token."
    )


def _refuse_others(row: Mapping[str, Any], tokens: int, origin: str) -> None:
    for name, value in row.items():
        if name in (INPUT_IDS, LABELS, LOSS_MASK, ATTENTION_MASK) or name in _SAY_NOTHING:
            continue
        if _key(name) in _PROMPTS and (LABELS in row or LOSS_MASK in row):
            continue
        if (key := _key(name)) in _REFUSED or key in (LABELS, LOSS_MASK, ATTENTION_MASK, INPUT_IDS):
            nothing, remedy = _REFUSED.get(key, (_never, f"name it {key}"))
            if value is None or not nothing(_array(value)):
                raise InputError(f"{origin}: {name!r} cannot be used with 'input_ids': {remedy}.")
        elif isinstance(value, list | tuple | np.ndarray) and len(value) == tokens > 1 and _array(value).dtype.kind in "biuf":
            raise InputError(
                f"{origin}: {name!r} has a number per token, whose meaning Octavo does not know. Remove the column, or "
                "name it 'labels' or 'loss_mask' if it is one."
            )


def _mask(row: Mapping[str, Any], name: str, tokens: int, origin: str) -> npt.NDArray[np.bool_]:
    value = _array(row[name])
    if value.size == 0 and value.ndim == 1:
        value = np.empty(0, np.int64)
    if value.ndim != 1 or value.dtype.kind not in "biuf" or not np.isin(value, (0, 1)).all():
        raise InputError(f"{origin}: {name!r} must be a list of 0 and 1, one per token. Correct the row.")
    _check_length(name, len(value), tokens, origin)
    return value.astype(bool)


def _whole_numbers(value: object, name: str, origin: str) -> Int64:
    numbers = _array(value)
    if numbers.ndim == 1 and numbers.size == 0:
        return np.empty(0, np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or (isinstance(value, list) and bool in set(map(type, value))):
        remedy = "Correct the row, or change data.text_field." if name == INPUT_IDS else "Correct the row."
        raise InputError(f"{origin}: {name!r} must be a list of whole numbers. {remedy}")
    if numbers.dtype.kind == "u" and int(numbers.max()) >= 2**63:
        raise InputError(f"{origin}: {int(numbers.max())} in {name!r} is outside 0 … {_MOST_ID}. Tokenise the text again.")
    return numbers.astype(np.int64)


def _check_length(name: str, length: int, tokens: int, origin: str) -> None:
    if length != tokens:
        raise InputError(f"{origin}: {name!r} has {length:,} entries, but 'input_ids' {tokens:,}: give one per token.")


def _array(value: object) -> _Array:
    try:
        return np.asarray(value)
    except (ValueError, OverflowError):  # nested lists of different lengths
        return np.asarray(None)


def _number(value: object) -> object:
    """A number, also from the text of a CSV file."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
