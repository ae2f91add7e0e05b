"""Validation loss.

The model runs in evaluation mode without gradients, in FP8 with unchanged scales: no amax is recorded and no random number
drawn, so that a run with validation has the same losses as one without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from octavo.data.packing import Batch
from octavo.train.step import TrainContext, count_targets, loss_of


@torch.no_grad()
def validation_loss(context: TrainContext, batches: Sequence[Batch]) -> float:
    """Mean loss over all targets of the `batches` of all ranks, in nats; NaN without targets."""
    targets = sum(count_targets(batch.labels) for batch in batches)
    if context.group is not None:
        counted = torch.tensor(targets, device=context.device)
        dist.all_reduce(counted, group=context.group)
        targets = int(counted)
    if targets == 0:
        return math.nan
    total = torch.zeros((), device=context.device)
    training = context.model.training
    context.model.eval()
    try:
        for batch in batches:
            context.watch.phase("validation")
            total += loss_of(
                context.model, batch, targets, recipe=context.recipe, device=context.device, documents=context.documents
            )
    finally:
        context.model.train(training)
    if context.group is not None:
        dist.all_reduce(total, group=context.group)
    return total.item()


def perplexity(loss: float) -> float:
    """exp(loss); infinite beyond a float's range."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
