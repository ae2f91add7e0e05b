"""`inspect`: the current scales and amax histories of a module's FP8 tensors, for people and for tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from octavo.errors import InputError
from octavo.fp8 import scaling
from octavo.fp8.scaling import ModuleState


def inspect(module: nn.Module) -> dict[str, Any]:
    """The state of each FP8 tensor of a module: `"input" | "weight" | "grad_output"` → format, scale, history, saturation.

    Each entry has `format` ("E4M3" | "E5M2"), `scale` (float32; under delayed scaling what the next cast multiplies by, else
    what the last one did, one a tensor, row or block, and None before a cast or in compiled code), `amax_history` (float32 [L],
    or None without a history) and `saturated` (whether the last recorded amax lay beyond the format's range at the scale it
    met). A module with several matrices gives such a dict for each by name; one that was never called gives an empty one.

    Raises:
        InputError: nothing in the module runs in FP8.
    """
    scaling.flush()
    found = {name: _entries(state) for name, state in scaling.states_of(module)}
    if not found:
        raise InputError(f"{type(module).__name__} has no FP8 layer: octavo.describe(model) names those that have.")
    return found[""] if set(found) == {""} else found


def _entries(state: ModuleState) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for operand, how in state.recipe.casts.items() if state.recipe is not None else ():
        entry = entries[operand.value] = {
            "format": how.format.name, "scale": state.observed.get(operand), "amax_history": None, "saturated": False,
        }  # fmt: skip
        if how.delayed:
            slot = state.slots[operand]
            entry["scale"], entry["amax_history"] = slot.scale.clone(), slot.history.clone()
            entry["saturated"] = bool(slot.buffer.saturated[slot.index])
    return entries
