"""Patches to PyTorch, applied by the first import of torch.sagemaker and undone by `uninstall()`.

* `FullyShardedDataParallel(transformed model, …)` returns a `ShardedModel`, which its static functions accept. Other models get
  PyTorch's FSDP with SMP's argument `post_param_init_fn` and with the ranks of `init` (`octavo.compat.smp.plain`).
* `FullStateDictConfig` takes SMP's `translate_on_save`.
* Wrappers around Octavo's blocks recompute with the scales of the forward, and offload with prefetching for backward;
  `apply_activation_checkpointing` finds the blocks (`octavo.compat.smp.recompute`).
* PyTorch's `save` and `load` treat a local state of a `ShardedModel` as its shards.
* `FileSystemWriter` writes one checkpoint to several folders; `FileSystemReader` names a missing one
  (`octavo.compat.smp.folders`) and finds folders of another tensor degree (`octavo.compat.smp.tensor_folders`).
* `load_sharded_optimizer_state_dict` reads a state for a `ShardedModel`; `destroy_process_group` waits for saves; checkpoint
  functions take `coordinator_rank` as a global rank.
* For other packages and for `torch.load`: `octavo.compat.smp.substitutes`, `octavo.compat.smp.safe_globals`.

Classes and functions are changed in place: a script may import them from torch before it imports torch.sagemaker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.distributed.checkpoint import optimizer as dcp_optimizer
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from octavo.compat.changes import Changes, copy_of
from octavo.compat.smp import checkpoint as checkpoints
from octavo.compat.smp import folders, optim, plain, recompute, substitutes, tensor_folders
from octavo.compat.smp.asynchronous import maybe_finalize_async_calls
from octavo.compat.smp.fsdp import ShardedModel
from octavo.compat.smp.safe_globals import admit_config, admit_data
from octavo.compat.smp.state_dicts import Fp8State, Settings, sharded_in, typed
from octavo.compat.smp.substitutes import flash_attention, key_value_heads
from octavo.compat.smp.transform import transformed
from octavo.errors import InputError
from octavo.fp8.autocast import recomputing
from octavo.nn.norm import ResidualLayer


def apply() -> Callable[[], None]:
    """Apply the patches; returns the function that undoes them."""
    changes = Changes()
    _construct(changes)
    _static(changes)
    _wrappers(changes)
    recompute.apply(changes)
    _checkpoints(changes)
    flash_attention(changes)
    key_value_heads(changes)
    others = substitutes.apply(), admit_data()

    def undo_all() -> None:
        for undo in (*others, changes.undo):
            undo()

    return undo_all


def _construct(changes: Changes) -> None:
    init, config_init = Fsdp.__init__, FullStateDictConfig.__init__

    def new(cls: type, module: Any = None, *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("module", module)
        if isinstance(model, nn.Module) and issubclass(cls, Fsdp):
            admit_config(getattr(model, "config", None))
            if _sharded(model) is not None:
                raise InputError(f"FullyShardedDataParallel: {type(model).__name__} is already sharded. Wrap it once.")
            if transformed(model) is not None:
                return object.__new__(ShardedModel)
            inner = next((name for name, child in model.named_modules() if name and transformed(child) is not None), None)
            if inner is not None:
                raise InputError(
                    f"FullyShardedDataParallel around {type(model).__name__}, in which {inner} is transformed: wrap the "
                    "transformed model itself, and put the result into the enclosing module."
                )
        return object.__new__(cls)

    @functools.wraps(init)
    def with_post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        post = kwargs.pop("post_param_init_fn", None)
        first = kwargs.get("param_init_fn")
        if post is not None and first is not None:
            root = args[0] if args else kwargs["module"]

            def both(module: nn.Module) -> None:
                first(module)
                post(root)

            kwargs["param_init_fn"] = both
        args, kwargs = plain.with_ranks(self, args, kwargs)
        init(self, *args, **kwargs)

    @functools.wraps(config_init)
    def with_translation(self: Any, *args: Any, translate_on_save: bool = True, **kwargs: Any) -> None:
        config_init(self, *args, **kwargs)
        self.translate_on_save = translate_on_save

    changes.set(Fsdp, "__new__", staticmethod(new))
    changes.set(Fsdp, "__init__", with_post_init)
    changes.set(FullStateDictConfig, "__init__", with_translation)


def _sharded(model: Any) -> ShardedModel | None:
    models = sharded_in(model)
    return models[0] if models else None


def _state_dict_type(models: list[ShardedModel], kind: Any, model_config: Any = None, optim_config: Any = None) -> Any:
    return typed(models, Settings(kind, model_config, optim_config))


def _set_state_dict_type(models: list[ShardedModel], kind: Any, model_config: Any = None, optim_config: Any = None) -> Settings:
    before = models[0].state_settings
    for model in models:
        model.state_settings = Settings(kind, model_config, optim_config)
    return before


def _one(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one `ShardedModel`, applied to all of them in a module."""

    @functools.wraps(function)
    def call(models: list[ShardedModel], *args: Any, **kwargs: Any) -> Any:
        return function(models[0], *args, **kwargs)

    return call


