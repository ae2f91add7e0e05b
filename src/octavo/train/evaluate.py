"""Validation loss, and samples of generated text.

The model runs in evaluation mode without gradients, in FP8 with unchanged scales. No amax is recorded and no random number
drawn, so a run with validation has the same losses as one without.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from octavo.data.packing import Batch
from octavo.errors import OctavoError, warn
from octavo.models.decoder import Decoder
from octavo.parallel.world import state
from octavo.run.sample import evaluating, sample_text
from octavo.train.step import TrainContext, count_targets, loss_of


@dataclass
class BestValidation:
    """The best value so far of a figure, by default `validation_loss`, and the number of validations since."""

    step: int = 0
    loss: float = math.inf
    since: int = 0
    key: str = "validation_loss"
    lowest: bool = True

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], key: str = "validation_loss", *, lowest: bool = True) -> BestValidation:
        """From the lines of metrics.jsonl. lowest: the lowest value is the best one."""
        best = cls(loss=math.inf if lowest else -math.inf, key=key, lowest=lowest)
        for record in records:
            if record.get(key) is not None:
                best.add(record["step"], record[key])
        return best

    @property
    def named(self) -> str:
        """The figure in words, such as "lowest validation loss"."""
        loss = self.key.replace("validation_loss/", "validation loss of ").replace("validation_loss", "validation loss")
        return f"{'lowest' if self.lowest else 'highest'} {loss}"

    def add(self, step: int, value: float) -> None:
        """Count a validation; NaN is never better."""
        if value < self.loss if self.lowest else value > self.loss:
            self.step, self.loss, self.since = step, value, 0
        else:
            self.since += 1


class Validation(NamedTuple):
    """Result of a validation, in nats per target."""

    loss: float  # with router losses
    cross_entropy: float


@torch.no_grad()
def validate(context: TrainContext, batches: Sequence[Batch]) -> Validation:
    """Mean loss over all targets of the `batches` of all ranks; NaN without targets.

    Router losses are computed over all tokens together, so they do not depend on micro-batch and number of ranks.
    """
    device, model = context.plan.device, context.model
    own = sum(count_targets(batch.labels) for batch in batches)
    targets = int(context.all_reduce(torch.tensor(own, device=device)))
    if targets == 0:
        return Validation(math.nan, math.nan)
    total = torch.zeros((), dtype=torch.float32, device=device)
    with evaluating(model), _router_losses_apart(model):
        for batch in batches:
            context.watch.phase("validation")
            total += loss_of(context, batch, targets)
        routers = _router_losses(context)
    cross_entropy = context.all_reduce(total).item()
    return Validation(cross_entropy + routers, cross_entropy)


@contextlib.contextmanager
def _router_losses_apart(model: nn.Module) -> Iterator[None]:
    if not isinstance(model, Decoder):
        yield
        return
    model.router_losses_apart = True
    try:
        yield
    finally:
        model.router_losses_apart = False
        model.take_routing()


def _router_losses(context: TrainContext) -> float:
    """Router losses, times their coefficients, in the forwards of all ranks since the last call."""
    model = context.model
    routed = model.take_routing() if isinstance(model, Decoder) else None
    if routed is None or not isinstance(model, Decoder):
        return 0.0
    routing = routed[0].double()
    if context.world_group is not None:
        dist.all_reduce(routing, group=context.world_group)
    losses = model.weighted_router_losses(routing)
    return 0.0 if losses is None else losses.item()


def perplexity(cross_entropy: float) -> float:
    """exp(cross_entropy); infinite beyond a float's range."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf


def sample_of(context: TrainContext, tokenizer: Path | None) -> str | None:
    """A prompt with the model's continuation; None without a tokenizer, or if sampling failed. All ranks call it."""
    train = context.plan.config.train
    if tokenizer is None or not train.sample_tokens:
        return None
    context.watch.phase("validation")
    try:
        return sample_text(context.model, tokenizer, train.sample_prompt, tokens=train.sample_tokens, seed=train.seed)
    except OctavoError as error:
        if state.rank == 0:
            warn(f"no sample of text: {error}")
        return None
