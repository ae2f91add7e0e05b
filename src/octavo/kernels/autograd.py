"""Helpers of autograd functions whose backward runs kernels: guards, and a notice when attention's backward begins.

`SavedBytes` is for the memory plan: each function states what it saves in the file where it saves it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as modules

from octavo.errors import InputError
from octavo.process import process


class SavedBytes(NamedTuple):
    """Bytes of each tensor that a forward saves for backward; parameters are not counted, as they take no extra memory.

    Attributes:
        activations: inputs and results.
        weight_copies: weights in FP8, or in the dtype of a product.
    """

    activations: list[int]
    weight_copies: list[int]


def refuse_second_derivative(of: str) -> None:
    """Call first in a backward: a RuntimeError under create_graph=True. of: the message's subject, in the plural."""
    refuse_transforms(of)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{of} have no second derivative: call backward without create_graph=True.")


def refuse_transforms(of: str) -> None:
    """Call first in a forward or a backward: an InputError inside a `torch.func` transform. of: the subject, in the plural.

    Kernels read a tensor's memory, scales are recorded in place, and there is no rule for a batch or a tangent.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise InputError(
            f"{of} cannot be transformed by torch.func (grad, vjp, vmap, jvp, jacrev, hessian): take "
            "gradients by backward() or torch.autograd.grad, one batch at a time. torch.func.functional_call works."
        )


def has_hooks(module: nn.Module) -> bool:
    """True if a hook may read this module's inputs or outputs, or the gradients of either."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or modules._has_any_global_hook()


@contextlib.contextmanager
def at_attention(listener: Callable[[], None]) -> Iterator[None]:
    """`listener` is called when the backward of attention begins."""
    process.at_attention.append(listener)
    try:
        yield
    finally:
        process.at_attention.remove(listener)


def attention_begins() -> None:
    """Call first in the backward of an attention."""
    if not torch.compiler.is_compiling():
        for listener in process.at_attention:
            listener()
