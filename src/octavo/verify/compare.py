"""Differences of two results of `octavo.verify.worker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

_KINDS = ("gradient", "loss", "norm", "parameter", "exp_avg", "exp_avg_sq", "scale", "history")


class Difference(NamedTuple):
    """Of a tensor: its name, ‖found − wanted‖ / ‖wanted‖, and whether that is within the bound."""

    name: str
    error: float
    within: bool


class Bounds(NamedTuple):
    """The largest relative errors of losses, which are float32, of norms, and of tensors."""

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
    """Of each tensor, by kind in the order of a step. One that a result lacks differs by infinity."""
    result = []
    for name in sorted({*wanted, *found}, key=lambda name: (_KINDS.index(name.split()[0]), name)):
        if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
            result.append(Difference(name, float("inf"), False))
            continue
        one, other = found[name].double(), wanted[name].double()
        error = ((one - other).norm() / (other.norm() + 1e-30)).item()
        result.append(Difference(name, error, error <= bounds.of(name)))
    return result
