"""Differences between two results of `octavo.verify.worker`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

LOADED = ", as loaded"
_COPY = re.compile(r" of rank (\d+)\b")
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of the moments of AdamW, and of Muon."""
_HELD = ("parameter", "step", *MOMENTS, "history")
NAN = 1e30
"""Replaces NaN, as in scales that have not begun, so that it equals only itself."""


class Difference(NamedTuple):
    """Difference of a tensor: name, ‖found − wanted‖ / ‖wanted‖, whether within the bound, and its ranks if known."""

    name: str
    error: float
    within: bool
    ranks: Sequence[int] = ()


class Bounds(NamedTuple):
    """The largest relative errors of losses (float32), of norms, and of tensors; logits have that of tensors.

    router: for a router's gradient and moments; None: that of tensors.
    """

    loss: float
    norm: float
    tensor: float
    router: float | None = None

    def of(self, name: str) -> float:
        """The bound of a result; 0 for scales and histories, which must be equal to the bit."""
        kind = name.split()[0]
        tensor = self.router if self.router is not None and ".router." in name else self.tensor
        return 0.0 if is_record(name) else {"loss": self.loss, "norm": self.norm}.get(kind, tensor)


def is_record(name: str) -> bool:
    """True for a scale or an amax history."""
    return name.startswith(("scale ", "history "))


def differences(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], bounds: Bounds) -> list[Difference]:
    """The difference of each tensor, in the order of `tensors`. A tensor missing in one result differs by infinity.

    Gradients and moments are divided by 1e-5 of the norm of all of their kind, if theirs is smaller: a router's gradient is 0
    if each token has one expert, with weight 1, and only rounding remains. A rank's copy that differs from the others ("… of
    rank N") is compared with the other result, and exceeds any bound.
    """
    result, least = [], _least(wanted)
    for name in dict.fromkeys((*tensors, *wanted)):
        copy = _COPY.search(name)
        alike = name if copy is None else _COPY.sub("", name)
        one, other = tensors.get(name, tensors.get(alike)), wanted.get(name, wanted.get(alike))
        ranks = () if copy is None else (int(copy[1]),)
        if one is None or other is None or one.shape != other.shape:
            result.append(Difference(name, float("inf"), False, ranks))
            continue
        one, other = (each.double().nan_to_num(NAN) for each in (one, other))
        size = max(other.norm().item(), least.get(_of_kind(name), 0.0), 1e-30)
        error = (one - other).norm().item() / size
        result.append(Difference(name, error, copy is None and error <= bounds.of(name), ranks))
    return result


def _of_kind(name: str) -> tuple[str, str]:
    """Kind and seed in the name of a result."""
    return name.split()[0], name.rpartition(", seed ")[2]


def _least(wanted: Mapping[str, Tensor]) -> dict[tuple[str, str], float]:
    """(kind, seed) → 1e-5 of the norm of all results of that kind."""
    squares: dict[tuple[str, str], float] = {}
    for name, tensor in wanted.items():
        if name.split()[0] in ("gradient", *MOMENTS):
            squares[_of_kind(name)] = squares.get(_of_kind(name), 0.0) + tensor.double().norm().item() ** 2
    return {kind: 1e-5 * math.sqrt(square) for kind, square in squares.items()}


def with_ranks(
    every: Sequence[Difference],
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
    samples: Sequence[Sequence[int]],
) -> list[Difference]:
    """The differences; the first beyond its bound gets the ranks whose parts differ.

    Args:
        every: the differences of `tensors` and `wanted`.
        tensors, wanted: the results.
        parts: parameter → [rank, first indices, sizes] of each box of elements that a rank holds.
        samples: groups of ranks with the same samples, in the order of samples.
    """
    place = next((place for place, each in enumerate(every) if not each.within), None)
    if place is None or every[place].ranks:
        return list(every)
    name = every[place].name.removesuffix(LOADED)
    kind, parameter = name.split(",")[0].split()[:2]
    one, other = tensors.get(name), wanted.get(name)
    ranks: list[int] = []
    if one is not None and other is not None and one.shape == other.shape:
        distance = (one.double().nan_to_num(NAN) - other.double().nan_to_num(NAN)).abs()
        if kind in ("parameter", "gradient", *MOMENTS) and parameter in parts:
            ranks = _where(distance, parts[parameter])
        elif kind in ("states", "logits") and distance.shape[0] % len(samples) == 0:
            rows = distance.chunk(len(samples))
            ranks = [rank for those, part in zip(samples, rows, strict=True) if _is_much(part, distance) for rank in those]
    return [*every[:place], every[place]._replace(ranks=ranks), *every[place + 1 :]]


def _where(distance: Tensor, boxes: Tensor) -> list[int]:
    """The ranks whose boxes have at least 1/100 of the largest distance."""
    ranks = set()
    for rank, *box in boxes.tolist():
        firsts, sizes = box[: len(box) // 2], box[len(box) // 2 :]
        part = distance[tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))]
        if _is_much(part, distance):
            ranks.add(rank)
    return sorted(ranks)


def _is_much(part: Tensor, distance: Tensor) -> bool:
    return part.numel() > 0 and bool(part.max() >= 0.01 * distance.max())


def loaded(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[Difference]:
    """Differences, in any bit, between the tensors that a layout loaded and the saved ones."""
    wanted = {name: tensor for name, tensor in saved.items() if name.split()[0] in _HELD and " after " not in name}
    return [each._replace(name=f"{each.name}{LOADED}") for each in differences(tensors, wanted, Bounds(0.0, 0.0, 0.0))]
