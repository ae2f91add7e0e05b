"""Sharding of a model: ranks, dtypes and the exchange of context parallelism, from `octavo.init`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from octavo.collectives.context import ContextGroup
from octavo.config.degrees import composes, divisors
from octavo.config.parallel import ParallelConfig
from octavo.dtypes import torch_dtype
from octavo.errors import InputError
from octavo.fp8.recipe import Recipe
from octavo.parallel.world import State


@dataclass(frozen=True)
class Sharding:
    """Ranks and dtypes of a sharded model.

    Attributes:
        mesh: [replicate, shard] or [shard].
        expert_mesh: [replicate, expert_shard, expert] over the same ranks and their tensor groups; None if each rank computes
            with all experts, or with slices of all.
        data_group: the ranks that see different samples.
        token_group: the data group and the ranks that share its sequences; None: the data group alone.
        context: the ranks that share each sequence; None for one.
        tensor_group: the ranks that hold parts of each matrix; None for one.
        recipe: the FP8 recipe of later autocasts, or None. Weights with one scale a tensor are gathered in FP8 under an
            autocast of any such recipe, and in their dtype outside of it.
        param_dtype: of parameters gathered in high precision; None: their dtype.
        reduce_dtype: of the sums of gradients; None: that of the gradient.
        reshard_after_forward: free a block's parameters after its forward and regather them in backward; "auto":
            `octavo.parallel.gathered` decides it before the model is sharded.
        sync_each_micro_batch: sum gradients over the shards in every backward; `set_requires_gradient_sync(False)` then leaves
            out replicas alone.
        expert_dispatch_fp8: tokens, and gradients of results, are sent to their experts in FP8 under an autocast.
    """

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None
    token_group: dist.ProcessGroup | None = None
    context: ContextGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    recipe: Recipe | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = torch.float32
    reshard_after_forward: bool | Literal["auto"] = "auto"
    expert_dispatch_fp8: bool = False
    sync_each_micro_batch: bool = False

    @property
    def shards(self) -> bool:
        """True if ranks shard parameters, or average their gradients; False for tensor ranks alone."""
        return self.mesh.size() > 1 or self.expert_mesh is not None

    @property
    def frees_blocks(self) -> bool:
        """The resolved `reshard_after_forward`."""
        assert not isinstance(self.reshard_after_forward, str), "octavo.parallel.gathered.settle_gathering decides it"
        return self.reshard_after_forward


def sharding_of(
    ranks: State, recipe: Recipe | None, *, dtype: torch.dtype, params_dtype: torch.dtype | None, strategy: str | None = None
) -> Sharding | None:
    """The sharding over the ranks of `octavo.init`, which exchange keys and values by `strategy`, by default `init`'s.

    None for one rank.
    """
    if ranks.shard_mesh is None or ranks.world_size == 1:
        return None
    group = ranks.cp_process_group
    return Sharding(
        mesh=ranks.shard_mesh,
        expert_mesh=ranks.expert_mesh,
        data_group=ranks.dp_process_group,
        token_group=ranks.token_process_group,
        context=None if group is None or ranks.cp_size == 1 else ContextGroup(group, strategy or ranks.config.cp_comm_type),
        tensor_group=None if ranks.tp_size == 1 else ranks.tp_process_group,
        recipe=recipe,
        param_dtype=gather_dtype(ranks.config, dtype, params_dtype),
        reduce_dtype=dtype if dtype == torch.float64 else torch_dtype(ranks.config.reduce_dtype),
        reshard_after_forward=ranks.config.reshard_after_forward,
        expert_dispatch_fp8=ranks.config.expert_dispatch_fp8,
        sync_each_micro_batch=ranks.config.sync_each_micro_batch,
    )


def gather_dtype(config: ParallelConfig, dtype: torch.dtype, params_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of parameters gathered in high precision; None: their dtype. dtype: of activations."""
    gathered = dtype if config.param_dtype is None else torch_dtype(config.param_dtype)
    return None if gathered == params_dtype else gathered


def check_experts(experts: int, degree: int, shards: int, name: str, tensor: int = 1) -> None:
    """Raise an InputError unless all ranks of an expert group hold equal numbers of experts.

    experts: of an MoE layer, 0 without one. degree: ranks of the expert group. shards, tensor: ranks of an FSDP group and of a
    tensor group. name: of the model.
    """
    if degree == 1 or (experts and not experts % degree):
        return
    key = "parallel.expert_parallel_degree"
    if not experts:
        raise InputError(
            f"{key} = {degree}: {name} has no experts in Octavo's decoder, the only ones that are distributed. Set {key} = 1."
        )
    *fitting, last = [str(n) for n in divisors(math.gcd(experts, shards * tensor)) if composes(tensor, n)]
    nearest = f"{', '.join(fitting)} or {last}" if fitting else last
    raise InputError(f"{key} = {degree} does not divide the {experts} experts of {name}. Set {key} to {nearest}.")
