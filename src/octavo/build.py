"""Builds a model, in one order for `octavo.transform` and for runs, so that each parallelism is written once.

1. replace      a known family becomes Octavo's decoder, timm's vision transformer gets Octavo's blocks, and any other module
                Octavo's linears in place of its eligible `nn.Linear` layers
2. choose       another recipe, or none, for layers by pattern; frozen parameters; adapters
3. recompute    activation checkpointing per block: all, all but attention, or the MLP's first product; offload to host memory
4. shard        over the ranks, block by block
5. materialise  storage for this rank's shards
6. load         from the model itself, from a folder of weights, from rank 0, or by initialisation
7. gather       all-gather weights in FP8, and large matrices in place; on one rank, cache columnwise FP8 weights for backward
                if they fit

`octavo.transform` and runs both call `build_model`. Only `transform` reads the global `octavo.state`; everything below takes
arguments.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import __version__ as transformers_version

from octavo import versions
from octavo.collectives.context import STRATEGIES
from octavo.collectives.tensor import TensorGroup
from octavo.config.lora import LoRA
from octavo.config.moe import MoeConfig
from octavo.config.parallel import HORIZON
from octavo.config.peft_settings import peft_settings
from octavo.config.recompute import Recompute, check_blocks, check_values
from octavo.dtypes import torch_dtype
from octavo.errors import InputError, unknown, warn
from octavo.fp8.columnwise import cache_columnwise
from octavo.fp8.recipe import DelayedScaling, Recipe, coerce
from octavo.fp8.scaling import states_of, use_separate_buffers
from octavo.kernels.cross_entropy import Objective
from octavo.matrix_parts import watch
from octavo.models.decoder import Decoder
from octavo.models.description import describe
from octavo.models.exact import difference, tie_again
from octavo.models.families import decoder_spec, with_moe
from octavo.models.fingerprint import noting
from octavo.models.fp8_folders import DEQUANTISE
from octavo.models.huggingface import pose_as_pretrained
from octavo.models.lora import adapt, adapted, settle
from octavo.models.original_code import (
    cast,
    compute_in,
    params_dtype_of,
    recompute_own_code,
    refuse_block_settings,
    refuse_float32_parameters,
    refuse_head_settings,
)
from octavo.models.peft_folder import check_folder, other_base, reader
from octavo.models.published import keep_float32_buffers
from octavo.models.replace import (
    attention_dropout,
    attributes_of,
    carry_attributes,
    choose_recipes,
    freeze,
    has_experts,
    keep_frozen,
    recompute_mlps,
    refuse_blocks,
    refuse_hooks,
    replace_linears,
    restore_attributes,
)
from octavo.models.spec import ModelSpec
from octavo.models.tensor_parallel import check_tensor, group_of, part_of_rank, refuse_own_calls
from octavo.models.tensor_parallel import original_code_message as no_tensor_message
from octavo.models.vision import Blocks, is_vision_transformer, original_code_reason, replace_blocks
from octavo.models.weight_files import Weights
from octavo.models.weight_loader import WeightLoader, folder_weights, model_weights
from octavo.nn.norm import FLOATS, FLOATS_OF_PYTORCH
from octavo.parallel.calls import begin, together
from octavo.parallel.context import check_context, original_code_message
from octavo.parallel.coordination import Ranks, all_ranks
from octavo.parallel.deferred_init import BesideAdapters, CounterInit, FromRank0, Loaded, Values, delayed_init, materialise
from octavo.parallel.fsdp import blocks_of, check_same_weights, extend_gathers, refuse_wrappers, shard
from octavo.parallel.gathered import memory_of_gpu, settle_gathering
from octavo.parallel.joined_amaxes import join_weights
from octavo.parallel.module_init import OwnInit
from octavo.parallel.offload import offloaded
from octavo.parallel.recompute import recomputed, selectively_recomputed
from octavo.parallel.replicated import sum_together
from octavo.parallel.saving import save_whole
from octavo.parallel.sharding import Sharding, check_experts, sharding_of
from octavo.parallel.shards import local_shard, named_tensors
from octavo.parallel.stored_base import store_in_fp8, values_in_fp8
from octavo.parallel.torch_clipping import refuse_torch_clipping
from octavo.parallel.torch_states import check_torch_states
from octavo.parallel.world import rank_variable, state
from octavo.process import process
from octavo.storage import local_path

__all__ = ["BuildOptions", "build_model", "describe", "parts_of", "place", "transform"]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build, for `transform`, a run and SMP's scripts.

    Attributes:
        dtype: dtype of activations and of products outside FP8.
        params_dtype: dtype of parameters; None for a model with its original code, whose parameters keep their dtypes.
        buffer_dtype: dtype of buffers.
        seed: seed of initial weights.
        blocks: "own" runs a model's original code, "auto" uses Octavo's blocks where they exist for it.
        skip: patterns of layers that are excluded from FP8. excluded: names of further ones, each with its reason.
        layers: pattern → a separate recipe, or None to exclude from FP8.
        fp8_head: as in `transform`. objective: label smoothing and z-loss of the training loss (only Octavo's decoder).
        recompute, mlp_chunks: as in `octavo.config.recompute`.
        offload: store saved activations in host memory. horizon: blocks that are loaded ahead in backward.
        moe: losses, noise and balancing of routers.
        frozen: patterns of parameters that are not trained.
        averaged: average the gradients of a model with its original code over ranks, for mean losses; False sums them.
        resize: the config may have more tokens than the weights of `load_from`.
        lora: adapters; only they, and the modules in `save_whole`, are trained.
        base_recipe: recipe of the products with frozen weights stored in FP8; None without products in FP8.
    """

    dtype: torch.dtype
    params_dtype: torch.dtype | None
    buffer_dtype: torch.dtype = torch.float32
    seed: int = 0
    blocks: Literal["auto", "own"] = "auto"
    skip: Sequence[str] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, Recipe | None] = field(default_factory=dict)
    fp8_head: bool | Literal["backward"] | None = None
    objective: Objective | None = None
    recompute: Recompute = False
    mlp_chunks: int = 1
    offload: bool = False
    horizon: int = HORIZON
    moe: MoeConfig | None = None
    frozen: Sequence[str] = ()
    averaged: bool = False
    resize: bool = False
    lora: LoRA | None = None
    base_recipe: Recipe | None = None

    def check(self) -> None:
        """Raise an InputError for values that no model supports, and for libraries that lack a name used in training."""
        if sentence := versions.lacking():
            raise InputError(f"{sentence}.")
        if self.blocks not in ("auto", "own"):
            raise unknown("blocks", str(self.blocks), ("auto", "own"), key="model.blocks")
        check_values(self.recompute, self.mlp_chunks)
        if not isinstance(self.offload, bool):
            raise InputError(f"offload = {self.offload!r} is not supported: use False or True.")
        if self.lora is None:
            return
        if self.frozen:
            raise InputError("train.freeze with lora.rank: adapters freeze all other weights. Remove one of the two.")
        if self.recompute == "mlp" or self.mlp_chunks > 1:
            key = 'recompute = "mlp"' if self.recompute == "mlp" else f"mlp_chunks = {self.mlp_chunks}"
            raise InputError(
                f"train.{key} with lora.rank: adapters are computed between the parts of an MLP. Set train.recompute = true or "
                '"selective", and train.mlp_chunks = 1.'
            )


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
    cp_comm_type: str | None = None,
    params_dtype: torch.dtype | None = None,
    fp8_head: bool | Literal["backward"] | None = None,
    recompute: Recompute = False,
    mlp_chunks: int = 1,
    offload: bool = False,
    blocks: Literal["auto", "own"] = "auto",
    moe: MoeConfig | Mapping[str, Any] | None = None,
    lora: LoRA | None = None,
) -> nn.Module:
    """Make a model's linear layers run in FP8 under `octavo.fp8_autocast`, and shard it over the ranks of `octavo.init`.

    A Hugging Face model of a known family becomes Octavo's decoder with the same weights, and timm's `VisionTransformer` gets
    Octavo's blocks. Any other module runs its original code, with its eligible `nn.Linear` layers replaced in place. All are
    called as before. On several ranks, gradients of a decoder are summed, for the mean loss of the global batch, and those of
    other models averaged. Query, key and value become one parameter, and so do gate and up: optimizers that treat a parameter
    as one matrix, such as Muon, need `octavo.matrices`, and are refused without it at their first step.

    Args:
        model: with weights; or on the meta device (`octavo.delayed_init`), to be filled from `load_from`, from rank 0, or else
            with initial values from octavo.init's `random_seed`, the same on any number of ranks.
        recipe: the recipe of the later `fp8_autocast`. Here it only decides the dtype in which sharded weights are gathered.
        dtype: dtype of activations and of products outside FP8. torch.float64, on a CPU, is for comparisons of layouts: then
            sums do not depend on their order, and casts to FP8 are the same in every layout.
        device: device of the result; None: the model's (on several ranks: this rank's).
        config: the Hugging Face config, if it is not `model.config`.
        skip: patterns of module names (`fnmatch`, Octavo's or Hugging Face's names) that are excluded from FP8.
        layers: pattern → the layers' recipe instead of `fp8_autocast`'s, or None to exclude them from FP8. Later patterns win;
            `skip` overrides all.
        load_from: a Hugging Face model folder with weights, from which each rank reads its rows.
        load_state_dict_from_rank0: use the weights of rank 0's model; other ranks' may be on the meta device.
        cp_comm_type: as in `octavo.init`, or "own": the model's original code splits its sequences, through
            `octavo.context_parallel`.
        params_dtype: dtype of parameters; None: unchanged. float32 with a bf16 `dtype` gives master weights.
        fp8_head: run the head's products for a loss in FP8 too; "backward": only those of its gradients; False: none. None:
            "backward" for Octavo's decoder, but False for a Transformer Engine `recipe` and for other models.
        recompute: save only each block's input for backward; "selective": also attention's result; "mlp": everything except
            the MLP's first product.
        mlp_chunks: chunks of tokens that each MLP computes one after the other, with the temporaries of one.
        offload: store activations saved for backward in host memory, as `sm_activation_offloading` of `octavo.init` does.
        blocks: "own" runs the original code of a model that would get Octavo's blocks, with its names in checkpoints.
        moe: losses and noise of the experts' routers, by the keys of a run file's [moe]; absent ones as in the config.
        lora: `octavo.LoRA`: adapters on the matrices of Octavo's decoder; all other weights are frozen. Leave it out for a
            PEFT model, which already has adapters.
            model of PEFT's, which has adapters.

    Raises:
        InputError: a pattern that matches nothing, an unknown recipe or strategy, a folder without the weights, a tensor
            without a source for its values, weights that differ between ranks, parameters of several dtypes where one is
            needed.
    """
    recipe, training = DelayedScaling() if recipe is None else coerce(recipe), getattr(model, "training", True)
    fp8_head = False if fp8_head is None and not recipe.native else fp8_head
    _check_arguments(model, dtype, params_dtype, skip, layers, cp_comm_type, moe)
    load_from = None if load_from is None else local_path(load_from, "octavo.transform: load_from")
    exact = torch.float64 in (dtype, params_dtype)
    params_dtype = params_dtype or (dtype if exact else params_dtype_of(model))
    sharding = sharding_of(state, recipe, dtype=dtype, params_dtype=params_dtype, strategy=cp_comm_type)
    begin()  # so that the other ranks can report where they are if only one calls octavo.save
    if sharding is not None and load_from is None:  # with a folder a rank may build a model alone
        with together("octavo.transform"):
            if not load_state_dict_from_rank0:
                check_same_weights(model, all_ranks())
    options = BuildOptions(
        dtype=dtype,
        params_dtype=params_dtype,
        buffer_dtype=torch_dtype(state.config.buffer_dtype),
        seed=state.config.random_seed,
        blocks=blocks,
        skip=skip,
        layers={pattern: None if each is None else coerce(each) for pattern, each in (layers or {}).items()},
        fp8_head=fp8_head,
        recompute=recompute,
        mlp_chunks=mlp_chunks,
        offload=state.config.sm_activation_offloading if offload is False else offload,
        horizon=state.config.activation_loading_horizon,
        moe=moe if isinstance(moe, MoeConfig) else MoeConfig.from_dict(moe or {}, where="octavo.transform(moe=…)"),
        averaged=True,
        lora=lora,
        base_recipe=recipe,
    )
    if lora is not None and load_state_dict_from_rank0:
        raise InputError("load_state_dict_from_rank0 with lora: give load_from, a folder of which each rank reads its part.")
    device = torch.device(_device_of(model) if device is None else device)
    if exact and not (dtype == params_dtype and device.type in ("cpu", "meta")):
        raise InputError(
            f"dtype = {dtype}, params_dtype = {params_dtype} on {device.type}: set torch.float64 for both, on a CPU. "
            "Set dtype = torch.bfloat16 and params_dtype = torch.float32."
        )
    transformed = build_model(
        model,
        options,
        config=config,
        device=device,
        sharding=sharding,
        load_from=load_from,
        from_rank0=all_ranks() if load_state_dict_from_rank0 and sharding is not None else None,
    )
    return _handed_over(transformed, model, training=training)


