"""Experiment trackers: a table of adapters, each an extra to install, all off by default.

A tracker gets what metrics.jsonl gets, after it was written there; the file stays the record. An adapter only translates
names and keeps a continued run in the same curve. A tracker that cannot be opened refuses the run; one that fails later is
dropped with a warning, since a training is worth more than its curve on a server. What trackers print goes to stderr: stdout
may be one JSON document.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import InputError, first_line


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


_REMEDIES = {"wandb": "Log in with `wandb login`, or set WANDB_MODE=offline in the environment"}


class Trackers:
    """The open trackers of a run."""

    def __init__(self, opened: Mapping[str, Tracker] | None = None) -> None:
        self._open = dict(opened or {})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give every tracker the numbers of one step; one that fails gets no more."""
        for name, tracker in list(self._open.items()):
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    tracker.log(step, values)
            except Exception as error:
                del self._open[name]
                _warn(f"{name} failed at step {step} and is dropped ({first_line(error)}); metrics.jsonl has every step.")

    def close(self) -> None:
        """Let every tracker hand over what it still holds."""
        while self._open:
            name, tracker = self._open.popitem()
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    tracker.close()
            except Exception as error:
                _warn(f"{name} could not be closed ({first_line(error)}); metrics.jsonl has every step.")


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed (InputError names the extra)."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"log.trackers asks for {name!r}, which is not installed. Install it with: pip install 'octavo[{name}]', "
                "or take it out of log.trackers."
            )


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any], first_step: int) -> Trackers:
    """Start each tracker for the run in `folder`, whose next step is `first_step`.

    Raises:
        InputError: one does not start; those before it are closed again.
    """
    opened: dict[str, Tracker] = {}
    for name in names:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                opened[name] = TRACKERS[name](folder, config, first_step)
        except BaseException as error:
            Trackers(opened).close()
            if not isinstance(error, Exception):
                raise
            remedy = _REMEDIES.get(name, f"Check that {name} works by itself")
            raise InputError(
                f"log.trackers asks for {name!r}, which does not start: {first_line(error)}. {remedy}, or take it out of "
                "log.trackers."
            ) from None
    return Trackers(opened)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What of a metrics record a tracker can draw."""
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "step"}


def _run_id(folder: Path) -> str:
    return f"{folder.name}-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]}"


def _warn(message: str) -> None:
    sys.stderr.write(f"octavo: log.trackers: {message}\n")
