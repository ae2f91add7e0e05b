"""`python -m octavo.watchdog RANKS COMMAND …`: any command as several ranks of this host, in the environment of torchrun.

The supervisor of an `octavo.launch` job uses it. Unlike torchrun's, the store of the ranks is bound to the
loopback interface, and the exit code is that of the rank that failed first.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from octavo.errors import InputError, warn
from octavo.watchdog.launcher import launch

_TIMEOUT = 120.0
"""Seconds to save after a signal, as in SageMaker."""
_GRACE = 10.0
_ENDED = ("before a rank could save.", 128 + signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code of the rank that failed first, or 0."""
    try:
        return launch(arguments[1:], int(arguments[0]), timeout=_TIMEOUT, grace=_GRACE, stopped=_ENDED)
    except InputError as error:
        warn(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
