"""`train.verify`: a run starts only if `octavo verify` has passed for its layout.

A layout that trains wrongly costs a run: the report of a minute on CPUs is checked before a GPU is touched.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo._version import __version__
from octavo.config.degrees import DEGREES, MOST_CPU_RANKS, Degrees, divisors
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.sources import load_config
from octavo.storage import local_path

FILE = "verify.json"
"""The report that `octavo verify` writes, and that `train.verify = true` reads."""
_DECIDE: dict[str, tuple[str, ...]] = {
    "model": ("blocks", "dtype", "params_dtype"),
    "data": ("packing",),
    "train": ("recompute", "mlp_chunks", "offload", "label_smoothing", "z_loss", "freeze"),
    "optimizer": ("name", "muon_scale", "rates", "layer_decay"),
    **dict.fromkeys(("fp8", "moe", "lora", "parallel"), ()),
}
"""Keys by section that affect what a layout computes; () for a whole section."""
_DO_NOT = (*(f"parallel.{key}" for key in DEGREES), "fp8.schedule", "fp8.emulate")
"""Keys that are not compared: degrees are compared separately; the layout does not decide where and in which steps FP8 runs."""
_IN_ORDER = ("fp8.layers", "optimizer.rates")
"""Tables of patterns in which later ones take precedence."""
_NOT_OF_THE_MODEL = frozenset(
    (
        *("architectures", "transformers_version", "auto_map", "id2label", "label2id", "problem_type"),
        *("dtype", "torch_dtype", "use_cache", "output_hidden_states", "output_attentions", "return_dict"),
        *("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"),
    )
)
"""Keys of a Hugging Face config that do not affect a training step."""


def verified_keys(config: RunConfig) -> dict[str, Any]:
    """The keys of a run, and of its model's config.json, that affect what a layout computes, with their values."""
    values = config.model_dump(mode="json")
    keys = {f"{section}.{key}": values[section][key] for section, some in _DECIDE.items() for key in some or values[section]}
    keys["data.packing"] = keys["data.packing"] or "join"
    keys["optimizer.clip"] = "above 0" if config.optimizer.clip > 0 else 0
    model = load_config(config.model.source, config.model.config).to_dict()
    keys |= {f"model.config.{key}": value for key, value in model.items() if key not in _NOT_OF_THE_MODEL and key[0] != "_"}
    return {key: value for key, value in keys.items() if key not in _DO_NOT}


def versions() -> dict[str, str]:
    """Versions of Octavo and of PyTorch, the latter without its build: for CPUs on a laptop, for GPUs on a cluster."""
    return {"version": __version__, "torch": importlib.metadata.version("torch").partition("+")[0]}


def refuse_unverified(config: RunConfig, degrees: Degrees) -> None:
    """Raise an InputError unless the file of `train.verify` verifies the layout of this run, and was written by these versions.

    Tensor, context and expert degrees must be equal; there may be fewer shards and replicas, but more than one if the run has
    more than one. `data.packing` is compared if it is set.
    """
    if not config.train.verify or degrees.world == 1:
        return
    path = local_path(FILE if config.train.verify is True else config.train.verify, "train.verify")
    asked = f"train.verify = {json.dumps(config.train.verify)}: {path}"
    run = _remedy(degrees, path)
    figures = _read(path, asked, run)
    if not figures["verified"]:
        raise InputError(f"{asked} reports that the layout differs from one rank. Read it, or set train.verify = false.")
    for key, name in (("version", "Octavo"), ("torch", "PyTorch")):
        if (by := figures.get(key)) != (wanted := versions()[key]):
            raise InputError(f"{asked} was written by {name} {by or 'of an unknown version'}, but the run has {wanted}. {run}.")
    here, there = verified_keys(config), dict(figures["keys"])
    if config.data.packing is None:  # unknown until the data are prepared
        del here["data.packing"]
        there.pop("data.packing", None)
    for key in sorted({*here, *there}):
        in_order = key in _IN_ORDER
        if json.dumps(here.get(key), sort_keys=not in_order) != json.dumps(there.get(key), sort_keys=not in_order):
            by_file, wanted = json.dumps(there.get(key)), json.dumps(here.get(key))
            raise InputError(f"{asked} verified {key} = {by_file}, but the run has {wanted}. {run}, with the run's other keys.")
    verified = Degrees(**figures["degrees"])
    for name in ("tensor", "context", "expert"):
        if (by_file := getattr(verified, name)) != (wanted := getattr(degrees, name)):
            raise InputError(f"{asked} verified {name} degree {by_file}, but the run has {wanted}. {run}.")
    for name in ("replicate", "shard"):
        if (getattr(degrees, name) > 1) != (getattr(verified, name) > 1):
            by_file, wanted = getattr(verified, name), getattr(degrees, name)
            raise InputError(f"{asked} verified {name} degree {by_file}, but the run has {wanted}. {run}.")


def _remedy(degrees: Degrees, path: Path) -> str:
    """The command that verifies these degrees on the fewest ranks: with two shards or replicas if there are several.

    Raises:
        InputError: these are more ranks than the command can start.
    """
    parts = degrees.context * degrees.tensor
    shards = next(n for n in divisors(degrees.shard) if n >= min(degrees.shard, 2) and n * parts % degrees.expert == 0)
    few = dataclasses.replace(degrees, hybrid_shard=shards * degrees.context)
    replicas = min(degrees.replicate, 2)
    sizes = (few.hybrid_shard if replicas > 1 else 0, few.tensor, few.context, few.expert)
    overrides = [f"parallel.{key}={size}" for key, size in zip(DEGREES, sizes, strict=True) if size > (key != DEGREES[0])]
    if (ranks := replicas * few.hybrid_shard * few.tensor) > MOST_CPU_RANKS:
        raise InputError(
            f"train.verify: octavo verify starts at most {MOST_CPU_RANKS} processes, and this run's tensor, context and expert "
            f"degrees need {ranks}: verify smaller ones, and set train.verify = false."
        )
    return " ".join(["Run octavo verify RUN.toml --ranks", str(ranks), "--output", str(path), *overrides])


def _read(path: Path, asked: str, run: str) -> Mapping[str, Any]:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{asked} does not exist. {run}, or set train.verify = false.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{asked} cannot be read: {error}. {run}.") from None
    if not _is_report(figures):
        raise InputError(f"{asked} is not a report of octavo verify about a run's layout. {run}.")
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
