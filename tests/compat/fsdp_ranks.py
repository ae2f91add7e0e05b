"""Run by several ranks: transformed models in FullyShardedDataParallel, PyTorch's own beside them, and their checkpoints."""

import contextlib
import functools
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import octavo
import octavo.compat.smp
import octavo.compat.te
from octavo import build
from octavo.collectives.whole import whole_tensor
from octavo.compat.smp import fsdp
from octavo.compat.smp.state_dicts import clean
from octavo.compat.te import recipes
from octavo.fp8.scaling import state_records, states_of
from octavo.hardware import GIB
from octavo.nn.plain_names import stored_names
from octavo.parallel.fsdp import sharded_modules
from octavo.parallel.fsdp2.adapter import groups_of

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def names():
    """The old names in this process."""
    octavo.compat.te.install(), octavo.compat.smp.install()
    import torch.sagemaker

    return torch.sagemaker


def empty(**changes):
    """A Llama on the meta device."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return AutoModelForCausalLM.from_config(LlamaConfig(**TINY | changes))


def sharded(tsm, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter

    model = tsm.transform(empty(), **{key: options.pop(key) for key in ("cp_comm_type",) if key in options})
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        return FullyShardedDataParallel(model, param_init_fn=initer.get_param_init_fn(), **options)


def placements(of):
    """How often a transformed model in FSDP is placed, and of how many weights a columnwise layout is to stay until backward.

    of: a model with weights, with those of rank 0, or on the meta device; on a GPU of 80 GiB, as far as the rule is told.
    """
    tsm, counted = names(), mock.Mock(side_effect=build.place)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter

    rank_0 = {"load_state_dict_from_rank0": True} if of == "rank 0" else {}
    with (
        mock.patch.object(build, "place", counted),
        mock.patch.object(fsdp, "place", counted),
        mock.patch.object(build, "memory_of_gpu", return_value=80 * GIB),
    ):
        tsm.init()
        if of == "meta" or (rank_0 and octavo.state.rank):
            model = empty()
        else:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
        model = tsm.transform(model, dtype=torch.bfloat16, **rank_0)
        initer = DelayedParamIniter(model)
        given = {"param_init_fn": initer.get_param_init_fn()} if of == "meta" else {"sync_module_states": bool(rank_0)}
        model = FullyShardedDataParallel(model, **given)
    kept = [state for _, state in states_of(model) if state.caches_columnwise]
    return {"placed": counted.call_count, "kept": len(kept)}


def batch(number, samples):
    """Samples [samples, 16] of this step, others for every step."""
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(number))[samples]


def steps(model, samples, count=2, part=None, fp8=False):
    """(loss, norm of the gradient) of some steps; part: this rank's tokens of a sequence, as SMP's examples take them."""
    from transformer_engine.pytorch import fp8_autocast

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    rows = []
    for number in range(count):
        ids = batch(number, samples)
        ids = ids if part is None else part(ids)
        with fp8_autocast(enabled=fp8):
            loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"]
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), float(norm)))
    return rows, optimizer


def on_one_rank():
    """The same steps of Octavo itself."""
    with octavo.delayed_init():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    model = octavo.transform(model, dtype=torch.float32, params_dtype=torch.float32, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    rows = []
    for number in range(2):
        ids = batch(number, slice(0, 4))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = octavo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    return rows


def layouts(folder):
    """Losses and groups under degrees and strategies, over four ranks that take two samples each step and sequence."""
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import ShardingStrategy

    tsm = names()
    rank, found = dist.get_rank(), {}
    for name, degrees, strategy in (
        ("hybrid", {"hybrid_shard_degree": 2, "context_parallel_degree": 2}, ShardingStrategy.HYBRID_SHARD),
        ("zero2", {"hybrid_shard_degree": 4, "context_parallel_degree": 2}, ShardingStrategy._HYBRID_SHARD_ZERO2),
        ("none", {"context_parallel_degree": 2, "hybrid_shard_degree": 0}, ShardingStrategy.FULL_SHARD),
        ("overridden", {"context_parallel_degree": 2, "hybrid_shard_degree": 2}, ShardingStrategy.FULL_SHARD),
    ):
        octavo.shutdown()
        tsm.init(degrees)
        samples = [slice(0, 2), slice(2, 4)][rank // 2]
        n, r = tsm.state.cp_size, tsm.state.cp_rank

        def part(ids, n=n, r=r):
            return ids.view(2, 2 * n, -1)[:, [r, 2 * n - 1 - r]].reshape(2, -1)

        for kind, cut in (("whole", None), ("parts", part)):
            how = "all_gather" if name == "zero2" else "p2p"
            model = sharded(tsm, sharding_strategy=strategy, cp_comm_type=how)
            rows, _ = steps(model, samples, part=cut)
            found[name, kind] = rows
        ranker = tsm.state.ranker
        if name == "hybrid":  # as scripts of PyTorch 2.0 to 2.5: the coordinator's rank among all ranks
            members = dist.get_process_group_ranks(model.process_group)
            state = {"rank": rank, "row": model.module.layers[0].self_attention.proj.weight.detach()}
            path = Path(folder) / str(members[0])
            how = {"process_group": model.process_group, "coordinator_rank": min(members)}
            checkpoint.save_state_dict(state, checkpoint.FileSystemWriter(path), **how)
            checkpoint.load_state_dict(state, checkpoint.FileSystemReader(path), **how)
        found[name] = {
            "group": dist.get_process_group_ranks(model.process_group),
            "strategy": model.sharding_strategy.name,
            "replicas": (ranker.get_rep_rank(rank), ranker.get_rep_groups()),
            "replica": dist.get_process_group_ranks(tsm.state.rep_rank_process_group),
            "asked": tsm.state.hybrid_shard_degree,
            "rows": model.module.layers[0].self_attention.proj.weight.to_local().shape[0],
        }
    try:
        model(input_ids=batch(0, samples), labels=batch(0, samples))
    except octavo.errors.InputError as error:
        found["mixed"] = str(error)
    return found


def checkpoints(folder):
    """Wrappers, checkpoints of all types, fine-tuning from rank 0, PyTorch's own FSDP and refusals, on two ranks."""
    tsm = names()
    tsm.init({"hybrid_shard_degree": 2})
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    return wrappers(tsm, mine) | states(tsm, mine, Path(folder)) | from_rank_0(tsm) | native(mine) | refusals(tsm)


