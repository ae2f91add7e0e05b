"""The cross entropy of logits whose columns the ranks of a tensor group hold: one collective for a chunk of tokens.

Each rank gives, for every token, its largest logit, the sum of exponentials below it, the target's logit where it has it, and
for label smoothing the sum of its logits. All ranks then know the loss, and each the gradient of its own columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.collectives.work import start_gather
from octavo.kernels import reference
from octavo.kernels.cross_entropy import Gradient, Objective
from octavo.nn.embedding import Words


def cross_entropy_of_slices_(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor | None,
    objective: Objective,
    fp8: Tensor | None,
    words: Words,
) -> tuple[Tensor, Gradient | None]:
    """As `octavo.kernels.cross_entropy.cross_entropy_`, of logits [N, V / n]: the loss of all words, the gradient of own ones.

    Columns behind `words.number` are padding, whose gradient is 0. Collective.
    """
    own = logits.float()
    own = own.clone() if own is logits else own
    own[:, words.number :] = -torch.inf
    real = target != objective.ignore_index
    unknown = real & ((target < 0) | (target >= words.vocabulary))
    local = target - words.first
    here = real & (local >= 0) & (local < words.number)
    index = torch.where(here, local, 0)[:, None]
    largest = own.amax(-1)
    base = torch.where(largest == -torch.inf, 0.0, largest)
    sums = (own - base[:, None]).exp().sum(-1)
    picked = torch.where(here, own.gather(1, index)[:, 0], 0.0)
    statistics = [largest, sums, picked]
    if objective.label_smoothing:
        statistics.append(own[:, : words.number].sum(-1))
    of_ranks = start_gather(torch.stack(statistics), words.tensor.group).wait()  # [n, 3 or 4, N]
    top = of_ranks[:, 0].amax(0)
    base = torch.where(top == -torch.inf, 0.0, top)
    # A factor of 0 for a rank whose words are all padding, or far below.
    total = base + (of_ranks[:, 1] * (of_ranks[:, 0] - base).exp()).sum(0).log()
    losses = (1 - objective.label_smoothing) * (total - of_ranks[:, 2].sum(0))
    even = 0.0
    if objective.label_smoothing:
        even = objective.label_smoothing / words.vocabulary
        losses = losses + objective.label_smoothing * total - even * of_ranks[:, 3].sum(0)
    losses = (losses + objective.z_loss * total.square()).masked_fill(unknown, torch.nan)
    loss = torch.where(real, losses, 0.0).sum()
    if grad_scale is None:
        return loss, None
    grad = own.sub_(total[:, None]).exp_().mul_((1 + 2 * objective.z_loss * total)[:, None])
    if even:
        grad[:, : words.number] -= even
    grad.scatter_add_(1, index, torch.where(here, objective.label_smoothing - 1, 0.0)[:, None])
    grad.masked_fill_(unknown[:, None], torch.nan)
    if fp8 is None:
        return loss, Gradient(logits.copy_(grad.mul_((real * grad_scale)[:, None])))
    fp8_max = torch.finfo(fp8.dtype).max
    grad.mul_(real[:, None])
    fp8.copy_(reference.cast(grad, grad.new_tensor(fp8_max), fp8.dtype, fp8_max))
    return loss, Gradient(None, fp8, grad_scale / fp8_max)
