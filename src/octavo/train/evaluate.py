"""Loss on held-out text.

The model runs as it trains (FP8 included, with the scales as they are) but in evaluation mode and without gradients, so
nothing is recorded, nothing is drawn from the random generators, and a run that validates has the same losses as one that
does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from octavo.data.loader import Batch
from octavo.train.step import Stepper, count_targets, loss_of


@torch.no_grad()
def validation_loss(run: Stepper, batches: Sequence[Batch]) -> float:
    """Mean loss over all real targets of `batches`, in nats; NaN if there are none."""
    targets = sum(count_targets(batch.labels) for batch in batches)
    if targets == 0:
        return math.nan
    total = torch.zeros((), device=run.device)
    training = run.model.training
    run.model.eval()
    try:
        for batch in batches:
            total += loss_of(run.model, batch, targets, recipe=run.recipe, device=run.device, documents=run.documents)
    finally:
        run.model.train(training)
    return total.item()


def perplexity(loss: float) -> float:
    """exp(loss); infinite where a float has no room for it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
