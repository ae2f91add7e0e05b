"""Refuses PyTorch's norms and `full_tensor` of tensor-parallel parameters: each rank would see only its part.

`torch.nn.utils.clip_grad_norm_` and `get_total_norm` take the norm over the ranks that shard a tensor. In a tensor group each
rank would compute a different norm and scale by it, and replicated parameters would silently diverge. `full_tensor()` and
`norm()` of a parameter and of its gradient are refused too; those of tensors computed from them cannot be detected.
`clip_grads_with_norm_` accepts the norm that `octavo.clip_grad_norm_` returns.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from octavo.collectives.blocks import parameters_of
from octavo.errors import InputError

_MARK = "octavo_part_of_a_tensor_rank"
_KNOWN = "octavo_norm_of_all_ranks"


def refuse_torch_clipping(model: nn.Module) -> None:
    """Make PyTorch's norms and `full_tensor` raise an InputError for parameters and gradients of this model."""
    for parameter, block in parameters_of(model).items():
        of_part = block is not None and not block.is_whole
        _mark(parameter, of_part)
        if not parameter.is_floating_point():  # frozen bytes
            continue
        trained = parameter.requires_grad
        parameter.requires_grad_()  # a frozen parameter accepts no hook, and may be trained later
        parameter.register_post_accumulate_grad_hook(functools.partial(_mark_gradient, of_part=of_part))
        parameter.requires_grad_(trained)
    _check(clip_grad, "_clip_grads_with_norm_", _checked)
    _check(clip_grad, "_group_tensors_by_device_and_dtype", _checked_groups)


def _mark(tensor: Tensor, of_part: bool) -> None:
    vars(tensor)[_MARK] = True
    if of_part:
        vars(tensor).update(full_tensor=_refuse_whole, norm=_refuse_norm)


def _mark_gradient(parameter: Tensor, of_part: bool) -> None:
    if parameter.grad is not None:
        _mark(parameter.grad, of_part)


def _refuse_whole() -> NoReturn:
    raise InputError(
        "full_tensor() of a tensor-parallel model's parameter or gradient: it would be this rank's part. "
        "octavo.to_huggingface(model) has whole weights, and octavo.export writes them."
    )


def _refuse_norm(*_: Any, **__: Any) -> NoReturn:
    raise InputError(
        "norm() of a tensor-parallel model's parameter or gradient: it would be that of this rank's part. "
        "octavo.clip_grad_norm_(model, 0.0) returns the norm of all gradients and does not scale them."
    )


def _check(module: Any, name: str, checked: Any) -> None:
    """Wrap a function of PyTorch's with a check, once."""
    known: Any = getattr(module, name)
    if not hasattr(known, _MARK):
        wrapped = checked(known)
        setattr(wrapped, _MARK, True)
        setattr(module, name, wrapped)


def of_all_ranks(norm: Tensor) -> Tensor:
    """Mark a norm over all elements, which `torch.nn.utils.clip_grads_with_norm_` may use."""
    vars(norm)[_KNOWN] = True
    return norm


def is_of_tensor_rank(parameter: Tensor) -> bool:
    """True for a parameter of a model of `refuse_torch_clipping`, and for its gradient."""
    return hasattr(parameter, _MARK)


def _checked(clip: Any) -> Any:
    """Check `clip_grads_with_norm_` by its parameters, since their gradients may have been replaced."""

    @functools.wraps(clip)
    def checked(parameters: Tensor | Iterable[Tensor], *arguments: Any, **keywords: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = arguments[1] if len(arguments) > 1 else keywords.get("total_norm")
        if not hasattr(norm, _KNOWN):
            _refuse(tensors)
        return clip(tensors, *arguments, **keywords)

    return checked


def _checked_groups(group: Any) -> Any:
    """Check the helper that every function of `clip_grad` calls first, also those imported earlier."""

    @functools.wraps(group)
    def checked(lists: list[list[Tensor]], *arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1)
        of_elements = caller.f_code.co_name == torch.nn.utils.clip_grad_value_.__name__
        if not (of_elements or hasattr(caller.f_locals.get("total_norm"), _KNOWN)):
            _refuse(tensor for each in lists for tensor in each)
        return group(lists, *arguments, **keywords)

    return checked


def _refuse(tensors: Iterable[Tensor]) -> None:
    if any(map(is_of_tensor_rank, tensors)):
        raise InputError(
            "a norm of torch.nn.utils (clip_grad_norm_, get_total_norm) of a tensor-parallel model would be that of each "
            "rank's parts. Call octavo.clip_grad_norm_(model, max_norm), which counts every element once; with 0.0 it only "
            "returns the norm."
        )
