"""Trains a Llama with SageMaker's model parallel library and PyTorch FSDP, as its published examples do.

Typed in for SMP: delayed initialisation on the meta device, FSDP with mixed precision, FP8 through Transformer Engine, wrappers
for activation checkpointing and offloading, checkpoints in the background, and resume. Data are synthetic.
"""

import argparse
import functools
import json
import math
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
import transformer_engine
from accelerate import init_empty_weights
from torch import optim
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import FullStateDictConfig
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import LayerNorm
from torch.sagemaker import transform
from torch.sagemaker.checkpoint.utils import SORT_BY_LAST_INT, limit_num_subdirs
from torch.sagemaker.delayed_param import DelayedParamIniter
from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.logger import get_logger
from torch.sagemaker.utils import utils as tsm_utils
from torch.sagemaker.utils.process_group_utils import get_global_ranks
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformer_engine.common.recipe import DelayedScaling, Format
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed
from transformers.models.llama.modeling_llama import LlamaRMSNorm

logger = get_logger()
CHECKPOINT_REGEX = r"^.*\d+steps$"


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--bf16", type=int, default=1)
    parser.add_argument("--fp8", type=int, default=1)
    parser.add_argument("--fp8_amax_history_len", type=int, default=4)
    parser.add_argument("--fp8_amax_compute_algo", type=str, default="max")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--min_lr", type=float, default=1e-4)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--train_batch_size", type=int, default=2)
    parser.add_argument("--val_batch_size", type=int, default=2)
    parser.add_argument("--max_context_width", type=int, default=32)
    parser.add_argument("--vocab_size", type=int, default=128)
    parser.add_argument("--hidden_width", type=int, default=64)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--num_key_value_heads", type=int, default=2)
    parser.add_argument("--llama_intermediate_size", type=int, default=128)
    parser.add_argument("--initializer_range", type=float, default=0.02)
    parser.add_argument("--hf_pretrained_model_name_or_dir", type=str, default=None)
    parser.add_argument("--delayed_param", type=int, default=1)
    parser.add_argument("--activation_checkpointing", type=int, default=1)
    parser.add_argument("--sharding_strategy", type=str, default="hybrid_shard")
    parser.add_argument("--backward_fetch_policy", type=str, default="backward_pre")
    parser.add_argument("--limit_all_gathers", type=int, default=1)
    parser.add_argument("--forward_prefetch", type=int, default=1)
    parser.add_argument("--device", type=str, default="cpu")
    parser.add_argument("--distributed_backend", type=str, default="gloo")
    parser.add_argument("--checkpoint_dir", type=str, required=True)
    parser.add_argument("--checkpoint_freq", type=int, default=3)
    parser.add_argument("--num_kept_checkpoints", type=int, default=1)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    parser.add_argument("--model_dir", type=str, default=None)
    parser.add_argument("--validation_freq", type=int, default=3)
    parser.add_argument("--metrics", type=str, default=None)
    return parser.parse_args()


class SyntheticDataset(Dataset):
    """Sequences that count upwards from a start of their own."""

    def __init__(self, vocab_size, seqlen, length):
        self.vocab_size, self.seqlen, self.length = vocab_size, seqlen, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return (torch.arange(self.seqlen) * (index % 3 + 1) + 7 * index) % self.vocab_size


def create_dataloader(args, dp_rank, dp_size, batch_size, length):
    dataset = SyntheticDataset(args.vocab_size, args.max_context_width, length)
    sampler = DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=False, drop_last=True)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=0, drop_last=True)


def get_model_config(args):
    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_width,
        intermediate_size=args.llama_intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_key_value_heads,
        hidden_act="silu",
        max_position_embeddings=args.max_context_width,
        initializer_range=args.initializer_range,
        rms_norm_eps=1e-5,
        use_cache=False,
        tie_word_embeddings=False,
    )


def create_model(args, model_config):
    """The whole model on rank 0 for fine-tuning, an empty one on the meta device otherwise."""
    finetune = args.hf_pretrained_model_name_or_dir is not None and args.resume_from_checkpoint is None
    if finetune and dist.get_rank() == 0:
        return AutoModelForCausalLM.from_pretrained(args.hf_pretrained_model_name_or_dir, config=model_config)
    with init_empty_weights() if args.delayed_param else nullcontext():
        return AutoModelForCausalLM.from_config(model_config)


def compute_num_params(model):
    seen, total = set(), 0
    for parameter in model.parameters():
        if parameter not in seen:
            seen.add(parameter)
            total += parameter.numel()
    return total


