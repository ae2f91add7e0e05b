"""The optimizer of a run: parameter groups, learning rate schedule, and clipping.

The schedule is a pure function of the step: a continued run needs no scheduler state.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from octavo.collectives.blocks import parameters_of
from octavo.config.optimizer import OptimizerConfig
from octavo.groups import decay_groups, factors_of
from octavo.parallel.calls import noted
from octavo.parallel.fsdp import settle
from octavo.parallel.shards import gradient_norm
from octavo.parallel.torch_clipping import of_all_ranks
from octavo.train.adamw import AdamW
from octavo.train.muon import MuonAdamW

RATE_KEYS = ("optimizer.rates", "optimizer.layer_decay")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW, or Muon with it, with decoupled weight decay of matrices by the rule of `octavo.parameter_groups`.

    Groups store their rate's factor as `lr_scale` if optimizer.rates or optimizer.layer_decay is set.
    """
    if config.name == "muon":
        return MuonAdamW(
            model,
            lr=config.lr,
            adamw_lr=config.adamw_lr,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            scale=config.muon_scale,
            betas=config.betas,
            eps=config.eps,
            rates=config.rates,
            layer_decay=config.layer_decay,
        )
    groups = decay_groups(model, config.weight_decay, factors_of(model, config.rates, config.layer_decay, keys=RATE_KEYS))
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set this rate in each group, times the group's factor if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def learning_rate(step: int, config: OptimizerConfig, steps: int) -> float:
    """The rate of optimizer step `step` (the first is 1, the last is `steps`).

    Linear from 0 to lr at step `warmup_steps`; then constant, or linear or cosine decay to lr × min_lr_fraction at the last
    step. wsd is constant up to its last `decay_steps`, then linear.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, config.decay_start(steps))
    if config.schedule == "constant" or step <= start:
        return config.lr
    done = (step - start) / max(1, steps - start)
    falling = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_fraction + (1 - config.min_lr_fraction) * falling)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, *, loss_scale: float = 1.0, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor:
    """Scale the gradients of `model` to a norm of at most `max_norm` (0: no clipping); returns the norm before.

    Gradients of a loss multiplied by `loss_scale` are divided by it in the same pass; the norm excludes it. optimizer: Octavo's
    AdamW on a GPU applies the factor in its next step, and the gradients stay unchanged here. No synchronisation with the
    device: after a non-finite norm the gradients are not finite either, and the caller checks the result.
    """
    with noted("octavo.clip_grad_norm_"):
        settle(model)  # moves gradients to the shards
        parameters = parameters_of(model)
        norm = gradient_norm(parameters) / loss_scale
    factor = None
    if max_norm > 0 or loss_scale != 1:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
        factor = factor / loss_scale
    if isinstance(optimizer, AdamW) and norm.device.type == "cuda":
        optimizer.grad_scale = factor
    elif factor is not None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
        if own:
            torch._foreach_mul_(own, factor)
    return of_all_ranks(norm)
