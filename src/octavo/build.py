"""The whole order of a transformation on one screen: what is replaced, skipped, wrapped, sharded, placed and filled.

1. replace      a known family becomes Octavo's decoder; in any other module eligible `nn.Linear`s are replaced in place
2. choose       layers that a pattern names run by another recipe, or stay out of FP8
3. recompute    blocks keep their input only, or all but one product; offload: what they keep waits in host memory
4. compile      block by block
5. shard        over the ranks, block by block; FP8 weights travel as FP8
6. materialise  storage for what this rank holds
7. fill         from the model itself, from a folder of weights, from rank 0, or by initialisation
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from octavo.errors import InputError, unknown
from octavo.fp8.recipe import DelayedScaling, Recipe, coerce
from octavo.kernels.cross_entropy import Objective
from octavo.models.decoder import Decoder
from octavo.models.description import describe
from octavo.models.families import FAMILIES
from octavo.models.replace import choose_recipes, replace_linears
from octavo.models.weight_loader import Loader
from octavo.models.weights import HeldWeights, WeightFiles, Weights, family_of, hugging_face_names
from octavo.nn.mlp import LayerNormMLP
from octavo.parallel.deferred_init import CounterInit, FromRank0, Loaded, Values, delayed_init, materialise
from octavo.parallel.fsdp import Sharding, blocks_of, gather_weights_in_fp8, shard
from octavo.parallel.mesh import Degrees
from octavo.parallel.module_init import OwnInit
from octavo.parallel.offload import offloaded
from octavo.parallel.recompute import recomputed
from octavo.parallel.world import State, state

_OLD_SWITCH = "gradient_checkpointing_enable"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

__all__ = ["build_model", "describe", "transform"]


def transform(
    model: nn.Module,
    recipe: Any = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    config: Any = None,
    skip: Sequence[str] = (),
    layers: Mapping[str, Any] | None = None,
    load_from: str | Path | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "all_gather",
    params_dtype: torch.dtype | None = None,
    fp8_head: bool | Literal["backward"] = False,
) -> nn.Module:
    """Make a model's linear layers run in FP8 under `octavo.fp8_autocast`, and shard it over the ranks of `octavo.init`.

    A Hugging Face model of a known family becomes Octavo's decoder with the same weights. Any other module keeps its code and
    has its eligible `nn.Linear`s replaced in place. Both are called as before. Gradients of a sharded decoder are summed over
    the ranks, and its loss is the mean over the global batch; those of any other module are averaged.

    Args:
        model: with weights; or on the meta device (`octavo.delayed_init`), to be filled from `load_from`, from rank 0, or else
            with initial values by octavo.init's `random_seed`, the same on any number of ranks.
        recipe: what `fp8_autocast` will be given. It takes effect there; here it says how sharded weights travel.
        dtype: of activations and of products outside FP8.
        device: where the result lives; where the model is when absent (with several ranks: this rank's device).
        config: the Hugging Face config, when `model.config` is not it.
        skip: patterns of module names (`fnmatch`, by Octavo's or Hugging Face's names) that stay out of FP8.
        layers: such a pattern → the recipe by which these layers run in place of `fp8_autocast`'s, or None to stay out of FP8.
            The last pattern that names a layer holds, and `skip` above all. `fp8_autocast` joins amaxes for all of them.
        load_from: a Hugging Face model folder whose weights are taken, by each rank its own rows.
        load_state_dict_from_rank0: take the weights of rank 0's model; those of the others may be on the meta device.
        cp_comm_type: how context parallelism communicates; one rank alone has nobody to talk to.
        params_dtype: of parameters; `dtype` when absent. float32 under a bf16 `dtype` is master weights.
        fp8_head: the head's products for a loss are FP8 too; "backward": those of its gradients (Octavo's decoder alone).

    Raises:
        InputError: a pattern that matches nothing, an unknown recipe or strategy, a folder without the weights, a parameter or
            buffer that would have no value.
    """
    recipe = DelayedScaling() if recipe is None else coerce(recipe)
    chosen = {pattern: None if own is None else coerce(own) for pattern, own in (layers or {}).items()}
    if cp_comm_type not in ("all_gather", "p2p", "a2a"):
        raise unknown("cp_comm_type", cp_comm_type, ("all_gather", "p2p", "a2a"))
    params_dtype = params_dtype or dtype
    sharding = sharding_of(state, recipe, dtype=dtype, params_dtype=params_dtype)
    device = torch.device(device) if device is not None else _device_of(model)
    config = config if config is not None else getattr(model, "config", None)
    known = hasattr(config, "model_type") and type(model).__name__.endswith("ForCausalLM")
    family = family_of(config)[0] if known else None
    weights: Weights | None = WeightFiles(load_from) if load_from is not None else None
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    from_rank0 = load_state_dict_from_rank0 and sharding is not None
    if weights is None and not on_meta and (family is not None or from_rank0):
        weights = HeldWeights(dict(model.state_dict()))
    training, original = model.training, model
    buffer_dtype = DTYPES[state.config.buffer_dtype]
    if family is not None:
        make: dict[str, Any] = {"dtype": dtype, "params_dtype": params_dtype, "buffer_dtype": buffer_dtype}
        model = Decoder(config, family, device="meta", fp8_head=fp8_head, **make)
        _keep_frozen(model, original)
        choose_recipes(model, layers=chosen, skip=skip)
        if state.config.sm_activation_offloading:
            model.run_block = offloaded(model.run_block)
    else:
        _only_the_decoder(type(model).__name__, fp8_head=fp8_head)
        model = replace_linears(model)
        choose_recipes(model, layers=chosen, skip=skip)
        _cast(model, params_dtype, buffer_dtype)
        model = _compute_in(model, dtype, device)
    loader = None if weights is None else Loader(model, weights)
    values: Values
    if from_rank0:
        values = FromRank0(loader if state.rank == 0 else None)
    elif loader is not None:
        values = Loaded(loader)
    else:
        values = _initial(model, state.config.random_seed)
    return _place(model, device, values, sharding, summed=family is not None).train(training)


def build_model(
    config: Any,
    *,
    dtype: torch.dtype,
    params_dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    skip: Sequence[str] = (),
    load_from: str | Path | None = None,
    recompute: bool | Literal["mlp"] = False,
    offload: bool = False,
    compile: bool = False,
    sharding: Sharding | None = None,
    buffer_dtype: torch.dtype = torch.float32,
    layers: Mapping[str, Recipe | None] | None = None,
    excluded: Mapping[str, str] | None = None,
    fp8_head: bool | Literal["backward"] = False,
    objective: Objective | None = None,
) -> nn.Module:
    """A causal language model for training from its Hugging Face config, with random weights by `seed` or those of `load_from`.

    recompute: keep only each block's input for backward, or with "mlp" all but the first product of each MLP. offload: keep
    what is saved for backward in host memory. compile: `torch.compile` each block. excluded: names of layers that stay out of
    FP8, each with its reason. objective: what is minimised in training (Octavo's decoder alone). sharding: over several ranks;
    gradients are then summed. With `device="meta"` nothing is filled, for counting parameters. The other arguments are as in
    `transform`.
    """
    if recompute not in (False, True, "mlp"):
        raise InputError(f'recompute = {recompute!r} is not supported: use False, True, or "mlp".')
    device = torch.device(device)
    family, _ = family_of(config)
    model: nn.Module
    if family is None:
        # A cache serves generation. In training it costs memory, and with one Hugging Face does not see where documents begin.
        config = copy.deepcopy(config)
        config.use_cache = False
        with delayed_init():
            model = replace_linears(AutoModelForCausalLM.from_config(config, dtype=params_dtype, trust_remote_code=False))
        choose_recipes(model, layers=layers, skip=skip, excluded=excluded)
        _only_the_decoder(config.model_type, fp8_head=fp8_head, objective=objective)
        if offload:
            raise InputError(
                f"train.offload = true: {config.model_type} keeps its own code, and only the blocks of Octavo's decoder are"
                f" offloaded ({', '.join(FAMILIES)}). Use train.recompute = true instead."
            )
        if recompute == "mlp":
            raise InputError(
                f'train.recompute = "mlp": {config.model_type} keeps its own code, and only the MLPs of Octavo\'s decoder make'
                f" their first product again ({', '.join(FAMILIES)}). Use train.recompute = true instead."
            )
        if recompute:
            # transformers 5.2x gave the same switch a new name and warns of the old one
            name = "activation_checkpointing_enable" if hasattr(model, "activation_checkpointing_enable") else _OLD_SWITCH
            getattr(model, name)({"use_reentrant": False})
        _cast(model, params_dtype, buffer_dtype)
        model = _compute_in(model, dtype, device)
    else:
        make: dict[str, Any] = {"dtype": dtype, "params_dtype": params_dtype, "buffer_dtype": buffer_dtype}
        model = Decoder(config, family, device="meta", fp8_head=fp8_head, **make)
        choose_recipes(model, layers=layers, skip=skip, excluded=excluded)
        model.objective = objective
        if recompute == "mlp":
            for module in model.modules():
                if isinstance(module, LayerNormMLP):
                    module.checkpoint = True
        elif recompute:
            model.run_block = recomputed
        if offload:
            model.run_block = offloaded(model.run_block)
        for part in (*model.layers, model.norm) if compile else ():
            if sharding is None:
                part.compile()
            else:  # inside of the hooks that gather and free its parameters, which no graph can hold
                part.forward = torch.compile(part.forward)
    if device.type == "meta":
        return model.train()
    values = _initial(model, seed) if load_from is None else Loaded(Loader(model, WeightFiles(load_from)))
    return _place(model, device, values, sharding, summed=True).train()


def sharding_of(ranks: State, recipe: Recipe | None, *, dtype: torch.dtype, params_dtype: torch.dtype) -> Sharding | None:
    """How a model is spread over the ranks of `octavo.init`; None for one rank."""
    if ranks.shard_mesh is None or ranks.world_size == 1:
        return None
    check_supported(ranks.degrees)
    asked = ranks.config.param_dtype
    param_dtype = dtype if asked is None else DTYPES[asked]
    return Sharding(
        mesh=ranks.shard_mesh,
        data_group=ranks.dp_process_group,
        recipe=recipe,
        param_dtype=None if param_dtype == params_dtype else param_dtype,
        reduce_dtype=DTYPES[ranks.config.reduce_dtype],
        reshard_after_forward=ranks.config.reshard_after_forward,
    )


def check_supported(degrees: Degrees) -> None:
    """Refuse degrees that fit the ranks and that this version does not run.

    Raises:
        InputError: a degree of tensor, context or expert parallelism beyond 1.
    """
    for name in ("tensor", "context", "expert"):
        if (degree := getattr(degrees, name)) > 1:
            raise InputError(
                f"parallel.{name}_parallel_degree = {degree}: this version shards over data-parallel ranks only. "
                f"Set parallel.{name}_parallel_degree = 1."
            )


def _place(model: nn.Module, device: torch.device, values: Values, sharding: Sharding | None, *, summed: bool) -> nn.Module:
    """Shard a model and give it storage and values."""
    if sharding is None:
        return materialise(model, device, values)
    blocks = list(model.layers) if isinstance(model, Decoder) else blocks_of(model)
    shard(model, blocks, sharding, summed=summed)
    if isinstance(model, Decoder):
        model.data_group = sharding.data_group
    materialise(model, device, values)
    gather_weights_in_fp8(model, blocks, sharding)
    return model


def _initial(model: nn.Module, seed: int) -> Values:
    """Values for a model that has none: Octavo's decoder has an initialisation of its own, others have their modules'."""
    return CounterInit(seed, model.config.initializer_range) if isinstance(model, Decoder) else OwnInit(seed)


def _only_the_decoder(what: str, *, fp8_head: bool | Literal["backward"], objective: Objective | None = None) -> None:
    """Refuse what Octavo's own head does, of a model that keeps its own.

    Raises:
        InputError: naming the key to change.
    """
    objective = objective or Objective()
    asked = {
        f"fp8.head = {json.dumps(fp8_head)}": fp8_head,
        f"train.label_smoothing = {objective.label_smoothing:g}": objective.label_smoothing,
        f"train.z_loss = {objective.z_loss:g}": objective.z_loss,
    }
    if said := [setting for setting, is_asked in asked.items() if is_asked]:
        defaults = ", ".join(f"{setting.partition(' =')[0]} = {'false' if 'head' in setting else '0.0'}" for setting in said)
        raise InputError(
            f"{', '.join(said)}: {what} keeps its own code with its own head and loss, and only those of Octavo's decoder can"
            f" do that ({', '.join(FAMILIES)}). Set {defaults}."
        )


def _keep_frozen(model: Decoder, original: nn.Module) -> None:
    """What was frozen in the model that the decoder replaces is frozen in it.

    Raises:
        InputError: of matrices that become one parameter some are frozen and some are not.
    """
    trains = {name: parameter.requires_grad for name, parameter in original.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        parts = {part: trains.get(part, True) for part in hugging_face_names(name, model.family)}
        if len(set(parts.values())) > 1:
            frozen = [part for part, trained in parts.items() if not trained]
            raise InputError(
                f"{', '.join(frozen)} is frozen, but in Octavo's decoder {', '.join(parts)} are one parameter ({name}): "
                "set requires_grad of all of them to the same."
            )
        parameter.requires_grad_(all(parts.values()))


def _cast(model: nn.Module, params_dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
    """Parameters into one dtype; buffers only into a lower one: a rotary table or a running mean keeps its precision."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(params_dtype)
        for buffer in model.buffers() if buffer_dtype != torch.float32 else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(buffer_dtype)


def _compute_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Let a model that keeps its own code compute in `dtype` with parameters of another, by PyTorch's autocast.

    The class changes and not the instance, so that a deep copy computes with its own weights.
    """
    params_dtype = next((p.dtype for p in model.parameters()), dtype)
    if params_dtype == dtype or device.type == "meta":
        return model
    if dtype == torch.float32:
        raise InputError(
            f"{type(model).__name__} keeps its own code, which computes in the dtype of its parameters or below: with"
            f" params_dtype {params_dtype}, dtype float32 is not possible. Use params_dtype float32."
        )
    base = type(model)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return base.forward(self, *args, **kwargs)

    model.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    return model


def _device_of(model: nn.Module) -> torch.device:
    if state.world_size > 1:
        return state.device
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
