"""One optimizer step; the order of its operations determines every number of a run.

The loss of a step is the sum over all targets of the global batch divided by their number, for any number of ranks and
micro-batches: targets are counted before the first forward, and gradients are summed over ranks in the last micro-batch. FP8
weights are quantised in the first micro-batch and reused in the others. The host waits for the device once a step, to check
loss and norm before the weights change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octavo.data.packing import IGNORED, Batch
from octavo.data.prefetch import Prefetcher
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.models.decoder import Decoder
from octavo.nn.moe import routing_metrics
from octavo.parallel.fsdp import accumulate
from octavo.parallel.world import state
from octavo.plan.precision import PrecisionSchedule
from octavo.plan.run import RunPlan
from octavo.train.graph import StepGraph
from octavo.train.loss_scale import LossScale, forget_overflow, overflow_in_fp8
from octavo.train.nonfinite import check_finite
from octavo.train.optimizer import clip_grad_norm_, learning_rate, set_rates
from octavo.watchdog.stopping import StopRequest
from octavo.watchdog.watchdog import Watchdog


@dataclass(frozen=True)
class TrainContext:
    """A run's plan with its model, optimizer and data."""

    plan: RunPlan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Prefetcher
    loss_scale: LossScale | None  # None outside float16
    group: dist.ProcessGroup | None  # data-parallel ranks; None for one rank
    world_group: dist.ProcessGroup | None  # all ranks
    watch: Watchdog
    precision: PrecisionSchedule | None = None
    graph: StepGraph | None = None  # of train.graph, on one rank only

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the data-parallel ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclass(frozen=True)
class StepResult:
    """Result of a step."""

    loss: float  # nats per target
    lr: float
    grad_norm: float  # before clipping and without the loss scale
    tokens: int  # over all ranks
    step_seconds: float
    data_seconds: float
    loss_scale: float | None  # None outside float16
    skipped: bool  # the step overflowed and changed no weight
    stopping: bool  # some rank received a signal
    ending: bool  # some rank was told to end the run
    routing: dict[str, Any]  # `routing_metrics`; empty without experts


def train_step(context: TrainContext, step: int, stop: StopRequest | None = None) -> StepResult:
    """Do optimizer step `step` (the first is 1); all ranks call it.

    Raises:
        OctavoError: loss or gradient is not finite, and a smaller loss scale would not help; the weights are unchanged.
    """
    started = time.perf_counter()
    config = context.plan.config
    loss_scale = context.loss_scale
    context.watch.step(step)
    if context.precision is not None:
        context.precision.begin(step)
    _take_routing(context.model)  # discard routing of a callback's forwards
    batches = context.loader.step((step - 1) * config.train.global_batch)
    data_seconds = time.perf_counter() - started
    context.watch.phase("forward")  # ranks wait here for a rank with slow data
    targets = _global_targets(context, batches)

    if context.graph is not None and isinstance(targets, int) and context.graph.can_replay():
        total = context.graph(batches, targets)
    else:
        total = _forward_and_backward(context, batches, targets)

    context.watch.phase("optimizer")
    scale = 1.0 if loss_scale is None else loss_scale.scale
    norm = clip_grad_norm_(context.model, config.optimizer.clip, loss_scale=scale, optimizer=context.optimizer)
    overflow = overflow_in_fp8(context.model) if loss_scale is not None else None
    flags = [0.0, 0.0] if stop is None else [float(stop.received is not None), float(stop.ending)]
    if state.cp_rank or state.tp_rank:
        total = torch.zeros_like(total)  # ranks that share a sequence or matrices have the same loss: count it once
    routing = _take_routing(context.model)
    joined = torch.cat([total[None], total.new_tensor(flags), *([] if routing is None else [routing])])
    if context.world_group is not None:
        dist.all_reduce(joined, group=context.world_group)
    loss_value, stopping, ending, *routed, norm_value = torch.cat(
        [joined, (norm if overflow is None else norm + overflow)[None]]
    ).tolist()

    skipped = loss_scale is not None and loss_scale.update(loss_value, norm_value)
    if skipped:
        forget_overflow(context.model)
    else:
        forwards = [partial(loss_of, context, batch, targets) for batch in batches]
        advice = "" if loss_scale is None else loss_scale.advice
        check_finite(context.model, step, loss_value, norm_value, forwards, advice)
    rate = learning_rate(step, config.optimizer, context.plan.schedule_end(step))
    set_rates(context.optimizer, rate)
    if not skipped:
        context.optimizer.step()
    context.optimizer.zero_grad()

    return StepResult(
        loss_value,
        rate,
        norm_value,
        tokens=sum(batch.input_ids.numel() for batch in batches) * (1 if context.group is None else context.group.size()),
        step_seconds=time.perf_counter() - started,
        data_seconds=data_seconds,
        loss_scale=None if loss_scale is None else scale,
        skipped=skipped,
        stopping=stopping > 0,
        ending=ending > 0,
        routing=_routing_metrics(context.model, routed),
    )


