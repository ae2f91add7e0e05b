"""Experiment trackers: a table of adapters, each an extra to install, all off by default.

Trackers get each step after metrics.jsonl, which stays the record. An adapter translates names and continues the curve of a
continued run. A tracker that does not open is an error; one that fails later is dropped with a warning, and the training goes
on. Output of trackers goes to stderr, since stdout may be one JSON document.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import InputError, first_line


class Tracker(Protocol):
    """Interface of an adapter."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step."""

    def close(self) -> None:
        """Flush and finish."""


class TensorBoard:
    """Event files in `<run>/tensorboard`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the last events."""
        self._writer.close()


class _Project:
    """An entry in a project named octavo, for packages with W&B's functions; a continued run resumes its own entry."""

    def __init__(self, package: str, config: Mapping[str, Any], **options: Any) -> None:
        self._package = importlib.import_module(package)
        self._package.init(project="octavo", config=dict(config), resume="allow", **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step."""
        self._package.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the entry."""
        self._package.finish()


def _trackio(folder: Path, config: Mapping[str, Any], first_step: int) -> Tracker:
    return _Project("trackio", config, name=_run_id(folder))


def _wandb(folder: Path, config: Mapping[str, Any], first_step: int) -> Tracker:
    return _Project("wandb", config, id=_run_id(folder), name=folder.name, dir=str(folder))


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": _trackio,
    "wandb": _wandb,
}
"""Adapters by name in log.trackers, which is also the name of the package and of Octavo's extra."""

_REMEDIES = {"wandb": "Log in with `wandb login`, or set WANDB_MODE=offline in the environment"}


class Trackers:
    """The open trackers of a run."""

    def __init__(self, opened: Mapping[str, Tracker] | None = None) -> None:
        self._open = dict(opened or {})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the numbers of one step to every tracker; drop one that fails."""
        for name, tracker in list(self._open.items()):
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    tracker.log(step, values)
            except Exception as error:
                del self._open[name]
                _warn(f"{name} failed at step {step} and is dropped ({first_line(error)}); metrics.jsonl has every step.")

    def close(self) -> None:
        """Close every tracker."""
        while self._open:
            name, tracker = self._open.popitem()
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    tracker.close()
            except Exception as error:
                _warn(f"{name} could not be closed ({first_line(error)}); metrics.jsonl has every step.")


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of these trackers are installed (the InputError names the extra)."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"log.trackers asks for {name!r}, which is not installed. Install it with: pip install 'octavo[{name}]', "
                "or take it out of log.trackers."
            )


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any], first_step: int) -> Trackers:
    """Start each tracker for the run in `folder`, whose next step is `first_step`.

    Raises:
        InputError: one does not start; the others are closed.
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
    """The numbers of a metrics record."""
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "step"}


def _run_id(folder: Path) -> str:
    return f"{folder.name}-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]}"


def _warn(message: str) -> None:
    sys.stderr.write(f"octavo: log.trackers: {message}\n")
