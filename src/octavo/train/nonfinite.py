"""Locate NaN and infinity: the first module with an output that is not finite, found by repeating the forward.

A normal step has no checks. If its loss or gradient is not finite, the weights are still those of the step before, so the same
batch runs again, now with a hook on every module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from octavo.train.adamw import local


@torch.no_grad()
def first_nonfinite(model: nn.Module, forwards: Iterable[Callable[[], Any]]) -> str | None:
    """The weights that are not finite, else the first module with such an output, as a phrase; None if all are finite.

    forwards: each runs `model` on a micro-batch. All ranks call this, since a forward gathers weights.
    """
    found: list[str] = []

    def hook(name: str, _: nn.Module, __: Any, output: Any) -> None:
        tensors = (x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point())
        if not found and not all(torch.isfinite(x).all() for x in tensors):
            found.append(f"the first output that is not finite is of {name}")

    handles = [module.register_forward_hook(partial(hook, name)) for name, module in model.named_modules() if name]
    try:
        for forward in forwards:
            forward()
    finally:
        for handle in handles:
            handle.remove()
    weights = [name for name, p in model.named_parameters() if not torch.isfinite(local(p)).all()]
    if weights:
        return f"weights that are not finite: {', '.join(weights[:5])}"
    return found[0] if found else None