def _handed_over(transformed: nn.Module, model: nn.Module, *, training: bool) -> nn.Module:
    if isinstance(transformed, Decoder):
        transformed.generation_config = getattr(model, "generation_config", None)
        transformed.output_hidden_states = bool(getattr(transformed.config, "output_hidden_states", False))
        pose_as_pretrained(transformed)
    if next(states_of(transformed), None) is None:
        warnings.warn(f"octavo.transform: {type(model).__name__} has no linear layer that can run in FP8.", stacklevel=3)
    watch(transformed)
    if not state.initialised:
        process.models_of_one_rank.add(transformed)
    return transformed.train(training)


def build_model(
    source: Any,
    options: BuildOptions,
    *,
    device: torch.device | str,
    config: Any = None,
    sharding: Sharding | None = None,
    load_from: str | Path | None = None,
    from_rank0: Ranks | None = None,
    placed: bool = True,
) -> nn.Module:
    """Build a model, in the order at the top of this file, for `transform` and for a run.

    Args:
        source: a model, with weights or on the meta device; or a Hugging Face config, for a causal language model with random
            weights by the options' seed or those of `load_from`.
        options: the build options.
        device: "meta" allocates nothing, for counting parameters.
        config, load_from: as in `transform`.
        sharding: the ranks; None does not shard the model.
        from_rank0: all ranks; rank 0 has the weights.
        placed: False to stop before sharding, for a caller that shards the model by `place`.
    """
    options.check()
    device = torch.device(device)
    original = source if isinstance(source, nn.Module) else None
    if original is not None:
        tie_again(original)
    config = source if original is None else config or getattr(original, "config", None)
    load_from = None if device.type == "meta" else load_from
    spec, vision, reason = _replacement(original, config, options.blocks, can_fill=bool(load_from or from_rank0))
    spec = with_moe(spec, config, options.moe)
    if original is not None:
        refuse_blocks(original)
    dtype, params_dtype = options.dtype, options.params_dtype
    if params_dtype is None and (spec is not None or vision or sharding is not None):
        raise InputError(f"{type(original).__name__} has parameters of several dtypes: set params_dtype=torch.float32.")
    weights = _weights(original, config, load_from, from_rank0, replaced=vision or spec is not None, resize=options.resize)
    trains = {} if original is None else {n: p.requires_grad for n, p in original.named_parameters(remove_duplicate=False)}
    attributes = {} if original is None else attributes_of(original)
    if original is not None:
        _refuse_hooks(original, all_new=spec is not None or sharding is not None, vision=vision)

    # 1. Replace.
    model: nn.Module
    if spec is not None:
        dtypes: dict[str, Any] = {"dtype": dtype, "params_dtype": params_dtype, "buffer_dtype": options.buffer_dtype}
        tensor = _tensor_group(spec, sharding)
        spread = sharding is not None and sharding.expert_mesh is not None
        loss: dict[str, Any] = {"fp8_head": options.fp8_head, "objective": options.objective}
        model = Decoder(config, spec, **dtypes, device="meta", **loss, tensor=tensor, spread=spread)
        keep_frozen(model, trains)
        carry_attributes(model, attributes)
    else:
        model = _from_config(config, params_dtype or dtype) if original is None else original
        if sharding is not None and sharding.tensor_group is not None:
            raise InputError(no_tensor_message(type(model).__name__, sharding.tensor_group.size()))
        refuse_head_settings(model, options.fp8_head, options.objective)
        if vision:
            replace_blocks(model, params_dtype or dtype)
            keep_frozen(model, trains)
            carry_attributes(model, attributes)
        else:
            _keep_own_code(model, reason, options)
        cast(model, params_dtype, options.buffer_dtype)
        if sharding is not None and params_dtype is not None:
            refuse_float32_parameters(model, params_dtype)
        compute_in(model, dtype, device)
    # 2. Choose.
    choose_recipes(model, layers=options.layers, skip=options.skip, excluded=options.excluded)
    use_separate_buffers(model)
    freeze(model, options.frozen)
    _adapt(model, options.lora)
    if options.lora is not None and options.lora.base == "fp8":
        _store_base(model, options, device)
    # 3. Recompute, offload.
    _recompute(model, parts_of(model)[0], options)
    if device.type == "meta":
        return model.train()
    if not placed:
        materialise(model, device, _values(model, weights, from_rank0, options))
        _begin_adapters(model)
        return model.train()
    return place(model, device, sharding, lambda: _values(model, weights, from_rank0, options), averaged=options.averaged)


