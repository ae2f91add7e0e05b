"""Names that `torch.load` takes in a checkpoint that a script wrote by `torch.save`: since PyTorch 2.6 it loads weights only.

SMP's examples save, beside tensors, a count of parameters, which is a scalar of numpy, and the model's config. Their classes
hold data alone, and are named here one by one; all other names stay refused, and nothing is unpickled without the check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from transformers import PretrainedConfig

_SCALAR: Any = np.int64(0).__reduce__()[0]
_SCALARS = (_SCALAR, (_SCALAR, "numpy.core.multiarray.scalar"), (_SCALAR, "numpy._core.multiarray.scalar"))
"""The function that makes a numpy scalar, by the names of numpy 1 and 2."""
_DTYPES = (np.dtype, *{type(np.dtype(name)) for name in ("bool", "int32", "int64", "uint8", "float16", "float32", "float64")})


def admit_scalars() -> Callable[[], None]:
    """Let `torch.load` take scalars of numpy; returns the function that takes all names of this module away."""
    add_safe_globals([*_SCALARS, *_DTYPES])

    def undo() -> None:
        kept = [one for one in get_safe_globals() if one not in _SCALARS and one not in _DTYPES and one not in _configs]
        clear_safe_globals()
        add_safe_globals(kept)
        _configs.clear()

    return undo


_configs: list[Any] = []


def admit_config(config: Any) -> None:
    """Let `torch.load` take configs of this class, and those inside it."""
    if not isinstance(config, PretrainedConfig) or type(config) in _configs:
        return
    _configs.append(type(config))
    add_safe_globals([type(config)])
    for value in vars(config).values():
        admit_config(value)
