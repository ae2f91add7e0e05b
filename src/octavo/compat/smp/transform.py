"""`torch.sagemaker.transform`: puts Octavo's blocks into a Hugging Face model, which FullyShardedDataParallel shards later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from octavo.build import BuildOptions, build_model
from octavo.compat.smp.init import given_names
from octavo.compat.smp.moe import moe_of
from octavo.compat.smp.safe_globals import admit_config
from octavo.errors import InputError, unknown
from octavo.fp8.recipe import DelayedScaling
from octavo.models.decoder import Decoder
from octavo.models.original_code import params_dtype_of
from octavo.models.weight_files import Weights
from octavo.models.weight_loader import WeightLoader, model_weights
from octavo.nn.moe import LayerNormMoE
from octavo.nn.norm import FLOATS
from octavo.parallel.coordination import all_ranks
from octavo.parallel.deferred_init import Load
from octavo.parallel.fsdp import check_same_weights
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import state

STRATEGIES = ("p2p", "all_gather")
_MARK = "octavo_smp"


@dataclass
class Transformed:
    """Settings of `transform`, stored on its model until FullyShardedDataParallel shards it.

    Attributes:
        cp_comm_type: exchange of keys and values.
        from_rank0: only rank 0 has the weights.
        layers: classes of decoder layers with experts, which SMP leaves in place.
        weights: rank 0's whole weights, if each rank's model has only parts of them.
    """

    cp_comm_type: str
    from_rank0: bool
    layers: tuple[type[nn.Module], ...] = ()
    weights: Weights | None = None


def whole_weights(model: nn.Module) -> Load | None:
    """Rank 0's whole weights, for a transformed model with tensor parallelism; None for any other."""
    noted = transformed(model)
    return None if noted is None or noted.weights is None else WeightLoader(model, noted.weights)


def transformed(model: nn.Module) -> Transformed | None:
    """The settings of `transform` for a model; None for a model that is not transformed."""
    settings: Transformed | None = vars(model).get(_MARK)
    return settings


class Output(CausalLMOutput):
    """A model's result; without a loss it has the attributes of its logits too, as in `out.sum()`."""

    def __getattr__(self, name: str) -> Any:
        logits = self.get("logits")
        if isinstance(logits, Tensor) and self.get("loss") is None and not name.startswith("__") and hasattr(logits, name):
            return getattr(logits, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def transform(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Put Octavo's blocks into a model, for `FullyShardedDataParallel`, or for direct use on one rank.

    Args:
        model: with weights, which are used; or on the meta device, where it stays until FSDP.
        device: of the result; None: the model's.
        dtype: of parameters; None: unchanged.
        config: a `MoEConfig`, which overrides the model's config; None: expert losses by the model's config.
        load_state_dict_from_rank0: rank 0 has the weights; FSDP with sync_module_states=True gives them to the others.
        cp_comm_type: exchange of keys and values, "p2p" or "all_gather".

    Raises:
        InputError: an unsupported argument, or parameters of several dtypes.
    """
    moe = moe_of(config)
    admit_config(getattr(model, "config", None))
    if cp_comm_type not in STRATEGIES:
        raise unknown("cp_comm_type", str(cp_comm_type), STRATEGIES)
    if not isinstance(model, nn.Module):
        raise InputError(f"transform got {type(model).__name__}: give a torch.nn.Module.")
    if transformed(model) is not None:
        raise InputError("transform: the model is already transformed. Call it once.")
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    params_dtype = dtype or (next(iter(dtypes)) if len(dtypes) == 1 else params_dtype_of(model))
    if params_dtype is None:
        raise InputError(f"transform: the model has parameters of {sorted(map(str, dtypes))}: set dtype=torch.float32.")
    if params_dtype not in FLOATS:
        raise InputError(f"transform: parameters of {params_dtype} are not supported: use {', '.join(map(str, FLOATS))}.")
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if load_state_dict_from_rank0 and on_meta and state.rank == 0:
        raise InputError("load_state_dict_from_rank0: the model of rank 0 is on the meta device. Build it with weights there.")
    home: Any = "meta" if on_meta else device or next(parameter.device for parameter in model.parameters())
    training = model.training
    tensor, weights = state.tp_size > 1, None
    if tensor and load_state_dict_from_rank0 and not on_meta:
        home, weights = "meta", model_weights(model, received=True)
    with given_names():
        seed = state.config.random_seed
        options = BuildOptions(dtype=params_dtype, params_dtype=params_dtype, seed=seed, moe=moe, averaged=True)
        # FSDP shards the model later, and then decides which weight layouts are cached. Whether ranks have the same weights
        # is checked here: afterwards each tensor rank has only its part of a matrix.
        if tensor and not load_state_dict_from_rank0:
            check_same_weights(model, all_ranks())
        how: Any = {"dtype": params_dtype, "params_dtype": params_dtype, "strategy": cp_comm_type}
        sharding = sharding_of(state, DelayedScaling(), **how) if tensor else None
        placed = state.world_size == 1
        new = build_model(model, options, device=home, sharding=sharding, placed=placed).train(training)
    if isinstance(new, Decoder):
        new.generation_config = getattr(model, "generation_config", None)
        new.register_forward_hook(_as_output)
    vars(new)[_MARK] = Transformed(cp_comm_type, load_state_dict_from_rank0, _layers_with_experts(model, new), weights)
    if state.cp_size > 1 or tensor:
        new.register_forward_pre_hook(_refuse_unwrapped)
    return new


def _layers_with_experts(model: nn.Module, new: nn.Module) -> tuple[type[nn.Module], ...]:
    if not any(isinstance(part, LayerNormMoE) for part in new.modules()):
        return ()
    names = getattr(model, "_no_split_modules", None) or ()  # Hugging Face's name for whole layers
    return tuple({type(part) for part in model.modules() if type(part).__name__ in names})


def _as_output(model: nn.Module, inputs: Any, output: Any) -> Any:
    return Output(**output) if type(output) is CausalLMOutput else output


def _refuse_unwrapped(model: nn.Module, inputs: Any) -> None:
    if state.cp_size > 1 and getattr(model, "context", None) is None:
        raise InputError(
            f"context_parallel_degree = {state.cp_size}: wrap the transformed model in FullyShardedDataParallel before its "
            "first forward; it sets up the ranks that share a sequence."
        )
    if state.tp_size > 1 and getattr(model, "token_group", None) is None:
        raise InputError(
            f"tensor_parallel_degree = {state.tp_size}: wrap the transformed model in FullyShardedDataParallel before its "
            "first forward, which shards each rank's parts of the matrices."
        )