def place(
    model: nn.Module,
    device: torch.device,
    sharding: Sharding | None,
    values: Callable[[], Values],
    *,
    averaged: bool,
    of_one_rank: bool = False,
) -> nn.Module:
    """The steps from sharding on, for a model after the earlier steps; `values` is called once the model is sharded.

    of_one_rank: FSDP2 would also wrap tensor-parallel ranks without shards. Its hooks and copies, useless there, take as long
    to launch as the products.
    """
    shards = sharding is not None and (sharding.shards or of_one_rank)
    _, parts = parts_of(model)
    attributes = attributes_of(model)
    # 4. Shard.
    if sharding is not None:
        refuse_hooks(model)
        _share_sequences(model, sharding)
    if sharding is not None and shards:
        sharding = settle_gathering(model, parts, sharding)
        _shard(model, parts, sharding, averaged=averaged)
    # 5. and 6. Materialise, load.
    materialise(model, device, values())
    restore_attributes(model, attributes)
    _begin_adapters(model)
    if isinstance(model, Decoder) and model.tensor is not None:
        refuse_torch_clipping(model)
        check_torch_states()
        refuse_own_calls(model)
        if not shards:
            refuse_wrappers(model)
    # 7. Extend the all-gathers, or cache.
    if sharding is not None:
        save_whole(model)
    if isinstance(model, Decoder) and model.tensor is not None:
        join_weights(model)
        sum_together(model, model.tensor, parts if shards else [model])
    if sharding is not None and shards:
        extend_gathers(model, parts, sharding)
    else:
        cache_columnwise(parts or [model], memory_of_gpu(device))
    return model.train()


