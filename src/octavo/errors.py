"""Errors with their exit codes, and warnings: one message each, no traceback.

A message states the fault, the value, the limit, the nearest value that works and the key to change.
"""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C with nothing to save (128 + SIGINT, as shells count)."""
EXIT_STOPPED = 75
"""Stopped early but saved: run the same command again (BSD's EX_TEMPFAIL, on which Slurm can requeue)."""


class OctavoError(Exception):
    """A failure that one message explains."""

    exit_code = EXIT_FAILED


class InputError(OctavoError, ValueError):
    """The user's input is wrong; nothing was started or lost."""

    exit_code = EXIT_INPUT


class RunStopped(OctavoError):
    """A signal stopped the run after it had saved; the same command continues it."""

    exit_code = EXIT_STOPPED


class Interrupted(OctavoError):
    """Ctrl-C outside a training; a training would stop and save."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self) -> None:
        super().__init__("interrupted.")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to `word`; None if none is close enough to be a typo."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def unknown(what: str, value: str, known: Iterable[str], *, key: str | None = None) -> InputError:
    """An InputError for a name outside a closed set: the value, the nearest name, and the whole set."""
    names = sorted(known)
    guess = nearest(value, names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    where = f" Change {key}." if key else ""
    return InputError(f"unknown {what} {value!r}.{hint} Known: {', '.join(names)}.{where}")


def check_flags(owner: str, **flags: object) -> None:
    """Raise an InputError for a flag of `owner` that is no bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{owner}: {name} = {flag!r} is neither True nor False.")


def install_extra(name: str) -> str:
    """The command that installs an extra of Octavo, from an index of packages and from a clone."""
    return f"pip install 'octavo[{name}]' (in a clone of Octavo: pip install -e '.[{name}]')"


def print_in_any_encoding() -> None:
    """Let standard output escape characters that its encoding lacks, as stderr does: printing them must not end a run."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and not out.encoding.lower().startswith("utf"):
        out.reconfigure(errors="backslashreplace")


def warn(message: str) -> None:
    """Write a line for the user to stderr, which may be None if a caller has closed it."""
    if sys.stderr is not None:
        sys.stderr.write(f"octavo: {message}\n")


def some(names: Iterable[str], shown: int = 4) -> str:
    """The first names, and the number of remaining ones."""
    first = list(names)
    return ", ".join(first[:shown]) + (f" and {len(first) - shown} more" if len(first) > shown else "")


def first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message, without the full stop.

    If the line ends with a colon, the next line is added.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {line.rstrip('.')}"


@contextmanager
def recorded(row: dict[str, str], name: str, say: Callable[[str], None], *, key: str = "error") -> Iterator[None]:
    """A context for one of many measurements: an exception ends only this one.

    The exception's first line is stored in the row under `key`, and printed in a message with the name.
    """
    try:
        yield
    except Exception as error:
        row[key] = first_line(error)
        say(f"{name} failed: {row[key]}")


_UNREACHABLE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ConnectTimeout")
_OFFLINE = ("couldn't connect", "couldn't reach", "offline mode")


def unreachable(key: str, name: str, what: str, otherwise: str, *, hint: str = "") -> InputError:
    """An InputError for an id of the Hugging Face Hub out of reach; `what`: "model", "tokenizer" or "data set"."""
    option = "--repo-type dataset " if what == "data set" else ""
    return InputError(
        f"{key} = {name!r} is not a local path, and the Hugging Face Hub cannot be reached for a {what} of this name; the "
        f"local cache has none.{hint} Run `hf download {option}{name}` on a machine with a network, and set {key} to "
        f"that folder; or use {otherwise}."
    )


def is_unreachable(error: BaseException | None) -> bool:
    """True if the Hugging Face Hub could not be reached: by the types and messages of an exception and its causes."""
    while error is not None:
        text = str(error).lower()
        if type(error).__name__ in _UNREACHABLE or any(words in text for words in _OFFLINE):
            return True
        error = error.__cause__ or error.__context__
    return False