def wrappers(tsm, mine):
    """Recomputation and offloading change no bit."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
    from transformer_engine.pytorch import MultiheadAttention, checkpoint

    found = {}
    plain, _ = steps(sharded(tsm), mine, fp8=True)
    for impl in CheckpointImpl:
        model = sharded(tsm)
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, TransformerLayer))
        assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
        wrapped = offload_wrapper(model)
        assert not model._offloads
        found[f"same with {impl.name}"] = steps(wrapped, mine, fp8=True)[0] == plain and model._offloads
    model = sharded(tsm)
    wrap = functools.partial(checkpoint_wrapper, checkpoint_fn=checkpoint)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, MultiheadAttention))
    assert sum("_checkpoint_wrapped_module" in name.rpartition(".")[2] for name, _ in model.named_modules()) == 2
    found["same with attention alone"] = steps(model, mine, fp8=True)[0] == plain
    return found


def states(tsm, mine, folder):
    """Model and optimizer of two steps, saved in every way and read into other models."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    model = sharded(tsm)
    _, optimizer = steps(model, mine, fp8=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full, moments = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    hf = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    hf.load_state_dict(full)
    with torch.no_grad():
        ids = batch(9, mine)
        losses = hf(input_ids=ids, labels=ids).loss.item(), model(input_ids=ids, labels=ids).loss.item()

    def loss_of(logits, ids):
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    loss_of(model(ids).logits, ids).backward()  # of the script's own, without labels
    norm = model.clip_grad_norm_(1e9).item()
    model.zero_grad()
    whole = batch(9, slice(0, 2 * dist.get_world_size()))
    loss_of(hf(whole).logits, whole).backward()
    norms = norm, torch.nn.utils.clip_grad_norm_(hf.parameters(), 1e9).item()
    shapes = {name: tuple(entries["exp_avg"].shape) for name, entries in moments["state"].items()}
    stored = stored_names(model.module)
    found = {
        "hugging face": losses,
        "norms of an own loss": norms,
        "whole states": shapes == {stored.get(n, n): tuple(p.shape) for n, p in model.module.named_parameters()},
    }
    for name, how in (
        ("local", by_local),
        ("together", by_local_together),
        ("full", by_full),
        ("all", by_model_checkpoint),
        ("file", by_file),
    ):
        other = sharded(tsm)
        fresh = torch.optim.AdamW(other.parameters(), lr=5.0, fused=True)
        found |= how(tsm, model, optimizer, other, fresh, folder)
        pairs = list(zip(model.parameters(), other.parameters(), strict=True))
        same = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
        squares = [(optimizer.state[a]["exp_avg_sq"], fresh.state[b]["exp_avg_sq"]) for a, b in pairs]
        same = same and all(torch.equal(a.to_local(), b.to_local()) for a, b in squares)
        found[name] = same and {float(s["step"]) for s in fresh.state.values()} == {2.0}
    return found


def by_local(tsm, model, optimizer, other, fresh, folder):
    """In place, within a group of the ranks with the same shard."""
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
        SMStateDictType,
        init_optim_state,
        sm_state_dict_type,
    )

    own = None
    for members in tsm.state.ranker.get_rep_groups():
        group = dist.new_group(members)
        own = group if dist.get_rank() in members else own
    path = str(folder / f"local-{model.rank}")
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        async_save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path, process_group=own)
    finalised = maybe_finalize_async_calls()
    with sm_state_dict_type(other, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {"model": other.state_dict()}
        init_optim_state(fresh, skip_empty_param=True)
        state["optimizer"] = fresh.state_dict()
    load(state, checkpoint_id=path, process_group=own)
    return {"finalised": finalised}


def by_local_together(tsm, model, optimizer, other, fresh, folder):
    """Rows of all ranks in one folder; what would lose some of them is refused."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import save
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import init_optim_state

    path, refused = str(folder / "together"), []
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        save({"model": state, "optimizer": optimizer.state_dict()}, checkpoint_id=path)
        name = next(name for name, value in state.items() if isinstance(value, torch.Tensor))
        state[name] = state[name].clone()
        for given in (lambda: save({"model": state}, checkpoint_id=path + "2"),
                      lambda: save({"model": model.state_dict()}, checkpoint_id=f"{path}-{model.rank}")):  # fmt: skip
            try:
                given()
            except octavo.errors.InputError as error:
                refused.append(str(error))
    with FSDP.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        init_optim_state(fresh, skip_empty_param=True)
        state = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
        load(state, checkpoint_id=path)
        other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    return {"refused": refused}


def by_full(tsm, model, optimizer, other, fresh, folder):
    """Whole tensors in memory."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full, moments = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    other.load_state_dict(full)
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, moments))
    return {"rate": fresh.param_groups[0]["lr"]}


