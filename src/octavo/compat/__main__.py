"""`python -m octavo.compat SCRIPT …`: runs a script with the shims; also as `torchrun … -m octavo.compat`.

The process becomes the script's (`exec`), so that its `__main__`, arguments, signals and process id are as without the shim.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from octavo.compat.finder import REPLACE
from octavo.compat.start import SHIMS
from octavo.errors import EXIT_INPUT, InputError, OctavoError, warn

SITE = Path(__file__).resolve().parent / "site"
USAGE = """\
usage: python -m octavo.compat [--replace-installed] SCRIPT [argument …]
       python -m octavo.compat [--replace-installed] -m MODULE [argument …]
       torchrun --nproc-per-node=8 -m octavo.compat SCRIPT [argument …]

Runs a script written for Transformer Engine (transformer_engine) or SageMaker's model parallel library (torch.sagemaker) on
Octavo, unchanged. Every process that it spawns finds the same names.

  --replace-installed   replace these packages even if one is installed; or OCTAVO_COMPAT_REPLACE=1
"""


def command(arguments: Sequence[str]) -> list[str]:
    """The command line of Python for the script.

    Raises:
        InputError: there is no such script, or one of the real packages is installed.
    """
    rest = list(arguments)
    while rest and rest[0] == "--replace-installed":
        os.environ[REPLACE] = "1"
        rest.pop(0)
    if not rest or (rest[0] in ("-m", "-c") and len(rest) < 2):
        raise InputError(f"no script given.\n{USAGE.rstrip()}")
    if rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        raise InputError(f"unknown option {rest[0]}.\n{USAGE.rstrip()}")
    if not rest[0].startswith("-") and not Path(rest[0]).exists():
        raise InputError(f"{rest[0]!r} does not exist: give the path of the script (here: {Path.cwd()}).")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise InputError("Python was started with -I, -E or -S, and would not see the shim: start it without these options.")
    for shim in SHIMS:
        shim.check(replace=False)
    return [sys.executable, *subprocess._args_from_interpreter_flags(), *rest]  # type: ignore[attr-defined]


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the script's."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    line = command(arguments)
    before = os.environ.get("PYTHONPATH", "")
    others = [entry for entry in before.split(os.pathsep) if entry and Path(entry).resolve() != SITE]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *others])
    sys.stdout.flush()
    os.execv(line[0], line)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OctavoError as error:
        warn(str(error))
        sys.exit(EXIT_INPUT)
