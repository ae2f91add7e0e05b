"""Loss and gradients that are not finite: the run stops, with the first module at fault.

A normal step has no checks. If its loss or gradient is not finite, the weights are still those before the step, so the same
batch is repeated with a hook on every module. All ranks name what any of them has found: each sees its shards, its part of a
matrix and its tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from octavo.errors import OctavoError
from octavo.nn.plain_names import Uncalled
from octavo.parallel.coordination import all_ranks
from octavo.train.adamw import local


class NotFinite(OctavoError):
    """A loss or gradient that is not finite."""


def check_finite(
    model: nn.Module, step: int, loss: float, norm: float, forwards: Sequence[Callable[[], Any]] = (), advice: str = ""
) -> None:
    """Stop a run with a loss or gradient that is not finite, before the weights change.

    `forwards` repeat the step's micro-batches, to find the module; `advice` is the first remedy of the message.

    Raises:
        NotFinite: names the result of `first_nonfinite` and the parameters with gradients that are not finite.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    parameters = model.named_parameters()
    bad = _of_all_ranks(n for n, p in parameters if p.grad is not None and not torch.isfinite(local(p.grad)).all())
    names = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    locations = [first_nonfinite(model, forwards), f"gradients that are not finite: {names}" if bad else None]
    where = "".join(f"; {location}" for location in locations if location)
    raise NotFinite(
        f"step {step}: loss {loss}, gradient norm {norm}{where}. {advice}Lower optimizer.lr, lengthen optimizer.warmup_steps "
        "or set optimizer.clip, and start again."
    )


@torch.no_grad()
def first_nonfinite(model: nn.Module, forwards: Sequence[Callable[[], Any]]) -> str | None:
    """The non-finite weights, else the first module with a non-finite output, as a phrase; None if all are finite.

    All ranks call this, since a forward gathers weights.
    """
    found: list[tuple[int, str]] = []
    outputs = itertools.count()

    def hook(name: str, _: nn.Module, __: Any, output: Any) -> None:
        number = next(outputs)
        tensors = (x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point())
        if not found and not all(torch.isfinite(x).all() for x in tensors):
            found.append((number, name))

    called = ((name, module) for name, module in model.named_modules() if name and not isinstance(module, Uncalled))
    handles = [module.register_forward_hook(partial(hook, name)) for name, module in called]
    try:
        for forward in forwards:
            forward()
    finally:
        for handle in handles:
            handle.remove()
    weights = _of_all_ranks(name for name, p in model.named_parameters() if not torch.isfinite(local(p)).all())
    first = sorted(one for of_rank in all_ranks().all_gather(found) for one in of_rank)  # the ranks call the same modules
    if weights:
        return f"weights that are not finite: {', '.join(weights[:5])}"
    return f"the first output that is not finite is that of {first[0][1]}" if first else None


def _of_all_ranks(names: Iterable[str]) -> list[str]:
    """The names that any rank has found."""
    return list(dict.fromkeys(name for of_rank in all_ranks().all_gather(list(names)) for name in of_rank))
