"""Validation loss, and samples of generated text.

The model runs in evaluation mode without gradients, in FP8 with unchanged scales: no amax is recorded and no random number
drawn, so that a run with validation has the same losses as one without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.data.packing import Batch
from octavo.errors import InputError, OctavoError, warn
from octavo.parallel.world import state
from octavo.run.sample import sample_text
from octavo.train.step import TrainContext, count_targets, loss_of


@torch.no_grad()
def validation_loss(context: TrainContext, batches: Sequence[Batch]) -> float:
    """Mean loss over all targets of the `batches` of all ranks, in nats; NaN without targets."""
    device, model = context.plan.device, context.model
    own = sum(count_targets(batch.labels) for batch in batches)
    targets = int(context.all_reduce(torch.tensor(own, device=device)))
    if targets == 0:
        return math.nan
    total = torch.zeros((), device=device)
    training = model.training
    model.eval()
    try:
        for batch in batches:
            context.watch.phase("validation")
            total += loss_of(context, batch, targets)
    finally:
        model.train(training)
    return context.all_reduce(total).item()


def perplexity(loss: float) -> float:
    """exp(loss); infinite beyond a float's range."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def sample_of(context: TrainContext, tokenizer: Path | None) -> str | None:
    """A prompt with its continuation by the model; None without a tokenizer, or if it cannot be made. All ranks call it."""
    train = context.plan.config.train
    if tokenizer is None or not train.sample_tokens:
        return None
    context.watch.phase("validation")
    try:
        return sample_text(context.model, tokenizer, train.sample_prompt, tokens=train.sample_tokens, seed=train.seed)
    except (InputError, OctavoError) as error:
        if state.rank == 0:
            warn(f"no sample of text: {error}")
        return None
