"""What the tests of sharded training run on every rank: a small decoder, ten steps, everything that one rank would have."""

import hashlib

import torch
import torch.distributed as dist
from llamas import llama_config

import first_casts
from building import built_model
from octavo.collectives.whole import whole_tensor
from octavo.fp8 import scaling
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate
from octavo.parallel.fsdp2 import fp8_gather
from octavo.parallel.sharding import Sharding
from octavo.train.optimizer import clip_grad_norm_

BATCH, TOKENS = 8, 24
SIZES = {"vocab_size": 17, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3}
"""No size divides by 4 ranks, nor by the 16 elements of FP8 products."""
LAYOUTS = {
    "shard 2": (2, {}),
    "shard 4": (4, {}),
    "replicate 2 x shard 2": (4, {"hybrid_shard_degree": 2}),
    "replicate 2": (2, {"hybrid_shard_degree": 1}),
}
"""Name → ranks and their degrees."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def full(tensor):
    """The whole of a tensor, on the CPU."""
    return whole_tensor(tensor).detach().to("cpu", copy=True)


def sharding(recipe, dtype, **settings):
    """Blocks are freed unless `settings` say otherwise: "auto" would keep such small ones on a GPU."""
    return Sharding(
        mesh=world.state.shard_mesh,
        expert_mesh=world.state.expert_mesh,
        data_group=world.state.dp_process_group,
        token_group=world.state.token_process_group,
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        recipe=recipe,
        **{"reshard_after_forward": True} | settings,
    )


def build(dtype, recipe, *, seed=0, settings=None, sizes=None, **options):
    """The model of this rank: whole when there is one."""
    return built_model(
        llama_config(**SIZES | (sizes or {})),
        dtype=dtype,
        params_dtype=torch.float32,
        device=DEVICE if world.state.world_size == 1 else world.state.device,
        seed=seed,
        sharding=sharding(recipe, dtype, **settings or {}) if world.state.world_size > 1 else None,
        **options,
    )


def build_whole(dtype, sizes):
    """The same weights, all of them on every rank."""
    config = llama_config(**SIZES | sizes)
    return built_model(config, dtype=dtype, params_dtype=torch.float32, device=world.state.device, seed=0)


@first_casts.by_one()
def train(degrees, dtype, recipe, micro_batches, *, steps=10, settings=None, sizes=None, **options):
    """Loss, norm, gathered gradients and a hash of the FP8 state of each step; that state and gathered weights at the end."""
    if dist.is_initialized():
        world.init(degrees)
    recipe = None if recipe is None else RECIPES[recipe]()
    model = build(dtype, recipe, settings=settings, sizes=sizes, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, model.config.vocab_size, (BATCH, TOKENS), generator=draw)
        mine = ids.chunk(world.state.dp_size)[world.state.dp_rank].chunk(micro_batches)
        device = next(model.parameters()).device
        loss = torch.zeros((), device=device)
        for index, part in enumerate(mine):
            accumulate(model, last=index == len(mine) - 1)
            part = part.to(device)
            with microbatch(first=index == 0), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                output = model(input_ids=part, labels=part, num_items_in_batch=BATCH * (TOKENS - 1))
            output.loss.backward()
            loss += output.loss.detach()
        if world.state.world_size > 1:
            dist.all_reduce(loss)
        gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        records = {name: record.cpu() for name, record in scaling.state_records(model).items()}
        digest = hashlib.sha256(b"".join(record.numpy().tobytes() for record in records.values())).hexdigest()
        found.append((loss.item(), norm.item(), gradients, digest))
    return found, records, {name: full(p) for name, p in model.named_parameters()}


def fsdp2_group(module):
    """FSDP2's own record of a module's parameters."""
    return module._get_fsdp_state()._fsdp_param_group


def weights_in_fp8(model):
    """The weights that hooks of blocks keep alive."""
    hooks = [hook for part in model.layers.modules() for hook in part._forward_pre_hooks.values()]
    cells = [cell.cell_contents for hook in hooks for cell in getattr(hook, "__closure__", None) or ()]
    return [one for cell in cells if isinstance(cell, list) for one in cell if isinstance(one, fp8_gather._SharedWeight)]


def bytes_held(weights):
    """Bytes of shards in FP8 that wait to be gathered again."""
    return sum(0 if weight.shard_rows is None else weight.shard_rows.nbytes for weight in weights)