def by_model_checkpoint(tsm, model, optimizer, other, fresh, folder):
    """By the function that saves model, optimizer, scheduler and values of the script at once."""
    from torch.distributed.fsdp import StateDictType
    from torch.sagemaker.distributed.fsdp.checkpoint import load_model_checkpoint, save_model_checkpoint

    kind, path = StateDictType.SHARDED_STATE_DICT, str(folder / "all")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_model_checkpoint(model, kind, path, optimizer=optimizer, scheduler=scheduler, extra_exports={"total_steps": 7})
    scheduler = torch.optim.lr_scheduler.StepLR(fresh, 2)
    read = load_model_checkpoint(other, kind, path, optimizer=fresh, scheduler=scheduler, extra_imports={"total_steps": 0})
    return {"extra": (read["identity"], read["scheduler"].step_size)}


def by_file(tsm, model, optimizer, other, fresh, folder):
    """A file of each rank, by torch.save."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    path = folder / f"local-{model.rank}.pt"
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    state = torch.load(path)
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    return {}


def recipe_of(rule):
    """A new recipe of delayed scaling by Octavo's rule or Transformer Engine's, or CurrentScaling; None for "none"."""
    ours = {"octavo": octavo.recipe.DelayedScaling, "current": octavo.recipe.CurrentScaling}
    return {**ours, "te": recipes.DelayedScaling, "none": lambda: None}[rule]()


def first_step(model, autocast, rule, ids):
    """Loss and whole gradients of a step under `autocast`, without an optimizer."""
    with autocast(enabled=True, fp8_recipe=recipe_of(rule)):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {clean(name): whole_tensor(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.item(), gradients


def first_steps_of_one_rank(rule, config, copies):
    """Of Octavo itself: the first step, of eight samples so many times, as ranks have them together."""
    with octavo.delayed_init():
        model = AutoModelForCausalLM.from_config(config)
    model = octavo.transform(model, dtype=torch.float32, params_dtype=torch.float32, device="cpu")
    return first_step(model, octavo.fp8_autocast, rule, batch(0, slice(0, 8)).repeat(copies, 1))


def first_steps(degrees, config, strategy, rule, autocast):
    """The same over ranks: each takes all eight samples, so that all amaxes are those of one rank."""
    tsm = names()
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from transformer_engine.pytorch import fp8_autocast

    tsm.init(degrees)
    with octavo.delayed_init():
        model = tsm.transform(AutoModelForCausalLM.from_config(config))
    initer = DelayedParamIniter(model)
    how = {"param_init_fn": initer.get_param_init_fn(), "sharding_strategy": ShardingStrategy[strategy]}
    model = FullyShardedDataParallel(model, **how)
    # A first evaluation changes nothing.
    ids, around = batch(0, slice(0, 8)), {"te": fp8_autocast, "octavo": octavo.fp8_autocast}[autocast]
    model.eval()
    with torch.no_grad(), around(enabled=True, fp8_recipe=recipe_of(rule)):
        evaluated = model(input_ids=ids, labels=ids).loss.item()
    return evaluated, *first_step(model.train(), around, rule, ids)


def loads(kind, rule):
    """Which weights had begun before a load that makes one of each block 100 times larger, and behind it; the logits' error."""
    tsm = names()
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    tsm.init({"hybrid_shard_degree": 2})
    model, ids = sharded(tsm), batch(0, slice(0, 8))
    for _ in range(2):
        first_step(model, octavo.fp8_autocast, rule, ids)
    trained = begun_weights(model)
    with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        state = model.state_dict()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and any(part in name for part in ("o_proj", "self_attention.proj")):
                state[name] = value * 100
        model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        exact = model(input_ids=ids).logits.clone()
        with octavo.fp8_autocast(fp8_recipe=recipe_of(rule)):
            found = model(input_ids=ids).logits
    return trained, begun_weights(model), ((found - exact).norm() / exact.norm()).item()


