"""`torch.sagemaker.init` and `state`: SMP's configuration and its view of the ranks, on `octavo.init` and `octavo.state`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from octavo.compat.missing import MissingName, way_of
from octavo.compat.sagemaker.keys import of_this_job
from octavo.compat.smp.configs import SmpConfig
from octavo.compat.smp.keys import users_names
from octavo.compat.smp.shim import WAYS
from octavo.config.degrees import check_composed
from octavo.errors import InputError
from octavo.parallel import world
from octavo.process import process
from octavo.storage import local_path

PARAMETERS = "SM_HP_MP_PARAMETERS"
"""Environment variable with SMP's configuration as JSON, set by the estimator."""


class _Given:
    """The configuration given to `init`; None before."""

    config: SmpConfig | None = None
    where: str = "torch.sagemaker.init"


def given_names() -> contextlib.AbstractContextManager[None]:
    """Context in which errors use the key names of `init`'s configuration."""
    return users_names(_Given.where)


def _last_mesh() -> tuple[int, Any] | None:
    """(ranks of a replica, its mesh, or None if all ranks are one replica) of the newest FSDP model."""
    meshes = [
        (key, mesh)
        for key, (of, mesh) in process.shard_meshes.items()
        if of is world.state.mesh and key[0] in ("dense", "plain")
    ]
    if not meshes:
        return None
    (kind, degree), mesh = meshes[-1]
    inside = degree * world.state.tp_size if kind == "dense" else degree
    return (inside, mesh) if mesh is not None else (world.state.world_size, None)


def cached(kind: str, degree: int, make: Callable[[], Any]) -> Any:
    """The mesh or group of a kind and a degree, created once, and moved to the end of the cache."""
    entry = process.shard_meshes.pop((kind, degree), None)
    if entry is None or entry[0] is not world.state.mesh:
        entry = world.state.mesh, make()
    process.shard_meshes[kind, degree] = entry
    return entry[1]


def replica_group(degree: int) -> dist.ProcessGroup:
    """The ranks of this rank's replica: `degree` shards of each tensor rank. Collective in its first call."""
    ranks = world.state
    inside = degree * ranks.tp_size
    if inside == ranks.world_size:
        assert ranks.world_process_group is not None
        return ranks.world_process_group

    def make() -> Any:
        return dist.new_subgroups_by_enumeration(torch.arange(ranks.world_size, device="cpu").view(-1, inside).tolist())[0]

    group: dist.ProcessGroup = cached("replica", degree, make)
    return group


class Ranker:
    """Ranks by replica: `torch.sagemaker.state.ranker`.

    With hybrid_shard_degree 0, replicas are those of the newest FullyShardedDataParallel model's sharding strategy.
    """

    def get_rep_rank(self, rank: int) -> int:
        """Number of the rank's replica of the sharded model."""
        return rank // self._ranks_of_a_replica()

    def get_rep_groups(self) -> list[list[int]]:
        """For each shard, the ranks that hold it."""
        inside = self._ranks_of_a_replica()
        return [list(range(first, world.state.degrees.world, inside)) for first in range(inside)]

    def _ranks_of_a_replica(self) -> int:
        last = _last_mesh()
        return world.state.world_size // world.state.degrees.replicate if last is None else last[0]


class SmpState:
    """`torch.sagemaker.state`: `octavo.state`, with SMP's names and meanings where they differ.

    Attributes:
        hybrid_shard_degree: as given to `init`, also 0.
        rep_rank_process_group: the ranks of this rank's replica.
        sm_activation_offloading, activation_loading_horizon: as given to `init`.
        ranker: ranks by replica.
    """

    ranker = Ranker()

    @property
    def cfg(self) -> SmpConfig:
        """The configuration; defaults before `init`."""
        return _Given.config or SmpConfig()

    @property
    def hybrid_shard_degree(self) -> int:
        """As given to `init`."""
        return self.cfg.hybrid_shard_degree

    @property
    def sm_activation_offloading(self) -> bool:
        """As given to `init`."""
        return self.cfg.sm_activation_offloading

    @property
    def activation_loading_horizon(self) -> int:
        """As given to `init`."""
        return self.cfg.activation_loading_horizon

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's replica of the model; None for a single process."""
        ranks, last = world.state, _last_mesh()
        inside = ranks.world_size // ranks.degrees.replicate if last is None else last[0]
        if ranks.tp_size > 1 and ("replica", inside // ranks.tp_size) in process.shard_meshes:  # else PyTorch's FSDP
            return replica_group(inside // ranks.tp_size)
        if last is not None:
            return ranks.world_process_group if last[0] == ranks.world_size else last[1].get_group("hybrid_shard")
        if ranks.mesh is None or ranks.degrees.replicate == 1:
            return ranks.world_process_group
        return ranks.mesh["hybrid_shard"].get_group()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(world.state, name):
            known = [key for key in vars(world.state) if not key.startswith("_")]
            raise MissingName(way_of(f"torch.sagemaker.state.{name}", WAYS, known))
        return getattr(world.state, name)


state = SmpState()


def init(config: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> None:
    """Start the process groups and lay out the ranks.

    Args:
        config: SMP's configuration, or the path of a JSON file with it; None: the estimator's, else defaults.

    Raises:
        InputError: an unknown key, text that is not JSON, or a degree that does not fit.
    """
    values, where = _read(config)
    chosen = SmpConfig.from_dict(values, where=where)
    keys = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "hybrid_shard_degree")
    degrees = {key: getattr(chosen, key) for key in keys}
    horizon = chosen.activation_loading_horizon
    with users_names(where):
        check_composed(chosen.tensor_parallel_degree, chosen.expert_parallel_degree)
        world.init({**degrees, "random_seed": chosen.random_seed, "activation_loading_horizon": horizon})
    _Given.config, _Given.where = chosen, where
    if world.state.tp_size > 1:
        replica_group(world.state.degrees.hybrid_shard)  # creates the group here, in a call of all ranks


def is_initialized() -> bool:
    """True after `init`."""
    return _Given.config is not None


def _read(config: Any) -> tuple[Mapping[str, Any], str]:
    """(the configuration, its source for messages)."""
    if isinstance(config, Mapping):
        return config, "torch.sagemaker.init"
    if config is None:
        keys = of_this_job()
        text = os.environ.get(PARAMETERS, "").strip() or "{}"
        where = f"{PARAMETERS} in the environment" if keys is None else keys.smp
    elif isinstance(config, str | os.PathLike):
        where = str(config)
        try:
            text = local_path(config, "torch.sagemaker.init: config").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"torch.sagemaker.init: {where!r} cannot be read: {error}. Give a JSON file or a dict.") from None
    else:
        raise InputError(f"torch.sagemaker.init got {type(config).__name__}: give a dict, the path of a JSON file, or nothing.")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"torch.sagemaker.init: {where} is not JSON ({error}): {text[:60]!r}.") from None
    if not isinstance(values, dict):
        raise InputError(
            f'torch.sagemaker.init: {where} is {text[:60]!r}: give an object such as {{"hybrid_shard_degree": 8}}.'
        )
    return values, where
