"""Loss on held-out text.

The model runs as it trains (FP8 included, with the scales as they are) but in evaluation mode and without gradients, so
nothing is recorded, nothing is drawn from the random generators, and a run that validates has the same losses as one that
does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from octavo.data.loader import Batch
from octavo.train.step import TrainContext, count_targets, loss_of


@torch.no_grad()
def validation_loss(run: TrainContext, batches: Sequence[Batch]) -> float:
    """Mean loss over all real targets of the ranks' `batches`, in nats; NaN if there are none."""
    targets = sum(count_targets(batch.labels) for batch in batches)
    if run.group is not None:
        counted = torch.tensor(targets, device=run.device)
        dist.all_reduce(counted, group=run.group)
        targets = int(counted)
    if targets == 0:
        return math.nan
    total = torch.zeros((), device=run.device)
    training = run.model.training
    run.model.eval()
    try:
        for batch in batches:
            run.watch.phase("validation")
            total += loss_of(run.model, batch, targets, recipe=run.recipe, device=run.device, documents=run.documents)
    finally:
        run.model.train(training)
    if run.group is not None:
        dist.all_reduce(total, group=run.group)
    return total.item()


def perplexity(loss: float) -> float:
    """exp(loss); infinite where a float has no room for it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
