"""Loss scale of float16 training: scaling against underflow, skipped steps after overflow.

float16 ranges from 6e-8 to 65,504, so the loss is multiplied before backward and the gradients are divided by the same factor
(Micikevicius et al., "Mixed Precision Training", 2018). A step with a loss or gradient that is not finite is skipped, but
counts, so that schedule and samples do not depend on overflows. All ranks decide the same, from the global batch's loss and
the norm of all gradients, whatever ranks hold parts of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from octavo.config.train import LARGEST_SCALE
from octavo.fp8 import scaling
from octavo.fp8.buffers import ScaleBuffer
from octavo.fp8.recipe import Operand

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # good steps before a dynamic scale is doubled; PyTorch's default
PATIENCE = 20  # most steps skipped in a row for a fixed scale; a dynamic one falls from its start to 1 in 16


class LossScale:
    """Factor of the loss before backward: a fixed number, or "dynamic".

    A dynamic scale is halved on overflow, never below 1, and doubled after `GROWTH_INTERVAL` good steps in a row.
    """

    def __init__(self, value: Literal["dynamic"] | float = "dynamic") -> None:
        self.dynamic = value == "dynamic"
        self.scale = FIRST_SCALE if value == "dynamic" else float(value)
        self.good_steps = 0
        self.skipped_in_a_row = 0

    def update(self, loss: float, norm: float) -> bool:
        """Update the scale after a step; returns True for a step to skip.

        Also False if skipping would not help after an overflow (a dynamic scale of 1, or too many skips in a row with a fixed
        one): the caller's check of loss and norm then stops the run.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.dynamic and self.good_steps >= GROWTH_INTERVAL:
                self.scale, self.good_steps = min(2 * self.scale, LARGEST_SCALE), 0
            return False
        exhausted = self.scale <= 1 if self.dynamic else self.skipped_in_a_row >= PATIENCE
        if exhausted:
            return False
        self.good_steps = 0
        self.skipped_in_a_row += 1
        if self.dynamic:
            self.scale = max(self.scale / 2, 1.0)
        return True

    @property
    def advice(self) -> str:
        """Remedy for the message of a stopped run."""
        if self.dynamic:
            return 'The loss scale is down to 1, so it is not the cause: try model.dtype = "bfloat16". '
        return f'train.loss_scale = {self.scale:g} overflowed in {PATIENCE} steps in a row: set it to "dynamic", or lower. '

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return dict(vars(self))

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`; after a change of train.loss_scale, start with the new value."""
        if state["dynamic"] != self.dynamic or (not self.dynamic and state["scale"] != self.scale):
            return
        self.scale = float(state["scale"])
        self.good_steps, self.skipped_in_a_row = int(state["good_steps"]), int(state["skipped_in_a_row"])


@torch.no_grad()
def overflow_in_fp8(model: nn.Module) -> torch.Tensor | None:
    """inf if a gradient overflowed before an FP8 cast, else 0: float32 []; None without histories of gradients.

    An FP8 cast saturates, so that gradients after it are finite; the recorded amax is infinite. The amaxes of backward are
    reduced over the FP8 group first, so that all ranks agree.
    """
    buffers = _buffers(model, backward_only=True)
    if not buffers:
        return None
    overflow = torch.stack([buffer.history.isinf().any() for buffer in buffers]).any()
    return torch.where(overflow, math.inf, 0.0)


@torch.no_grad()
def forget_overflow(model: nn.Module) -> None:
    """Remove infinite amaxes from histories after a skipped step: a scale does not change while its history has one."""
    for buffer in _buffers(model, backward_only=False):
        buffer.history.masked_fill_(buffer.history.isinf(), 0.0)


def _buffers(model: nn.Module, *, backward_only: bool) -> list[ScaleBuffer]:
    slots = [item for _, state in scaling.states_of(model) for item in state.slots.items()]
    wanted = (slot.buffer for operand, slot in slots if operand is Operand.GRAD_OUTPUT or not backward_only)
    return list(dict.fromkeys(wanted))
