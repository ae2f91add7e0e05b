"""`train.verify`: a run starts only if `octavo verify` has passed for its layout.

A layout that trains wrongly costs a run; the report of a minute on CPUs is read before a GPU is touched.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config.degrees import DEGREES, Degrees, divisors
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.storage import local_path

FILE = "verify.json"
"""Written by `octavo verify`, and read where `train.verify` is true."""
_DECIDE: dict[str, tuple[str, ...]] = {
    "model": ("source", "config", "blocks", "dtype", "params_dtype"),
    "data": ("packing",),
    "train": ("recompute", "mlp_chunks", "offload", "label_smoothing", "z_loss", "freeze"),
    **dict.fromkeys(("fp8", "moe", "lora", "parallel"), ()),
}
"""Keys by section that decide what a layout computes; () for all of a section."""
_DO_NOT = (*(f"parallel.{key}" for key in DEGREES), "fp8.schedule", "fp8.emulate")
"""Degrees are compared by themselves; where FP8 runs, and in which steps, no layout decides."""


def verified_keys(config: RunConfig) -> dict[str, Any]:
    """The keys of a run that decide what a layout computes, with their values."""
    values = config.model_dump(mode="json")
    keys = {f"{section}.{key}": values[section][key] for section, some in _DECIDE.items() for key in some or values[section]}
    keys["data.packing"] = keys["data.packing"] or "join"
    return {key: value for key, value in keys.items() if key not in _DO_NOT}


def refuse_unverified(config: RunConfig, degrees: Degrees) -> None:
    """Raise an InputError unless the file of `train.verify` verifies the layout of this run.

    Tensor, context and expert degrees are the same there; of shards and of replicas there may be fewer, but more than one where
    the run has more than one.
    """
    if not config.train.verify or degrees.world == 1:
        return
    path = local_path(FILE if config.train.verify is True else config.train.verify, "train.verify")
    asked = f"train.verify = {json.dumps(config.train.verify)}: {path}"
    command = _command(degrees, path)
    figures = _read(path, asked, command)
    if not figures["verified"]:
        raise InputError(f"{asked} says that the layout differs from one rank. Read it, or set train.verify = false.")
    here, there = verified_keys(config), figures["keys"]
    for key in sorted({*here, *there}):
        if json.dumps(here.get(key), sort_keys=True) != json.dumps(there.get(key), sort_keys=True):
            found, wanted = json.dumps(there.get(key)), json.dumps(here.get(key))
            raise InputError(
                f"{asked} is of {key} = {found}, and the run has {wanted}. Run {command}, with the run's other keys."
            )
    verified = Degrees(**figures["degrees"])
    for name in ("tensor", "context", "expert"):
        if (found := getattr(verified, name)) != (wanted := getattr(degrees, name)):
            raise InputError(f"{asked} is of {name} degree {found}, and the run has {wanted}. Run {command}.")
    for name in ("replicate", "shard"):
        if (getattr(degrees, name) > 1) != (getattr(verified, name) > 1):
            few = "one" if getattr(verified, name) == 1 else "several"
            raise InputError(f"{asked} is of {few} of {name}, and the run has {getattr(degrees, name)}. Run {command}.")


def _command(degrees: Degrees, path: Path) -> str:
    """The command that verifies these degrees on the fewest ranks: with two shards or replicas where there are several."""
    parts = degrees.context * degrees.tensor
    shards = next(n for n in divisors(degrees.shard) if n >= min(degrees.shard, 2) and n * parts % degrees.expert == 0)
    few = dataclasses.replace(degrees, hybrid_shard=shards * degrees.context)
    replicas = min(degrees.replicate, 2)
    sizes = (few.hybrid_shard if replicas > 1 else 0, few.tensor, few.context, few.expert)
    given = [f"parallel.{key}={size}" for key, size in zip(DEGREES, sizes, strict=True) if size > (key != DEGREES[0])]
    return " ".join(
        ["octavo verify RUN.toml --ranks", str(replicas * few.hybrid_shard * few.tensor), "--output", str(path), *given]
    )


def _read(path: Path, asked: str, command: str) -> Mapping[str, Any]:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{asked} is not there. Run {command}, or set train.verify = false.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{asked} cannot be read: {error}. Run {command}.") from None
    if not _is_report(figures):
        raise InputError(f"{asked} is no report of a run's layout by octavo verify. Run {command}.")
    return figures


def _is_report(figures: Any) -> bool:
    """True for a report of `octavo verify` of a run file on CPUs."""
    if not isinstance(figures, dict) or not isinstance(figures.get("verified"), bool):
        return False
    keys, degrees = figures.get("keys"), figures.get("degrees")
    names = {field.name for field in dataclasses.fields(Degrees)}
    if not isinstance(keys, dict) or not isinstance(degrees, dict) or degrees.keys() != names:
        return False
    return all(type(size) is int and size > 0 for size in degrees.values())
