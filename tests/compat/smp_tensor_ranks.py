"""Run by two and four ranks: a Llama whose matrices tensor ranks share, by SMP's names, beside one rank; its checkpoints."""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_ranks import TINY, batch, empty, names
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import octavo
from octavo.compat.smp.state_dicts import Settings, model_state
from octavo.fp8.scaling import state_records

STEPS = 3
SHAPE = TINY | {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
EXPERTS = TINY | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": None}


def adam(model):
    """A gradient that is 0 but for rounding moves nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)


def on_one_rank(experts=False):
    """Losses, norms and whole weights of the steps, of Octavo itself."""
    octavo.shutdown()
    with octavo.delayed_init():
        model = AutoModelForCausalLM.from_config(MixtralConfig(**EXPERTS) if experts else LlamaConfig(**SHAPE))
    model = octavo.transform(model, dtype=torch.float32, params_dtype=torch.float32, device="cpu")
    optimizer, found = adam(model), []
    for number in range(STEPS):
        ids = batch(number, slice(0, 4))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.item(), octavo.clip_grad_norm_(model, 1.0).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: value.clone() for name, value in model_state(model, Settings()).items()}


def empty_mixtral():
    """A Mixtral on the meta device."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return AutoModelForCausalLM.from_config(MixtralConfig(**EXPERTS))


def made(tsm, degrees, **options):
    """A model in FSDP and an optimizer under these degrees; options: "experts" for a Mixtral, others are FSDP's."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter

    octavo.shutdown()
    tsm.init(degrees)
    model = tsm.transform(empty_mixtral() if options.pop("experts", False) else empty(**SHAPE))
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        model = FullyShardedDataParallel(model, param_init_fn=initer.get_param_init_fn(), **options)
    return model, adam(model)


def own(number):
    """This rank's samples of the step's four."""
    size = 4 // octavo.state.dp_size
    return batch(number, slice(size * octavo.state.dp_rank, size * (octavo.state.dp_rank + 1)))


def step(model, optimizer, number, fp8=False):
    """(loss, norm), after a step."""
    from transformer_engine.pytorch import fp8_autocast

    ids = own(number)
    with fp8_autocast(enabled=fp8):
        loss = model(input_ids=ids, labels=ids)["loss"]
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float(norm)


def full(model):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


def everything(model, optimizer):
    """Whole weights and moments by name."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        moments = FSDP.optim_state_dict(model, optimizer)["state"]
    return full(model) | {f"{name}.{key}": value for name, entries in moments.items() for key, value in entries.items()}


def largest_difference(found, wanted):
    assert found.keys() == wanted.keys()
    return max((found[name].float() - wanted[name].float()).abs().max().item() for name in wanted)


def trained(degrees, strategies=("FULL_SHARD",), experts=False):
    """[(losses and norms, difference of whole weights from one rank's)] by strategy, and what describes the ranks."""
    from torch.distributed.fsdp import ShardingStrategy

    tsm = names()
    wanted, weights = on_one_rank(experts)
    found = {"one rank": wanted}
    for name in strategies:
        model, optimizer = made(tsm, degrees, sharding_strategy=ShardingStrategy[name], experts=experts)
        rows = [step(model, optimizer, number) for number in range(STEPS)]
        found[name] = rows, largest_difference(full(model), weights)
        group = dist.get_process_group_ranks(model.process_group)
        found[f"{name} ranks"] = group, dist.get_process_group_ranks(tsm.state.rep_rank_process_group)
        ranker = tsm.state.ranker
        found[f"{name} replicas"] = ranker.get_rep_rank(dist.get_rank()), ranker.get_rep_groups()
    state = tsm.state
    found["state"] = (state.tp_rank, state.tp_size, dist.get_process_group_ranks(state.tp_process_group))
    return found


def own_folder(folder, by):
    """`tp{n}-{r}` or `ep{n}-{r}` of this rank."""
    state = names().state
    return folder / f"{by}{getattr(state, f'{by}_size')}-{getattr(state, f'{by}_rank')}"


def saved_by_the_script(model, optimizer, folder, kind, extra, by="tp"):
    """As the example's `_save_sharded`: over `model.process_group`, to a folder for each tensor or expert rank."""
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    with FSDP.state_dict_type(model, kind):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)} | extra
    checkpoint.save_state_dict(
        state_dict=state,
        storage_writer=checkpoint.FileSystemWriter(str(own_folder(folder, by))),
        planner=checkpoint.DefaultSavePlanner(),
        process_group=model.process_group,
        coordinator_rank=min(dist.get_process_group_ranks(model.process_group)),
    )


