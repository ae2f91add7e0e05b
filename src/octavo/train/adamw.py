"""`torch.optim.AdamW` with Octavo's kernel for large tensors, and clipping folded into the step.

Groups, states and their dtypes are PyTorch's, so that states of either load into the other; so are the numbers on a CPU, where
PyTorch's fused kernel runs. A launch of its own costs the host more than a norm's weights are worth: small tensors go to
PyTorch's fused kernel together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT, _use_grad_for_differentiable

from octavo.kernels.adamw import adamw_

SMALL = 65_536
"""Elements below which a tensor is stepped with others by PyTorch's kernel."""


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW(torch.optim.AdamW):
    """A drop-in for `torch.optim.AdamW(fused=True)`.

    Attributes:
        grad_scale: what the next steps multiply gradients by, float32 [] on their device; None: nothing. Gradients that go to
            PyTorch's kernel are multiplied in place first. It is not what `torch.amp.GradScaler` would put there: that one is
            told to unscale by itself.
    """

    grad_scale: Tensor | None = None

    def __init__(self, params: ParamsT, *args: Any, fused: bool | None = True, **settings: Any) -> None:
        super().__init__(params, *args, fused=fused, **settings)
        self._step_supports_amp_scaling = False

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            has_complex = self._init_group(group, *lists)
            held = [[local(tensor) for tensor in kind] for kind in lists]
            amsgrad = bool(held[4])
            mine = [not amsgrad and _suits(group, *tensors) for tensors in zip(*held[:4], strict=True)]
            if any(mine):
                self._step_by_kernel(group, *(_where(mine, held[kind]) for kind in (0, 1, 2, 3, 5)))
            if not all(mine):
                others = [not taken for taken in mine]
                self._step_by_torch(group, [_where(others, kind) if kind else kind for kind in held], has_complex)
        return loss

    def _step_by_kernel(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        torch._foreach_add_(steps, 1)
        beta1, beta2 = group["betas"]
        for param, grad, exp_avg, exp_avg_sq, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
            adamw_(
                param,
                grad,
                exp_avg,
                exp_avg_sq,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step if step.device == param.device else step.item(),
                grad_scale=self.grad_scale,
            )

    def _step_by_torch(self, group: dict[str, Any], lists: list[list[Tensor]], has_complex: bool) -> None:
        if self.grad_scale is not None:
            torch._foreach_mul_(lists[1], self.grad_scale)
        beta1, beta2 = group["betas"]
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "capturable", "differentiable", "fused")
        settings: dict[str, Any] = {name: group[name] for name in names}
        settings |= {"has_complex": has_complex, "decoupled_weight_decay": True}
        params, grads, exp_avgs, exp_avg_sqs, maxima, steps = lists
        adam(params, grads, exp_avgs, exp_avg_sqs, maxima, steps, beta1=beta1, beta2=beta2, **settings)


def _native(device: torch.device) -> bool:
    """Whether the kernel runs there."""
    return device.type == "cuda"


def _suits(group: dict[str, Any], param: Tensor, *others: Tensor) -> bool:
    """Whether the kernel takes a parameter, its gradient and its moments: large, contiguous, and nothing that it has not."""
    if not _native(param.device) or group["maximize"] or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    if not all(x.is_contiguous() and x.is_floating_point() for x in (param, *others)):
        return False
    return param.numel() >= SMALL or any(x.dtype != param.dtype for x in others)


def _where(chosen: list[bool], tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor, taken in zip(tensors, chosen, strict=True) if taken]
