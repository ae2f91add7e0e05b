"""Activation checkpointing: save a block's input, recompute the rest in backward, with the scales of its forward.

Selectively, attention's result and log-sum-exp are saved too, and attention, with its exchange over ranks, is not recomputed.
Products whose results are only added to the stream are not recomputed either, since backward reads none of them, and the first
forward casts nothing for backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo.fp8.autocast import discard_copies, recomputing
from octavo.kernels.attention.cached import caching
from octavo.nn.block import TransformerLayer
from octavo.nn.moe import LayerNormMoE

_Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]
"""Contexts of a forward and of its recomputation."""


def recomputed(block: TransformerLayer, residual: Tensor, delta: Tensor | None, *args: Any, **options: Any) -> tuple[Any, ...]:
    """`block(residual + delta, *args)`, [B, T, hidden], with only residual + delta and the other arguments saved for backward.

    FP8 casts repeat exactly and record once. The result has no delta.
    """
    return _checkpointed(recomputing, block, residual, delta, *args, **options)


def selectively_recomputed(
    block: TransformerLayer, residual: Tensor, delta: Tensor | None, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """`recomputed`, but attention's result and log-sum-exp are saved too."""
    return _checkpointed(_selectively, block, residual, delta, *args, **options)


def _checkpointed(
    contexts: Callable[[], _Contexts],
    block: TransformerLayer,
    residual: Tensor,
    delta: Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[Any, ...]:
    hidden = residual if delta is None else residual + delta
    within = functools.partial(_skipping_unused_outputs, contexts, block)
    # A generator's state cannot be read while a CUDA graph is recorded: PyTorch refuses blocks that draw random numbers.
    draws = not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()) or _draws(block)
    output = checkpoint(block, hidden, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=within, **options)
    if isinstance(output, Tensor):
        return output, None
    out, *routing = output  # of experts
    return out, None, *routing


def _draws(block: TransformerLayer) -> bool:
    """True if a training forward may draw random numbers: for dropout, or in a module that is not Octavo's."""
    rates = ("dropout", "hidden_dropout", "attention_dropout", "drop_path_rate")
    modules = list(block.modules())
    foreign = any(not type(module).__module__.startswith("octavo.") for module in modules)
    jitters = any(isinstance(module, LayerNormMoE) and module.config.jitter for module in modules)
    return foreign or jitters or any(getattr(module, rate, 0.0) for module in modules for rate in rates)


class _PairedContext(contextlib.AbstractContextManager[None]):
    """Two contexts, which may be entered repeatedly."""

    def __init__(self, *contexts: contextlib.AbstractContextManager[None]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exception)


class _SkipUnusedOutputs(contextlib.AbstractContextManager[None]):
    """A recomputation that does not use the block's result."""

    def __init__(self, block: TransformerLayer) -> None:
        self._block = block

    def __enter__(self) -> None:
        self._block.set_skip_output(True)

    def __exit__(self, *exception: Any) -> None:
        self._block.set_skip_output(False)


def _selectively() -> _Contexts:
    forward, recomputation = zip(recomputing(), caching(), strict=True)
    return _PairedContext(*forward), _PairedContext(*recomputation)


def _skipping_unused_outputs(contexts: Callable[[], _Contexts], block: TransformerLayer) -> _Contexts:
    forward, recomputation = contexts()
    if any(part._compiled_call_impl is not None for part in block.modules()):  # its two graphs would differ
        return forward, recomputation
    return _PairedContext(forward, discard_copies()), _PairedContext(recomputation, _SkipUnusedOutputs(block))