def begun_weights(model):
    """Names of the weights of blocks that have begun."""
    flags = {name: bool(flag.all()) for name, flag in state_records(model).items() if "layers." in name}
    return {name for name, flag in flags.items() if flag and name.endswith(".weight.begun")}


def micro_batches(degrees, config, strategy, *, sync):
    """Whole gradients of three micro-batches of a rank's own, all but the last in `no_sync`, and the FP8 records."""
    tsm = names()
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.sagemaker.delayed_param import DelayedParamIniter

    octavo.init({**degrees, "sync_each_micro_batch": sync})
    with octavo.delayed_init():
        model = tsm.transform(AutoModelForCausalLM.from_config(config))
    initer = DelayedParamIniter(model)
    how = {"param_init_fn": initer.get_param_init_fn(), "sharding_strategy": ShardingStrategy[strategy]}
    model = FullyShardedDataParallel(model, **how)
    kept = []
    for number in range(3):
        ids = batch(number, slice(dist.get_rank(), dist.get_rank() + 1))
        with contextlib.nullcontext() if number == 2 else model.no_sync():
            with octavo.fp8_autocast():
                loss = model(input_ids=ids, labels=ids).loss / 3
            loss.backward()
        kept.append(sum(one.gradient() is not None for group in groups_of(sharded_modules(model)) for one in group.parameters))
    gradients = {clean(name): whole_tensor(p.grad).clone() for name, p in model.named_parameters()}
    return gradients, state_records(model), kept


