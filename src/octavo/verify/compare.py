"""Differences of two results of `octavo.verify.worker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

_HELD = ("parameter", "step", "exp_avg", "exp_avg_sq", "history")
_NAN = 1e30
"""In place of NaN, as of scales that have not begun, which equals itself alone."""


class Difference(NamedTuple):
    """Of a tensor: its name, ‖found − wanted‖ / ‖wanted‖, and whether that is within the bound."""

    name: str
    error: float
    within: bool


class Bounds(NamedTuple):
    """The largest relative errors of losses, which are float32, of norms, and of tensors; those of logits are theirs."""

    loss: float
    norm: float
    tensor: float

    def of(self, name: str) -> float:
        """That of a result; scales and histories are equal to the bit or are not."""
        kind = name.split()[0]
        return 0.0 if is_record(name) else {"loss": self.loss, "norm": self.norm}.get(kind, self.tensor)


def is_record(name: str) -> bool:
    """A scale, or the history of one."""
    return name.startswith(("scale ", "history "))


def differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], bounds: Bounds) -> list[Difference]:
    """Of each tensor, in the order in which they were found. One that a result lacks differs by infinity."""
    result = []
    for name in dict.fromkeys((*found, *wanted)):
        if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
            result.append(Difference(name, float("inf"), False))
            continue
        one, other = (each[name].double().nan_to_num(_NAN) for each in (found, wanted))
        error = ((one - other).norm() / (other.norm() + 1e-30)).item()
        result.append(Difference(name, error, error <= bounds.of(name)))
    return result


def loaded(found: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[Difference]:
    """Differences of what a layout holds behind a load from what was saved, in any bit."""
    wanted = {name: tensor for name, tensor in saved.items() if name.split()[0] in _HELD and " behind " not in name}
    return [each._replace(name=f"{each.name}, as loaded") for each in differences(found, wanted, Bounds(0.0, 0.0, 0.0))]
