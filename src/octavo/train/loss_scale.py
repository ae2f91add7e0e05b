"""The loss scale of float16 training: what keeps small gradients from vanishing, and what happens when a large one overflows.

float16 ends at 65,504 and at 6e-8, so the loss is multiplied before backward and the gradients are divided by the same number
before they are used (Micikevicius et al., "Mixed Precision Training", 2018). A step whose loss or gradient is not finite is
skipped: weights and the optimizer's states stay as they are. The step counts all the same, so that the schedule and the samples
of a run do not depend on what overflowed.

Decisions are a pure function of the state here and of the step's loss and norm, both of the global batch, so that ranks which
know the same two numbers decide alike without asking each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from octavo.fp8 import scaling
from octavo.fp8.recipe import Operand

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Good steps after which a dynamic scale is doubled; PyTorch's and Transformer Engine's users know the same number."""
LARGEST_SCALE = 2.0**60
"""Far beyond any gradient, and far from where float32 would end: a model without gradients must not double it for ever."""
PATIENCE = 20
"""Skipped steps in a row that a fixed scale may cost. A dynamic one needs at most 16 to come down from where it starts."""


class LossScale:
    """What the loss is multiplied by.

    Args:
        value: "dynamic": halved on overflow, never below 1, and doubled after `growth_interval` good steps in a row. A number
            stays.
        start: where a dynamic scale begins.
        growth_interval: in steps.
    """

    def __init__(
        self,
        value: Literal["dynamic"] | float = "dynamic",
        *,
        start: float = FIRST_SCALE,
        growth_interval: int = GROWTH_INTERVAL,
    ) -> None:
        self.dynamic = value == "dynamic"
        self.scale = start if value == "dynamic" else float(value)
        self.growth_interval = growth_interval
        self.good_steps = 0
        self.skipped_in_a_row = 0

    def update(self, loss: float, norm: float) -> bool:
        """Take note of a step's loss and gradient norm; whether the step must be skipped.

        Where a skipped step would help no further the answer is False, and the caller's own check of the numbers stops the run:
        the loss scale is 1 and still overflows, or a fixed one has cost too many steps in a row.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.dynamic and self.good_steps >= self.growth_interval:
                self.scale, self.good_steps = min(2 * self.scale, LARGEST_SCALE), 0
            return False
        if self.scale <= 1 if self.dynamic else self.skipped_in_a_row >= PATIENCE:
            return False
        self.good_steps = 0
        self.skipped_in_a_row += 1
        if self.dynamic:
            self.scale = max(self.scale / 2, 1.0)
        return True

    @property
    def advice(self) -> str:
        """What to change when the run was stopped, for the message that says so."""
        if self.dynamic:
            return 'The loss scale is down to 1, so it is not to blame: try model.dtype = "bfloat16". '
        return f'train.loss_scale = {self.scale:g} cost {PATIENCE} steps in a row: set it to "dynamic", or lower. '

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave, unless train.loss_scale was changed since: then it begins anew."""
        if state["dynamic"] != self.dynamic or (not self.dynamic and state["scale"] != self.scale):
            return
        self.scale = float(state["scale"])
        self.good_steps, self.skipped_in_a_row = int(state["good_steps"]), int(state["skipped_in_a_row"])


@torch.no_grad()
def overflow_in_fp8(model: nn.Module) -> torch.Tensor | None:
    """inf if a gradient overflowed on its way into an FP8 cast, else 0: float32 []; None where no history would know.

    An FP8 cast saturates, so behind it the gradients may look sound. The amax that it recorded does not, and delayed scaling
    keeps it. What backward recorded takes effect first, and is joined over the ranks of the FP8 group, so that they agree here.
    """
    scaling.flush()
    arenas = _arenas(model, backward_only=True)
    if not arenas:
        return None
    found = torch.stack([arena.history.isinf().any() for arena in arenas]).any()
    return torch.where(found, math.inf, 0.0)


@torch.no_grad()
def forget_overflow(model: nn.Module) -> None:
    """Take infinite amaxes out of the histories of delayed scaling, after a step that was skipped for them.

    A scale does not move as long as its history holds an infinity, which is right for a run that is about to end; here it
    would be the next 1,023 steps.
    """
    scaling.flush()
    for arena in _arenas(model, backward_only=False):
        arena.history.masked_fill_(arena.history.isinf(), 0.0)


def _arenas(model: nn.Module, *, backward_only: bool) -> list[scaling.Arena]:
    found: dict[int, scaling.Arena] = {}
    for _, state in scaling.states_of(model):
        for operand, slot in state.slots.items():
            if operand is Operand.GRAD_OUTPUT or not backward_only:
                found[slot.arena.number] = slot.arena
    return list(found.values())