def _adapt(model: nn.Module, options: LoRA | None) -> None:
    if options is None:
        return
    if not isinstance(model, Decoder):
        raise InputError(
            f"lora: {type(model).__name__} runs its original code, and Octavo's adapters are those of its decoder. Add PEFT's "
            "before: octavo.transform(peft.get_peft_model(model, config))."
        )
    adapt(model, options)
    if options.load is not None:
        check_folder(model, options)


def _store_base(model: nn.Module, options: BuildOptions, device: torch.device) -> None:
    """Store frozen weights in FP8; a model that stays on meta, whose products are unknown, is unchanged."""
    if options.base_recipe is not None:
        store_in_fp8(model, options.base_recipe)
    elif device.type != "meta":
        raise InputError(
            'lora.base = "fp8", but no product runs in FP8. Set fp8.enabled = true, or lora.base = "params_dtype".'
        )


@torch.no_grad()
def _begin_adapters(model: nn.Module) -> None:
    """Load adapters from the folder that the options name, and record the fingerprint of the frozen weights."""
    if not isinstance(model, Decoder) or (adapters := adapted(model)) is None:
        return
    if adapters.options.load is not None:
        if (said := other_base(model, adapters.options.load)) and rank_variable("RANK", 0) == 0:
            warn(said)
        theirs, ours = peft_settings(adapters.options.load).dropout, adapters.options.dropout
        if theirs != ours and rank_variable("RANK", 0) == 0:
            warn(f"lora.load: the folder's adapters were trained with lora.dropout = {theirs:g}, here it is {ours:g}.")
        read, named = reader(model, adapters.options.load), dict(named_tensors(model))
        for name, fill in read.items():
            local_shard(named[name]).load(fill)
    settle(model)