def _optim_state_dict(model: ShardedModel, optimizer: Any, optim_state_dict: Any = None, group: Any = None) -> dict[str, Any]:
    return optim.optim_state(model, optimizer, model.state_settings)


def _full_optim_state_dict(model: ShardedModel, optimizer: Any, *args: Any, rank0_only: bool = True, **kwargs: Any) -> Any:
    config = type("Config", (), {"rank0_only": rank0_only, "offload_to_cpu": True})
    return optim.optim_state(model, optimizer, Settings(StateDictType.FULL_STATE_DICT, None, config))


def _fsdp_modules(models: list[ShardedModel], root_only: bool = False) -> list[Any]:
    return models


_STATIC: dict[str, Callable[..., Any]] = {
    "state_dict_type": _state_dict_type,
    "set_state_dict_type": _set_state_dict_type,
    "get_state_dict_type": lambda models: models[0].state_settings,
    "optim_state_dict": _one(_optim_state_dict),
    "full_optim_state_dict": _one(_full_optim_state_dict),
    "fsdp_modules": _fsdp_modules,
}
_INSTEAD = {
    "summon_full_params": "FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT) gives whole tensors.",
    "sharded_optim_state_dict": "Use FSDP.optim_state_dict in a state_dict_type context.",
    "shard_full_optim_state_dict": "Use FSDP.optim_state_dict_to_load.",
    "scatter_full_optim_state_dict": "Use FSDP.optim_state_dict_to_load.",
    "flatten_sharded_optim_state_dict": "Use FSDP.optim_state_dict_to_load.",
    "rekey_optim_state_dict": "Use FSDP.optim_state_dict, whose keys are names.",
}


def _static(changes: Changes) -> None:
    for name, ours in _STATIC.items():
        changes.set(Fsdp, name, staticmethod(_either(getattr(Fsdp, name), ours)))
    for name, way in _INSTEAD.items():
        changes.set(Fsdp, name, staticmethod(_either(getattr(Fsdp, name), _refusal(name, way))))
    theirs = Fsdp.optim_state_dict_to_load

    @functools.wraps(theirs)
    def to_load(*args: Any, **kwargs: Any) -> Any:
        """Positional arguments in PyTorch's order, or in that of PyTorch 2.0, where the state comes first."""
        arguments = {**kwargs}
        for value in args:
            kind = "model" if isinstance(value, nn.Module) else "optim" if isinstance(value, torch.optim.Optimizer) else None
            arguments.setdefault(kind or "optim_state_dict", value)
        model = _sharded(arguments.get("model"))
        if model is None:
            return theirs(*args, **kwargs)
        state = optim.optim_state_to_load(model, arguments["optim"], arguments["optim_state_dict"])
        if arguments.get("load_directly"):
            arguments["optim"].load_state_dict(state)
        return state

    changes.set(Fsdp, "optim_state_dict_to_load", staticmethod(to_load))


