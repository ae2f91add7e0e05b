"""Shows prepared data: documents with their trained tokens marked, and counts.

The token files that training reads are shown, not the original text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from octavo.config.data import DataConfig, counted
from octavo.data.columns import IGNORED
from octavo.data.loader import treatment
from octavo.data.manifest import SPLITS, Split
from octavo.data.prepared import PreparedData
from octavo.data.tokenizer import transformers_tokenizer
from octavo.errors import InputError

_AT_ONCE = 2**22
TRAINED, OTHER = "bold green", "dim"
"""Styles of trained tokens and of others."""


class Run(NamedTuple):
    """Consecutive tokens that are all trained, or all not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class SplitCounts:
    """Sizes of a split.

    Attributes:
        trained: tokens that are targets, before documents are cut to sequences.
        overlong: documents longer than `data.sequence_length`.
        untrained: overlong documents without a trained token in their first sequence.
    """

    documents: int
    tokens: int
    trained: int
    overlong: int
    untrained: int

    @property
    def share(self) -> float:
        """Share of trained tokens."""
        return self.trained / max(self.tokens, 1)


def documents(prepared: PreparedData, count: int) -> list[list[Run]]:
    """The first documents of the training split, as decoded runs of tokens.

    Raises:
        InputError: the data has no tokenizer.
    """
    folder = prepared.tokenizer_folder
    if folder is None:
        raise InputError("--show: the data is token ids without a tokenizer. Set data.tokenizer to see their texts.")
    tokenizer = transformers_tokenizer(str(folder))
    tokens, offsets, labels = prepared.tokens("train"), prepared.offsets("train").astype(np.int64), prepared.labels("train")
    shown = []
    for start, end in zip(offsets[:count].tolist(), offsets[1 : count + 1].tolist(), strict=False):
        trained = np.ones(end - start, bool) if labels is None else np.asarray(labels[start:end]) != IGNORED
        trained[0] = False  # it is not predicted
        runs = []
        for is_trained, places in groupby(range(end - start), key=trained.tolist().__getitem__):
            ids = tokens[[start + place for place in places]].tolist()
            runs.append(Run(tokenizer.decode(ids, clean_up_tokenization_spaces=False), is_trained))
        shown.append(runs)
    return shown


def counts(prepared: PreparedData, config: DataConfig) -> dict[Split, SplitCounts]:
    """Sizes of both splits."""
    by_split: dict[Split, SplitCounts] = {}
    for split in SPLITS:
        sizes, labels, offsets = prepared.manifest.splits[split], prepared.labels(split), prepared.offsets(split)
        first = offsets[:-1].astype(np.int64)
        trained = sizes.tokens - sizes.documents
        if labels is not None:
            blocks = range(0, len(labels), _AT_ONCE)
            trained = sum(int((labels[at : at + _AT_ONCE] != IGNORED).sum()) for at in blocks)
            trained -= int((labels[first] != IGNORED).sum())
        overlong = first[np.diff(offsets.astype(np.int64)) > config.sequence_length].tolist()
        untrained = 0
        if labels is not None:
            untrained = sum(bool((labels[at + 1 : at + config.sequence_length] == IGNORED).all()) for at in overlong)
        by_split[split] = SplitCounts(sizes.documents, sizes.tokens, trained, len(overlong), untrained)
    return by_split


def lines_of(prepared: PreparedData, config: DataConfig) -> list[str]:
    """Counts in words: of documents, tokens, trained ones, documents longer than a sequence, and rows that were dropped."""
    examples = prepared.manifest.examples
    noun = "document" if examples is None else "conversation" if examples.format == "chat" else "completion"
    how = treatment(prepared, config.overlong)
    done = {"truncate": "truncated to it", "cut": "cut to several", "drop": "dropped"}[how]
    lines = []
    for split, each in counts(prepared, config).items():
        if not each.documents:
            continue
        text = f"{split}: {counted(each.documents, noun)}, {each.tokens:,} tokens, {each.share:.1%} of them trained"
        if each.overlong and prepared.packing(config) == "documents":
            text += f"; {each.overlong:,} longer than data.sequence_length = {config.sequence_length:,}: {done}"
            if each.untrained and how == "truncate":
                text += f", {each.untrained:,} of them dropped, with no trained token in the first sequence"
        lines.append(text)
    if examples is not None:
        dropped = sum(examples.dropped.values())
        reasons = ", ".join(
            f"{reason} ({count:,})" for reason, count in sorted(examples.dropped.items(), key=lambda each: -each[1])
        )
        lines.append(f"dropped: {dropped:,} of {counted(examples.read, 'row')}" + (f": {reasons}" if reasons else ""))
        if examples.turns_by:
            by = "generation marks of the chat template" if examples.turns_by == "marks" else "prompts of the chat template"
            lines.append(f"trained turns by the {by}")
    return lines


def colored(runs: Sequence[Run], *, plain: bool) -> Text:
    """A document with trained tokens in colour; plain: between ⟦ and ⟧, where there are no colours."""
    text = Text()
    for run in runs:
        shown = f"⟦{run.text}⟧" if plain and run.trained else run.text
        text.append(shown, TRAINED if run.trained else OTHER)
    return text


def as_json(prepared: PreparedData, config: DataConfig, shown: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Counts and documents as values of JSON."""
    examples = prepared.manifest.examples
    return {
        "counts": {split: {**vars(each), "trained_share": each.share} for split, each in counts(prepared, config).items()},
        "rows": None if examples is None else {"read": examples.read, "dropped": examples.dropped},
        "shown": [[run._asdict() for run in runs] for runs in shown],
    }
