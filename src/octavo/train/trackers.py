"""Experiment trackers: a table of adapters, each an extra to install, all off by default.

A tracker gets what metrics.jsonl gets, after it was written there; the file stays the record. An adapter only translates
names and keeps a continued run in the same curve.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import InputError


class Tracker(Protocol):
    """What a run asks of a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one step."""

    def close(self) -> None:
        """Hand over what is still held."""


class TensorBoard:
    """Event files in `<run>/tensorboard`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the last events."""
        self._writer.close()


class Trackio:
    """A local trackio project named octavo; a continued run resumes its own entry."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project="octavo", name=_run_id(folder), config=dict(config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one step."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


class WeightsAndBiases:
    """A W&B project named octavo; a continued run resumes its own entry."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        import wandb

        self._wandb = wandb
        wandb.init(project="octavo", id=_run_id(folder), name=folder.name, dir=str(folder), config=dict(config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one step."""
        self._wandb.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._wandb.finish()


TRACKERS: dict[str, type[TensorBoard] | type[Trackio] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}
"""By the name in log.trackers, which is also the package and Octavo's extra."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed (InputError names the extra)."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"log.trackers asks for {name!r}, which is not installed. Install it with: pip install 'octavo[{name}]', "
                "or take it out of log.trackers."
            )


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any], first_step: int) -> list[Tracker]:
    """Start each tracker for the run in `folder`, whose next step is `first_step`."""
    return [TRACKERS[name](folder, config, first_step) for name in names]


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What of a metrics record a tracker can draw."""
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "step"}


def _run_id(folder: Path) -> str:
    return f"{folder.name}-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]}"
