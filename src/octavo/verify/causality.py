"""Checks causality: replaces tokens in an evaluation, and compares the bits of logits that must not change.

Tokens are replaced in turn: all from one position on; one sequence, then all others; the samples of every second data-parallel
rank; with documents, those of each sequence before its last document. Row counts of products stay the same, so rounding stays
the same. Experts are the exception: the rows of an expert's product are the tokens routed to it.

Not checked: forwards in training, which compute the same but set the next scales; padding, which follows all real tokens.
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
"""Approximate number of positions after which tokens are replaced, evenly spaced."""


class Change(NamedTuple):
    """others: the replaced tokens; stay: tokens whose logits must not change. Bool [B, T], of this rank's samples."""

    name: str
    others: Tensor
    stay: Tensor


def changes(batch: Batch, *, documents: bool) -> Iterator[Change]:
    """The changes of this rank's batch; equally many on every rank."""
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
    """By a change's name: the largest change of a logit that must not change, over the largest logit. Collective.

    The second element is that token's position in its sequence, the third the first position with a replaced token.

    Args:
        batch: this rank's samples.
        logits: evaluates token ids [B, T] → logits, float [B, T, words].
        documents: each sequence of the batch has a second document.
    """
    ids, by_name = batch.input_ids, dict[str, Tensor]()
    others, wanted = torch.where(ids == ids.max(), ids.min(), ids + 1), logits(ids)
    if (others == ids).any():
        raise ValueError("all samples have the same token: none can be replaced")
    size = wanted.abs().max().double()
    if state.world_size > 1:
        dist.all_reduce(size, dist.ReduceOp.MAX)
    for change in changes(batch, documents=documents):
        # NaN instead of a number is a change too.
        distance = (logits(torch.where(change.others, others, ids)) - wanted).abs().nan_to_num(torch.inf)
        of_tokens = distance.amax(-1).double().where(change.stay, 0.0)
        row, token = divmod(int(of_tokens.argmax()), ids.shape[1])
        # Changes in other sequences or on other ranks have no first position in this one.
        first = int(change.others[row].int().argmax()) if change.others[row].any() else -1
        largest = _of_all_ranks(torch.tensor([of_tokens[row, token] / size, token, first], dtype=torch.float64))
        if change.name not in by_name or largest[0] > by_name[change.name][0]:
            by_name[change.name] = largest
    return by_name


def _of_all_ranks(here: Tensor) -> Tensor:
    """The ranks' tensor with the largest first element. Collective."""
    if state.world_size == 1:
        return here
    every = [torch.empty_like(here) for _ in range(state.world_size)]
    dist.all_gather(every, here)
    return max(every, key=lambda each: each[0].item())
