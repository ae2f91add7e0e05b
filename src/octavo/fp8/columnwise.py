"""The rule by which backward reads a cached columnwise FP8 weight or recasts it, for unsharded 16-bit parameters.

The input gradient reads a weight columnwise. If forward casts both layouts, the parameter is read once, and the columnwise copy
takes 1 byte an element until backward. If backward recasts, it takes none, and the parameter is read twice. The copies are
cached if together they take at most 1 / `octavo.hardware.PART` of a GPU's memory. None is cached under activation
checkpointing, offloading or FSDP (`LinearQuantizer.weight`), or for an MLP that is recomputed or runs in chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn
from torch.distributed._composable_state import _module_state_mapping

from octavo.fp8.scaling import states_of
from octavo.hardware import is_affordable
from octavo.process import process

WRAPPED = _module_state_mapping
"""Modules wrapped by FSDP2, or by another wrapper that does not replace them, in order."""


def is_sharded(module: nn.Module | None) -> bool:
    """True if FSDP2 may free the weights of a module between forward and backward."""
    wrapped = WRAPPED.keyrefs()
    now = len(wrapped), wrapped[-1] if wrapped else None
    if now != process.sharded_as_of:
        process.sharded = weakref.WeakSet(each for root in list(WRAPPED) for each in root.modules())
        process.sharded_as_of = now
    return module is None or module in process.sharded


def cache_columnwise(blocks: Sequence[nn.Module], memory: int | None) -> None:
    """Cache the columnwise layouts of 16-bit parameters in these blocks until backward, if a GPU of `memory` bytes has room.

    memory: None on a CPU. To be called again after the model moves to another device.
    """
    weights = [(state, state.weight) for block in blocks for _, state in states_of(block) if not state.skipped]
    of_16_bits = [(state, weight) for state, weight in weights if weight is not None and weight.itemsize == 2]
    elements = {id(weight): weight.numel() for _, weight in of_16_bits}  # a tied weight counts once
    affordable = is_affordable(sum(elements.values()), memory)
    for state, _ in of_16_bits:
        state.caches_columnwise = affordable
