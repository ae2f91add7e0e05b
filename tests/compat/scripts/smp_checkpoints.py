"""Trains a Llama for three steps by the names that SMP's published training script calls, in its order, and resumes it.

Step 3 runs five times: in the training itself, and in fresh models from a checkpoint of each kind. Data are synthetic; FP8 is
off, so that the losses are those of plain transformers from the first weights, which `first.bin` has.
"""

# isort: off
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict  # before torch.sagemaker
from torch.distributed import destroy_process_group
# isort: on

import datetime
import functools
import json
import os
import sys
from distutils.version import LooseVersion

import numpy as np
import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import torch
import torch.distributed as dist
import torch.sagemaker as tsm
import transformers
from accelerate import init_empty_weights
from megatron.core.dist_checkpointing.mapping import CheckpointingException
from torch.distributed import checkpoint
from torch.distributed._shard.api import load_with_process_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import FullStateDictConfig, ShardedOptimStateDictConfig
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker import transform
from torch.sagemaker.delayed_param import DelayedParamIniter
from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save
from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, init_optim_state, sm_state_dict_type
from torch.sagemaker.distributed.fsdp import checkpoint as tsm_fsdp_checkpoint
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.utils.process_group_utils import get_global_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

SHARDED = StateDictType.SHARDED_STATE_DICT


def build(config):
    """The model under all wrappers, its optimizer and scheduler."""
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

    with init_empty_weights():
        if LooseVersion(transformers.__version__) >= LooseVersion("4.37.1"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")
        num_params = sum(np.prod(p.size()) for p in model.parameters())
    model = transform(model, config=None, load_state_dict_from_rank0=False)
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        model = FSDP(
            model,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
            mixed_precision=None,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=True,
            limit_all_gathers=True,
            device_id=None,
            use_orig_params=True,
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
            sync_module_states=False,
        )
    dist.barrier()
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT, checkpoint_fn=None)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda one: isinstance(one, TransformerLayer))
    if tsm.state.sm_activation_offloading > 0:
        model = offload_wrapper(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), lr=5e-3, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), num_params


def train_step(model, optimizer, scheduler, step):
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))[2 * dist.get_rank() :][:2]
    optimizer.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"]
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()


def save_all(folder, queue, group, model, optimizer, scheduler, content):
    """A checkpoint of each kind."""
    ranks = {"process_group": model.process_group, "coordinator_rank": min(get_global_ranks(model.process_group))}
    with FSDP.state_dict_type(model, SHARDED):
        state = {"optimizer": FSDP.optim_state_dict(model, optimizer), "model": model.state_dict(), **content}
    if tsm.state.ranker.get_rep_rank(dist.get_rank()) == 0:
        writer = checkpoint.FileSystemWriter(f"{folder}/sharded")
        checkpoint.save_state_dict(state, writer, planner=checkpoint.DefaultSavePlanner(), **ranks)
    os.makedirs(f"{folder}/local", exist_ok=True)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **content}
    torch.save(state, f"{folder}/local/{dist.get_rank()}.pt")
    queue.maybe_finalize_async_calls(blocking=True, process_group=group, skip_sync=True)
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "total_steps": content["total_steps"]}
    place = f"{folder}/sm_local/fsdp{dist.get_rank(model.process_group)}"
    async_save(state, checkpoint_id=place, process_group=group, coordinator_rank=dist.get_rank(), queue=queue)
    writes = model.process_group, ranks["coordinator_rank"], tsm.state.ranker.get_rep_rank(dist.get_rank()) == 0
    tsm_fsdp_checkpoint.save_model_checkpoint(
        model, SHARDED, f"{folder}/util", ShardingStrategy.HYBRID_SHARD, writes, log=False, optimizer=optimizer,
        scheduler=scheduler, extra_exports={"total_steps": content["total_steps"]},
    )  # fmt: skip
    try:
        queue.maybe_finalize_async_calls(blocking=True, process_group=group)
    except CheckpointingException as error:
        raise SystemExit(str(error)) from error
    return writes


def resume(kind, folder, group, writes, model, optimizer, scheduler):
    """The steps behind a checkpoint of this kind, which is in the model afterwards."""
    if kind == "sharded":
        ranks = {"process_group": model.process_group, "coordinator_rank": writes[1]}
        offloaded = ShardedOptimStateDictConfig(offload_to_cpu=True)
        with FSDP.state_dict_type(model, SHARDED, optim_state_dict_config=offloaded):
            state = {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "total_steps": 0}
            reader = checkpoint.FileSystemReader(f"{folder}/sharded")
            checkpoint.load_state_dict(state, reader, planner=checkpoint.DefaultLoadPlanner(), **ranks)
            model.load_state_dict(state["model"])
            optim = load_sharded_optimizer_state_dict(
                model_state_dict=state["model"], optimizer_key="optimizer", storage_reader=reader,
                process_group=model.process_group,
            )["optimizer"]  # fmt: skip
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=optim))
    elif kind == "local":
        with load_with_process_group(model.process_group):
            state = torch.load(f"{folder}/local/{dist.get_rank()}.pt")
        assert state["model_config"].hidden_size == 32
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    elif kind == "sm_local":
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            init_optim_state(optimizer, skip_empty_param=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "total_steps": 0}
            reader = DistributedFileSystemReader(f"{folder}/sm_local/fsdp{dist.get_rank(model.process_group)}")
            load(state, storage_reader=reader, process_group=group, coordinator_rank=dist.get_rank())
            model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        read = tsm_fsdp_checkpoint.load_model_checkpoint(
            model, SHARDED, f"{folder}/util", ShardingStrategy.HYBRID_SHARD, writes, log=False, optimizer=optimizer,
            scheduler=scheduler, extra_imports={"total_steps": 0},
        )  # fmt: skip
        return read[tsm_fsdp_checkpoint.EXPORT_KEY_IDENTITY]["total_steps"]
    if "scheduler" in state:
        scheduler.load_state_dict(state["scheduler"])
    return state["total_steps"]


def save_full(path, model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def main(folder):
    dist.init_process_group("smddp", timeout=datetime.timedelta(seconds=300))
    tsm.init()
    set_seed(12345)
    groups = [dist.new_group(ranks) for ranks in tsm.state.ranker.get_rep_groups()]
    group = next(one for one in groups if one is not dist.GroupMember.NON_GROUP_MEMBER)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model, optimizer, scheduler, num_params = build(config)
    save_full(f"{folder}/first.bin", model)
    losses = [train_step(model, optimizer, scheduler, step) for step in range(2)]
    content = {"model_config": config, "num_params": num_params, "total_steps": 2, "scheduler": scheduler.state_dict()}
    writes = save_all(folder, AsyncCallsQueue(), group, model, optimizer, scheduler, content)
    losses.append(train_step(model, optimizer, scheduler, 2))
    resumed = []
    for kind in ("sharded", "local", "sm_local", "util"):
        fresh, optimizer, scheduler, _ = build(config)
        steps = resume(kind, folder, group, writes, fresh, optimizer, scheduler)
        resumed.append(train_step(fresh, optimizer, scheduler, steps))
    if dist.get_rank() == 0:
        with open(f"{folder}/losses.json", "w") as file:
            json.dump([losses, *resumed], file)
    destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
