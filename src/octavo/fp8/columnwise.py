"""How long columnwise FP8 weights of 16-bit parameters live: the rule of a model whose weights no ranks share.

The input gradient reads a weight columnwise. A cast of both layouts in forward reads the parameter once, and holds 1 byte an
element until backward; a second cast in backward holds none, and reads the parameter twice. The columnwise layouts stay if they
take at most 1 / `octavo.hardware.PART` of a GPU's memory together. Under an activation checkpoint, offloading or FSDP none does
(`LinearQuantizer.weight`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from octavo.fp8.scaling import states_of
from octavo.hardware import is_affordable


def keep_columnwise(blocks: Sequence[nn.Module], memory: int | None) -> None:
    """Let the FP8 weights of 16 bits in these blocks keep columnwise layouts, if a GPU of `memory` bytes has room for them.

    memory: None on a CPU.
    """
    weights = [(state, state.weight) for block in blocks for _, state in states_of(block) if not state.skipped]
    of_16_bits = {id(weight): weight.numel() for _, weight in weights if weight is not None and weight.itemsize == 2}
    if is_affordable(sum(of_16_bits.values()), memory):
        for state, _ in weights:
            state.keeps_columnwise = True
