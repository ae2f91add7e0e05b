"""What ranks do with SMP's state dicts of a model whose parameters they hold by ranges."""

import torch
from torch.distributed.fsdp import StateDictType

import block_ranks
from octavo.collectives.blocks import BlockTensor, has_part
from octavo.compat.smp import checkpoint
from octavo.compat.smp.optim import optim_state, optim_state_to_load
from octavo.compat.smp.state_dicts import FP8, Settings, SMStateDictType, load_model_state, model_state
from octavo.errors import InputError

KINDS = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    SMStateDictType.SM_LOCAL_STATE_DICT,
)


def other(tensor, **options):
    """A model and an optimizer with other values."""
    model = block_ranks.build(tensor, **options)
    block_ranks.fill_all(model, block_ranks.whole_values(77))
    optimizer = block_ranks.optimizer_of(model)
    block_ranks.give_gradients(model, block_ranks.whole_values(78))
    optimizer.step()
    return model, optimizer


def round_trips(tensor, wanted):
    """By kind of state dict: what differs in a model and an optimizer that have loaded it, and in a full state itself."""
    model, optimizer = block_ranks.trained(tensor)
    found = {}
    for kind in KINDS:
        settings = Settings(kind)
        state, of_optimizer = model_state(model, settings), optim_state(model, optimizer, settings)
        loaded, its = other(tensor)
        load_model_state(loaded, state, settings, strict=True)
        its.load_state_dict(optim_state_to_load(loaded, its, of_optimizer))
        wrong = block_ranks.differences(block_ranks.state_of(loaded, its), wanted)
        state.pop(FP8, None)
        if kind is StateDictType.FULL_STATE_DICT:
            wrong += block_ranks.differences(state, {name: wanted[f"model.{name}"] for name in state})
            assert not any(map(has_part, state.values()))
        found[kind.name] = wrong
    return found


def exchanged(tensor, wanted):
    """What differs where a sharded state is loaded by ranks that hold each other's ranges, of the same shapes."""
    settings = Settings(StateDictType.SHARDED_STATE_DICT)
    model, optimizer = block_ranks.trained(tensor)
    loaded, its = other(tensor, backwards=True)
    same = [mine.shape == theirs.shape for mine, theirs in zip(model.parameters(), loaded.parameters(), strict=True)]
    assert sum(same) > len(same) // 2
    load_model_state(loaded, model_state(model, settings), settings, strict=True)
    its.load_state_dict(optim_state_to_load(loaded, its, optim_state(model, optimizer, settings)))
    return block_ranks.differences(block_ranks.state_of(loaded, its), wanted)


def save(path, tensor, *, background=False):
    """Write a sharded state of model and optimizer, as SMP's scripts do."""
    model, optimizer = block_ranks.trained(tensor)
    settings = Settings(StateDictType.SHARDED_STATE_DICT)
    state = {"model": model_state(model, settings), "optimizer": optim_state(model, optimizer, settings)}
    assert all(isinstance(value, BlockTensor) for name, value in state["model"].items() if tensor > 1 and name != FP8)
    write = checkpoint.async_save if background else checkpoint.save
    write(state, checkpoint_id=path)
    checkpoint.DEFAULT_ASYNC_REQUEST_QUEUE.maybe_finalize_async_calls(blocking=True)


def load(path, tensor, wanted):
    """Load it; what differs."""
    block_ranks.start(tensor)
    model, optimizer = other(tensor)
    settings = Settings(StateDictType.SHARDED_STATE_DICT)
    state = {"model": model_state(model, settings), "optimizer": optim_state(model, optimizer, settings)}
    checkpoint.load(state, checkpoint_id=path)
    load_model_state(model, state["model"], settings, strict=True)
    optimizer.load_state_dict(optim_state_to_load(model, optimizer, state["optimizer"]))
    return block_ranks.differences(block_ranks.state_of(model, optimizer), wanted)


def refused(path, tensor):
    """What a save over some of the ranks says."""
    model, _ = block_ranks.trained(tensor)
    state = model_state(model, Settings(StateDictType.SHARDED_STATE_DICT))
    group = torch.distributed.new_group([0, 1])
    if torch.distributed.get_rank() > 1:
        return None
    try:
        checkpoint.save(state, checkpoint_id=path, process_group=group)
    except InputError as error:
        return str(error)
    raise AssertionError("nothing was raised")
