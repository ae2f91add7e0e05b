"""Answers of the model in training to an evaluation's texts: log-likelihoods and greedy continuations over all ranks.

Ranks with different samples answer a share of the texts each; then all have all answers. Every rank runs equally many forwards,
since sharded ranks run them together. Texts of about equal length share a forward, right-padded. There is no cache of keys and
values: each new token of a continuation costs a forward of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.models.decoder import Decoder
from octavo.parallel.coordination import all_ranks
from octavo.parallel.world import state

_STEP = 16
"""Lengths of batches are multiples of this, and of the multiple that context ranks need."""


class Scoring(NamedTuple):
    """A model and the settings of its forwards.

    tokenizer: its folder. longest: most tokens in a forward. vocabulary: size of the model's. batch: texts in a rank's forward.
    chat: variables of the chat template that writes questions; None for plain text. turn_ends: ids at which an answer ends, in
    addition to the end token.
    """

    model: nn.Module
    tokenizer: Path
    device: torch.device
    longest: int
    vocabulary: int
    batch: int
    autocast: Callable[[], Any]
    chat: Mapping[str, Any] | None = None
    turn_ends: tuple[int, ...] = ()


class Scored(NamedTuple):
    """A text of which the last `scored` tokens are scored."""

    ids: list[int]
    scored: int


class Answerer:
    """The forwards of an evaluation: log-likelihoods and greedy continuations over all ranks."""

    def __init__(self, settings: Scoring) -> None:
        self._settings = settings
        self._ranks = max(1, state.dp_size)
        self._rank = state.dp_rank if self._ranks > 1 else 0

    def score(self, texts: Sequence[Scored]) -> list[tuple[float, bool]]:
        """(sum of the log-probabilities of the scored tokens, whether each is the most probable one) of each text."""
        size = self._settings.batch
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at].ids))  # texts of about equal length in a forward
        scores: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), size * self._ranks):
            mine = order[first : first + size * self._ranks][self._rank * size :][:size]
            length = len(texts[order[first]].ids) - 1  # the same on all ranks: they may share forwards
            asked = mine or [order[first]]
            results = self._scores([texts[at] for at in asked], length)
            scores |= dict(zip(mine, results, strict=False))
        whole: dict[int, tuple[float, bool]] = {}
        for part in all_ranks().all_gather(scores):
            for at, value in part.items():
                whole.setdefault(at, value)  # ranks that share samples have equal values
        return [whole[at] for at in range(len(texts))]

    def _scores(self, texts: Sequence[Scored], length: int) -> list[tuple[float, bool]]:
        """Scores of a batch; the model reads each text without its last token."""
        first = min(len(text.ids) - 1 - text.scored for text in texts)
        logits = self.logits([text.ids[:-1] for text in texts], length, torch.arange(first, length))
        results = []
        for row, text in zip(logits, texts, strict=True):
            end = len(text.ids) - 1 - first
            scored = row[end - text.scored : end].float()
            targets = torch.tensor(text.ids[-text.scored :], device=scored.device)
            log_probabilities = scored.log_softmax(-1).gather(-1, targets[:, None])
            results.append((float(log_probabilities.double().sum()), bool((scored.argmax(-1) == targets).all())))
        return results

    def continued(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], ended: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        """The greedy continuation of each prompt, up to its limit, or until `ended(number, tokens so far)`."""
        size = self._settings.batch
        answers: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda at: -len(prompts[at]))
        for first in range(0, len(order), size * self._ranks):
            mine = order[first : first + size * self._ranks][self._rank * size :][:size]
            together = order[first : first + size * self._ranks]
            length = min(self._settings.longest, max(len(prompts[at]) + limits[at] for at in together))
            new: dict[int, list[int]] = {at: [] for at in mine}
            open_ = {at for at in mine if limits[at] > 0}
            while all_ranks().max(len(open_)):
                asked = mine or [order[first]]
                rows = [[*prompts[at], *new.get(at, [])] for at in asked]
                ends = torch.tensor([len(row) - 1 for row in rows])
                span = torch.arange(int(ends.min()), int(ends.max()) + 1)
                logits = self.logits(rows, length, span)
                for number, at in enumerate(asked):
                    if at in open_:
                        row = logits[number, int(ends[number]) - int(span[0])].float()
                        new[at].append(int(row.argmax()))
                        if len(new[at]) == limits[at] or ended(at, new[at]):
                            open_.remove(at)
            answers |= new
        whole: dict[int, list[int]] = {}
        for part in all_ranks().all_gather(answers):
            whole |= {at: value for at, value in part.items() if at not in whole}
        return [whole[at] for at in range(len(prompts))]

    def logits(self, rows: Sequence[Sequence[int]], length: int, positions: Tensor) -> Tensor:
        """Logits [B, len(positions), V] of rows that are right-padded to a length: no token attends to later ones."""
        settings = self._settings
        unit = _STEP * (2 * state.cp_size if state.cp_size > 1 else 1)
        padded = -(-length // unit) * unit
        padded = padded if padded <= settings.longest or state.cp_size > 1 else max(length, 1)
        ids = torch.zeros(len(rows), padded, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        ids = ids.to(settings.device)
        with settings.autocast():
            if isinstance(settings.model, Decoder):
                logits: Tensor = settings.model(input_ids=ids, logits_to_keep=positions.to(settings.device)).logits
                return logits
            output = settings.model(input_ids=ids)
        whole: Tensor = getattr(output, "logits", output)
        return whole[:, positions.to(whole.device)]
