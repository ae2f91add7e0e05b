"""Random states, taken and put back.

Dropout draws from torch's generators; a user's own data or model code may draw from Python's and numpy's. All of them
belong to the state of a run, for a continued run must draw what the uninterrupted one would have drawn. torch's are tensors
and go among the tensors, the others are JSON; none is pickled.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Start every generator from `seed`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_tensors() -> dict[str, torch.Tensor]:
    """torch's generator states, uint8: "cpu", and "cuda" for this process's device once CUDA was used."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def random_scalars() -> dict[str, Any]:
    """Python's and numpy's generator states as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), [int(k) for k in np.asarray(keys)], int(position), int(has_gauss), float(cached)],
    }


def restore_random(tensors: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
    """Put back what `random_tensors` and `random_scalars` gave; a CUDA state is left out where there is no CUDA."""
    version, words, gauss = scalars["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = scalars["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
