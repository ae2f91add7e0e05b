"""Transformer Engine's layers beside Octavo's, in the suite of `octavo.bench.layers`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks import te_attention
from benchmarks.peers import reason_of
from octavo.bench.layers import Library


def transformer_engine(device: torch.device, say: Callable[[str], None]) -> Library | None:
    """Transformer Engine's layers; None, with a message of the reason, if they cannot run.

    To be called before any work on the GPU: the library does not load after PyTorch has used cuDNN.
    """
    if device.type != "cuda":
        say("Transformer Engine needs a GPU: only Octavo's errors")
        return None
    te_attention.choose(te_attention.CUDNN)
    try:
        import transformer_engine.pytorch as layers

        from benchmarks import te
    except Exception as error:  # a broken installation has any
        say(f"only Octavo's errors, since Transformer Engine cannot be imported: {reason_of(error)}")
        return None
    return Library("te", layers, lambda recipe: te.autocast(None if recipe == "bf16" else recipe))
