"""Activation recomputation: keep a block's input, compute the rest again in backward, with the scales of its forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo.fp8.autocast import recomputing


def recomputed(block: nn.Module, residual: Tensor, delta: Tensor | None, *args: Any) -> tuple[Tensor, None]:
    """`block(residual + delta, *args)`, of which only the arguments are kept for backward: one tensor, not two.

    FP8 casts repeat exactly and record once. The result has no delta.
    """
    hidden = residual if delta is None else residual + delta
    return checkpoint(block, hidden, *args, use_reentrant=False, context_fn=recomputing), None
