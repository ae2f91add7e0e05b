"""Activation recomputation: keep a block's input, compute the rest again in backward, with the scales of its forward.

Selectively, attention's result and log-sum-exp are kept too and attention, with its exchange over ranks, never runs again.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo.fp8.autocast import recomputing
from octavo.kernels.attention.kept import keeping


def recomputed(block: nn.Module, residual: Tensor, delta: Tensor | None, *args: Any, **options: Any) -> tuple[Any, ...]:
    """`block(residual + delta, *args)`, of which only the arguments are kept for backward: one tensor, not two.

    FP8 casts repeat exactly and record once. The result has no delta.
    """
    return _checkpointed(recomputing, block, residual, delta, *args, **options)


def selectively_recomputed(
    block: nn.Module, residual: Tensor, delta: Tensor | None, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """`recomputed`, but attention's result and log-sum-exp are kept too."""
    return _checkpointed(_contexts, block, residual, delta, *args, **options)


def _checkpointed(
    contexts: Any, block: nn.Module, residual: Tensor, delta: Tensor | None, *args: Any, **options: Any
) -> tuple[Any, ...]:
    hidden = residual if delta is None else residual + delta
    output = checkpoint(block, hidden, *args, use_reentrant=False, context_fn=contexts, **options)
    if isinstance(output, Tensor):
        return output, None
    out, *routing = output  # of experts
    return out, None, *routing


class _Both(contextlib.AbstractContextManager[None]):
    """Two contexts, which may be entered again and again."""

    def __init__(self, *contexts: contextlib.AbstractContextManager[None]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exception)


def _contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    forward, again = zip(recomputing(), keeping(), strict=True)
    return _Both(*forward), _Both(*again)
