"""Octavo trains transformers in 8-bit floating point.

Names are handed on when they are first asked for, so that `import octavo` is quick and the parts that need no torch load none.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "init": "octavo.parallel.world",
    "shutdown": "octavo.parallel.world",
    "state": "octavo.parallel.world",
    "delayed_init": "octavo.parallel.meta",
    "transform": "octavo.transform",
    "describe": "octavo.transform",
    "fp8_autocast": "octavo.fp8.autocast",
    "save": "octavo.train.checkpoint",
    "load": "octavo.train.checkpoint",
    "export": "octavo.train.export",
    "clip_grad_norm_": "octavo.train.optimizer",
    "graphed": "octavo.train.graphed",
}
_MODULES = {"fp8", "nn", "errors", "config"}
_ALIASES = {"recipe": "octavo.fp8.recipe"}

if TYPE_CHECKING:
    from octavo import config, errors, fp8, nn
    from octavo.fp8 import recipe
    from octavo.fp8.autocast import fp8_autocast
    from octavo.parallel.meta import delayed_init
    from octavo.parallel.world import init, shutdown, state
    from octavo.train.checkpoint import load, save
    from octavo.train.export import export
    from octavo.train.graphed import graphed
    from octavo.train.optimizer import clip_grad_norm_
    from octavo.transform import describe, transform

__all__ = [
    "clip_grad_norm_", "config", "delayed_init", "describe", "errors", "export", "fp8", "fp8_autocast", "graphed", "init",
    "load", "nn", "recipe", "save", "shutdown", "state", "transform",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES or name in _ALIASES:
        value = importlib.import_module(_ALIASES.get(name, f"octavo.{name}"))
    else:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """`octavo.transform` is the function, also after somebody has imported from the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
