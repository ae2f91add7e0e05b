"""How a mistake is answered: one message, one exit code, no traceback.

Every message that a user can cause says what is wrong, the value that was seen, the limit it broke, the nearest value that
works and the key to change. The classes here carry the exit code; `octavo.cli` turns them into text, and a program that uses
Octavo as a library catches them as ordinary exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_STOPPED = 75
"""The run stopped early but saved: run the same command again (BSD's EX_TEMPFAIL, which Slurm can requeue on)."""


class OctavoError(Exception):
    """A failure that Octavo understands and can explain in one message."""

    exit_code = EXIT_FAILED


class InputError(OctavoError, ValueError):
    """The user's input is wrong; nothing was started and nothing was lost."""

    exit_code = EXIT_INPUT


class RunStopped(OctavoError):
    """The run was asked to stop, finished its step and saved; running the command again continues it."""

    exit_code = EXIT_STOPPED


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that is not empty; "no message" where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to `word`, or None if none is close enough to be a slip of the finger."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def unknown(what: str, value: str, known: Iterable[str], *, key: str | None = None) -> InputError:
    """An InputError for a name that is not in a closed set: the value, the nearest right one, and the whole set."""
    names = sorted(known)
    guess = nearest(value, names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    where = f" Change {key}." if key else ""
    return InputError(f"unknown {what} {value!r}.{hint} Known: {', '.join(names)}.{where}")
