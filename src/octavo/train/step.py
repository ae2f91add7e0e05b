"""One optimizer step; the order of operations here decides every number of a run.

The loss of a step is the sum over all targets of the global batch divided by their number, for any number of ranks and
micro-batches: targets are counted before the first forward, each micro-batch is divided by the same count, and gradients are
summed, over ranks in the last micro-batch. FP8 weights are quantised in the first micro-batch and reused in the others. The
host waits for the device once a step, to check loss and norm before the optimizer changes the weights. In float16 the loss is
scaled for backward, and a step that overflows is skipped (`octavo.train.loss_scale`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octavo.config.optimizer import OptimizerConfig
from octavo.data.packing import IGNORED, Batch
from octavo.data.prefetch import Prefetcher
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import Recipe
from octavo.fp8.scaling import states_of
from octavo.parallel.fsdp import accumulate
from octavo.train.loss_scale import LossScale, forget_overflow, overflow_in_fp8
from octavo.train.nonfinite import first_nonfinite
from octavo.train.optimizer import check_finite, clip_grad_norm_, learning_rate, set_learning_rate
from octavo.watchdog.stopping import StopRequest
from octavo.watchdog.watchdog import Watchdog


@dataclass(frozen=True)
class TrainContext:
    """Arguments of a step: model, optimizer, data and settings.

    Attributes:
        recipe: FP8 recipe; None without FP8.
        documents: whether position ids restart within a sequence and are passed to the model.
        steps: the last step, where the schedule ends.
        loss_scale: loss scale of float16; None for other dtypes.
        group: the data-parallel group; None for one rank.
        watch: watchdog; each phase of a step is reported to it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Prefetcher
    recipe: Recipe | None
    device: torch.device
    documents: bool
    global_batch: int
    steps: int
    config: OptimizerConfig
    loss_scale: LossScale | None = None
    group: dist.ProcessGroup | None = None
    watch: Watchdog = field(default_factory=Watchdog)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return 1 if self.group is None else self.group.size()


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        loss: in nats a target.
        grad_norm: before clipping and without the loss scale.
        tokens: of the global batch.
        loss_scale: used by this step; None outside float16.
        skipped: the step overflowed and changed no weight.
        stopping: some rank received a signal.
    """

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    step_seconds: float
    data_seconds: float
    loss_scale: float | None = None
    skipped: bool = False
    stopping: bool = False


HISTORY_PASSES = 4
"""Passes over the first samples that fill amax histories. The scale of a cast is right one pass after the casts behind it in
backward: two passes within a branch of a block, one for the residual stream, and one more for longer branches."""


def begin_histories(context: TrainContext) -> None:
    """Fill the amax histories of delayed scaling from the samples of the first step; all ranks call it, before any random draw.

    A scale starts at 1, at which gradients vanish in E5M2: the first steps would train on little, and pretrained weights would
    suffer. Weights and optimizer do not change. In float16, infinite amaxes of an overflow are dropped.
    """
    recipes = [state.under(context.recipe) for _, state in states_of(context.model)]
    if all(recipe is None or recipe.history is None for recipe in recipes):
        return
    batches = context.loader.loader.step(0)  # past the prefetcher, which starts with the first step
    targets = _global_targets(context, batches)
    accumulate(context.model, last=True)
    for _ in range(HISTORY_PASSES):
        loss = loss_of(
            context.model, batches[0], targets, recipe=context.recipe, device=context.device, documents=context.documents
        )
        (loss if context.loss_scale is None else loss * context.loss_scale.scale).backward()
        context.optimizer.zero_grad()
        if context.loss_scale is not None:
            forget_overflow(context.model)


def train_step(context: TrainContext, step: int, stop: StopRequest | None = None) -> StepResult:
    """Do optimizer step `step` (the first is 1); all ranks call it.

    Raises:
        OctavoError: loss or gradient is not finite, and a smaller loss scale would not help; the weights are unchanged.
    """
    started = time.perf_counter()
    context.watch.step(step)
    batches = context.loader.step((step - 1) * context.global_batch)
    data_seconds = time.perf_counter() - started
    context.watch.phase("forward")  # ranks wait here for a rank with slow data
    targets = _global_targets(context, batches)

    scale = 1.0 if context.loss_scale is None else context.loss_scale.scale
    total = torch.zeros((), device=context.device)
    for index, batch in enumerate(batches):
        accumulate(context.model, last=index == len(batches) - 1)
        context.watch.phase("forward")
        with microbatch(first=index == 0) if len(batches) > 1 else contextlib.nullcontext():
            loss = loss_of(
                context.model, batch, targets, recipe=context.recipe, device=context.device, documents=context.documents
            )
        context.watch.phase("backward")
        (loss if context.loss_scale is None else loss * scale).backward()
        total += loss.detach()

    context.watch.phase("optimizer")
    norm = clip_grad_norm_(context.model, context.config.clip, loss_scale=scale, optimizer=context.optimizer)
    overflow = overflow_in_fp8(context.model) if context.loss_scale is not None else None
    joined = torch.stack([total, total.new_tensor(float(stop is not None and stop.received is not None))])
    if context.group is not None:
        dist.all_reduce(joined, group=context.group)
    loss_value, stopping, norm_value = torch.cat([joined, (norm if overflow is None else norm + overflow)[None]]).tolist()
    skipped = _skips(context, step, loss_value, norm_value, partial(_locate, context, batches, targets))

    rate = learning_rate(step, context.config, context.steps)
    set_learning_rate(context.optimizer, rate)
    if not skipped:
        context.optimizer.step()
    context.optimizer.zero_grad()

    tokens = sum(batch.input_ids.numel() for batch in batches) * context.ranks
    return StepResult(
        loss_value,
        rate,
        norm_value,
        tokens,
        step_seconds=time.perf_counter() - started,
        data_seconds=data_seconds,
        loss_scale=None if context.loss_scale is None else scale,
        skipped=skipped,
        stopping=stopping > 0,
    )


def _global_targets(context: TrainContext, batches: Sequence[Batch]) -> int | torch.Tensor:
    """Targets of the global batch, at least 1; without waiting for the device."""
    own = sum(count_targets(batch.labels) for batch in batches)
    if context.group is None:
        return max(1, own)
    total = torch.tensor(own, device=context.device)
    dist.all_reduce(total, group=context.group)
    return total.clamp(min=1)


def _skips(context: TrainContext, step: int, loss: float, norm: float, locate: Callable[[], str | None]) -> bool:
    """Whether to skip the step for an overflow; raises where skipping would not help."""
    if context.loss_scale is None:
        check_finite(context.model, step, loss, norm, locate=locate)
        return False
    if context.loss_scale.update(loss, norm):
        forget_overflow(context.model)
        return True
    check_finite(context.model, step, loss, norm, advice=context.loss_scale.advice, locate=locate)
    return False


def _locate(context: TrainContext, batches: Sequence[Batch], targets: int | torch.Tensor) -> str | None:
    """Repeat the forwards of these micro-batches and name the first module with an output that is not finite."""
    how: dict[str, Any] = {"recipe": context.recipe, "device": context.device, "documents": context.documents}
    return first_nonfinite(context.model, [partial(loss_of, context.model, batch, targets, **how) for batch in batches])


def loss_of(
    model: nn.Module, batch: Batch, targets: int | torch.Tensor, *, recipe: Recipe | None, device: torch.device, documents: bool
) -> torch.Tensor:
    """Sum of the batch's losses divided by `targets`: a float32 scalar on the device."""
    # emulate=True: the plan has decided whether this device runs FP8 or emulates it.
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
    """Targets in labels [B, T]: all but the first of each sequence and those that are IGNORED."""
    return int((labels[:, 1:] != IGNORED).sum())
