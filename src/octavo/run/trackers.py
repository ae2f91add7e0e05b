"""Experiment trackers: a table of adapters, each in an optional extra, all off by default.

Trackers get each step after metrics.jsonl, which stays the record. A tracker that does not start is an error; one that fails
later is dropped with a warning, and training continues. Output of trackers goes to stderr, since stdout may be one JSON
document.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import InputError, first_line, install_extra, warn


class _Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    """Event files in `<run>/tensorboard`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self.close = self._writer.close

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class _Project:
    """An entry in a project named octavo, for packages with W&B's functions; a continued run resumes its entry."""

    def __init__(self, package: str, config: Mapping[str, Any], **options: Any) -> None:
        self._package = importlib.import_module(package)
        self._package.init(project="octavo", config=dict(config), resume="allow", **options)
        self.close = self._package.finish

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log(dict(values), step=step)


def _trackio(folder: Path, config: Mapping[str, Any], first_step: int) -> _Tracker:
    return _Project("trackio", config, name=_run_id(folder))


def _wandb(folder: Path, config: Mapping[str, Any], first_step: int) -> _Tracker:
    return _Project("wandb", config, id=_run_id(folder), name=folder.name, dir=str(folder))


def _run_id(folder: Path) -> str:
    return f"{folder.name}-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]}"


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], _Tracker]] = {
    "tensorboard": _TensorBoard,
    "trackio": _trackio,
    "wandb": _wandb,
}
"""Adapters by name in log.trackers, which is also the name of the package and of Octavo's extra."""

_REMEDIES = {"wandb": "Log in with `wandb login`, or set WANDB_MODE=offline in the environment"}


class Trackers:
    """The trackers of the run in `folder`, from `first_step` on.

    Raises:
        InputError: a tracker does not start; the others are closed.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        self._open: dict[str, _Tracker] = {}
        for name in names:
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    self._open[name] = TRACKERS[name](folder, config, first_step)
            except BaseException as error:
                self.close()
                if not isinstance(error, Exception):
                    raise
                remedy = _REMEDIES.get(name, f"Check that {name} works by itself")
                raise InputError(
                    f"log.trackers names {name!r}, which does not start: {first_line(error)}. {remedy}, or remove it from "
                    "log.trackers."
                ) from None

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass the numbers of one step's metrics to every tracker; drop one that fails."""
        numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        del numbers["step"]
        for name, tracker in list(self._open.items()):
            with self._warned(name, f"failed at step {record['step']} and is dropped"):
                tracker.log(record["step"], numbers)

    def close(self) -> None:
        """Close every tracker."""
        while self._open:
            name, tracker = self._open.popitem()
            with self._warned(name, "could not be closed"):
                tracker.close()

    @contextlib.contextmanager
    def _warned(self, name: str, fault: str) -> Iterator[None]:
        """Drop a tracker that fails, with a warning; its output goes to stderr."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except Exception as error:
            self._open.pop(name, None)
            warn(f"log.trackers: {name} {fault} ({first_line(error)}); metrics.jsonl has every step.")


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of these trackers are installed (the InputError names the extra)."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"log.trackers names {name!r}, which is not installed. Install it by {install_extra(name)}, or remove it "
                "from log.trackers."
            )
