"""PyTorch's clipping of gradients, for parameters of which its norm would be that of one tensor rank's parts.

`torch.nn.utils.clip_grad_norm_` takes the norm over the ranks that shard a tensor. Of a tensor group each rank would find
another norm, scale by it, and the ranks' copies of a norm's weight would part, in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from octavo.errors import InputError

_MARK = "octavo_part_of_a_tensor_rank"


def refuse_torch_clipping(model: nn.Module) -> None:
    """Have PyTorch's clipping by a norm raise an InputError for the parameters of this model."""
    for parameter in model.parameters():
        vars(parameter)[_MARK] = True
    for name in ("_clip_grads_with_norm_", "clip_grads_with_norm_"):
        known: Any = getattr(clip_grad, name, None)
        if known is None or hasattr(known, _MARK):
            continue
        checked = _checked(known)
        setattr(clip_grad, name, checked)
        if getattr(torch.nn.utils, name, None) is known:
            setattr(torch.nn.utils, name, checked)


def is_of_tensor_rank(parameter: Tensor) -> bool:
    """True for a parameter of a model of `refuse_torch_clipping`."""
    return hasattr(parameter, _MARK)


def _checked(clip: Any) -> Any:
    @functools.wraps(clip)
    def checked(parameters: Tensor | Iterable[Tensor], *arguments: Any, **keywords: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(map(is_of_tensor_rank, given)):
            raise InputError(
                "torch.nn.utils.clip_grad_norm_ of a tensor-parallel model: each rank would clip by the norm of its own parts. "
                "Call octavo.clip_grad_norm_(model, max_norm), which counts every element once."
            )
        return clip(given, *arguments, **keywords)

    setattr(checked, _MARK, True)
    return checked
