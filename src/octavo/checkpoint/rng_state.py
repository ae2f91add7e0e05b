"""Random states: saved and restored, so that a resumed run draws the same numbers as an uninterrupted one.

Dropout draws from torch's generators; a user's data or model code may draw from Python's and numpy's. Ranks with different
tokens draw different numbers; ranks of a tensor group draw the same, except from the tracker's generators. A checkpoint loaded
at another tensor degree preserves that: a rank restores the states of a saved rank with its share of the tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from octavo.parallel.world import seed_everything, state

_TRACKED = "tracked."  # prefix of the generators of octavo.state's tracker


def random_tensors() -> dict[str, torch.Tensor]:
    """torch's generator states, uint8: "cpu", and "cuda" and "tracked.<name>" if CUDA and octavo.state's tracker were used."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if state.rng_tracker is not None:
        states |= {_TRACKED + name: value for name, value in state.rng_tracker.get_states().items()}
    return states


def random_scalars() -> dict[str, Any]:
    """Python's and numpy's generator states as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), [int(k) for k in np.asarray(keys)], int(position), int(has_gauss), float(cached)],
    }


def _python_state(scalars: dict[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = scalars["python"]
    return version, tuple(words), gauss


def _numpy_state(scalars: dict[str, Any]) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = scalars["numpy"]
    return kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached


def check_random(tensors: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
    """Try the results of `random_tensors` and `random_scalars` on new generators; an invalid one raises any error."""
    random.Random().setstate(_python_state(scalars))
    np.random.RandomState().set_state(_numpy_state(scalars))
    for name, value in tensors.items():
        if name == "cpu":
            torch.Generator().set_state(value)
        elif value.dtype != torch.uint8 or value.ndim != 1:
            raise ValueError(f"{name} is {value.dtype} {list(value.shape)}")
    if "cpu" not in tensors:
        raise ValueError("cpu is missing")


def restore_random(tensors: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
    """Restore the results of `random_tensors` and `random_scalars`; a CUDA state is ignored without CUDA."""
    random.setstate(_python_state(scalars))
    np.random.set_state(_numpy_state(scalars))
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    tracked = {name.removeprefix(_TRACKED): value for name, value in tensors.items() if name.startswith(_TRACKED)}
    if tracked:
        tracker = state.get_rng_state_tracker()
        tracker.set_states(tracker.get_states() | tracked)


def source_of(rank: int, saved: Collection[int], tensor: int) -> tuple[int, bool]:
    """The saved rank whose states this rank restores; and True if that rank had other tokens, so this one is reseeded.

    rank: this rank. saved: the ranks of the save. tensor: their tensor-parallel degree.
    """
    group, place = divmod(rank, state.tp_size)
    inside = place if place < tensor else 0
    source = group * tensor + inside
    return (source, False) if source in saved else (inside, True)


def without_tracked(tensors: dict[str, torch.Tensor], rank: int, tensor: int) -> dict[str, torch.Tensor]:
    """`random_tensors` for a rank; the tracker of tensor ranks that the save did not have retains its current states."""
    beyond = rank % state.tp_size >= tensor
    return {name: value for name, value in tensors.items() if not (beyond and name.startswith(_TRACKED))}


def seed_new_rank(tensors: dict[str, torch.Tensor], rank: int) -> None:
    """Seed ranks without a saved state from rank 0's state and their index, so that all draw different numbers."""
    number = rank // state.tp_size
    digest = hashlib.sha256(tensors["cpu"].numpy().tobytes() + number.to_bytes(8, "little")).digest()
    seed_everything(int.from_bytes(digest[:8], "little") >> 1)
