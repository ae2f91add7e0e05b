"""Batches of a rank, as a function of the number of the next sample.

Sample g of a run is sequence `permutation(seed, g // n)[g % n]` of the n sequences; with weights, the same within each source
(`octavo.data.order`). The state of the data is therefore one integer: a resumed run, on any number of ranks and with any
micro-batch, sees the same samples in the same global batches. The cost is a permutation in memory, 8 bytes a sequence.


Sequences are copied from a memory map on request; `octavo.data.prefetch` requests them ahead, in several threads that share one
permutation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from octavo.config.data import DataConfig
from octavo.config.degrees import fit_batch
from octavo.data.manifest import Counts, Split
from octavo.data.order import Mixture, SampleOrder
from octavo.data.packing import IGNORED, Batch, Packing, Sequences, concatenated, join, pack_documents
from octavo.data.prepared import PreparedData
from octavo.errors import InputError, OctavoError, some

Overlong = Literal["truncate", "cut", "drop"]


class BatchLoader:
    """Batches of one split for one rank of data parallelism.

    Args:
        sequence_length: T.
        seed: seed of the order of samples.
        global_batch: sequences in a step, over all ranks.
        micro_batch: sequences in a micro-batch of one rank; None: the rank's whole share.
        dp_rank, dp_size: rank and size of the data-parallel group.
        weights: `data.weights` of the prepared section.
        overlong: `data.overlong`.

    Raises:
        InputError: ranks × micro-batch does not divide the global batch; or the split, or a source with a weight, is empty.
    """

    def __init__(
        self,
        prepared: PreparedData,
        split: Split,
        *,
        sequence_length: int,
        packing: Literal["join", "documents"],
        seed: int,
        global_batch: int,
        micro_batch: int | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        weights: Sequence[float] = (),
        overlong: Overlong | None = None,
    ) -> None:
        self.micro_batch, _ = fit_batch(global_batch, micro_batch, dp_size)
        self._sequences = sequences_of(prepared, split, sequence_length=sequence_length, packing=packing, overlong=overlong)
        if not len(self._sequences):
            raise InputError(_empty(prepared, split))
        if split == "train" and 0 in self._sequences.of_source:
            raise InputError(_empty(prepared, split, self._sequences.of_source.index(0)))
        self._prepared = prepared
        self._split: Split = split
        self.global_batch = global_batch
        self._rank = dp_rank
        self._ranks = dp_size
        self._order = _order(self._sequences, weights, seed)
        self._ordering = threading.Lock()
        balance = packing == "documents" and dp_size > 1
        self._work = self._sequences.packing.work(sequence_length) if balance else None

    def step(self, first_sample: int) -> list[Batch]:
        """This rank's micro-batches of the global batch that begins at `first_sample`.

        Samples are counted from 0 over all epochs. A rank gets a contiguous part; with separately packed documents, a part
        balanced by attention work (`balanced`).
        """
        if first_sample < 0:
            raise ValueError(f"sample numbers start at 0, not {first_sample}")
        share = self.global_batch // self._ranks
        size = self.micro_batch
        first, count = first_sample, self.global_batch
        if self._work is None:
            first, count = first_sample + self._rank * share, share
        with self._ordering:  # one thread computes the order of an epoch, the others wait for it
            indices = [self._order[sample] for sample in range(first, first + count)]
        if self._work is None:
            return [self._batch(indices[at : at + size]) for at in range(0, share, size)]
        shares = balanced(indices, self._work[indices].tolist(), self._ranks, size)
        return [self._batch(samples) for samples in shares[self._rank]]

    @property
    def most_documents(self) -> int:
        """Most documents in a packed micro-batch; padding at the end of a sequence counts as one."""
        return self.micro_batch * self._sequences.packing.most_documents(self._sequences.sequence_length)

    def epoch(self, steps: int) -> float:
        """The epoch after this many steps: 1.25 if a quarter of the sequences was trained twice.

        With weights: passes over the total number of sequences; `source_epochs` returns those of each source.
        """
        return steps * self.global_batch / len(self._sequences)

    def source_epochs(self, steps: int) -> list[float]:
        """The epoch of each source after this many steps, in the order of `data.source`; without weights a single one."""
        return self._order.epochs(steps * self.global_batch)

    def validation(self, sequences: int) -> Iterator[Batch]:
        """This rank's part of the first `sequences` sequences of the split, in fixed order, each once, in its micro-batches.

        With weights the sources alternate by weight, until one is exhausted.

        `sequences` counts over all ranks: any number of ranks, with any micro-batch, validates on the same ones. Every rank
        yields equally many batches, since ranks run collectives together: the last may be smaller, and a rank without a
        sequence for it yields a batch of IGNORED labels.
        """
        total = min(sequences, len(self._sequences))
        order = self._order.once()
        for first in range(0, total, self.micro_batch * self._ranks):
            mine = first + self._rank * self.micro_batch
            batch = self._batch(order[mine : min(mine + self.micro_batch, total)].tolist() or [0])
            if mine >= total:
                batch.labels.fill_(IGNORED)
                batch.lengths.fill_(0)
            yield batch

    def _batch(self, indices: Sequence[int]) -> Batch:
        """A batch of sequences; refuses unknown token ids and labels, with which a GPU would read beyond the embedding."""
        batch = self._sequences.batch(indices)
        known = self._prepared.manifest.max_token_id
        largest = max(int(batch.input_ids.max()), int(batch.labels.max()))
        least = int(batch.labels.where(batch.labels != IGNORED, 0).min())
        if largest > known or least < 0:
            fault = f"the token id {largest}" if largest > known else f"the label {least}"
            raise OctavoError(
                f"the {self._split} split has {fault}, but {known} was the largest when it was prepared: "
                f"{str(self._prepared.folder)!r} has changed. Remove that folder; `octavo prepare` recreates it."
            )
        return batch


def balanced(indices: Sequence[int], work: Sequence[int], ranks: int, micro_batch: int) -> list[list[list[int]]]:
    """Distribute a global batch so that in each micro-batch all ranks have about the same work.

    Ranks wait for each other in every micro-batch. Sequences are assigned in decreasing order of attention work, one
    micro-batch at a time, each to the rank with the least work that has room. The global batch does not depend on the ranks.

    Args:
        indices: sequences of the global batch.
        work: attention work of each.

    Returns:
        [ranks][micro-batches][micro_batch] sequences.
    """
    decreasing = sorted(range(len(indices)), key=lambda at: -work[at])  # stable: the same on every rank
    of_ranks: list[list[list[int]]] = [[] for _ in range(ranks)]
    for first in range(0, len(indices), ranks * micro_batch):
        loads, rows = [0] * ranks, [[] for _ in range(ranks)]  # type: list[int], list[list[int]]
        for at in decreasing[first : first + ranks * micro_batch]:
            rank = min((rank for rank in range(ranks) if len(rows[rank]) < micro_batch), key=lambda rank: loads[rank])
            rows[rank].append(indices[at])
            loads[rank] += work[at]
        for rank in range(ranks):
            of_ranks[rank].append(rows[rank])
    return of_ranks


class Passes(NamedTuple):
    """The epochs of a source in a number of steps; of all sources together without weights."""

    source: str
    sequences: int
    epochs: float

    def __str__(self) -> str:
        return f"{self.epochs:.2f} of {self.sequences:,} sequences"


def passes(prepared: PreparedData, config: DataConfig, samples: int) -> list[Passes]:
    """Epochs of each source in a run of this many samples; empty without sequences."""
    sequences = sequences_of(
        prepared, "train", sequence_length=config.sequence_length, packing=prepared.packing(config), overlong=config.overlong
    )
    if not all(sequences.of_source):
        return []
    epochs = _order(sequences, config.weights, config.seed).epochs(samples)
    names = config.sources if len(epochs) > 1 else [some(config.sources)]
    return [Passes(*each) for each in zip(names, sequences.of_source, epochs, strict=True)]


def unused_sources(config: DataConfig, samples: int) -> str:
    """Notice about sources that get no sample in a run of this many, by their weights; empty if all do."""
    if not config.weights:
        return ""
    each = zip(config.sources, config.weights, Mixture(config.weights).counts(samples), strict=True)
    unused = [f"{name} (weight {weight:g})" for name, weight, count in each if count == 0]
    if not unused:
        return ""
    weights, them = ("its weight", "it") if len(unused) == 1 else ("their weights", "them")
    return (
        f"data.weights: none of the run's {samples:,} sequences is from {some(unused)}. Raise {weights}, or remove {them} from "
        "data.source."
    )


def treatment(prepared: PreparedData, overlong: Overlong | None) -> Overlong:
    """`data.overlong`, or its default, which avoids training later parts of conversations without their beginning."""
    return overlong or ("cut" if prepared.manifest.examples is None else "truncate")


def sequences_of(
    prepared: PreparedData,
    split: Split,
    *,
    sequence_length: int,
    packing: Literal["join", "documents"],
    overlong: Overlong | None = None,
) -> Sequences:
    """The sequences of a split with a target, by number. If sources have weights, no sequence has text of two.

    overlong: `data.overlong`, for separately packed documents.
    """
    tokens, offsets, labels = prepared.tokens(split), prepared.offsets(split), prepared.labels(split)
    parts: list[Packing] = []
    first_tokens, document = [], 0
    for part in prepared.manifest.parts.get(split) or [Counts(documents=len(offsets) - 1, tokens=len(tokens))]:
        first = int(offsets[document])
        offsets_of_part = offsets[document : document + part.documents + 1] - offsets[document]
        if packing == "join":
            packed = join(part.tokens, sequence_length)
        else:
            packed = pack_documents(offsets_of_part, sequence_length, overlong=treatment(prepared, overlong))
        parts.append(packed if labels is None else packed.with_targets(labels[first : first + part.tokens]))
        first_tokens.append(first)
        document += part.documents
    whole = parts[0] if len(parts) == 1 else concatenated(parts, first_tokens)
    of_source = tuple(map(len, parts))
    return Sequences(tokens, whole, sequence_length, prepared.manifest.end_token_id or 0, of_source, labels)


def _order(sequences: Sequences, weights: Sequence[float], seed: int) -> SampleOrder:
    """Sources of `data.validation_source` have no weights."""
    return SampleOrder(sequences.of_source, weights if len(sequences.of_source) > 1 else [1], seed)


def _empty(prepared: PreparedData, split: Split, source: int | None = None) -> str:
    counts = prepared.manifest.splits[split] if source is None else prepared.manifest.parts[split][source]
    if counts.tokens == 0 and split == "validation":
        return (
            "there is no validation data: data.validation_fraction = 0. Set it above 0, such as 0.05, or name a "
            "data.validation_source, to validate."
        )
    if prepared.manifest.examples is not None:
        return (
            f"the {split} split has {counts.documents:,} conversations or completions, but no trained token within a sequence: "
            "all are longer than data.sequence_length before their answers, or dropped (data.overlong). Raise "
            "data.sequence_length."
        )
    where = "" if source is None else f" of data.source {prepared.manifest.key['source'][source]!r}"
    if prepared.manifest.labels is not None and counts.tokens >= 2:
        return (
            f"the {split} split{where} has {counts.tokens} tokens in {counts.documents} documents, but no sequence with a "
            f"target: 'labels' are {IGNORED} (or 'loss_mask' 0) at all tokens but first ones. Mark the tokens to predict in "
            "the data."
        )
    return (
        f"the {split} split{where} has {counts.tokens} tokens in {counts.documents} documents, none with 2 tokens or more, so "
        'there is nothing to predict. Give longer documents, or set data.packing = "join".'
    )
