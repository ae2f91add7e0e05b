"""Long sequences with SMP's names, as its users write them; `estimator.py` starts it, through `octavo.compat`.

Delayed initialisation, FSDP with a mixed-precision policy, activation checkpointing, FP8 by Transformer Engine's autocast. It
names no device: on GPUs it takes NCCL, elsewhere gloo.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
import transformer_engine.pytorch as te
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.delayed_param import DelayedParamIniter
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
from transformer_engine.common.recipe import DelayedScaling, Format
from transformers import AutoConfig, AutoModelForCausalLM


def parse() -> argparse.Namespace:
    """Hyperparameters of the walk-through."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hf_pretrained_model_name_or_dir", required=True, help="a folder with config.json")
    parser.add_argument("--max_context_width", type=int, default=16384)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--train_batch_size", type=int, default=1)
    parser.add_argument("--val_batch_size", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bf16", type=int, default=1)
    parser.add_argument("--fp8", type=int, default=0)
    parser.add_argument("--activation_checkpointing", type=int, default=1)
    parser.add_argument("--use_smp_implementation", type=int, default=1)
    parser.add_argument("--auto_wrap_policy", default="transformer_auto_wrap_policy")
    parser.add_argument("--distributed_backend", default="nccl")
    parser.add_argument("--training_dir", default=os.environ.get("SM_CHANNEL_TRAIN"))
    parser.add_argument("--test_dir", default=os.environ.get("SM_CHANNEL_TEST"))
    return parser.parse_args()


def batches(folder: str, args: argparse.Namespace, size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Batches of chunks; the ranks of a context group get the same ones."""
    ranks, rank = dp()
    with next(Path(folder).glob("*.json")).open() as file:
        for number, rows in enumerate(iter(functools.partial(lines, file, size), [])):
            if number % ranks == rank:
                ids = torch.tensor([json.loads(row)["input_ids"] for row in rows], device=device)
                assert ids.shape[1] == args.max_context_width, f"{folder} has chunks of {ids.shape[1]} tokens"
                yield ids


def dp() -> tuple[int, int]:
    """Data-parallel ranks, and this one among them: those of a context group see the same samples."""
    together = tsm.state.cp_size * tsm.state.tp_size
    return tsm.state.world_size // together, tsm.state.rank // together


def lines(file: TextIO, count: int) -> list[str]:
    """The next `count` lines; fewer at the end are none."""
    found = [line for _, line in zip(range(count), file, strict=False)]
    return found if len(found) == count else []


def build(args: argparse.Namespace) -> torch.nn.Module:
    """The model on the meta device, transformed, sharded and initialised."""
    config = AutoConfig.from_pretrained(args.hf_pretrained_model_name_or_dir)
    config.use_cache = False
    config.vocab_size = args.vocab_size
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = tsm.transform(model, cp_comm_type="all_gather")
    initer = DelayedParamIniter(model)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    with initer.validate_params_and_buffers_inited():
        model = FSDP(
            model,
            auto_wrap_policy=policy,
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.cuda.current_device() if torch.cuda.is_available() else None,
            use_orig_params=True,
            limit_all_gathers=True,
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
        )
    if args.activation_checkpointing:
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, TransformerLayer)
        )
    return model


def main() -> None:
    """Train, and validate on one batch."""
    args = parse()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(args.distributed_backend if on_gpu else "gloo")
    tsm.init()  # the degrees of the estimator
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(args.seed)
    model = build(args)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=32, amax_compute_algo="max")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if rank == 0:
        degrees = f"context {tsm.state.cp_size}, hybrid_shard {tsm.state.hybrid_shard_degree}"
        print(f"{dist.get_world_size()} ranks: {degrees}; {'FP8' if args.fp8 else 'bf16'}", flush=True)
    for step, ids in enumerate(batches(args.training_dir, args, args.train_batch_size, device), start=1):
        begun = time.perf_counter()
        with te.fp8_autocast(enabled=bool(args.fp8), fp8_recipe=recipe, fp8_group=tsm.state.world_process_group):
            loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"]
        loss.backward()
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().float()
        dist.all_reduce(mean)
        if rank == 0:
            seconds = time.perf_counter() - begun
            samples = ids.shape[0] * dp()[0] / seconds
            print(f"step {step}: loss {mean / dist.get_world_size():.4f}, norm {norm:.3f}, {samples:.3f} samples/s", flush=True)
        if step == args.max_steps:
            break
    model.eval()
    with torch.no_grad():
        ids = next(batches(args.test_dir, args, args.val_batch_size, device))
        loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"].float()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"validation: loss {loss / dist.get_world_size():.4f}", flush=True)
        result = {"validation_loss": float(loss / dist.get_world_size()), "steps": step}
        Path(os.environ.get("SM_MODEL_DIR", "."), "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