def loaded_by_the_script(model, optimizer, folder, kind, extra, by="tp"):
    """As the example's `_load_sharded`; returns the values beside the model."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    at = str(own_folder(folder, by) if getattr(names().state, f"{by}_size") > 1 else folder)
    with FSDP.state_dict_type(model, kind):
        state = {"model": model.state_dict()} | extra
        checkpoint.load_state_dict(
            state_dict=state,
            storage_reader=checkpoint.FileSystemReader(at),
            process_group=model.process_group,
            coordinator_rank=min(dist.get_process_group_ranks(model.process_group)),
            planner=checkpoint.DefaultLoadPlanner(),
        )
        model.load_state_dict(state["model"])
        read = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optimizer",
            storage_reader=checkpoint.FileSystemReader(at),
            process_group=model.process_group,
        )["optimizer"]
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=read))
    return {name: state[name] for name in extra}


def checkpoints(folder, degrees, others, experts=False):
    """Two steps in FP8, saved by the example's ways and read at these degrees and others: same values, and the next loss."""
    from torch.distributed.fsdp import StateDictType

    tsm, folder = names(), Path(folder)
    model, optimizer = made(tsm, degrees, experts=experts)
    for number in range(2):
        step(model, optimizer, number, fp8=True)
    tracker = tsm.state.get_rng_state_tracker()
    states = tracker.get_states()
    kinds = {"sharded": StateDictType.SHARDED_STATE_DICT, "local": StateDictType.LOCAL_STATE_DICT}
    for name, kind in kinds.items():
        saved_by_the_script(model, optimizer, folder / name, kind, {"total_steps": 2, "rng": states})
    whole, found = full(model), {}
    together(model, optimizer, folder, found, functools.partial(made, tsm, degrees, experts=experts))
    if model.world_size > 1 and not experts:
        rank_by_rank(model, folder, found)
    found["files"] = sorted(str(path.relative_to(folder)) for path in (folder / "sharded").rglob("*") if path.is_file())
    wanted, rank = everything(model, optimizer), tsm.state.tp_rank
    records = {name: value.clone() for name, value in state_records(model).items()}
    following = step(model, optimizer, 2, fp8=True)
    for given in others:
        for name, kind in (*kinds.items(), ("full", None)):
            other, fresh = made(tsm, given, experts=experts)
            if kind is None:
                other.load_state_dict(whole)
                found[name, str(given)] = largest_difference(full(other), whole)
                continue
            blank = {"total_steps": 0, "rng": {key: torch.zeros_like(value) for key, value in states.items()}}
            read = loaded_by_the_script(other, fresh, folder / name, kind, blank)
            rng = {key: torch.equal(value, states[key]) for key, value in read["rng"].items()}
            same = tsm.state.tp_rank == rank
            difference = largest_difference(everything(other, fresh), wanted)
            scales = largest_difference(state_records(other), records)
            loss = step(other, fresh, 2, fp8=True)
            found[name, str(given)] = (difference, scales, read["total_steps"], not same or all(rng.values()), loss, following)
    return found


KINDS = ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT")


def written(folder, degrees, experts, by):
    """Checkpoints of the example's ways behind a step in FP8, and beside them the whole state, for worlds of other ranks."""
    from torch.distributed.fsdp import StateDictType

    tsm, folder = names(), Path(folder)
    model, optimizer = made(tsm, degrees, experts=experts)
    step(model, optimizer, 0, fp8=True)
    for kind in KINDS:
        saved_by_the_script(model, optimizer, folder / kind, StateDictType[kind], {"total_steps": 1}, by)
    local_rows(model, optimizer, folder / "rows", save=True)
    wanted = everything(model, optimizer) | dict(state_records(model))
    if dist.get_rank() == 0:
        torch.save(wanted, folder / "wanted.pt")