def apply_activation_checkpoint(args, model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

    if args.fp8 == 1:
        checkpoint_fn = functools.partial(
            transformer_engine.pytorch.checkpoint,
            distribute_saved_activations=False,
            get_rng_state_tracker=tsm.state.get_rng_state_tracker,
            tp_group=tsm.state.tp_process_group,
            use_reentrant=False,
        )
        checkpoint_impl = CheckpointImpl.NO_REENTRANT
    else:
        checkpoint_fn = None
        checkpoint_impl = CheckpointImpl.REENTRANT
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=checkpoint_impl, checkpoint_fn=checkpoint_fn)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda submodule: isinstance(submodule, TransformerLayer)
    )


def get_param_groups_by_weight_decay(module):
    decayed, others, seen = {"params": []}, {"params": [], "weight_decay": 0.0}, set()
    for module_ in module.modules():
        for name, parameter in list(module_._parameters.items()):
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            plain = isinstance(module_, (LayerNorm, LlamaRMSNorm)) or name.endswith("bias")
            (others if plain else decayed)["params"].append(parameter)
    return [group for group in (decayed, others) if group["params"]]


def wrap_model(args, model, delayed_param_initer, finetune):
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    mixed_precision = None
    if args.bf16:
        mixed_precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.float32)
    with (
        delayed_param_initer.validate_params_and_buffers_inited() if delayed_param_initer and not finetune else nullcontext(),
        tsm_utils.timeit(True, "FSDP constructor", dist.get_rank()),
    ):
        return FSDP(
            model,
            auto_wrap_policy=policy,
            mixed_precision=mixed_precision,
            sharding_strategy=getattr(ShardingStrategy, args.sharding_strategy.upper()),
            backward_prefetch=getattr(BackwardPrefetch, args.backward_fetch_policy.upper()),
            forward_prefetch=args.forward_prefetch > 0,
            limit_all_gathers=args.limit_all_gathers > 0,
            device_id=torch.cuda.current_device() if args.device == "cuda" else None,
            use_orig_params=True,
            param_init_fn=delayed_param_initer.get_param_init_fn() if delayed_param_initer else None,
            post_param_init_fn=delayed_param_initer.get_post_param_init_fn() if delayed_param_initer else None,
            sync_module_states=finetune,
        )


def save_checkpoint(args, model, optimizer, scheduler, total_steps):
    """Write this step in the background, and keep the newest ones."""
    group = model.process_group
    maybe_finalize_async_calls(blocking=True, process_group=group)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "scheduler": scheduler.state_dict(),
            "total_steps": total_steps,
        }
    if tsm.state.ranker.get_rep_rank(dist.get_rank()) == 0:
        async_save(
            state_dict,
            checkpoint_id=os.path.join(args.checkpoint_dir, f"llama_v2-{total_steps}steps"),
            process_group=group,
            coordinator_rank=min(get_global_ranks(group)),
        )


def load_checkpoint(args, model, optimizer, scheduler):
    group, reader = model.process_group, DistributedFileSystemReader(args.resume_from_checkpoint)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "total_steps": 0}
        load(state_dict, storage_reader=reader, process_group=group, coordinator_rank=min(get_global_ranks(group)))
        model.load_state_dict(state_dict["model"])
        scheduler.load_state_dict(state_dict["scheduler"])
        optim_state = load_sharded_optimizer_state_dict(
            model_state_dict=state_dict["model"], optimizer_key="optimizer", storage_reader=reader, process_group=group
        )
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(optim_state["optimizer"], model, optimizer, group=group))
    return state_dict["total_steps"]


def save_full(args, model, model_config):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)):
        state_dict = model.state_dict()
    if dist.get_rank() == 0:
        os.makedirs(args.model_dir, exist_ok=True)
        torch.save(state_dict, os.path.join(args.model_dir, "pytorch_model.bin"))
        model_config.save_pretrained(args.model_dir)
    dist.barrier()


def eval_model(model, dataloader, num_batches):
    model = model.eval()
    loss, n_batches = 0.0, 0
    with torch.no_grad():
        for input_ids in dataloader:
            input_ids = input_ids.to(next(model.parameters()).device)
            if n_batches >= num_batches:
                break
            loss += model(input_ids=input_ids, attention_mask=None, labels=input_ids)["loss"]
            n_batches += 1
    loss = loss.detach()
    dist.all_reduce(loss)
    model.train()
    return loss.item() / dist.get_world_size() / n_batches