def _shard(model: nn.Module, parts: Sequence[nn.Module], sharding: Sharding, *, averaged: bool) -> None:
    if sharding.expert_mesh is not None:
        spec, name = (model.spec, model.spec.family) if isinstance(model, Decoder) else (None, type(model).__name__)
        experts = spec.experts if spec is not None and spec.mixtures else 0
        tensor = 1 if sharding.tensor_group is None else sharding.tensor_group.size()
        check_experts(experts, sharding.expert_mesh.size(-1), sharding.mesh.size(-1), name, tensor)
    if isinstance(model, Decoder):
        shard(model, parts, sharding, summed=True, ends=model.ends())
    else:
        shard(model, parts, sharding, summed=not averaged)


def _tensor_group(spec: ModelSpec, sharding: Sharding | None) -> TensorGroup | None:
    """The ranks that share each matrix of a decoder."""
    if sharding is None or sharding.tensor_group is None:
        return None
    check_tensor(spec, sharding.tensor_group.size(), spread=sharding.expert_mesh is not None)
    return group_of(spec, sharding.tensor_group)


def _refuse_hooks(model: nn.Module, *, all_new: bool, vision: bool) -> None:
    """Refuse hooks of parameters that will be replaced: all, those of a vision transformer's blocks, or those on meta."""
    refuse_hooks(model, meta=not all_new)
    if vision:
        refuse_hooks(model, "blocks.")


