"""Run by four ranks: a Mixtral with its experts over two, whose sharded checkpoint is a folder for each rank of experts."""

from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_ranks import TINY, batch, names
from transformers import AutoModelForCausalLM, MixtralConfig

import octavo


def mixtral(tsm, degrees):
    """A Mixtral in FSDP, with an optimizer, under these degrees."""
    from accelerate import init_empty_weights
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.moe.moe_config import MoEConfig

    octavo.shutdown()
    tsm.init(degrees)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(MixtralConfig(**TINY | {"num_local_experts": 4, "sliding_window": None}))
        model = tsm.transform(model, config=MoEConfig(moe_load_balancing="aux_loss"))
    initer = DelayedParamIniter(model)
    model = FullyShardedDataParallel(model, param_init_fn=initer.get_param_init_fn())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(model, optimizer, number):
    ids = batch(number, slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2))
    loss = model(input_ids=ids, labels=ids)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(model, optimizer):
    """Whole tensors of weights and moments by name."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        moments = FSDP.optim_state_dict(model, optimizer)["state"]
        state = model.state_dict()
    return state | {f"{name}.{key}": value for name, entries in moments.items() for key, value in entries.items()}


def by_the_script(folder):
    """The script's functions: save over `model.process_group`, resume at the same and at other degrees."""
    tsm = names()
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    kind = StateDictType.SHARDED_STATE_DICT
    model, optimizer = mixtral(tsm, {"expert_parallel_degree": 2})
    for number in range(2):
        step(model, optimizer, number)
    root, folders = Path(folder), [f"ep2-{tsm.state.ep_rank}"]
    with FSDP.state_dict_type(model, kind):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer), "total_steps": 2}
    checkpoint.save_state_dict(
        state_dict=state,
        storage_writer=checkpoint.FileSystemWriter(str(root / folders[0])),
        planner=checkpoint.DefaultSavePlanner(),
        process_group=model.process_group,
        coordinator_rank=min(dist.get_process_group_ranks(model.process_group)),
    )
    wanted, found = (
        whole(model, optimizer),
        {"files": sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())},
    )
    following = step(model, optimizer, 2)
    for name, degrees, place in (
        ("same", {"expert_parallel_degree": 2}, None),
        ("without", {}, "ep2-1"),
        ("four", {"expert_parallel_degree": 4}, "ep2-0"),
        ("replicas", {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, None),
    ):
        other, fresh = mixtral(tsm, degrees)
        at = str(root / (place or f"ep2-{tsm.state.ep_rank}"))
        with FSDP.state_dict_type(other, kind):
            state = {"model": other.state_dict(), "total_steps": 0}
            checkpoint.load_state_dict(
                state_dict=state,
                storage_reader=checkpoint.FileSystemReader(at),
                process_group=other.process_group,
                coordinator_rank=min(dist.get_process_group_ranks(other.process_group)),
                planner=checkpoint.DefaultLoadPlanner(),
            )
            other.load_state_dict(state["model"])
            read = load_sharded_optimizer_state_dict(
                model_state_dict=state["model"],
                optimizer_key="optimizer",
                storage_reader=checkpoint.FileSystemReader(at),
                process_group=other.process_group,
            )["optimizer"]
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(model=other, optim=fresh, optim_state_dict=read))
        restored = whole(other, fresh)
        same = restored.keys() == wanted.keys() and all(torch.equal(restored[key], wanted[key]) for key in wanted)
        found[name] = same and state["total_steps"] == 2, abs(step(other, fresh, 2) - following)
    found["some"] = refusal_of_some_ranks(tsm, root)
    found["own"] = refusal_of_several_folders(model, root, folders[0])
    found["missing"] = refusal_of_a_missing_folder(tsm, root)
    return found


def refusal_of_several_folders(model, root, own):
    """The message for SMP's own save of one state to a folder for each rank of experts, and what one folder holds."""
    from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemWriter
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import save

    found = []
    for given in ({"checkpoint_id": root / own}, {"storage_writer": DistributedFileSystemWriter(str(root / own))}):
        try:
            save({"total_steps": 1}, process_group=model.process_group, **given)
        except octavo.errors.InputError as error:
            found.append(str(error))
    save({"total_steps": 1}, process_group=model.process_group, checkpoint_id=root / "ep2")
    return found


def refusal_of_a_missing_folder(tsm, root):
    """The message for a load from one folder of which the other is not there."""
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load

    dist.barrier()
    if dist.get_rank() == 0:
        (root / "ep2-1").rename(root / "elsewhere")
    dist.barrier()
    try:
        load({"total_steps": 0}, checkpoint_id=root / "ep2-0")
    except octavo.errors.InputError as error:
        return str(error)
    return "none"


def refusal_of_some_ranks(tsm, root):
    """The message for a save over ranks with some of the rows: two of four."""
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import save
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

    model, _ = mixtral(tsm, {"expert_parallel_degree": 2})
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state, place = model.state_dict(), str(root / f"some{dist.get_rank() // 2}")
    try:
        save({"model": state}, checkpoint_id=place, process_group=tsm.state.ep_process_group)
    except octavo.errors.InputError as error:
        return str(error)
    return "none"


def refusals(folder):
    """Messages of every degree that does not fit two ranks or a model, by what asked for it."""
    from accelerate import init_empty_weights
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from transformers import GPT2Config, LlamaConfig, MistralConfig

    tsm = names()
    from torch.sagemaker.delayed_param import DelayedParamIniter

    def model(config, **changes):
        with init_empty_weights():
            return AutoModelForCausalLM.from_config(config(**changes))

    def sharded(degrees, config, changes, **options):
        octavo.shutdown()
        tsm.init(degrees)
        new = tsm.transform(model(config, **changes))
        FullyShardedDataParallel(new, param_init_fn=DelayedParamIniter(new).get_param_init_fn(), **options)

    def twice():
        octavo.shutdown()
        tsm.init()
        tsm.init({"expert_parallel_degree": 2})

    experts, context = {"expert_parallel_degree": 2}, {"context_parallel_degree": 2}
    small = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    found = {}
    for name, call in (
        ("expert_parallel_degree 3", lambda: tsm.init({"expert_parallel_degree": 3})),
        ("context_parallel_degree 3", lambda: tsm.init({"context_parallel_degree": 3})),
        ("hybrid_shard_degree 3", lambda: tsm.init({"hybrid_shard_degree": 3})),
        ("tensor_parallel_degree 2", lambda: tsm.init({"tensor_parallel_degree": 2, "expert_parallel_degree": 3})),
        ("Degrees twice", twice),
        ("expert_parallel_degree dense", lambda: sharded(experts, LlamaConfig, TINY)),
        ("expert_parallel_degree odd", lambda: sharded(experts, MixtralConfig, TINY | {"num_local_experts": 3})),
        (
            "expert_parallel_degree groups",
            lambda: sharded(experts, MixtralConfig, TINY, sharding_strategy=ShardingStrategy.NO_SHARD),
        ),
        ("context_parallel_degree other code", lambda: sharded(context, GPT2Config, small)),
        ("cp_comm_type window", lambda: sharded(context, MistralConfig, TINY | {"sliding_window": 8})),
        ("context_parallel_degree dropout", lambda: sharded(context, LlamaConfig, TINY | {"attention_dropout": 0.1})),
    ):  # fmt: skip
        try:
            call()
            found[name] = "none"
        except octavo.errors.InputError as error:
            found[name] = str(error)
    return found
