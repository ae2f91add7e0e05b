"""The tokens on which logits depend: evaluations with other tokens, and the bits of the logits that they may not change.

Replaced are, in turn: all tokens from a place on; one sequence, then all but that one; the samples of every second
data-parallel rank; with documents, those of each sequence before its last. Row counts of products stay the same, so that no
rounding differs. Experts are the exception: the rows of an expert's product are the tokens that chose it.

Left out: forwards in training, which compute the same but set scales for the next; padding, which follows all real tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.data.packing import Batch
from octavo.parallel.world import state

_PLACES = 32
"""About the number of places from which on later tokens are replaced, in even steps."""


class Change(NamedTuple):
    """`others`: tokens that are replaced; `stay`: tokens whose logits must not change. Bool [B, T] of this rank's samples."""

    name: str
    others: Tensor
    stay: Tensor


def changes(batch: Batch, *, documents: bool) -> Iterator[Change]:
    """The changes of a batch of this rank; as many on every rank."""
    rows, tokens = batch.input_ids.shape
    places, every = torch.arange(tokens).expand(rows, tokens), torch.ones(rows, tokens, dtype=torch.bool)
    for first in range(1, tokens, max(1, tokens // _PLACES)):
        yield Change("later tokens", places >= first, places < first)
    row = (torch.arange(rows) == 0)[:, None].expand(rows, tokens)
    for others in (row, ~row):
        yield Change("other sequences", others, ~others)
    if state.dp_size > 1:
        for odd in (0, 1):
            others = every if state.dp_rank % 2 == odd else ~every
            yield Change("samples of other ranks", others, ~others)
    if documents:
        last = ((batch.position_ids == 0) & (places > 0)).cumsum(-1) > 0
        yield Change("the document before", ~last, last)


def changed(batch: Batch, logits: Callable[[Tensor], Tensor], *, documents: bool) -> dict[str, Tensor]:
    """By the name of a change: the largest change of a logit that stays, over the largest logit. Collective.

    A second element is the place of that token in its sequence, a third the first place whose token is another.

    Args:
        batch: this rank's samples.
        logits: those of token ids [B, T] in an evaluation, float [B, T, words].
        documents: the batch has a second document in each sequence.
    """
    ids, found = batch.input_ids, dict[str, Tensor]()
    others, wanted = torch.where(ids == ids.max(), ids.min(), ids + 1), logits(ids)
    if (others == ids).any():
        raise ValueError("samples of one word alone: no token can be another")
    size = wanted.abs().max().double()
    if state.world_size > 1:
        dist.all_reduce(size, dist.ReduceOp.MAX)
    for change in changes(batch, documents=documents):
        # NaN in place of a number is a change too.
        distance = (logits(torch.where(change.others, others, ids)) - wanted).abs().nan_to_num(torch.inf)
        of_tokens = distance.amax(-1).double().where(change.stay, 0.0)
        row, token = divmod(int(of_tokens.argmax()), ids.shape[1])
        # A change in another sequence, or on another rank, begins nowhere in this one.
        first = int(change.others[row].int().argmax()) if change.others[row].any() else -1
        largest = _of_all_ranks(torch.tensor([of_tokens[row, token] / size, token, first], dtype=torch.float64))
        if change.name not in found or largest[0] > found[change.name][0]:
            found[change.name] = largest
    return found


def _of_all_ranks(here: Tensor) -> Tensor:
    """The one with the largest first element."""
    if state.world_size == 1:
        return here
    every = [torch.empty_like(here) for _ in range(state.world_size)]
    dist.all_gather(every, here)
    return max(every, key=lambda each: each[0].item())