def local_rows(model, optimizer, folder, *, save):
    """The optimizer's own rows beside the model's in a local state, to or from a folder for each tensor rank; the message."""
    from torch.sagemaker.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
        SMStateDictType,
        init_optim_state,
        sm_state_dict_type,
    )

    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        if not save:
            init_optim_state(optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        call = state_dict_saver.save if save else state_dict_loader.load
        try:
            call(state, checkpoint_id=str(own_folder(folder, "tp")), process_group=model.process_group)
        except octavo.errors.InputError as error:
            return str(error)
        optimizer.load_state_dict(state["optimizer"])
    return ""


def read_rows(folder, degrees, experts):
    """The message of `local_rows`, and the largest difference of a whole state if it was read."""
    model, optimizer = made(names(), degrees, experts=experts)
    if said := local_rows(model, optimizer, Path(folder) / "rows", save=False):
        return said
    return largest_difference(everything(model, optimizer) | dict(state_records(model)), torch.load(Path(folder) / "wanted.pt"))


def read(folder, degrees, experts, by):
    """The largest difference of a state that is read here from the whole one, of each way, and the value beside it."""
    from torch.distributed.fsdp import StateDictType

    tsm, folder, found = names(), Path(folder), {}
    for kind in KINDS:
        model, optimizer = made(tsm, degrees, experts=experts)
        values = loaded_by_the_script(model, optimizer, folder / kind, StateDictType[kind], {"total_steps": 0}, by)
        restored = everything(model, optimizer) | dict(state_records(model))
        found[kind] = largest_difference(restored, torch.load(folder / "wanted.pt")), values["total_steps"]
    return found


def rank_by_rank(model, folder, found):
    """Rows of each rank in its own folder, and the message for a folder that two tensor ranks give for theirs."""
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import save
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

    tsm, wanted = names(), full(model)
    alone = {members[0]: dist.new_group(members) for members in tsm.state.ranker.get_rep_groups()}[dist.get_rank()]
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {"model": model.state_dict()}
        save(state, checkpoint_id=str(folder / f"rank{dist.get_rank()}"), process_group=alone)
        try:
            save(state, checkpoint_id=str(folder / f"fsdp{model.rank}"), process_group=alone)
            found["apart"] = "none"
        except octavo.errors.InputError as error:
            found["apart"] = str(error)
    other, _ = made(tsm, {"tensor_parallel_degree": 2})
    with sm_state_dict_type(other, SMStateDictType.SM_LOCAL_STATE_DICT):
        load({"model": other.state_dict()}, checkpoint_id=str(folder / f"rank{dist.get_rank()}"), process_group=alone)
    found["rows"] = largest_difference(full(other), wanted)


def together(model, optimizer, folder, found, another):
    """SMP's own functions over `model.process_group`, to one folder for all tensor ranks; what would lose something."""
    from torch.distributed.fsdp import StateDictType
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls, save
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type
    from torch.sagemaker.distributed.fsdp.checkpoint import load_model_checkpoint, save_model_checkpoint

    tsm, group = names(), model.process_group
    wanted, moments = full(model), everything(model, optimizer)
    tracker = tsm.state.get_rng_state_tracker().get_states()
    found["refused"] = []
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {"model": model.state_dict(), "total_steps": 2}
        async_save(state, checkpoint_id=str(folder / "one"), process_group=group)
        maybe_finalize_async_calls(blocking=True)
        place = f"{folder}/tp{tsm.state.tp_size}-{tsm.state.tp_rank}"
        save(state | {"optimizer": optimizer.state_dict()}, checkpoint_id=place, process_group=group)
        for extra in ({"rng": tracker}, {"optimizer": optimizer.state_dict()}):
            for over in (group, None):
                try:
                    save(state | extra, checkpoint_id=str(folder / "lost"), process_group=over)
                    found["refused"].append("none")
                except octavo.errors.InputError as error:
                    found["refused"].append(str(error))
    save_model_checkpoint(model, StateDictType.SHARDED_STATE_DICT, str(folder / "util"), optimizer=optimizer)
    other, fresh = another()
    with sm_state_dict_type(other, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {"model": other.state_dict(), "total_steps": 0}
        load(state, checkpoint_id=str(folder / "one"), process_group=other.process_group)
    found["one"] = largest_difference(full(other), wanted), state["total_steps"]
    other, fresh = another()
    load_model_checkpoint(other, StateDictType.SHARDED_STATE_DICT, str(folder / "util"), optimizer=fresh)
    found["util"] = largest_difference(everything(other, fresh), moments)
    other, fresh = another()
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import init_optim_state

    with sm_state_dict_type(other, SMStateDictType.SM_LOCAL_STATE_DICT):
        init_optim_state(fresh)
        state = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
        load(state, checkpoint_id=place, process_group=other.process_group)
        fresh.load_state_dict(state["optimizer"])
    found["raw"] = largest_difference(everything(other, fresh), moments)


def wrapped(folder):
    """Recomputation by Transformer Engine's function and offloading change no loss; weights of rank 0, also whole for all."""
    tsm, found = names(), {}
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
    from transformer_engine.pytorch import checkpoint

    degrees = {"tensor_parallel_degree": 2}
    model, optimizer = made(tsm, degrees)
    plain = [step(model, optimizer, number, fp8=True) for number in range(STEPS)]
    model, optimizer = made(tsm, degrees)
    tracker, group = tsm.state.get_rng_state_tracker, tsm.state.tp_process_group
    recomputed = functools.partial(
        checkpoint, get_rng_state_tracker=tracker, tp_group=group, distribute_saved_activations=False
    )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_fn=recomputed),
        check_fn=lambda module: isinstance(module, TransformerLayer),
    )
    model = offload_wrapper(model)
    found["same"] = [step(model, optimizer, number, fp8=True) for number in range(STEPS)] == plain
    torch.manual_seed(7)
    source = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    wanted = {name: value.clone() for name, value in source.state_dict().items()}
    for name in ("rank 0", "all"):
        alone = name == "rank 0"
        octavo.shutdown()
        tsm.init(degrees)
        has = dist.get_rank() == 0 or not alone
        tuned = tsm.transform(source if has else empty(**SHAPE), load_state_dict_from_rank0=alone)
        init = None if has else DelayedParamIniter(tuned).get_param_init_fn()
        tuned = FullyShardedDataParallel(tuned, sync_module_states=alone, param_init_fn=init)
        found[name] = largest_difference(full(tuned), wanted)
        torch.manual_seed(7)
        source = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    return found