def _either(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `ours` if a model contains a ShardedModel, in any wrapper, and otherwise PyTorch's."""

    @functools.wraps(theirs)
    def choose(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = "module" if "module" in kwargs else "model"
        root = kwargs.pop(name, model)
        models = sharded_in(root)
        if not models:
            return theirs(root, *args, **kwargs)
        renamed = {"state_dict_type": "kind", "state_dict_config": "model_config", "optim_state_dict_config": "optim_config"}
        renamed |= {"optim": "optimizer"}
        return ours(models, *args, **{renamed.get(key, key): value for key, value in kwargs.items()})

    return choose


def _refusal(name: str, way: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InputError(f"FullyShardedDataParallel.{name} is not supported for a transformed model. {way}")

    return refuse


def _wrappers(changes: Changes) -> None:
    recompute, offload = CheckpointWrapper.forward, OffloadWrapper.forward

    @functools.wraps(recompute)
    def recomputed(self: Any, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        plain = getattr(self.checkpoint_fn, "func", None) is checkpoint  # not a function of the script
        if plain and any(isinstance(layer, ResidualLayer) for layer in block.modules()):
            # PyTorch's wrapper would recompute a second time: same numbers, but outside of the FP8 autocast.
            return checkpoint(block, *args, use_reentrant=False, context_fn=recomputing, **kwargs)
        return recompute(self, *args, **kwargs)

    @functools.wraps(offload)
    def offloaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = _sharded(self)
        if model is not None and model.stack is not None:
            model.offload()
            return self._checkpoint_wrapped_module(*args, **kwargs)
        return offload(self, *args, **kwargs)

    def delegated(name: str) -> Callable[..., Any]:
        theirs = getattr(OffloadWrapper, name)

        @functools.wraps(theirs)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            model = self._checkpoint_wrapped_module
            inside = isinstance(model, ShardedModel) and not args and "destination" not in kwargs
            loads = isinstance(model, ShardedModel) and name == "load_state_dict"
            return getattr(model, name)(*args, **kwargs) if inside or loads else theirs(self, *args, **kwargs)

        return call

    for name in ("state_dict", "load_state_dict"):
        changes.set(OffloadWrapper, name, delegated(name))
    changes.set(CheckpointWrapper, "forward", recomputed)
    changes.set(CheckpointWrapper, "forward_residual", ResidualLayer.forward_residual)
    changes.set(OffloadWrapper, "forward", offloaded)


def _checkpoints(changes: Changes) -> None:
    theirs, destroy = (copy_of(one) for one in (dcp_optimizer.load_sharded_optimizer_state_dict, dist.destroy_process_group))

    @functools.wraps(theirs)
    def load_optimizer(
        model_state_dict: Any, optimizer_key: str, storage_reader: Any, planner: Any = None, process_group: Any = None
    ) -> Any:
        if any(isinstance(value, DTensor | Fp8State) for value in model_state_dict.values()):
            return checkpoints.load_optimizer(model_state_dict, optimizer_key, storage_reader, planner, process_group)
        if (group := plain.group_of(model_state_dict, process_group)) is not None:
            return plain.load_optimizer(optimizer_key, storage_reader, planner, group)
        return theirs(model_state_dict, optimizer_key, storage_reader, planner)

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        maybe_finalize_async_calls(blocking=True)
        destroy(*args, **kwargs)

    init = _DistWrapper.__init__

    @functools.wraps(init)
    def coordinated(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        """Accept the coordinator's global rank too, as older versions of PyTorch do."""
        if use_dist and group is not None and coordinator_rank >= dist.get_world_size(group):
            members = dist.get_process_group_ranks(group)
            coordinator_rank = members.index(coordinator_rank) if coordinator_rank in members else coordinator_rank
        init(self, group, use_dist, coordinator_rank)

    save, load = state_dict_saver._save_state_dict, state_dict_loader._load_state_dict

    @functools.wraps(save)
    def save_shards(
        state_dict: Any,
        storage_writer: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Save a local state's rows as shards: ranks would overwrite each other's rows of the same names."""
        state, group = (
            (state_dict, process_group) if no_dist else checkpoints.to_save(state_dict, process_group, storage_writer)
        )
        coordinator_rank = coordinator_rank if group is process_group else 0  # one rank of all tensor ranks
        return save(state, storage_writer, group, coordinator_rank, no_dist, *args, **kwargs)

    @functools.wraps(load)
    def load_shards(
        state_dict: Any,
        storage_reader: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rows = state_dict if no_dist else checkpoints.of_models(state_dict, process_group)
        load(rows, storage_reader, process_group, coordinator_rank, no_dist, *args, **kwargs)
        if rows is not state_dict:
            checkpoints.read_back(state_dict, rows)

    changes.set(state_dict_saver, "_save_state_dict", save_shards)
    changes.set(state_dict_loader, "_load_state_dict", load_shards)
    changes.set(_DistWrapper, "__init__", coordinated)
    for name, method in folders.patched().items():
        changes.set(FileSystemWriter, name, method)
    for name, reading in (*folders.patched_reader().items(), *tensor_folders.patched_reader().items()):
        changes.set(FileSystemReader, name, reading)
    changes.redirect(dcp_optimizer.load_sharded_optimizer_state_dict, load_optimizer)
    changes.redirect(dist.destroy_process_group, destroy_process_group)