def _share_sequences(model: nn.Module, sharding: Sharding) -> None:
    """Set the ranks with other samples, and those that share sequences, in a model."""
    context = sharding.context
    if isinstance(model, Decoder):
        model.data_group, model.token_group = sharding.data_group, sharding.token_group or sharding.data_group
        model.sharded = sharding.mesh.size(-1) > 1
        if context is not None:
            spec = model.spec if model.tensor is None else part_of_rank(model.spec, model.tensor.size)
            check_context(
                context.size, context.strategy, spec.heads, spec.kv_heads, windows=spec.windows, dropout=spec.attention_dropout
            )
            model.context = context.resolved(spec.heads, spec.kv_heads)
            for layer in model.layers:
                layer.self_attention.core_attention.context = model.context  # type: ignore[union-attr]
    elif context is not None and context.strategy != "own":
        raise InputError(original_code_message(type(model).__name__, context.size))
    tensor = sharding.tensor_group
    for _, layer_state in states_of(model):
        layer_state.context_group = None if context is None else context.group
        layer_state.tensor_group = layer_state.buffers.tensor_group = tensor


def _keep_own_code(model: nn.Module, reason: str, options: BuildOptions) -> None:
    refuse_block_settings(model, options.recompute, options.mlp_chunks, offload=options.offload)
    replace_linears(model)
    vars(model)["octavo_own_code"] = reason  # for `describe`


def _check_arguments(model: Any, dtype: Any, params_dtype: Any, skip: Any, layers: Any, cp_comm_type: Any, moe: Any) -> None:
    """Refuse arguments of `transform` with a wrong type."""
    if cp_comm_type not in (None, *STRATEGIES, "auto", "own"):
        raise unknown("cp_comm_type", str(cp_comm_type), (*STRATEGIES, "auto", "own"))
    if not isinstance(model, nn.Module):
        raise InputError(f"octavo.transform got {type(model).__name__}: give a torch.nn.Module.")
    for name, value in (("dtype", dtype), ("params_dtype", params_dtype)):
        if value not in (FLOATS_OF_PYTORCH if name == "dtype" else (None, *FLOATS_OF_PYTORCH)):
            raise InputError(f"{name} = {value!r} is not supported: use {', '.join(map(str, FLOATS))}.")
    if isinstance(skip, str) or not all(isinstance(pattern, str) for pattern in skip):
        raise InputError(f'skip = {skip!r} is not a list of patterns: use a list of text, such as ["layers.0.*"].')
    if layers is not None and not isinstance(layers, Mapping):
        raise InputError(f"layers = {layers!r} is not a table: use a dict of pattern → recipe, or None for high precision.")
    if not isinstance(moe, MoeConfig | Mapping | None):
        raise InputError(f"moe = {moe!r} is not a table: use a dict of keys of [moe], such as {{'moe_z_loss_coeff': 0.001}}.")


