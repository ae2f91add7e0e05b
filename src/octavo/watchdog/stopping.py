"""Signals and a closed output: a run that receives a stop signal finishes its step, saves, and says "run me again".

Before the first step there is nothing to save, so a signal ends the run at once, with the same exit code. From then on it
only sets a flag that the loop reads between steps: an exception inside an optimizer step or a rename would leave it half done.
A second SIGTERM has no effect, since schedulers may send it twice. A second Ctrl-C interrupts at once. SIGHUP (the terminal
is gone), SIGUSR1 and SIGUSR2 (schedulers' notices that the time is nearly over) and a pipe without a reader count as SIGTERM.
SIGHUP stays ignored under nohup, and SIGUSR1 and SIGUSR2 stay with a handler that the program has installed.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from octavo.errors import RunStopped
from octavo.supervision import StopHandler, stop_signals


class _StopSignal(BaseException):
    """A signal before the first step; not an `Exception`, which libraries that read data and models catch."""


class StopRequest(StopHandler):
    """A context that handles the signals; its exit raises RunStopped after a signal before the first step."""

    def __init__(self) -> None:
        self.received: str | None = None  # name of the first signal
        self.ending = False  # the run should end as after its last step
        self._training = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        while error is not None and not isinstance(error, _StopSignal):
            error = error.__cause__ or error.__context__  # a library may have wrapped it
        if error is not None:
            raise RunStopped(str(error)) from None

    def training(self) -> None:
        """From now on a signal waits for the end of the step."""
        self._training = True

    def end(self) -> None:
        """End the run after this step, saved."""
        self.ending = True

    def output_closed(self) -> None:
        """Stop as for a signal: the reader of the output has exited."""
        _silence_closed_outputs()
        if threading.current_thread() is threading.main_thread():
            self._stop("a closed output")
        else:
            self.received = self.received or "a closed output"  # the main thread reads it after its step

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        _silence_closed_outputs()
        self._stop(signal.Signals(number).name)

    def _stop(self, cause: str) -> None:
        repeated = self.received is not None
        self.received = self.received or cause
        if not self._training and not repeated:
            raise _StopSignal(f"stopped by {self.received} before the first step: nothing to save. Run the same command again.")


def _silence_closed_outputs() -> None:
    """Redirect stdout and stderr to /dev/null if their pipe or terminal is closed: the next line would end the run."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)  # errors and hang-ups are always reported
        if poll.poll(0):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
