"""One optimizer step: the order that every number in a run depends on.

The loss of a step is the sum over all real targets of the global batch divided by their number, whatever the micro-batches:
the targets are counted before the first forward, so that each micro-batch is normalised by the same number and the
gradients simply add up. FP8 weights are quantised in the first micro-batch and reused by the others. The host waits for the
device once a step, where loss and norm are read and checked, so that a step that went wrong never reaches the weights.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch
from torch import nn

from octavo.config import OptimizerConfig
from octavo.data.loader import Batch, Loader
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import Recipe
from octavo.train.optimizer import check_finite, clip_grad_norm_, learning_rate, set_learning_rate

IGNORED = -100


@dataclass(frozen=True)
class Stepper:
    """What a step needs, all of it built.

    Attributes:
        recipe: of FP8, or None to train without.
        documents: whether positions restart within a sequence, so that the model must see them.
        steps: the last step, where the schedule ends.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Loader
    recipe: Recipe | None
    device: torch.device
    documents: bool
    global_batch: int
    steps: int
    config: OptimizerConfig


@dataclass(frozen=True)
class StepResult:
    """What one step did: loss in nats a target, the gradient's norm before clipping, and seconds."""

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    step_seconds: float
    data_seconds: float


def train_step(run: Stepper, step: int) -> StepResult:
    """Do optimizer step `step` (the first is 1).

    Raises:
        OctavoError: the loss or the gradient is not finite; the weights were not changed.
    """
    started = time.perf_counter()
    batches = run.loader.step((step - 1) * run.global_batch)
    targets = max(1, sum(count_targets(batch.labels) for batch in batches))
    data_seconds = time.perf_counter() - started

    total = torch.zeros((), device=run.device)
    for index, batch in enumerate(batches):
        with microbatch(first=index == 0) if len(batches) > 1 else contextlib.nullcontext():
            loss = loss_of(run.model, batch, targets, recipe=run.recipe, device=run.device, documents=run.documents)
        loss.backward()
        total += loss.detach()

    norm = clip_grad_norm_(run.model, run.config.clip)
    loss_value, norm_value = torch.stack([total, norm]).tolist()
    check_finite(run.model, step, loss_value, norm_value)

    rate = learning_rate(step, run.config, run.steps)
    set_learning_rate(run.optimizer, rate)
    run.optimizer.step()
    run.optimizer.zero_grad()

    tokens = sum(batch.input_ids.numel() for batch in batches)
    return StepResult(loss_value, rate, norm_value, tokens, time.perf_counter() - started, data_seconds)


def loss_of(
    model: nn.Module, batch: Batch, targets: int, *, recipe: Recipe | None, device: torch.device, documents: bool
) -> torch.Tensor:
    """Sum of the batch's losses over `targets`: a float32 scalar on the device."""
    # Whether this device runs FP8, or emulates it, was decided and said when the run was checked.
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, emulate=True):
        output = model(
            input_ids=batch.input_ids.to(device, non_blocking=True),
            position_ids=batch.position_ids.to(device, non_blocking=True) if documents else None,
            labels=batch.labels.to(device, non_blocking=True),
            num_items_in_batch=targets,
        )
    loss: torch.Tensor = output.loss
    return loss


def count_targets(labels: torch.Tensor) -> int:
    """Real targets of labels [B, T]: token t predicts token t + 1, so the first is no target, nor is any −100."""
    return int((labels[:, 1:] != IGNORED).sum())
