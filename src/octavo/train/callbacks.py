"""Events of a training: the calls that `octavo.Trainer` passes on to a user's callbacks and evaluation.

They run on every rank, so that a callback may use collectives. If one raises, the step is saved first. Random numbers that they
draw change no number of the run: the generators are restored after each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.checkpoint.rng_state import random_scalars, random_tensors, restore_random
from octavo.errors import InputError
from octavo.run.sample import evaluating
from octavo.run.summary import Result

Evaluation = Callable[[nn.Module, int], Mapping[str, float]]
"""A user's evaluation: model in evaluation mode and step → figures by name."""


class Callback:
    """Override any of the methods; `trainer` is the `octavo.Trainer`, with `model`, `optimizer`, `config` and `step`."""

    def on_step(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """After each step; `record` is its line of metrics.jsonl."""

    def on_validation(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """After each validation; `record` has `validation_loss`, `perplexity` and the figures of the user's evaluation."""

    def on_checkpoint(self, trainer: Any, path: Path) -> None:
        """After each save; under `checkpoint.async` the files of `path` may still be on their way."""

    def on_end(self, trainer: Any, result: Result) -> None:
        """After the last step, also of a run that ends early; not after a signal or an error."""


class Events:
    """Events of a training without listeners, such as the twin without FP8."""

    samples = False
    """Samples of text are shown."""

    def started(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Model and optimizer are ready, restored from a checkpoint if there is one."""

    def stepped(self, record: Mapping[str, Any]) -> None:
        """A step is done."""

    def validated(self, record: Mapping[str, Any]) -> None:
        """A validation is done."""

    def saved(self, path: Path) -> None:
        """A checkpoint is written or on its way."""

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        """Figures of the user's evaluation, as `evaluation/NAME`."""
        return {}


class CallbackEvents(Events):
    """Passes events on to callbacks and to an evaluation."""

    samples = True

    def __init__(self, trainer: Any, callbacks: Sequence[Callback], evaluation: Evaluation | None) -> None:
        self._trainer = trainer
        self._callbacks = callbacks
        self._evaluation = evaluation

    def started(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See `Events`."""
        self._trainer.model, self._trainer.optimizer = model, optimizer

    def stepped(self, record: Mapping[str, Any]) -> None:
        """See `Events`."""
        self._trainer.step = record["step"]
        self._tell("on_step", record)

    def validated(self, record: Mapping[str, Any]) -> None:
        """See `Events`."""
        self._tell("on_validation", record)

    def saved(self, path: Path) -> None:
        """See `Events`."""
        self._tell("on_checkpoint", path)

    def ended(self, result: Result) -> None:
        """The training has ended, in this start or in an earlier one."""
        self._trainer.step = result.summary.steps
        self._tell("on_end", result)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        """See `Events`.

        Raises:
            InputError: the evaluation returned no mapping of names to numbers.
        """
        if self._evaluation is None:
            return {}
        with evaluating(model), _same_random_numbers(), torch.no_grad():
            found = self._evaluation(model, step)
        if not isinstance(found, Mapping):
            raise InputError(
                f"Trainer(evaluate=…) returned {type(found).__name__}: return a dict of names and numbers, such as "
                '{"accuracy": 0.5}.'
            )
        for name in found:
            if not isinstance(name, str) or not name.strip():
                raise InputError(
                    f"Trainer(evaluate=…) returned the name {name!r}: a name is text that is not blank, such as "
                    '{"accuracy": 0.5}.'
                )
        return {f"evaluation/{name}": _number(name, value) for name, value in found.items()}

    def _tell(self, event: str, argument: Any) -> None:
        if self._callbacks:
            with _same_random_numbers():
                for callback in self._callbacks:
                    getattr(callback, event)(self._trainer, argument)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"Trainer(evaluate=…) returned {name} = {value!r}: it is a number, such as {math.pi:.2f}.") from None


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the random states of torch, numpy and Python at the end."""
    tensors, scalars = random_tensors(), random_scalars()
    try:
        yield
    finally:
        restore_random(tensors, scalars)
