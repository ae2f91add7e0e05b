"""Run by several ranks: PyTorch's own FSDP around models that were never transformed, under torch.sagemaker.init."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_ranks import TINY, batch, names, sharded
from transformers import AutoModelForCausalLM, LlamaConfig

import octavo

SAMPLES = 8


def _model(strategy, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    options |= {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, sharding_strategy=strategy, **options)


def _steps(model, optimizer, numbers):
    """(mean loss of all ranks, norm of the gradient) of each step, of this rank's part of the samples."""
    size, rank, rows = dist.get_world_size(), dist.get_rank(), []
    for number in numbers:
        ids = batch(number, slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        rows.append((mean.item(), float(norm)))
    return rows


def alone():
    """The same steps of transformers' model in one process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    rows = []
    for number in range(4):
        ids = batch(number, slice(0, SAMPLES))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    return rows


def train_and_resume(folder, degree, strategy, hosts, transformed=False):
    """Steps, groups, and whether a checkpoint as SMP's examples write it goes on to the bit.

    hosts: ranks of a host, as torchrun tells them.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy, StateDictType

    tsm = names()
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts)
    tsm.init({"hybrid_shard_degree": degree})
    ranker, rank = tsm.state.ranker, dist.get_rank()

    def made():
        strategy_ = ShardingStrategy[strategy]
        model = sharded(tsm, sharding_strategy=strategy_) if transformed else _model(strategy_)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    model, optimizer = made()
    rows = _steps(model, optimizer, range(2))
    where, group = Path(folder), model.process_group
    pair = {"process_group": group, "coordinator_rank": min(dist.get_process_group_ranks(group))}
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if ranker.get_rep_rank(rank) == 0:
        checkpoint.save_state_dict(state, checkpoint.FileSystemWriter(where), **pair)
    dist.barrier()
    wanted = _steps(model, optimizer, range(2, 4))
    other, fresh = made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        state = {"model": other.state_dict()}
        checkpoint.load_state_dict(state, checkpoint.FileSystemReader(where), **pair)
        other.load_state_dict(state["model"])
        moments = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"], optimizer_key="optimizer", storage_reader=checkpoint.FileSystemReader(where),
            process_group=other.process_group,
        )  # fmt: skip
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, moments["optimizer"]))
    found = {
        "rows": rows + wanted,
        "resumed": _steps(other, fresh, range(2, 4)) == wanted,
        "group": dist.get_process_group_ranks(group),
        "strategy": model.sharding_strategy.name,
        "replicas": (ranker.get_rep_rank(rank), ranker.get_rep_groups()),
        "replica": dist.get_process_group_ranks(tsm.state.rep_rank_process_group),
    }
    octavo.shutdown()
    return found


def groups():
    """Groups of a model with a group of the script's, and of a later one; the refusal of a degree that does not divide."""
    from torch.distributed.fsdp import ShardingStrategy

    tsm = names()
    tsm.init({"hybrid_shard_degree": 2})
    own = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = own[dist.get_rank() in (1, 2)]
    given = _model(ShardingStrategy.FULL_SHARD, process_group=mine)
    after = _model(ShardingStrategy.FULL_SHARD)
    return {
        "given": (given.sharding_strategy.name, dist.get_process_group_ranks(given.process_group)),
        "after": (after.sharding_strategy.name, dist.get_process_group_ranks(after.process_group)),
    }
