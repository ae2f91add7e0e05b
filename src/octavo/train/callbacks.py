"""Events of a training: the calls that `octavo.Trainer` passes on to a user's callbacks and evaluation.

They run on every rank, so that a callback may use collectives. If one raises, the step is saved first. Random numbers that they
draw and gradients that they leave do not affect the run. Settings that the run controls, such as the learning rate, must not be
changed: that is refused rather than overwritten. Checkpoints store the state of callbacks that have `state_dict`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.checkpoint.plain import KINDS, pack, unpack
from octavo.checkpoint.rng_state import random_scalars, random_tensors, restore_random
from octavo.errors import InputError, nearest, warn
from octavo.run.summary import Result
from octavo.train.evaluation import Evaluation, fault_of_arguments, figures_of, never_runs, same_settings

EVALUATE = "Trainer(evaluate=…)"
"""Name of a trainer's evaluation in messages."""


class Callback:
    """Base of callbacks: override any method. `trainer` is the `octavo.Trainer`: `model`, `optimizer`, `config`, `step`.

    With methods `state_dict` and `load_state_dict` a callback has a state, which each checkpoint of the run stores: tensors,
    numbers, text, and lists, tuples and dicts of them. A continued run restores it before its first step.
    """

    def on_step(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """After each step; `record` is its line of metrics.jsonl."""

    def on_validation(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """After each validation; `record` has `validation_loss`, `perplexity` and the figures of the user's evaluation."""

    def on_checkpoint(self, trainer: Any, path: Path) -> None:
        """After each save; under `checkpoint.async` the files of `path` may still be written."""

    def on_end(self, trainer: Any, result: Result) -> None:
        """After the last step, also if the run ends early; not after a signal or an error."""


EVENTS = ("on_step", "on_validation", "on_checkpoint", "on_end")
_LOOKS_LIKE_AN_EVENT = re.compile(r"on(_|[A-Z])")


def check_callbacks(callbacks: Any) -> None:
    """Refuse a callback whose methods would never be called, or fail when called.

    Raises:
        InputError: not a list of callbacks; a method with a misspelt name or other arguments; `state_dict` or `load_state_dict`
            alone.
    """
    if not isinstance(callbacks, list | tuple):
        raise InputError(f"Trainer(callbacks={callbacks!r}): give a list of callbacks, such as callbacks=[MyCallback()].")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            way = "create an object of it" if isinstance(callback, type) else "derive its class from octavo.Callback"
            raise InputError(f"Trainer(callbacks=…): {callback!r} is not an octavo.Callback: {way}.")
        kind = type(callback).__name__
        for name in dir(callback):
            joined = name.lower() in {event.replace("_", "") for event in EVENTS}
            if (joined or _LOOKS_LIKE_AN_EVENT.match(name)) and name not in EVENTS:
                guess = nearest(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(), EVENTS)
                hint = f" Did you mean {guess}?" if guess else ""
                raise InputError(
                    f"Trainer(callbacks=…): {kind}.{name} would never be called: no event has this name.{hint} Events are "
                    f"{', '.join(EVENTS)}; the name of a helper method must not begin with on."
                )
        for event in EVENTS:
            _check_method(callback, event, "trainer", next(reversed(inspect.signature(getattr(Callback, event)).parameters)))
        stateful = [hasattr(callback, name) for name in ("state_dict", "load_state_dict")]
        if any(stateful) and not all(stateful):
            here, absent = ("state_dict", "load_state_dict")[:: 1 if stateful[0] else -1]
            raise InputError(f"Trainer(callbacks=…): {kind} has {here} without {absent}: a state needs both.")
        if all(stateful):
            _check_method(callback, "state_dict")
            _check_method(callback, "load_state_dict", "state")


def _check_method(callback: Callback, name: str, *arguments: str) -> None:
    """Refuse a method that cannot be called with these arguments."""
    method, call = getattr(callback, name), f"{name}({', '.join(arguments)})"
    if what := never_runs(method) if callable(method) else f"is {method!r}, which cannot be called":
        raise InputError(f"Trainer(callbacks=…): {type(callback).__name__}.{name} {what}: define {call} as a plain method.")
    if error := fault_of_arguments(method, *arguments):
        raise InputError(
            f"Trainer(callbacks=…): {type(callback).__name__}.{name}{inspect.signature(method)} cannot be called as {call} "
            f"({error}): define it with these arguments after self."
        )


class Events:
    """Events without listeners, as in the run without FP8 of `train.compare_bf16`."""

    samples = False
    """True if samples of text are shown."""

    def started(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Model and optimizer are ready, restored from a checkpoint if there is one."""

    def state(self) -> bytes:
        """State for a checkpoint; empty without any."""
        return b""

    def restore(self, state: bytes) -> None:
        """Restore the state from the checkpoint that the run continues from; empty if it has none."""

    def stepped(self, record: Mapping[str, Any]) -> None:
        """A step is done."""

    def validated(self, record: Mapping[str, Any]) -> None:
        """A validation is done."""

    def saved(self, path: Path) -> None:
        """A checkpoint has been written, or is being written in the background."""

    def evaluate(self, model: nn.Module, step: int, alive: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Figures of the user's evaluation, as `evaluation/NAME`. alive: called before each forward."""
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

    def state(self) -> bytes:
        """See `Events`.

        Raises:
            InputError: the state of a callback has types that a checkpoint does not support.
        """
        states = {}
        for name, callback in self._stateful().items():
            with _same_random_numbers():
                states[name] = callback.state_dict()
            try:
                pack(states[name])
            except TypeError as error:
                raise InputError(
                    f"{name}.state_dict() cannot be stored in a checkpoint: {error}. A state is {KINDS}: return it as one of "
                    "these."
                ) from None
        return pack(states) if states else b""

    def restore(self, state: bytes) -> None:
        """See `Events`. Warns about a callback without a state in the checkpoint, and a state without its callback."""
        states = unpack(state) if state else {}
        callbacks = self._stateful()
        for name in [*callbacks, *(name for name in states if name not in callbacks)]:
            if name not in states:
                warn(f"the checkpoint has no state of the callback {name}, which starts without one.")
            elif name not in callbacks:
                warn(f"the checkpoint has the state of a callback {name}, which this run does not have: it is ignored.")
            else:
                with _same_random_numbers():
                    callbacks[name].load_state_dict(states[name])

    def _stateful(self) -> dict[str, Any]:
        """The callbacks with a state, by class name; numbered from the second of a class on."""
        by_name: dict[str, Any] = {}
        for callback in self._callbacks:
            kind = type(callback).__qualname__
            if hasattr(callback, "state_dict"):
                number = sum(type(each).__qualname__ == kind for each in by_name.values()) + 1
                by_name[kind if number == 1 else f"{kind} {number}"] = callback
        return by_name

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
        """The training has ended, now or in an earlier start."""
        self._trainer.step = result.summary.steps
        self._tell("on_end", result)

    def evaluate(self, model: nn.Module, step: int, alive: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See `Events`.

        Raises:
            InputError: see `octavo.train.evaluation.figures_of`.
        """
        if self._evaluation is None:
            return {}
        with self._guarded(EVALUATE):
            return figures_of(EVALUATE, self._evaluation, model, step, self._trainer.config.train.eval_reduce, alive)

    def _tell(self, event: str, argument: Any) -> None:
        if self._callbacks:
            with _same_random_numbers(), same_settings():
                for callback in self._callbacks:
                    with self._guarded(f"{type(callback).__name__}.{event}"):
                        getattr(callback, event)(self._trainer, argument)

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Around a user's code: drop gradients that it leaves, and refuse changes of settings that the run controls.

        Raises:
            InputError: names the setting and its key.
        """
        trainer = self._trainer
        model, optimizer = trainer.model, trainer.optimizer
        before = {key: getattr(trainer, key) for key in ("model", "optimizer", "config", "step")}
        groups = [] if optimizer is None else list(optimizer.param_groups)
        rates = [group["lr"] for group in groups]
        training = model is not None and model.training
        yield
        for key, value in before.items():
            if getattr(trainer, key) is not value:
                raise InputError(f"{name} set trainer.{key}, which the training does not read: do not set it.")
        if model is None or optimizer is None:
            return
        if list(map(id, optimizer.param_groups)) != list(map(id, groups)):
            raise InputError(
                f"{name} changed the parameter groups of the optimizer, which the run has set up: do not change them."
            )
        for number, (group, rate) in enumerate(zip(groups, rates, strict=True)):
            if group["lr"] != rate:
                raise InputError(
                    f"{name} set the learning rate of parameter group {number} to {float(group['lr']):g}, and each step sets "
                    "it by optimizer.schedule: give optimizer.lr, schedule, warmup_steps and min_lr_fraction instead."
                )
        if model.training != training:
            mode, other = ("evaluation", "train") if training else ("training", "eval")
            raise InputError(f"{name} left the model in {mode} mode: call trainer.model.{other}() at its end.")
        model.zero_grad()


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the random states of torch, numpy and Python at the end."""
    tensors, scalars = random_tensors(), random_scalars()
    try:
        yield
    finally:
        restore_random(tensors, scalars)
