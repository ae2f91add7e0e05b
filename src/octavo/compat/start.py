"""Start of a Python process under `python -m octavo.compat`: installs the shims, and turns Octavo's errors into one message.

Loads no torch: it runs in every process that a script starts.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from octavo.compat import finder, sdk
from octavo.compat.smp.beside import SHIMS as BESIDE
from octavo.compat.smp.shim import SHIM as SMP
from octavo.compat.te.limits import NO_MXFP8
from octavo.compat.te.shim import SHIM as TE
from octavo.errors import InputError, OctavoError, warn
from octavo.launch import faults

SHIMS = (TE, SMP)
LINES = "OCTAVO_COMPAT_LINES"
"""Environment variable: 1 makes output line-buffered, so that ranks with a common log do not split each other's lines."""

_SECONDS_OF_THREADS = 0.1


def install_all() -> None:
    """Install every shim, and turn an uncaught error of Octavo's into its message and exit code."""
    try:
        for shim in (*SHIMS, *BESIDE):
            finder.install(shim)
        sdk.install_if_absent()
    except InputError as error:  # of a package that was installed after the start
        warn(str(error))
    sys.excepthook = _excepthook(sys.excepthook, faults.of_this_process())
    threading.excepthook = _thread_excepthook(threading.excepthook)
    atexit.register(_let_threads_end)
    if os.environ.get(LINES) == "1" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _let_threads_end() -> None:
    """Wait until the threads of torch.distributed on a CPU have freed the collectives of the last backward.

    A collective refers to a Python object, and a thread that frees it during interpreter shutdown aborts the process: 4 of 20
    trainings on two ranks without the wait, none of 24 with it.
    """
    if "torch.distributed" in sys.modules:
        time.sleep(_SECONDS_OF_THREADS)


def _excepthook(before: Callable[..., Any], job: faults.Faults | None) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ValueError) and str(error).endswith(NO_MXFP8):  # Accelerate raises with the reason that it gets
            error = InputError(f"accelerate.utils.TERecipeKwargs(use_mxfp8_block_scaling=True): {NO_MXFP8}")
        said = isinstance(error, OctavoError)
        line = f"{_place(trace)}{error}" if said else _line(error)
        printed = line if said else "".join(traceback.format_exception(kind, error, trace))
        # An error that another rank of the job has printed is not printed a second time.
        shown = job is None or isinstance(error, KeyboardInterrupt) or job.record(printed, line)
        if not isinstance(error, OctavoError):
            if shown:
                before(kind, error, trace)
            return
        # Not sys.stderr: torch.distributed's hook buffers it, and drops it when this one raises.
        with contextlib.redirect_stderr(sys.__stderr__ or sys.stderr):
            if shown:
                warn(line)
            sys.stderr.flush()
        raise SystemExit(error.exit_code)

    return hook


def _thread_excepthook(before: Callable[..., Any]) -> Callable[..., None]:
    def hook(arguments: threading.ExceptHookArgs) -> None:
        if isinstance(arguments.exc_value, OctavoError):
            warn(f"{_place(arguments.exc_traceback)}{arguments.exc_value}")
        else:
            before(arguments)

    return hook


def _line(error: BaseException) -> str:
    """An exception in one line, as at the end of its traceback."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    if isinstance(error, SyntaxError):
        return lines[-1]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


def _place(trace: TracebackType | None) -> str:
    """The innermost line of a traceback outside of installed packages and Octavo: "train.py, line 12: "."""
    place = ""
    for frame in traceback.extract_tb(trace):
        if frame.filename.startswith("<") or "site-packages" in frame.filename or frame.filename.startswith(sys.prefix):
            continue
        if "/octavo/" in frame.filename and frame.filename.startswith(_ROOT):
            continue
        if frame.filename.startswith(_STDLIB):
            continue
        place = f"{frame.filename}, line {frame.lineno}: "
    return place


_ROOT = __file__.rpartition("/compat/")[0]
_STDLIB = traceback.__file__.rpartition("/")[0]
