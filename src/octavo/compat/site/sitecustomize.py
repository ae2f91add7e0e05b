"""Installs the shims when Python starts: `python -m octavo.compat` puts this folder first on PYTHONPATH.

So the script and every process that it spawns have the shims. The `sitecustomize` that this one hides runs afterwards.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _start() -> None:
    spec = importlib.util.find_spec("octavo")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != _HERE.parents[1]:
        sys.path.insert(0, str(_HERE.parents[2]))  # the Octavo that was started
    from octavo.compat import start

    start.install_all()


def _run_hidden() -> None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _start()
finally:  # Python reports the error and continues
    _run_hidden()