def _replacement(
    original: nn.Module | None, config: Any, blocks: Literal["auto", "own"], *, can_fill: bool
) -> tuple[ModelSpec | None, bool, str]:
    """(spec of the decoder that replaces the model, True for new vision blocks, reason for the original code if neither)."""
    if getattr(original, "hf_quantizer", None) is not None:
        raise InputError(
            f"the weights of this {type(original).__name__} are quantised in memory. For a folder in FP8, give a model without"
            " values, AutoModelForCausalLM.from_config(config) under octavo.delayed_init(), and load_from=folder. "
            f"{DEQUANTISE}"
        )
    causal_lm = original is None or (
        hasattr(config, "model_type") and any(base.__name__.endswith("ForCausalLM") for base in type(original).__mro__)
    )
    vision = original is not None and is_vision_transformer(original)
    if blocks == "own" and (isinstance(original, Decoder) or isinstance(getattr(original, "blocks", None), Blocks)):
        raise InputError('blocks = "own": the model has Octavo\'s blocks already. Transform the original model.')
    if not causal_lm and not vision:
        return None, False, ""
    if blocks == "own":
        return None, False, 'blocks = "own"'
    if causal_lm:
        spec, reason = decoder_spec(config)
        if spec is not None and original is not None:
            reason = difference(original, _from_config(config, torch.float32), spec)
        return None if reason else spec, False, reason
    assert original is not None
    if not can_fill and any(parameter.is_meta for parameter in original.parameters()):
        return None, False, "its blocks have custom initial values: give load_from or load_state_dict_from_rank0"
    reason = original_code_reason(original)
    return None, not reason, reason


def parts_of(model: nn.Module) -> tuple[Decoder | Blocks | None, list[nn.Module]]:
    """(the module that runs Octavo's blocks or None for a model's original code, the blocks: one shard group each)."""
    if isinstance(model, Decoder):
        return model, list(model.layers)
    stack = getattr(model, "blocks", None)
    return (stack, list(stack)) if isinstance(stack, Blocks) else (None, blocks_of(model))


def _recompute(model: nn.Module, stack: Decoder | Blocks | None, options: BuildOptions) -> None:
    recompute, chunks = options.recompute, options.mlp_chunks
    if stack is None:
        if recompute:
            recompute_own_code(model)
        return
    check_blocks(recompute, chunks, experts=has_experts(model), attention_dropout=attention_dropout(model))
    if recompute == "mlp" or chunks > 1:
        recompute_mlps(stack, chunks)
    if recompute == "selective":
        stack.run_block = selectively_recomputed
    elif recompute is True:
        stack.run_block = recomputed
    if options.offload:
        stack.run_block = offloaded(stack.run_block, options.horizon)


def _values(model: nn.Module, weights: Weights | None, from_rank0: Ranks | None, options: BuildOptions) -> Values:
    """The source of values: the weights; without any, the initialisation of the decoder or of a model's modules."""
    loader, seed = None if weights is None else WeightLoader(model, weights), options.seed
    if from_rank0 is not None:
        return FromRank0(loader if from_rank0.rank == 0 else None, from_rank0)
    values: Values
    if loader is not None:
        values = Loaded(loader)
    else:
        values = CounterInit(seed, model.spec.initializer_range) if isinstance(model, Decoder) else OwnInit(seed)
    if options.lora is None:
        return values
    if options.lora.base == "fp8":
        values = values_in_fp8(model, values, noting(model))
    return BesideAdapters(values, seed)


def _weights(
    original: nn.Module | None,
    config: Any,
    load_from: str | Path | None,
    from_rank0: Ranks | None,
    *,
    replaced: bool,
    resize: bool,
) -> Weights | None:
    """Weights from a folder, or a model's tensors that fill `replaced` blocks or other ranks; else None."""
    needed = replaced or from_rank0 is not None
    if load_from is not None:
        return folder_weights(load_from, original, config, resize=resize)
    return None if original is None or not needed else model_weights(original, received=from_rank0 is not None)


def _from_config(config: Any, dtype: torch.dtype) -> nn.Module:
    """Hugging Face's causal language model on the meta device."""
    # A cache serves generation. In training it costs memory, and hides the beginnings of documents from Hugging Face's masks.
    config = copy.deepcopy(config)
    config.use_cache = False
    try:
        with delayed_init():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except KeyError as error:  # an unknown activation or rotary scaling
        raise InputError(
            f"model.source: the config of {config.model_type} has the value {error}, which transformers {transformers_version} "
            "does not know. Correct it in config.json, or install a newer transformers."
        ) from None
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise InputError(
            f"model.source: {config.model_type} is not a causal language model of transformers, and a run trains only those. "
            "Give another model.source, or train it in your loop through octavo.transform."
        ) from None
    keep_float32_buffers(model, dtype)
    return model


def _device_of(model: nn.Module) -> torch.device:
    if state.world_size > 1:
        return state.device
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
