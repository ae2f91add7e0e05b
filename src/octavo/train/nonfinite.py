"""Where a step stopped being numbers: the first layer whose output is not finite, found by repeating the forward.

Nothing is watched while all goes well. When loss or gradient are not finite the weights are still those of the step before, so
the same batch takes the same way again, now with an eye on every module's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from octavo.train.adamw import local


@torch.no_grad()
def first_nonfinite(model: nn.Module, forwards: Iterable[Callable[[], Any]]) -> str | None:
    """What to tell of the first weight, or else the first module by order of execution, that is not finite; None: nothing is.

    forwards: each runs `model` on a micro-batch. With several ranks all of them call this, since a forward gathers weights.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensors = (x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point())
            if not found and not all(torch.isfinite(x).all() for x in tensors):
                found.append(f"the first output that is not finite is of {name}")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
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