def names_and_saves(config, folder):
    """Elements that decay by each rule, beside those of the source's matrices; and what octavo.save keeps of the model."""
    from transformers.trainer_pt_utils import get_parameter_names

    tsm = names()
    from torch.distributed.fsdp import FullyShardedDataParallel

    tsm.init()
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in source.parameters() if p.dim() > 1)
    model = FullyShardedDataParallel(tsm.transform(source))
    first, second = octavo.parameter_groups(model, 0.1)
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]  # of transformers' Trainer
    by_class = set(get_parameter_names(model, [nn.LayerNorm], patterns))
    decayed = {
        "groups": sum(p.numel() for p in first["params"]),
        "classes": sum(p.numel() for name, p in model.named_parameters() if name in by_class),
        "names": sum(p.numel() for name, p in model.named_parameters() if "norm" not in name and "bias" not in name),
    }
    kept = [whole_tensor(p).clone() for p in model.parameters()]
    octavo.save(folder, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    octavo.load(folder, model)
    return matrices, decayed, all(torch.equal(whole_tensor(p), k) for p, k in zip(model.parameters(), kept, strict=True))


def from_rank_0(tsm):
    """Rank 0 alone has the weights."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.sagemaker.delayed_param import DelayedParamIniter

    torch.manual_seed(7)
    source = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    tuned = tsm.transform(source if dist.get_rank() == 0 else empty(), load_state_dict_from_rank0=True)
    initer = None if dist.get_rank() == 0 else DelayedParamIniter(tuned)
    tuned = FSDP(tuned, sync_module_states=True, param_init_fn=initer.get_param_init_fn() if initer else None)
    with FSDP.state_dict_type(tuned, StateDictType.FULL_STATE_DICT):
        full = tuned.state_dict()
    torch.manual_seed(7)
    wanted = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).state_dict()
    return {"rank 0": all(torch.equal(full[name], wanted[name]) for name in wanted)}


def native(mine):
    """PyTorch's own FSDP for a model that was never transformed."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy
    from torch.sagemaker.delayed_param import DelayedParamIniter

    model = empty(tie_word_embeddings=True)
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        model = FSDP(
            model, use_orig_params=True, sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.device("cpu"),
            param_init_fn=initer.get_param_init_fn(), post_param_init_fn=initer.get_post_param_init_fn(),
        )  # fmt: skip
    ids = batch(9, mine)
    model(input_ids=ids, labels=ids).loss.backward()
    try:
        octavo.save("nowhere", model)
    except octavo.errors.InputError as error:
        refused = str(error)
    return {"native": type(model) is FSDP, "native norm": float(model.clip_grad_norm_(1.0)), "native save": refused}


def refusals(tsm):
    """The message of each call that is refused."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, StateDictType

    def filled():
        return AutoModelForCausalLM.from_config(LlamaConfig(**TINY))

    def routed():  # transformers keeps its router in float32
        experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}
        config = AutoConfig.for_model("ernie4_5_moe", **TINY, **experts, moe_layer_end_index=1)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    model, found = sharded(tsm), {}
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full = model.state_dict()
    for name, call in (
        ("weights", lambda: FSDP(tsm.transform(filled()))),
        ("meta", lambda: FSDP(tsm.transform(empty()))),
        ("own init", lambda: FSDP(tsm.transform(empty()), param_init_fn=lambda module: None)),
        ("sync", lambda: FSDP(tsm.transform(filled(), None, None, None, True))),
        ("around", lambda: FSDP(nn.Sequential(tsm.transform(empty())))),
        ("summon", lambda: FSDP.summon_full_params(model)),
        ("strategy", lambda: FSDP(tsm.transform(empty()), sharding_strategy="FULL_SHARD")),
        ("dtype", lambda: FSDP(tsm.transform(empty()), mixed_precision=MixedPrecision(torch.float64))),
        ("parts", lambda: model.load_state_dict({name: value[:1] for name, value in full.items()})),
        ("routers", lambda: FSDP(tsm.transform(routed()))),
        ("position", lambda: FSDP(tsm.transform(empty()), None, None, None, None, None, None, [nn.Linear(1, 1)])),
    ):
        try:
            torch.manual_seed(dist.get_rank())
            call()
            found[f"refusal {name}"] = "none"
        except octavo.errors.InputError as error:
            found[f"refusal {name}"] = str(error)
    return found


def two_worlds(folder):
    """Groups and losses of a model within hosts of two ranks, in one world after another."""
    from torch.distributed.fsdp import ShardingStrategy

    tsm, rank, found = names(), dist.get_rank(), []
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for number in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=4)
        octavo.shutdown()
        tsm.init()
        model = sharded(tsm, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        found.append((dist.get_process_group_ranks(model.process_group), steps(model, slice(rank, rank + 1))[0]))
    return found