def train(args, model, optimizer, scheduler, fp8_recipe, total_steps):
    dp_rank = dist.get_rank() // (tsm.state.tp_size * tsm.state.cp_size)
    dp_size = dist.get_world_size() // (tsm.state.tp_size * tsm.state.cp_size)
    batches = args.max_steps * args.train_batch_size * dp_size
    train_dataloader = create_dataloader(args, dp_rank, dp_size, args.train_batch_size, batches)
    val_dataloader = create_dataloader(args, dp_rank, dp_size, args.val_batch_size, 2 * args.val_batch_size * dp_size)
    metrics = []
    for batch_idx, input_ids in enumerate(train_dataloader):
        if batch_idx < total_steps:
            continue
        step_start = time.time()
        input_ids = input_ids.to(args.device)
        optimizer.zero_grad(set_to_none=True)
        with transformer_engine.pytorch.fp8_autocast(
            enabled=args.fp8, fp8_recipe=fp8_recipe, fp8_group=tsm.state.world_process_group
        ):
            loss = model(input_ids=input_ids, attention_mask=None, labels=input_ids)["loss"]
        loss.backward()
        grad_norm = clip_grad_norm_(model, args.grad_clip)
        optimizer.step()
        scheduler.step()
        total_steps += 1
        row = {"step": total_steps, "loss": loss.item(), "grad_norm": float(grad_norm), "lr": scheduler.get_last_lr()[0]}
        if not total_steps % args.validation_freq:
            row["val_loss"] = eval_model(model, val_dataloader, 2)
        metrics.append(row)
        if dist.get_rank() == 0:
            logger.info("Batch %d, Loss: %.4f, Speed: %.2f s", total_steps, row["loss"], time.time() - step_start)
        if not total_steps % args.checkpoint_freq:
            save_checkpoint(args, model, optimizer, scheduler, total_steps)
    return metrics


def main():
    args = parse_args()
    dist.init_process_group(args.distributed_backend)
    global_rank = dist.get_rank()
    tsm.init()
    set_seed(args.seed)
    finetune = args.hf_pretrained_model_name_or_dir is not None and args.resume_from_checkpoint is None
    model_config = get_model_config(args)
    with tsm_utils.timeit(True, "Model creation", global_rank):
        model = create_model(args, model_config)
        num_params = compute_num_params(model)
        model = transform(model, config=None, load_state_dict_from_rank0=finetune)
        delayed_param_initer = None
        if args.delayed_param and not (finetune and global_rank == 0):
            delayed_param_initer = DelayedParamIniter(model)
    assert {x.dtype for x in model.parameters()} == {torch.float32}, "FSDP mixed precision wants parameters in fp32"
    if global_rank == 0:
        logger.info("Created model with total parameters: %d (%.2f B)", num_params, num_params * 1e-9)

    model = wrap_model(args, model, delayed_param_initer, finetune)
    dist.barrier()
    fp8_recipe = None
    if args.fp8 == 1:
        fp8_recipe = DelayedScaling(
            fp8_format=Format.HYBRID,
            amax_history_len=args.fp8_amax_history_len,
            amax_compute_algo=args.fp8_amax_compute_algo,
        )
    if args.activation_checkpointing > 0:
        apply_activation_checkpoint(args, model)
    if tsm.state.sm_activation_offloading > 0:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

        model = offload_wrapper(model)

    optimizer = optim.AdamW(
        get_param_groups_by_weight_decay(model), betas=(args.beta1, args.beta2), lr=args.lr, weight_decay=args.weight_decay
    )
    cosine = lambda step: args.min_lr / args.lr + (1 - args.min_lr / args.lr) * (1 + math.cos(math.pi * step / 20)) / 2
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, cosine)
    total_steps = 0
    if args.resume_from_checkpoint:
        total_steps = load_checkpoint(args, model, optimizer, scheduler)
    metrics = train(args, model, optimizer, scheduler, fp8_recipe, total_steps)
    maybe_finalize_async_calls(blocking=True, process_group=model.process_group)
    dist.barrier()
    limit_num_subdirs(
        os.path.abspath(args.checkpoint_dir),
        args.num_kept_checkpoints,
        sort_fn=SORT_BY_LAST_INT,
        regex=CHECKPOINT_REGEX,
        log=global_rank == 0,
    )
    if args.model_dir:
        save_full(args, model, model_config)
    if args.metrics and global_rank == 0:
        with open(args.metrics, "w") as file:
            json.dump(metrics, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
