"""Run by two ranks: local checkpoints of a transformed model under every kind of wrapper."""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_ranks import batch, names, sharded
from torch import nn

import octavo


class Forwarding(nn.Module):
    """A script's own wrapper, which forwards what it does not have."""

    def __init__(self, model):
        super().__init__()
        self.inside = model

    def forward(self, *args, **kwargs):
        return self.inside(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)


class Plain(nn.Module):
    """A module around, which forwards nothing, with a parameter of its own."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class Hiding:
    """No module at all."""

    def __init__(self, model):
        self.__dict__["hidden"] = model

    def __call__(self, *args, **kwargs):
        return self.hidden(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__dict__["hidden"], name)


class HidingModule(Forwarding):
    """A module whose `modules()` does not list the model."""

    def __init__(self, model):
        nn.Module.__init__(self)
        self.__dict__["inside"] = model

    def __getattr__(self, name):
        return getattr(self.__dict__["inside"], name)

    def parameters(self, *args, **kwargs):
        return self.__dict__["inside"].parameters(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        return self.__dict__["inside"].state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.__dict__["inside"].load_state_dict(*args, **kwargs)


def kinds():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    torch.compiler.set_stance("force_eager")  # the module of torch.compile, without 30 seconds of tracing
    compiled = functools.partial(torch.compile, backend="eager")
    return {
        "offload": offload_wrapper,
        "recompute": checkpoint_wrapper,
        "compile": compiled,
        "own": Forwarding,
        "plain": Plain,
        "hiding": Hiding,
        "hiding module": HidingModule,
        "own in offload": lambda model: offload_wrapper(Forwarding(model)),
        "recompute in offload": lambda model: offload_wrapper(checkpoint_wrapper(model)),
        "plain in offload in compile": lambda model: compiled(offload_wrapper(Plain(model))),
        "compile in own in recompute": lambda model: checkpoint_wrapper(Forwarding(compiled(model))),
    }


def trained(model, mine, count, first=0):
    """Losses of `count` steps in FP8."""
    from torch.sagemaker.grad_norm import clip_grad_norm_
    from transformer_engine.pytorch import fp8_autocast

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for number in range(first, first + count):
        ids = batch(number, mine)
        with fp8_autocast(enabled=True):
            loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(model):
    """This rank's rows of all parameters."""
    return [getattr(p, "to_local", p.detach)().clone() for p in model.parameters()]


def wrapped(folder):
    """{wrapper: {"next loss": of the saved model, way: (a fresh model has its weights, and its next loss)}}"""
    tsm = names()
    from torch.distributed import checkpoint
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls, save
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

    tsm.init({"hybrid_shard_degree": 2})
    rank, local, found = dist.get_rank(), SMStateDictType.SM_LOCAL_STATE_DICT, {}
    mine = slice(2 * rank, 2 * rank + 2)
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    for kind, wrap in kinds().items():
        model = wrap(sharded(tsm))
        trained(model, mine, 1)
        path = Path(folder) / kind
        with sm_state_dict_type(model, local):
            state = {"model": model.state_dict()}
            async_save(state, checkpoint_id=str(path / f"rank{rank}"), process_group=own)
            save(state, checkpoint_id=str(path / "all"))
            torch.save(state, path / f"{rank}.pt")
            checkpoint.save(state, checkpoint_id=str(path / "pytorch"))
        maybe_finalize_async_calls(blocking=True)
        wanted, loss = bits(model), trained(model, mine, 1, first=1)
        found[kind], fresh = {"next loss": loss}, wrap(sharded(tsm))
        for way in ("each", "all", "file", *(["pytorch"] if kind == "offload" else [])):
            assert not all(torch.equal(*pair) for pair in zip(bits(fresh), wanted, strict=True))
            with sm_state_dict_type(fresh, local):
                state = {"model": fresh.state_dict()}
                if way == "each":  # in place, without another call
                    load(state, checkpoint_id=str(path / f"rank{rank}"), process_group=own)
                elif way == "all":
                    load(state, checkpoint_id=str(path / "all"))
                    fresh.load_state_dict(state["model"])
                elif way == "pytorch":
                    checkpoint.load(state, checkpoint_id=str(path / way))
                else:
                    fresh.load_state_dict(torch.load(path / f"{rank}.pt")["model"])
            same = all(torch.equal(*pair) for pair in zip(bits(fresh), wanted, strict=True))
            found[kind][way] = (same, trained(fresh, mine, 1, first=1) == loss)
    return found


def nothing_restored(folder):
    """Messages for states of which no key is the model's."""
    tsm = names()
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

    tsm.init({"hybrid_shard_degree": 2})
    model, found = sharded(tsm), []
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {f"other.{name}": value for name, value in model.state_dict().items()}
        for one, given in ((model, state), (Plain(model), model.state_dict()), (Plain(model), {"scale": torch.ones(())})):
            try:
                one.load_state_dict(given, strict=False)
                found.append("loaded")
            except octavo.errors.InputError as error:
                found.append(str(error))
    return found


def never_transformed(folder):
    """{(use_orig_params, way): True if a fresh model in PyTorch's own FSDP has the saved one's output}"""
    tsm = names()
    from torch.distributed._shard.api import load_with_process_group
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import save
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

    tsm.init()
    rank, local, found = dist.get_rank(), SMStateDictType.SM_LOCAL_STATE_DICT, {}
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))

    def build(seed, original):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(
            layers, auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu")
        )
        assert type(model) is FullyShardedDataParallel
        return model

    for original in (True, False):
        model, path = build(0, original), Path(folder) / str(original)
        wanted = model(x)
        path.mkdir(exist_ok=True)
        with sm_state_dict_type(model, local):
            state = {"model": model.state_dict()}
            save(state, checkpoint_id=str(path / "all"))
            save(state, checkpoint_id=str(path / f"rank{rank}"), process_group=own)
            torch.save(state, path / f"{rank}.pt")
        for way in ("all", "each", "file"):
            fresh = build(1, original)
            with sm_state_dict_type(fresh, local), load_with_process_group(fresh.process_group):
                state = torch.load(path / f"{rank}.pt") if way == "file" else {"model": fresh.state_dict()}
                if way == "all":
                    load(state, checkpoint_id=str(path / "all"))
                elif way == "each":
                    load(state, checkpoint_id=str(path / f"rank{rank}"), process_group=own)
                fresh.load_state_dict(state["model"])
            found[original, way] = torch.equal(fresh(x), wanted)
    return found