def _forward_and_backward(context: TrainContext, batches: Sequence[Batch], targets: int | torch.Tensor) -> torch.Tensor:
    """Accumulate the gradients of a step; returns this rank's loss."""
    total = torch.zeros((), dtype=torch.float32, device=context.plan.device)
    for index, batch in enumerate(batches):
        accumulate(context.model, last=index == len(batches) - 1)
        context.watch.phase("forward")
        with microbatch(first=index == 0) if len(batches) > 1 else contextlib.nullcontext():
            loss = loss_of(context, batch, targets)
        context.watch.phase("backward")
        _backward(context, loss)
        total += loss.detach()
    return total


def _take_routing(model: nn.Module) -> torch.Tensor | None:
    """The sums of `Decoder.take_routing`, then its two losses, in one row."""
    parts = model.take_routing() if isinstance(model, Decoder) else None
    return None if parts is None else torch.cat([part.flatten() for part in parts])


def _routing_metrics(model: nn.Module, routed: Sequence[float]) -> dict[str, Any]:
    """Metrics of the rows of sums over all ranks."""
    if not routed or not isinstance(model, Decoder):
        return {}
    *sums, balance, z_loss = routed
    metrics = routing_metrics(torch.tensor(sums, dtype=torch.float64).view(-1, 2 * model.spec.experts + 2), model.spec.top_k)
    return metrics | {"balancing_loss": balance, "router_z_loss": z_loss}


def _global_targets(context: TrainContext, batches: Sequence[Batch]) -> int | torch.Tensor:
    """Number of targets in the global batch, at least 1; without synchronisation with the device."""
    own = sum(count_targets(batch.labels) for batch in batches)
    if context.group is None:
        return max(1, own)
    return context.all_reduce(torch.tensor(own, device=context.plan.device)).clamp(min=1)


def _backward(context: TrainContext, loss: torch.Tensor) -> None:
    (loss if context.loss_scale is None else loss * context.loss_scale.scale).backward()


def loss_of(context: TrainContext, batch: Batch, targets: int | torch.Tensor, max_documents: int | None = None) -> torch.Tensor:
    """Sum of the batch's losses divided by `targets`: a float32 scalar on the device.

    max_documents: for packed documents with positions on the device; as in the decoder's forward.
    """
    plan = context.plan
    documents = plan.config.data.packing == "documents"  # position ids restart within a sequence
    model = context.model
    # Attention ignores padding anyway; router losses and metrics would count it.
    more: dict[str, Any] = {"attention_mask": batch.real()} if isinstance(model, Decoder) and model.spec.experts else {}
    if documents and max_documents is not None:
        more["max_documents"] = max_documents
    # emulate=True: the plan has decided whether this device runs FP8 or emulates it.
    with fp8_autocast(enabled=plan.recipe is not None, fp8_recipe=plan.recipe, emulate=True):
        output = model(
            input_ids=batch.input_ids.to(plan.device, non_blocking=True),
            position_ids=batch.position_ids if documents else None,  # on the host: no GPU synchronisation
            labels=batch.labels.to(plan.device, non_blocking=True),
            num_items_in_batch=targets,
            **more,
        )
    loss: torch.Tensor = output.loss
    return loss


def count_targets(labels: torch.Tensor) -> int:
    """Number of targets in labels [B, T]: all except the first of each sequence and those that are IGNORED."""
    return int((labels[:, 1:] != IGNORED).sum())
