"""SIGTERM and SIGINT: a run that is asked to stop finishes its step, saves, and says "run me again".

Before the first step there is nothing to save, so a signal ends the run at once, with the same exit code. From then on it
only sets a flag that the loop reads between steps: an exception raised inside an optimizer step or a rename would leave it
half done. A scheduler may send SIGTERM twice, so the second one means nothing new; a person who presses Ctrl-C twice means
it, and the checkpoint format survives it.

What the handler raises before the first step is no `Exception`: libraries that read data and models catch those and go on, or
report them as a fault of the input. It becomes `RunStopped` where the context ends.

Imports nothing heavy: the command installs it before torch is loaded.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from octavo.errors import RunStopped


class _Stop(BaseException):
    """A signal came before the first step."""


class StopRequest:
    """A context manager that takes over both signals and gives them back.

    Raises:
        RunStopped: on exit, when a signal came before the first step.

    Attributes:
        received: name of the signal that asked the run to stop, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._training = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only, and so leaves them to whoever runs it
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        while error is not None and not isinstance(error, _Stop):
            error = error.__cause__ or error.__context__  # somebody made another exception of it
        if error is not None:
            raise RunStopped(str(error)) from None

    def training(self) -> None:
        """From now on a signal waits for the step to end."""
        self._training = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number).name
        if not self._training and not again:
            raise _Stop(f"stopped by {self.received} before the first step: nothing to save. Run the same command again.")
