"""`torch.optim.AdamW` with Octavo's kernel for large tensors, and clipping fused into the step.

Groups, states and dtypes are PyTorch's, so that states of either load into the other. A CPU runs PyTorch's fused kernel, with
the same bits. Small tensors go to PyTorch's fused kernel together, since a launch for each would cost the host too much.
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
"""Tensors with fewer elements go to PyTorch's kernel."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW(torch.optim.AdamW):
    """A drop-in for `torch.optim.AdamW(fused=True)`.

    Attributes:
        grad_scale: factor of the gradients in the next steps, float32 [] on their device; None: no factor. Gradients for
            PyTorch's kernel are multiplied in place first. `torch.amp.GradScaler` does not set it: it unscales by itself.
    """

    grad_scale: Tensor | None = None

    def __init__(self, params: ParamsT, *args: Any, fused: bool | None = True, **settings: Any) -> None:
        super().__init__(params, *args, fused=fused, **settings)
        self._step_supports_amp_scaling = False

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups; returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            has_complex = self._init_group(group, *lists)
            lists = [[local(tensor) for tensor in tensors] for tensors in lists]
            amsgrad = bool(lists[4])
            own = [not amsgrad and _kernel_takes(group, *tensors) for tensors in zip(*lists[:4], strict=True)]
            if any(own):
                self._step_by_kernel(group, *(_select(own, lists[kind]) for kind in (0, 1, 2, 3, 5)))
            if not all(own):
                others = [not one for one in own]
                self._step_by_torch(group, [_select(others, kind) if kind else kind for kind in lists], has_complex)
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
    """Whether the kernel runs on this device."""
    return device.type == "cuda"


def _kernel_takes(group: dict[str, Any], param: Tensor, *others: Tensor) -> bool:
    """Whether the kernel takes a parameter with its gradient and moments: large, contiguous, without options that it lacks."""
    if not _native(param.device) or group["maximize"] or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    if not all(x.is_contiguous() and x.is_floating_point() for x in (param, *others)):
        return False
    return param.numel() >= SMALL or any(x.dtype != param.dtype for x in others)


def _select(selected: list[bool], tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor, chosen in zip(tensors, selected, strict=True) if chosen]
