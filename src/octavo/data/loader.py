"""Batches for a rank, from the number of the next sample and nothing else.

Sample g of a run is sequence `permutation(seed, g // n)[g % n]` of the n sequences. So the whole state of the data is one
integer: a resumed run, on any number of ranks and with any micro-batch, sees the same samples in the same global batches. The
price is a permutation in memory, 8 bytes a sequence.

Sequences come from a memory map, so a batch costs a copy and is made when it is asked for; `octavo.data.prefetch` asks early
where the disk is slower than that. Batches may be asked for from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch

from octavo.data import rng
from octavo.data.manifest import Split
from octavo.data.packing import IGNORED, Arrays, Int64
from octavo.data.prepared import PreparedData
from octavo.errors import InputError
from octavo.parallel.mesh import fit_batch


class Batch(NamedTuple):
    """A micro-batch, int64 [B, T] each. Labels are not shifted: label t is token t, or -100 where nothing is predicted."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


class Loader:
    """Batches of one split for one rank of data parallelism.

    Args:
        prepared: the data.
        split: "train" or "validation".
        sequence_length: T.
        packing: "join" or "documents".
        seed: of the order of samples.
        global_batch: sequences in a step, over all ranks.
        micro_batch: sequences in a micro-batch of one rank; None: all of the rank's share.
        dp_rank, dp_size: which ranks see different samples, and which of them this is.

    Raises:
        InputError: the global batch does not divide by the ranks and the micro-batch, or the split is empty.
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
        self._sequences = prepared.sequences(split, sequence_length=sequence_length, packing=packing)
        if not len(self._sequences):
            raise InputError(_empty(prepared, split))
        self._seed = seed
        self.global_batch = global_batch
        self._rank = dp_rank
        self._ranks = dp_size
        self._orders: OrderedDict[int, Int64] = OrderedDict()
        self._ordering = threading.Lock()

    def step(self, first_sample: int) -> list[Batch]:
        """The micro-batches of this rank for the step whose global batch begins with this sample.

        Samples are counted from 0 over all epochs.
        """
        if first_sample < 0:
            raise ValueError(f"sample numbers start at 0, not {first_sample}")
        chosen, size = self._chosen(first_sample), self.micro_batch
        return [_tensors(self._sequences.batch(chosen[at : at + size])) for at in range(0, len(chosen), size)]

    def validation(self, batches: int) -> Iterator[Batch]:
        """The first `batches` micro-batches of the split, or all where there are fewer, in fixed order, no sequence twice.

        The number counts micro-batches over all ranks, so that any number of ranks validates on the same sequences. Every
        rank yields equally many batches; the last one may be smaller, and a rank that has no sequence left for it yields one
        whose labels are all -100, so that ranks that work together stay in step.
        """
        total = min(batches * self.micro_batch, len(self._sequences))
        for first in range(0, total, self.micro_batch * self._ranks):
            mine = first + self._rank * self.micro_batch
            if mine < total:
                yield _tensors(self._sequences.batch(range(mine, min(mine + self.micro_batch, total))))
            else:
                filler = self._sequences.batch([0])
                filler.labels.fill(IGNORED)
                yield _tensors(filler)

    def _chosen(self, first_sample: int) -> list[int]:
        """The sequences of this rank's share: a contiguous part of the global batch."""
        share = self.global_batch // self._ranks
        start = first_sample + self._rank * share
        chosen = []
        for sample in range(start, start + share):
            epoch, place = divmod(sample, len(self._sequences))
            chosen.append(int(self._order(epoch)[place]))
        return chosen

    def _order(self, epoch: int) -> Int64:
        with self._ordering:  # or another thread's epoch would push this one out between the lines
            if epoch not in self._orders:
                self._orders[epoch] = rng.generator(self._seed, epoch).permutation(len(self._sequences))
                if len(self._orders) > 2:  # a step lies in two epochs at most, unless epochs are tiny
                    self._orders.popitem(last=False)
            return self._orders[epoch]


def _tensors(arrays: Arrays) -> Batch:
    return Batch(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))


def _empty(prepared: PreparedData, split: Split) -> str:
    if prepared.token_counts[split] == 0 and split == "validation":
        return "there is no validation data: data.validation_fraction = 0. Set it above 0, such as 0.05, to validate."
    return (
        f"the {split} split has {prepared.token_counts[split]} tokens in {prepared.documents[split]} documents, none with 2 "
        'tokens or more, so there is nothing to predict. Give longer documents, or set data.packing = "join".'
    )
