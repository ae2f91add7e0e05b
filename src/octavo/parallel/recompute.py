"""Activation recomputation: keep a block's input, compute the rest again in backward, with the scales of its forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo.fp8.autocast import recomputing


def recomputed(block: nn.Module, *args: Any) -> Tensor:
    """`block(*args)`, of which only the arguments are kept for backward. FP8 casts repeat exactly and record once."""
    return checkpoint(block, *args, use_reentrant=False, context_fn=recomputing)
