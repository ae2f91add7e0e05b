"""Batches for a rank, from the number of the next sample and nothing else.

Sample g of a run is sequence `permutation(seed, g // n)[g % n]` of the n sequences. So the whole state of the data is one
integer: a resumed run, on any number of ranks and with any micro-batch, sees the same samples in the same global batches. The
price is a permutation in memory, 8 bytes a sequence.

Sequences come from a memory map, so a batch costs a copy. With `num_workers` threads the next steps are made ready during the
current one; threads rather than processes, since there is nothing to compute and so nothing to pay a fork and a pickle for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
import torch

from octavo.data import draw
from octavo.data.manifest import Split
from octavo.data.packing import IGNORED, Arrays, Int64
from octavo.data.prepared import PreparedData
from octavo.errors import InputError


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
        num_workers: threads, each of which makes one step ready ahead; 0 makes batches when they are asked for.

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
        num_workers: int = 0,
    ) -> None:
        self.micro_batch = _micro_batch(global_batch, micro_batch, dp_size)
        self._sequences = prepared.sequences(split, sequence_length=sequence_length, packing=packing)
        if not len(self._sequences):
            raise InputError(_empty(prepared, split))
        self._seed = seed
        self._global_batch = global_batch
        self._rank = dp_rank
        self._ranks = dp_size
        self._orders: OrderedDict[int, Int64] = OrderedDict()
        self._ahead: dict[int, Future[list[Batch]]] = {}
        self._workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="octavo-loader") if num_workers else None

    @property
    def samples_per_epoch(self) -> int:
        """Sequences in the split."""
        return len(self._sequences)

    @property
    def padding(self) -> float:
        """The share of positions that hold padding, 0 to 1."""
        return self._sequences.padding

    def step(self, first_sample: int) -> list[Batch]:
        """The micro-batches of this rank for the step whose global batch begins with this sample.

        Samples are counted from 0 over all epochs. The next step is expected to begin `global_batch` later; another number
        only costs what was made ready.
        """
        if first_sample < 0:
            raise ValueError(f"sample numbers start at 0, not {first_sample}")
        if self._threads is None:
            return self._assemble(self._chosen(first_sample))
        ready = self._ahead.pop(first_sample, None)
        coming = [first_sample + self._global_batch * (step + 1) for step in range(self._workers)]
        for number in [number for number in self._ahead if number not in coming]:
            self._ahead.pop(number).cancel()
        for number in coming:
            if number not in self._ahead:  # the order is looked up here, in one thread
                self._ahead[number] = self._threads.submit(self._assemble, self._chosen(number))
        return ready.result() if ready is not None else self._assemble(self._chosen(first_sample))

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

    def close(self) -> None:
        """Stop the threads; batches that were made ready are dropped. The loader cannot be used afterwards if it had any."""
        self._ahead.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chosen(self, first_sample: int) -> list[int]:
        """The sequences of this rank's share: a contiguous part of the global batch."""
        share = self._global_batch // self._ranks
        start = first_sample + self._rank * share
        chosen = []
        for sample in range(start, start + share):
            epoch, place = divmod(sample, len(self._sequences))
            chosen.append(int(self._order(epoch)[place]))
        return chosen

    def _order(self, epoch: int) -> Int64:
        if epoch not in self._orders:
            self._orders[epoch] = draw.generator(self._seed, epoch).permutation(len(self._sequences))
            if len(self._orders) > 2:  # a step and those made ready lie in two epochs, unless epochs are tiny
                self._orders.popitem(last=False)
        return self._orders[epoch]

    def _assemble(self, chosen: Sequence[int]) -> list[Batch]:
        size = self.micro_batch
        return [_tensors(self._sequences.batch(chosen[at : at + size])) for at in range(0, len(chosen), size)]


def _tensors(arrays: Arrays) -> Batch:
    return Batch(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))


def _micro_batch(global_batch: int, micro_batch: int | None, dp_size: int) -> int:
    share, rest = divmod(global_batch, dp_size)
    if rest or share == 0:
        works = max(round(global_batch / dp_size), 1) * dp_size
        raise InputError(
            f"train.global_batch = {global_batch} does not divide among {dp_size} data-parallel ranks: use {works}, or "
            "another number of ranks."
        )
    size = share if micro_batch is None else micro_batch
    if share % size:
        divisors = [number for number in range(1, share + 1) if share % number == 0]
        works = min(divisors, key=lambda number: (abs(number - size), number))
        raise InputError(
            f"train.micro_batch = {size} does not divide a rank's share of {share} sequences (train.global_batch = "
            f"{global_batch} over {dp_size} ranks): use {works}."
        )
    return size


def _empty(prepared: PreparedData, split: Split) -> str:
    if prepared.token_counts[split] == 0 and split == "validation":
        return "there is no validation data: data.validation_fraction = 0. Set it above 0, such as 0.05, to validate."
    return (
        f"the {split} split has {prepared.token_counts[split]} tokens in {prepared.documents[split]} documents, none with 2 "
        'tokens or more, so there is nothing to predict. Give longer documents, or set data.packing = "join".'
    )
