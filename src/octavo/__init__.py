"""Octavo trains transformers in 8-bit floating point.

Public names are imported lazily, so that `import octavo` is quick and the parts that need no torch load none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo._version import __version__ as __version__

_HOME = {
    "init": "octavo.parallel.world",
    "shutdown": "octavo.parallel.world",
    "state": "octavo.parallel.world",
    "delayed_init": "octavo.parallel.deferred_init",
    "transform": "octavo.build",
    "describe": "octavo.build",
    "fp8_autocast": "octavo.fp8.autocast",
    "save": "octavo.checkpoint.api",
    "load": "octavo.checkpoint.api",
    "export": "octavo.fp8_export",
    "to_huggingface": "octavo.models.convert",
    "clip_grad_norm_": "octavo.train.optimizer",
    "graphed": "octavo.parallel.graphed",
    "matrices": "octavo.matrix_parts",
    "muon": "octavo.train.muon",
    "batches": "octavo.train.batches",
    "parameter_groups": "octavo.groups",
    "evaluating": "octavo.train.evaluation",
    "LoRA": "octavo.config.lora",
    "Trainer": "octavo.train.trainer",
    "Callback": "octavo.train.callbacks",
}
_MODULES = ("fp8", "nn", "recipe", "errors", "config", "context_parallel", "launch")

if TYPE_CHECKING:
    from octavo import config, context_parallel, errors, fp8, launch, nn, recipe
    from octavo.build import describe, transform
    from octavo.checkpoint.api import load, save
    from octavo.config.lora import LoRA
    from octavo.fp8.autocast import fp8_autocast
    from octavo.fp8_export import export
    from octavo.groups import parameter_groups
    from octavo.matrix_parts import matrices
    from octavo.models.convert import to_huggingface
    from octavo.parallel.deferred_init import delayed_init
    from octavo.parallel.graphed import graphed
    from octavo.parallel.world import init, shutdown, state
    from octavo.train.batches import batches
    from octavo.train.callbacks import Callback
    from octavo.train.evaluation import evaluating
    from octavo.train.muon import muon
    from octavo.train.optimizer import clip_grad_norm_
    from octavo.train.trainer import Trainer

__all__ = [
    "Callback", "LoRA", "Trainer", "batches", "clip_grad_norm_", "config", "context_parallel", "delayed_init", "describe",
    "errors", "evaluating", "export", "fp8", "fp8_autocast", "graphed", "init", "launch", "load", "matrices", "muon", "nn",
    "parameter_groups", "recipe", "save", "shutdown", "state", "to_huggingface", "transform",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(_imported(_HOME[name]), name)
    elif name in _MODULES:
        value = _imported(f"octavo.{name}")
    else:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    globals()[name] = value
    return value


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        from octavo.errors import InputError
        from octavo.versions import broken

        if (sentence := broken(error)) is not None:
            raise InputError(f"{sentence}.") from error
        raise


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
