"""One optimizer step: the order that every number in a run depends on.

The loss of a step is the sum over all real targets of the global batch divided by their number, whatever the ranks and the
micro-batches: the targets are counted before the first forward, so that each micro-batch is normalised by the same number and
the gradients simply add up, over ranks in the last micro-batch. FP8 weights are quantised in the first micro-batch and kept for
the others. The host waits for the device once a step, where loss and norm are read and checked, so that a step that went wrong
never reaches the weights. In float16 the loss is scaled for backward, and a step that overflows is skipped
(`octavo.train.loss_scale`).
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
from octavo.data.loader import Batch
from octavo.data.prefetch import Prefetcher
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import Recipe
from octavo.fp8.scaling import states_of
from octavo.parallel.fsdp import accumulate
from octavo.train.loss_scale import LossScale, forget_overflow, overflow_in_fp8
from octavo.train.nonfinite import first_nonfinite
from octavo.train.optimizer import check_finite, clip_grad_norm_, learning_rate, set_learning_rate
from octavo.watchdog.stopping import StopRequest
from octavo.watchdog.watchdog import Watch

IGNORED = -100


@dataclass(frozen=True)
class TrainContext:
    """What a step needs, all of it built.

    Attributes:
        recipe: of FP8, or None to train without.
        documents: whether positions restart within a sequence, so that the model must see them.
        steps: the last step, where the schedule ends.
        loss_scale: of float16; None where the model computes in another dtype.
        group: the ranks that see the other samples of a step, and how many they are; None for one rank.
        watch: is told the phase of the step.
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
    watch: Watch = field(default_factory=Watch)

    @property
    def ranks(self) -> int:
        """That see different samples."""
        return 1 if self.group is None else self.group.size()


@dataclass(frozen=True)
class StepResult:
    """What one step did: loss in nats a target, the gradient's norm before clipping and without the loss scale, and seconds.

    tokens are those of the global batch. loss_scale is what the step was computed with, None outside of float16; skipped: it
    overflowed and changed no weight; stopping: some rank was asked to stop.
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
"""Passes over the first samples from which histories begin. A cast has its scale once the casts behind it have theirs: two in a
branch of a block, and the gradient of the stream a pass later, since branches add to it; one more for longer branches."""


def begin_histories(run: TrainContext) -> None:
    """Let delayed scaling see the samples of the first step before that step; all ranks call it, before they draw a number.

    A history begins empty and its scale at 1, behind which gradients vanish: the first steps would train on what is left of
    them, and a model that starts from loaded weights would lose by it. Weights and optimizer stay as they are. Of a loss scale
    that overflows in float16 nothing is learnt.
    """
    by = [state.under(run.recipe) for _, state in states_of(run.model)]
    if all(recipe is None or recipe.history is None for recipe in by):
        return
    batches = run.loader.loader.step(0)  # not through what reads ahead, which is to begin with the first step
    targets = _global_targets(run, batches)
    accumulate(run.model, last=True)
    for _ in range(HISTORY_PASSES):
        loss = loss_of(run.model, batches[0], targets, recipe=run.recipe, device=run.device, documents=run.documents)
        (loss if run.loss_scale is None else loss * run.loss_scale.scale).backward()
        run.optimizer.zero_grad()
        if run.loss_scale is not None:
            forget_overflow(run.model)


def train_step(run: TrainContext, step: int, stop: StopRequest | None = None) -> StepResult:
    """Do optimizer step `step` (the first is 1); all ranks call it.

    Raises:
        OctavoError: the loss or the gradient is not finite, and no smaller loss scale would help; the weights were not changed.
    """
    started = time.perf_counter()
    run.watch.step(step)
    batches = run.loader.step((step - 1) * run.global_batch)
    data_seconds = time.perf_counter() - started
    run.watch.phase("forward")  # here the ranks wait for one whose data is late
    targets = _global_targets(run, batches)

    scale = 1.0 if run.loss_scale is None else run.loss_scale.scale
    total = torch.zeros((), device=run.device)
    for index, batch in enumerate(batches):
        accumulate(run.model, last=index == len(batches) - 1)
        run.watch.phase("forward")
        with microbatch(first=index == 0) if len(batches) > 1 else contextlib.nullcontext():
            loss = loss_of(run.model, batch, targets, recipe=run.recipe, device=run.device, documents=run.documents)
        run.watch.phase("backward")
        (loss if run.loss_scale is None else loss * scale).backward()
        total += loss.detach()

    run.watch.phase("optimizer")
    norm = clip_grad_norm_(run.model, run.config.clip, loss_scale=scale, optimizer=run.optimizer)
    hidden = overflow_in_fp8(run.model) if run.loss_scale is not None else None
    joined = torch.stack([total, total.new_tensor(float(stop is not None and stop.received is not None))])
    if run.group is not None:
        dist.all_reduce(joined, group=run.group)
    loss_value, stopping, norm_value = torch.cat([joined, (norm if hidden is None else norm + hidden)[None]]).tolist()
    skipped = _skips(run, step, loss_value, norm_value, partial(_locate, run, batches, targets))

    rate = learning_rate(step, run.config, run.steps)
    set_learning_rate(run.optimizer, rate)
    if not skipped:
        run.optimizer.step()
    run.optimizer.zero_grad()

    tokens = sum(batch.input_ids.numel() for batch in batches) * run.ranks
    return StepResult(
        loss_value,
        rate,
        norm_value,
        tokens,
        step_seconds=time.perf_counter() - started,
        data_seconds=data_seconds,
        loss_scale=None if run.loss_scale is None else scale,
        skipped=skipped,
        stopping=stopping > 0,
    )


def _global_targets(run: TrainContext, batches: Sequence[Batch]) -> int | torch.Tensor:
    """Real targets of the global batch, at least 1; nothing waits for the device."""
    own = sum(count_targets(batch.labels) for batch in batches)
    if run.group is None:
        return max(1, own)
    total = torch.tensor(own, device=run.device)
    dist.all_reduce(total, group=run.group)
    return total.clamp(min=1)


def _skips(run: TrainContext, step: int, loss: float, norm: float, locate: Callable[[], str | None]) -> bool:
    """Whether the step must leave the weights alone; raises where that would not help either."""
    if run.loss_scale is None:
        check_finite(run.model, step, loss, norm, locate=locate)
        return False
    if run.loss_scale.update(loss, norm):
        forget_overflow(run.model)
        return True
    check_finite(run.model, step, loss, norm, advice=run.loss_scale.advice, locate=locate)
    return False


def _locate(run: TrainContext, batches: Sequence[Batch], targets: int | torch.Tensor) -> str | None:
    """Where the forwards of these micro-batches stop being finite."""
    how: dict[str, Any] = {"recipe": run.recipe, "device": run.device, "documents": run.documents}
    return first_nonfinite(run.model, [partial(loss_of, run.model, batch, targets, **how) for batch in batches])


def loss_of(
    model: nn.Module, batch: Batch, targets: int | torch.Tensor, *, recipe: Recipe | None, device: torch.device, documents: bool
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
