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

SMALL = 1 << 19
"""Tensors with fewer elements go to PyTorch's kernel together. A launch costs a GPU some 2 µs, which Octavo's kernel regains
above 440,000 elements in float32, at 4.2 instead of 2.5 TB/s. All 448 adapters of rank 16 in an 8B model are smaller."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW(torch.optim.AdamW):
    """A drop-in for `torch.optim.AdamW(fused=True)`.

    Attributes:
        grad_scale: factor of the gradients in the next steps, float32 [] on their device; None: 1. Gradients for PyTorch's
            kernel are multiplied in place first. `torch.amp.GradScaler` does not set it: it unscales the gradients itself.
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
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        has_complex = self._init_group(group, *lists)
        params, grads, exp_avgs, exp_avg_sqs, maxima, steps = (
            [x.to_local() if isinstance(x, DTensor) else x for x in kind] for kind in lists
        )
        own: list[tuple[Tensor, ...]] = []
        rest: list[tuple[Tensor, ...]] = []
        native = {d for d in {p.device for p in params} if _native(d)} if not maxima and _kernel_has(group) else set()
        for row in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
            if row[0].device in native and _kernel_takes(*row[:4]):
                own.append(row)
            else:
                rest.append(row)
        if own:
            self._step_by_kernel(group, own)
        if rest:
            self._step_by_torch(group, rest, maxima, has_complex)

    def _step_by_kernel(self, group: dict[str, Any], rows: list[tuple[Tensor, ...]]) -> None:
        """Run Octavo's kernel. rows: (parameter, gradient, both moments, step) of each tensor."""
        torch._foreach_add_([row[-1] for row in rows], 1)
        beta1, beta2 = group["betas"]
        for param, grad, exp_avg, exp_avg_sq, step in rows:
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

    def _step_by_torch(
        self, group: dict[str, Any], rows: list[tuple[Tensor, ...]], maxima: list[Tensor], has_complex: bool
    ) -> None:
        params, grads, exp_avgs, exp_avg_sqs, steps = map(list, zip(*rows, strict=True))
        if self.grad_scale is not None:
            torch._foreach_mul_(grads, self.grad_scale)
        beta1, beta2 = group["betas"]
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "capturable", "differentiable", "fused")
        settings: dict[str, Any] = {name: group[name] for name in names}
        settings |= {"beta1": beta1, "beta2": beta2, "has_complex": has_complex, "decoupled_weight_decay": True}
        adam(params, grads, exp_avgs, exp_avg_sqs, maxima, steps, **settings)


def _native(device: torch.device) -> bool:
    """True if the kernel runs on this device."""
    return device.type == "cuda"


def _kernel_has(group: dict[str, Any]) -> bool:
    """True if the kernel supports all options of a group."""
    return not (group["maximize"] or group["differentiable"] or isinstance(group["lr"], Tensor))


def _kernel_takes(param: Tensor, *others: Tensor) -> bool:
    """True for a large, contiguous parameter with gradient and moments."""
    if not all(x.is_contiguous() and x.is_floating_point() for x in (param, *others)):
        return False
    return param.numel() >= SMALL or any(x.dtype != param.dtype for x in others)
