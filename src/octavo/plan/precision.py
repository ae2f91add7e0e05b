"""`fp8.schedule`: layers that stay out of FP8 in the first or the last steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from octavo.config.fp8 import steps_without_fp8
from octavo.fp8.scaling import ModuleState
from octavo.models.replace import matched_layers


class PrecisionSchedule:
    """The steps in which each layer of a model runs without FP8; `begin` applies them.

    A layer that enters FP8 gets its first scale as in the first step of a run, since there are no earlier amaxes. Only the step
    number decides, so a continued run computes the same as an uninterrupted one.

    Args:
        model: may be on the meta device, to check the schedule.
        schedule: `fp8.schedule`.
        steps: number of steps of the run.

    Raises:
        InputError: a pattern matches no FP8 layer.
    """

    def __init__(self, model: nn.Module, schedule: Mapping[str, Sequence[str]], steps: int) -> None:
        self._last = steps
        self._steps: dict[ModuleState, set[range]] = {}
        for when, patterns in schedule.items():
            for pattern in patterns:
                for state in matched_layers(model, pattern, "fp8.schedule"):
                    self._steps.setdefault(state, set()).add(steps_without_fp8(when, steps))

    def until(self, last: int) -> dict[ModuleState, list[range]]:
        """The steps without FP8 up to step `last`, as disjoint ranges, for each layer that has any."""
        by_state: dict[ModuleState, list[range]] = {}
        for state, ranges in self._steps.items():
            joined: list[range] = []
            for each in sorted(
                (range(steps.start, min(steps.stop, last + 1)) for steps in ranges), key=lambda each: each.start
            ):
                if joined and each and each.start <= joined[-1].stop:
                    joined[-1] = range(joined[-1].start, max(joined[-1].stop, each.stop))
                elif each:
                    joined.append(each)
            if joined:
                by_state[state] = joined
        return by_state

    def leaves_none(self, states: Iterable[ModuleState]) -> bool:
        """True if each of these layers runs without FP8 in every step of the run."""
        without = self.until(self._last)
        return all(without.get(state) == [range(1, self._last + 1)] for state in states)

    def begin(self, step: int) -> None:
        """Set the precision of step `step`, counted from 1, and of the evaluations after it."""
        for state, ranges in self._steps.items():
            state.pause(any(step in steps for steps in ranges))
