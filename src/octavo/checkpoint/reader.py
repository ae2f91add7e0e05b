"""Reads a checkpoint: its state into a model and an optimizer, or its weights one by one.

Everything is compared with the model before anything is loaded, so that a checkpoint that does not fit changes nothing. The
files are not verified here: `octavo.checkpoint.manifest` does that.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.checkpoint import manifest, optimizer_state, shard_io
from octavo.checkpoint.own_code import Converted, as_model_has_it
from octavo.checkpoint.rng_state import restore_random, seed_new_rank
from octavo.checkpoint.writer import STATE, weights
from octavo.errors import OctavoError
from octavo.fp8 import recipe as recipes
from octavo.fp8.scaling import check_state_records, load_state_records
from octavo.parallel.coordination import Ranks


def read_state(path: Path) -> dict[str, Any]:
    """The scalars of a checkpoint."""
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    """Load a verified checkpoint into a model and its optimizer, random states last; returns its scalars. Collective.

    Raises:
        InputError: it is of another model or optimizer; nothing was changed.
    """
    found = ranks.on_rank_0(lambda: shard_io.open_shards(path))
    with ranks.sharing_errors():
        state = read_state(path)
        stored = as_model_has_it(found, model, state.pop("blocks", None))
        groups = state.pop("groups")
        scalars: optimizer_state.Scalars = state.pop("optimizer", {})
        if isinstance(stored, Converted):
            scalars = stored.scalars(scalars)
        recipe = _recipe_from(state.pop("recipe"))
        layout = stored.layout
        own = weights(model)
        shard_io.check_layout(path, shard_io.subset(layout, "model."), shard_io.layout_of(own))
        states: dict[str, torch.Tensor] = {}
        if optimizer is not None:
            saved = shard_io.subset(layout, "optimizer.")
            states = optimizer_state.allocate_states(path, model, optimizer, saved, groups, scalars)
        random_rank = ranks.rank if f"random.{ranks.rank}.cpu" in layout else 0
        fp8, random = (shard_io.empty_tensors(shard_io.subset(layout, prefix)) for prefix in ("fp8.", f"random.{random_rank}."))
        if recipe is not None:
            check_state_records(model, fp8)
    with ranks.sharing_errors():
        sections = {"model": own, "optimizer": states, "fp8": fp8, f"random.{random_rank}": random}
        stored.read({f"{section}.{name}": tensor for section, held in sections.items() for name, tensor in held.items()})
    with ranks.sharing_errors():
        if recipe is not None:
            load_state_records(model, fp8, recipe)
        if optimizer is not None:
            optimizer_state.install_states(model, optimizer, states, groups, scalars)
        random_scalars = state.pop("random")
        if random_rank:
            random_scalars = json.loads((path / f"random-{random_rank}.json").read_text(encoding="utf-8"))
        restore_random(random, random_scalars)
        if random_rank != ranks.rank:
            seed_new_rank(random, ranks.rank)
    return state


def _recipe_from(record: dict[str, Any] | None) -> recipes.Recipe | None:
    if record is None:
        return None
    values = {k: recipes.Format[v] if k == "fp8_format" else v for k, v in record.items() if k != "name"}
    return recipes.RECIPES[record["name"]](**values)


class StoredWeights(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint by parameter name, each read whole onto the CPU when it is looked up."""

    def __init__(self, path: Path) -> None:
        self._stored = shard_io.open_shards(path)
        self.layout = shard_io.subset(self._stored.layout, "model.")

    def __getitem__(self, name: str) -> torch.Tensor:
        (tensor,) = shard_io.empty_tensors({name: self.layout[name]}).values()
        self._stored.read({f"model.{name}": tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def has_own_code(checkpoints: Path, wanted: shard_io.Layout, ranks: Ranks) -> bool:
    """True if the newest readable checkpoint of a run has none of the names of `wanted`: it is of the model's own code."""

    def look() -> bool:
        for _, path in manifest.step_folders(checkpoints):
            with contextlib.suppress(OctavoError, OSError):
                return wanted.keys().isdisjoint(shard_io.subset(shard_io.open_shards(path).layout, "model."))
        return False

    return ranks.on_rank_0(look)


def check_stored_weights(path: Path, wanted: shard_io.Layout, ranks: Ranks) -> None:
    """Compare a checkpoint's weights with those of a model, and refuse others by name. Collective."""
    stored = ranks.on_rank_0(lambda: shard_io.open_shards(path).layout)
    shard_io.check_layout(path, shard_io.subset(stored, "model."), wanted)
