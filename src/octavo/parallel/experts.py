"""Expert parallelism: the experts of an MoE layer are distributed over ranks before FSDP2 shards each rank's experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from octavo.collectives.experts import ExpertGroup
from octavo.nn.experts import StackedExperts
from octavo.parallel.shards import spread_rows


def experts_in(module: nn.Module) -> list[StackedExperts]:
    """The experts of a block, which are gathered separately from the rest of it."""
    return [part for part in module.modules() if isinstance(part, StackedExperts)]


@torch.no_grad()
def spread_experts(experts: StackedExperts, mesh: DeviceMesh, *, fp8: bool) -> None:
    """Leave only this rank's experts in an MoE layer, in place, on a real device or on meta.

    mesh: [replicate, expert_shard, expert], of tensor ranks too; its last dimension divides the experts. fp8: as of
    `ExpertGroup`. Parameters become DTensors of all experts.
    """
    ranks = mesh["expert"]
    group = experts.group = ExpertGroup(ranks.get_group(), experts.count, fp8=fp8)
    for state in (experts.fc1_fp8_state, experts.fc2_fp8_state):
        state.local_experts, state.buffers.expert_group = group.local_experts, group.group
        _spread(experts, state.weight_name, ranks)
    for adapters in experts.adapters:
        for name in ("lora_A", "lora_B"):
            _spread(adapters.adapter, name, ranks)


def _spread(module: nn.Module, name: str, ranks: DeviceMesh) -> None:
    whole: nn.Parameter = getattr(module, name)
    setattr(module, name, nn.Parameter(spread_rows(whole.detach(), ranks), whole.requires_grad))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """[replicate, expert_shard] of an expert mesh, or [expert_shard]: the ranks that hold parts of the same experts."""
    return mesh["expert_shard"] if mesh.size(0) == 1 else mesh["replicate", "expert_shard"]