def weights_of_experts(degrees):
    """Largest differences from a Mixtral's weights, of rank 0 or the same on all, in FSDP under these degrees."""
    tsm, found = names(), {}
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter

    for name in ("rank 0", "all"):
        torch.manual_seed(7)
        source, alone = AutoModelForCausalLM.from_config(MixtralConfig(**EXPERTS)), name == "rank 0"
        wanted = {key: value.clone() for key, value in source.state_dict().items()}
        octavo.shutdown()
        tsm.init(degrees)
        has = dist.get_rank() == 0 or not alone
        tuned = tsm.transform(source if has else empty_mixtral(), load_state_dict_from_rank0=alone)
        init = None if has else DelayedParamIniter(tuned).get_param_init_fn()
        found[name] = largest_difference(
            full(FullyShardedDataParallel(tuned, sync_module_states=alone, param_init_fn=init)), wanted
        )
    return found


def refusals(folder):
    """The message of each call that tensor ranks refuse, by what asks for it."""
    tsm = names()
    from accelerate import init_empty_weights
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from transformers import GPT2Config

    def model(config):
        with init_empty_weights():
            return AutoModelForCausalLM.from_config(config)

    def around(new, **options):
        return FullyShardedDataParallel(new, param_init_fn=DelayedParamIniter(new).get_param_init_fn(), **options)

    def clipped():
        sharded, _ = made(tsm, {"tensor_parallel_degree": 2})
        sharded(input_ids=own(0), labels=own(0))["loss"].backward()
        sharded.clip_grad_norm_(1.0, float("inf"))

    def other_samples():
        sharded, _ = made(tsm, {"tensor_parallel_degree": 2})
        ids = batch(0, slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2))
        sharded(input_ids=ids, labels=ids)

    def drawn():
        torch.manual_seed(dist.get_rank())
        FullyShardedDataParallel(tsm.transform(AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))))

    octavo.shutdown()
    tsm.init({"tensor_parallel_degree": 2})
    llama, found = functools.partial(LlamaConfig, **SHAPE), {}
    for name, call in (
        ("heads", lambda: tsm.transform(model(llama(num_attention_heads=1, num_key_value_heads=1)))),
        ("own code", lambda: tsm.transform(model(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)))),
        ("unwrapped", lambda: tsm.transform(AutoModelForCausalLM.from_config(llama()))(own(0))),
        ("weights", drawn),
        ("norm", clipped),
        ("samples", other_samples),
        ("degrees", lambda: (octavo.shutdown(), tsm.init({"tensor_parallel_degree": 3}))),
        ("both", lambda: tsm.init({"tensor_parallel_degree": 2, "expert_parallel_degree": 3})),
    ):
        try:
            call()
            found[name] = "none"
        except octavo.errors.InputError as error:
            found[name] = str(error)
    return found


def in_float16(degrees, planted):
    """(scale, whether a weight has changed, loss) of steps with PyTorch's scaler; planted: step → the rank with an infinity."""
    tsm = names()
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model, optimizer = made(tsm, degrees, mixed_precision=MixedPrecision(torch.float16, torch.float32))
    scaler, found = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=2), []
    for number in range(5):
        ids, before = own(number), full(model)
        loss = model(input_ids=ids, labels=ids)["loss"]
        scaler.scale(loss).backward()
        gradient = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.dim() == 2)
        if planted.get(number) == dist.get_rank():
            getattr(gradient, "_local_tensor", gradient)[0, 0] = torch.inf
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = full(model)
        found.append((scale, any(not torch.equal(before[name], value) for name, value in after.items()), loss.item()))
    return found
