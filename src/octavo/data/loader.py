"""Batches of a rank, as a function of the number of the next sample.

Sample g of a run is sequence `permutation(seed, g // n)[g % n]` of the n sequences. So the state of the data is one integer: a
resumed run, on any number of ranks and with any micro-batch, sees the same samples in the same global batches. The price is a
permutation in memory, 8 bytes a sequence.

Sequences are copied from a memory map on request; `octavo.data.prefetch` requests them early, in several threads, which share
one permutation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Literal

from octavo.data import rng
from octavo.data.manifest import Split
from octavo.data.packing import IGNORED, Batch, Int64, Sequences, join, pack_documents
from octavo.data.prepared import PreparedData
from octavo.errors import InputError, OctavoError
from octavo.parallel.mesh import fit_batch


class BatchLoader:
    """Batches of one split for one rank of data parallelism.

    Args:
        sequence_length: T.
        seed: seed of the order of samples.
        global_batch: sequences in a step, over all ranks.
        micro_batch: sequences in a micro-batch of one rank; None: the rank's whole share.
        dp_rank, dp_size: rank and size of the data-parallel group.

    Raises:
        InputError: ranks × micro-batch does not divide the global batch, or the split is empty.
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
    ) -> None:
        self.micro_batch, _ = fit_batch(global_batch, micro_batch, dp_size)
        self._sequences = sequences_of(prepared, split, sequence_length=sequence_length, packing=packing)
        if not len(self._sequences):
            raise InputError(_empty(prepared, split))
        self._prepared = prepared
        self._split: Split = split
        self.global_batch = global_batch
        self._rank = dp_rank
        self._ranks = dp_size
        # A step spans two epochs at most, unless epochs are tiny.
        self._order = lru_cache(maxsize=2)(partial(_permutation, seed, len(self._sequences)))
        self._ordering = threading.Lock()

    def step(self, first_sample: int) -> list[Batch]:
        """This rank's micro-batches, a contiguous part of the global batch that begins at `first_sample`.

        Samples are counted from 0 over all epochs.
        """
        if first_sample < 0:
            raise ValueError(f"sample numbers start at 0, not {first_sample}")
        share = self.global_batch // self._ranks
        size = self.micro_batch
        start = first_sample + self._rank * share
        places = (divmod(sample, len(self._sequences)) for sample in range(start, start + share))
        with self._ordering:  # one thread computes the order of an epoch, the others wait for it
            indices = [int(self._order(epoch)[position]) for epoch, position in places]
        return [self._batch(indices[at : at + size]) for at in range(0, share, size)]

    def validation(self, batches: int) -> Iterator[Batch]:
        """This rank's part of the first `batches` micro-batches of the split, in fixed order, each sequence once.

        `batches` counts over all ranks: any number of ranks validates on the same sequences. Every rank yields equally many
        batches, since ranks run collectives together: the last may be smaller, and a rank without a sequence for it yields a
        batch of IGNORED labels.
        """
        total = min(batches * self.micro_batch, len(self._sequences))
        for first in range(0, total, self.micro_batch * self._ranks):
            mine = first + self._rank * self.micro_batch
            batch = self._batch(range(mine, min(mine + self.micro_batch, total)) or [0])
            if mine >= total:
                batch.labels.fill_(IGNORED)
            yield batch

    def _batch(self, indices: Sequence[int]) -> Batch:
        """Sequences of known token ids; of others a GPU would read beyond the embedding."""
        batch = self._sequences.batch(indices)
        largest, known = int(batch.input_ids.max()), self._prepared.manifest.max_token_id
        if largest > known:
            raise OctavoError(
                f"the {self._split} split has the token id {largest}, and {known} was the largest when it was prepared: "
                f"{str(self._prepared.folder)!r} has changed. Remove that folder, and `octavo prepare` makes it again."
            )
        return batch


def sequences_of(
    prepared: PreparedData, split: Split, *, sequence_length: int, packing: Literal["join", "documents"]
) -> Sequences:
    """The sequences of a split, by number."""
    tokens, offsets = prepared.tokens(split), prepared.offsets(split)
    pieces = join(len(tokens), sequence_length) if packing == "join" else pack_documents(offsets, sequence_length)
    return Sequences(tokens, pieces, sequence_length, pad_id=prepared.manifest.end_token_id or 0)


def _permutation(seed: int, sequences: int, epoch: int) -> Int64:
    return rng.generator(seed, epoch).permutation(sequences)


def _empty(prepared: PreparedData, split: Split) -> str:
    counts = prepared.manifest.splits[split]
    if counts.tokens == 0 and split == "validation":
        return "there is no validation data: data.validation_fraction = 0. Set it above 0, such as 0.05, to validate."
    return (
        f"the {split} split has {counts.tokens} tokens in {counts.documents} documents, none with 2 tokens or more, so there "
        'is nothing to predict. Give longer documents, or set data.packing = "join".'
    )
