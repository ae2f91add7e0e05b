"""Run by several ranks: transformed models in FullyShardedDataParallel, PyTorch's own beside them, and their checkpoints."""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import octavo
import octavo.compat.smp
import octavo.compat.te

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


def batch(number, samples):
    """Samples [samples, 16] of this step, others for every step."""
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(number))[samples]


def steps(model, samples, count=2, part=None, fp8=False):
    """(loss, norm of the gradient) of some steps; part: this rank's tokens of a sequence, as SMP's examples take them."""
    from transformer_engine.pytorch import fp8_autocast

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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
    """States of all types, saved and loaded by two ranks; wrappers; fine-tuning from rank 0; and PyTorch's own FSDP."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType

    tsm = names()
    tsm.init({"hybrid_shard_degree": 2})
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
        SMStateDictType,
        init_optim_state,
        sm_state_dict_type,
    )
    from torch.sagemaker.distributed.fsdp.checkpoint import load_model_checkpoint, save_model_checkpoint
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
    from transformer_engine.pytorch import MultiheadAttention, checkpoint

    rank = dist.get_rank()
    mine = slice(2 * rank, 2 * rank + 2)
    found = {}

    # 1. Wrappers change no bit.
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
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_fn=checkpoint),
        check_fn=lambda m: isinstance(m, MultiheadAttention),
    )
    assert sum("_checkpoint_wrapped_module" in name.rpartition(".")[2] for name, _ in model.named_modules()) == 2
    found["same with attention alone"] = steps(model, mine, fp8=True)[0] == plain

    # 2. Local and full states, model and optimizer, in place and into another model.
    model = sharded(tsm)
    _, optimizer = steps(model, mine, fp8=True)
    own = None
    for members in tsm.state.ranker.get_rep_groups():
        group = dist.new_group(members)
        own = group if rank in members else own
    path = str(Path(folder) / f"local-{model.rank}")
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        async_save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path, process_group=own)
    found["finalised"] = maybe_finalize_async_calls()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    hf = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    hf.load_state_dict(full)
    with torch.no_grad():
        ids = batch(9, mine)
        found["hugging face"] = (hf(input_ids=ids, labels=ids).loss.item(), model(input_ids=ids, labels=ids).loss.item())
    shapes = {name: tuple(entries["exp_avg"].shape) for name, entries in states["state"].items()}
    found["whole states"] = shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_model_checkpoint(
        model, StateDictType.SHARDED_STATE_DICT, str(Path(folder) / "all"), optimizer=optimizer, scheduler=scheduler,
        extra_exports={"total_steps": 7},
    )  # fmt: skip
    fourth = sharded(tsm)
    last = torch.optim.AdamW(fourth.parameters(), lr=5.0)
    read = load_model_checkpoint(
        fourth, StateDictType.SHARDED_STATE_DICT, str(Path(folder) / "all"), optimizer=last,
        scheduler=torch.optim.lr_scheduler.StepLR(last, 2), extra_imports={"total_steps": 0},
    )  # fmt: skip
    found["extra"] = (read["identity"], read["scheduler"].step_size)
    other = sharded(tsm)
    fresh = torch.optim.AdamW(other.parameters(), lr=5.0)
    with sm_state_dict_type(other, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {"model": other.state_dict()}
        init_optim_state(fresh, skip_empty_param=True)
        state["optimizer"] = fresh.state_dict()
    load(state, checkpoint_id=path, process_group=own)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):  # a file of each rank
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.pt")
    fifth = sharded(tsm)
    filed = torch.optim.AdamW(fifth.parameters(), lr=5.0)
    state = torch.load(f"{path}.pt")
    fifth.load_state_dict(state["model"])
    filed.load_state_dict(state["optimizer"])
    third = sharded(tsm)
    third.load_state_dict(full)
    again = torch.optim.AdamW(third.parameters(), lr=5.0)
    again.load_state_dict(FSDP.optim_state_dict_to_load(third, again, states))
    found["rate"] = again.param_groups[0]["lr"]
    for name, one, opt in (("local", other, fresh), ("full", third, again), ("all", fourth, last), ("file", fifth, filed)):
        same = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), one.parameters(), strict=True))
        moments = [
            torch.equal(optimizer.state[a]["exp_avg_sq"].to_local(), opt.state[b]["exp_avg_sq"].to_local())
            for a, b in zip(model.parameters(), one.parameters(), strict=True)
        ]
        found[name] = same and all(moments) and {float(s["step"]) for s in opt.state.values()} == {2.0}

    # 3. Rank 0 alone has the weights.
    torch.manual_seed(7)
    source = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    tuned = tsm.transform(source if rank == 0 else empty(), load_state_dict_from_rank0=True)
    initer = None if rank == 0 else DelayedParamIniter(tuned)
    tuned = FSDP(tuned, sync_module_states=True, param_init_fn=initer.get_param_init_fn() if initer else None)
    with FSDP.state_dict_type(tuned, StateDictType.FULL_STATE_DICT):
        full = tuned.state_dict()
    wanted = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    torch.manual_seed(7)
    wanted = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).state_dict()
    found["rank 0"] = all(torch.equal(full[name], wanted[name]) for name in wanted)

    # 4. PyTorch's own FSDP for a model that was never transformed.
    native = empty(tie_word_embeddings=True)
    initer = DelayedParamIniter(native)
    with initer.validate_params_and_buffers_inited():
        native = FSDP(
            native, use_orig_params=True, sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.device("cpu"),
            param_init_fn=initer.get_param_init_fn(), post_param_init_fn=initer.get_post_param_init_fn(),
        )  # fmt: skip
    found["native"] = type(native) is FSDP
    native(input_ids=ids, labels=ids).loss.backward()
    found["native norm"] = float(native.clip_grad_norm_(1.0))

    # 5. Refusals.
    for name, call in (
        ("weights", lambda: FSDP(tsm.transform(AutoModelForCausalLM.from_config(LlamaConfig(**TINY))))),
        ("meta", lambda: FSDP(tsm.transform(empty()))),
        ("own init", lambda: FSDP(tsm.transform(empty()), param_init_fn=lambda module: None)),
        ("sync", lambda: FSDP(tsm.transform(AutoModelForCausalLM.from_config(LlamaConfig(**TINY)), None, None, None, True))),
        ("around", lambda: FSDP(nn.Sequential(tsm.transform(empty())))),
        ("summon", lambda: FSDP.summon_full_params(model)),
        ("strategy", lambda: FSDP(tsm.transform(empty()), sharding_strategy="FULL_SHARD")),
        ("dtype", lambda: FSDP(tsm.transform(empty()), mixed_precision=MixedPrecision(torch.float64))),
        ("parts", lambda: model.load_state_dict({name: value[:1] for name, value in full.items()})),
        ("position", lambda: FSDP(tsm.transform(empty()), None, None, None, None, None, None, [nn.Linear(1, 1)])),
    ):
        try:
            torch.manual_seed(rank)
            call()
            found[f"refusal {name}"] = "none"
        except octavo.errors.InputError as error:
            found[f"refusal {name}"] = str(error)
    return found
