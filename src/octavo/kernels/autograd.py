"""Helpers of autograd functions whose backward runs kernels: a guard, and a notice where an attention's backward begins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

_listeners: list[Callable[[], None]] = []


def refuse_second_derivative(of: str) -> None:
    """Call first in a backward: a RuntimeError under create_graph=True. of: subject of the message, in the plural."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{of} have no second derivative: call backward without create_graph=True.")


@contextlib.contextmanager
def at_attention(listener: Callable[[], None]) -> Iterator[None]:
    """`listener` is called where the backward of an attention begins."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def attention_begins() -> None:
    """Call first in the backward of an attention."""
    if not torch.compiler.is_compiling():
        for listener in _listeners:
            listener()
