"""Run plan: a run file checked against this machine, before data, model or GPU work.

`check` writes nothing, so that a mistake costs a second and leaves no trace. Weights from the Hub are downloaded into Hugging
Face's cache, since their names and shapes are compared with the model's.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from octavo.build import BuildOptions, build_model, parts_of
from octavo.checkpoint.shard_io import Layout, layout_of
from octavo.checkpoint.writer import weights
from octavo.collectives.tensor import TensorGroup
from octavo.config.degrees import DEGREES, Degrees, fit_batch, fit_degrees
from octavo.config.fp8 import KEYS_OF_RECIPES, Fp8Config
from octavo.config.run import RunConfig
from octavo.config.train import LARGEST_SCALE
from octavo.data.corpus import Corpus, check_sets
from octavo.data.loader import sequences_of
from octavo.data.prepared import PreparedData, prepared_or_none, with_packing
from octavo.dtypes import torch_dtype
from octavo.errors import InputError, warn
from octavo.fp8.recipe import RECIPES, CurrentScaling, DelayedScaling, Format, Operand, Recipe
from octavo.fp8.scaling import states_of
from octavo.groups import factors_of
from octavo.hardware import Device, Gpu, describe_device, supports_fp8, whole_gib
from octavo.job_ranks import adopt_ranks
from octavo.kernels.cross_entropy import Objective
from octavo.models.decoder import FP8_HEAD, Decoder
from octavo.models.families import decoder_spec, spec_of
from octavo.models.hidden import hidden_parameters
from octavo.models.original_code import refuse_float32_parameters, refuse_other_models
from octavo.models.replace import choose_recipes
from octavo.models.resized import grown
from octavo.models.sources import check_positions, load_config, weights_folder
from octavo.models.spec import ModelSpec
from octavo.models.weight_loader import folder_weights
from octavo.nn.experts import StackedExperts
from octavo.nn.lora import is_adapter
from octavo.nn.plain_names import stored_names
from octavo.parallel.context import check_context, original_code_message
from octavo.parallel.gathered import Choice, choose, gathered_bytes
from octavo.parallel.sharding import check_experts, gather_dtype
from octavo.parallel.stored_base import store_in_fp8
from octavo.parallel.world import rank_variable
from octavo.plan import flops, graph
from octavo.plan.graph import check_graph
from octavo.plan.muon import MuonWork, muon_work
from octavo.plan.precision import PrecisionSchedule
from octavo.plan.sizes import check_layers, check_length, check_sizes, check_vocabulary, needed_vocabulary
from octavo.plan.tensor import check_tensor
from octavo.run.trackers import check_trackers


@dataclass(frozen=True)
class RunPlan:
    """A checked run."""

    config: RunConfig
    hf_config: Any
    device: torch.device
    hardware: Device
    degrees: Degrees
    recipe: Recipe | None  # None without FP8
    fp8_note: str  # use of FP8, or why it is not used, in one line
    micro_batch: int  # sequences in a rank's forward
    accumulation: int  # forwards in a step
    layers: Mapping[str, Fp8Layer]  # layers that can run in FP8, by name
    flops: flops.TokenFlops | None  # per token; None for an uncounted family, or with frozen parameters without LoRA
    weights: Layout  # parameters and persistent buffers by their stored names
    weights_folder: Path | None  # pretrained weights; None for random ones
    blocks: Literal["auto", "own"]  # `model.blocks`; in a continued run the blocks that it began with
    parameters: int  # of the whole model, shared ones counted once
    fp8_head: bool | Literal["backward"]  # products of the decoder's head in FP8
    tokens_added: int = 0  # added to the source's vocabulary by `model.resize`
    frozen: int = 0  # parameters that are not trained
    frozen_of_block: int = 0  # in the block with the fewest
    head_frozen: bool = False
    expert_ranks: tuple[int, int] = (0, 0)
    excluded: Mapping[str, str] = field(default_factory=dict)  # from FP8 by `fp8.enabled = "auto"`, each with the reason

    @property
    def shared_sequences(self) -> str:
        """Context parallelism in words; empty without it."""
        degree = self.degrees.context
        return f"{degree} ranks share each sequence ({self.config.parallel.cp_comm_type})" if degree > 1 else ""

    @property
    def shared_matrices(self) -> str:
        """Tensor parallelism in words; empty without it."""
        degree = self.degrees.tensor
        if degree == 1:
            return ""
        whole = "; whole experts are distributed over ranks" if self.degrees.expert > 1 else ""
        return f"{degree} ranks hold parts of each matrix, and between products parts of the tokens{whole}"

    @property
    def build_options(self) -> BuildOptions:
        """The options by which the run's model is built."""
        return replace(build_options(self.config, blocks=self.blocks), excluded=self.excluded)

    @functools.cached_property
    def spec(self) -> ModelSpec | None:
        """The spec of Octavo's decoder; None for a model with its original code."""
        return decoder_spec(self.hf_config)[0] if self.blocks == "auto" else None

    @functools.cached_property
    def model_on_meta(self) -> torch.nn.Module:
        """The run's model without storage: names, shapes and recipes of its layers. Read-only."""
        return build_model(self.hf_config, self.build_options, device="meta")

    @property
    def graph(self) -> bool:
        """True if steps are recorded as CUDA graphs, or would be if this were not a CPU."""
        return graph.records(self.config, self.model_on_meta, self.degrees.world, self.hardware.kind)

    @property
    def graph_note(self) -> str | None:
        """The effect of `train.graph`, in one line; None if it has none."""
        return graph.note(self.config, self.model_on_meta, self.degrees.world, self.hardware.kind)

    @functools.cached_property
    def muon(self) -> MuonWork | None:
        """The matrices that Muon trains; None under AdamW."""
        if self.config.optimizer.name != "muon":
            return None
        hidden = hidden_parameters(self.model_on_meta)
        return muon_work([shape for one in hidden for shape in one.matrices], [math.prod(one.shape) for one in hidden])

    @functools.cached_property
    def part_on_meta(self) -> torch.nn.Module:
        """A tensor-parallel rank's part of `model_on_meta`; itself without tensor parallelism. Read-only."""
        whole, options = self.model_on_meta, self.build_options
        if self.degrees.tensor == 1 or not isinstance(whole, Decoder):
            return whole
        part = Decoder(
            self.hf_config,
            whole.spec,
            dtype=self.dtype,
            params_dtype=self.params_dtype,
            device="meta",
            fp8_head=options.fp8_head,
            tensor=TensorGroup(None, size=self.degrees.tensor, rank=0),
            spread=self.degrees.expert > 1,
        )
        choose_recipes(part, layers=options.layers, skip=options.skip, excluded=options.excluded)
        return part

    @functools.cached_property
    def gathering(self) -> Choice:
        """`parallel.reshard_after_forward` as resolved by the run on this device."""
        asked, hardware = self.config.parallel.reshard_after_forward, self.hardware
        if asked != "auto" or hardware.kind == "cpu":
            return choose(0, None) if asked == "auto" else Choice(asked)
        _, blocks = parts_of(self.part_on_meta)
        dtype = gather_dtype(self.config.parallel, self.dtype, self.params_dtype)
        gathered = gathered_bytes(blocks, self.recipe, dtype, experts_over=self.degrees.expert)
        return choose(gathered, whole_gib(hardware.memory_gib))

    @functools.cached_property
    def gathering_without_fp8(self) -> Choice:
        """The same for the run without FP8 of `train.compare_bf16`."""
        return replace(self, recipe=None, excluded={}).gathering

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return torch_dtype(self.config.model.dtype)

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of parameters, gradients and optimizer states."""
        return torch_dtype(self.config.model.params_dtype)

    @property
    def steps(self) -> int:
        """Optimizer steps; known once the length of the run is resolved."""
        assert self.config.train.steps is not None
        return self.config.train.steps

    def schedule_end(self, step: int) -> int:
        """The last step of the schedule that `step` belongs to: the run's, or an earlier one of an extended run."""
        return next(end for end in (*self.config.train.extended, self.steps) if step <= end)

    def rates(self, tokens_per_second: float) -> tuple[float | None, float | None]:
        """(TFLOP/s, MFU) per rank at this total speed of all ranks; None for an unknown family or GPU."""
        if self.flops is None:
            return None, None
        head = 2 / 3 if self.config.fp8.head == "backward" else float(self.config.fp8.head or 0)
        fp8 = 0.0 if self.recipe is None else self.flops.layers * self._fp8_share + self.flops.head * head
        split = {"bf16": self.flops.total - fp8, "fp8": fp8}
        achieved = {precision: flop * tokens_per_second / self.degrees.world for precision, flop in split.items() if flop}
        # float16 products run at bfloat16's rate on every GPU of the table, which has no float32 peaks.
        known = self.config.model.dtype in ("bfloat16", "float16")
        return sum(achieved.values()) / 1e12, flops.mfu(achieved, self.hardware.gpu) if known else None

    @property
    def _fp8_share(self) -> float:
        """Share of FP8 in the FLOPs of all layers; an MoE model's original code has no experts in `layers`."""
        assert self.flops is not None
        layers = (layer for name, layer in self.layers.items() if layer.recipe is not None and name not in self.excluded)
        return min(1.0, 6 * sum(layer.visits * math.prod(layer.shape) for layer in layers) / self.flops.layers)


@dataclass(frozen=True)
class Fp8Layer:
    """A layer that can run in FP8: shape [N, K] of its weight, and its recipe; None if the run file excludes it.

    For experts: the shape of one expert's weight; `visits` is the number of experts per token.
    """

    shape: tuple[int, int]
    recipe: Recipe | None
    visits: int = 1


@dataclass(frozen=True)
class Target:
    """Ranks and GPU of a run that is only planned here; None for the present ones."""

    world_size: int | None = None
    gpu: Gpu | None = None

    def device(self) -> tuple[torch.device, Device, bool]:
        """The device of a rank, its description, and True if it has FP8 products."""
        if self.gpu is not None:
            hardware = Device(self.gpu.name, self.gpu, self.gpu.capability, self.gpu.memory_gib, "cuda")
            return torch.device("cuda", 0), hardware, self.gpu.fp8_tflops is not None
        rank = rank_variable("LOCAL_RANK", 0)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = torch.device("cuda", rank if rank < gpus or gpus > 1 else 0) if gpus else torch.device("cpu")
        return device, describe_device(device), supports_fp8(device)


def check(
    config: RunConfig,
    *,
    blocks: Literal["auto", "own"] | None = None,
    target: Target | None = None,
    prepared: PreparedData | None = None,
    notes: bool = True,
) -> RunPlan:
    """Check a run against this machine, or against a `target`, whose memory may be too small.

    Args:
        config: the run.
        blocks: replaces `model.blocks`.
        target: ranks and a GPU that need not be present.
        prepared: the run's data, whose tokens `model.resize` adds; without it, the tokens that follow from the
            configuration.
        notes: print notes and warnings of an accepted run; False for one that does not start.

    Raises:
        InputError: names the fault, the nearest value that works and the key to change.
    """
    planned = target or Target()
    world = planned.world_size or _world()
    degrees = fit_degrees(**config.parallel.model_dump(include=set(DEGREES)), world_size=world)
    micro_batch, accumulation = fit_batch(config.train.global_batch, config.train.micro_batch, degrees.data)
    _check_settings(config)
    check_trackers(config.log.trackers)
    recipe = recipe_from_config(config.fp8)
    corpus = Corpus(config.data)
    check_sets(config.data)
    known = with_packing(config.data, prepared or prepared_or_none(config.data), corpus)
    config = config.model_copy(update={"data": known})
    check_layers(config.model.config)
    hf_config = load_config(config.model.source, config.model.config)
    refuse_other_models(hf_config)
    extended = check_positions(config.model.source, config.model.config) if config.model.load and config.model.config else ""
    check_length(config, hf_config)
    tokens = hf_config.vocab_size
    if config.model.resize:
        hf_config = grown(hf_config, needed_vocabulary(config, prepared, corpus))
    check_vocabulary(config, hf_config, corpus)
    device, hardware, native = planned.device()
    check_sizes(config, hf_config, degrees, micro_batch, hardware, planned=target is not None, here=planned.gpu is None)
    blocks = blocks or config.model.blocks
    spec = None if blocks == "own" else decoder_spec(hf_config)[0]
    config = _with_native_defaults(config, spec)
    # For names and shapes; building also checks the patterns of layers.
    model = build_model(hf_config, build_options(config, blocks=blocks), device="meta")
    factors_of(model, config.optimizer.rates, config.optimizer.layer_decay, keys=("optimizer.rates", "optimizer.layer_decay"))
    _check_context(config, degrees, model)
    check_tensor(config, degrees, model)
    if world > 1 and not isinstance(model, Decoder):
        refuse_float32_parameters(model, torch_dtype(config.model.params_dtype))
    experts = model.spec.experts if isinstance(model, Decoder) and model.spec.mixtures else 0
    check_graph(config, model, world)
    check_experts(experts, degrees.expert, degrees.hybrid_shard, hf_config.model_type, degrees.tensor)
    _check_dispatch(config, model, recipe)
    folder = weights_folder(config.model.source) if config.model.load else None
    if folder is not None:
        folder_weights(folder, model, hf_config, resize=config.model.resize)
    use, note = choose_fp8(config.fp8, recipe, hardware, native=native)
    layers = _layers(model, recipe)
    if config.fp8.enabled is not False and (why := _without_fp8_layers(model, recipe, hf_config)):
        if config.fp8.enabled is True:
            raise InputError(f"fp8.enabled = true, but {why}. Set fp8.enabled = false, or change the keys named.")
        use, note = False, f"no FP8: {why}"
    if use:
        _check_overflows(config, layers)
    if config.lora.options is not None and config.lora.base == "fp8":
        _store_base(config, model, recipe, use=use)
    if notes:
        config.tell_notes(world)
    if notes and rank_variable("RANK", 0) == 0:
        if extended:
            warn(extended)
        if config.lora.options is not None and not config.model.load:
            warn(
                "lora trains adapters of random weights, since model.load = false. Set model.load = true and model.source to a "
                "folder or an id with weights."
            )
    if (steps := config.steps or _steps_of_epochs(config)) is not None:
        config = config.with_steps(steps)
        if use:
            schedule = PrecisionSchedule(model, config.fp8.schedule, steps)  # raises for one that cannot be
            in_fp8 = [state for _, state in states_of(model) if state.under(recipe) is not None]
            if notes and config.fp8.schedule and schedule.leaves_none(in_fp8) and rank_variable("RANK", 0) == 0:
                warn(
                    f"fp8.schedule leaves every layer out of FP8 in all {steps} steps. Shorten its ranges, or set "
                    "fp8.enabled = false."
                )
    stored = stored_names(model)
    plan = RunPlan(
        config=config,
        hf_config=hf_config,
        device=device,
        hardware=hardware,
        degrees=degrees,
        recipe=recipe if use else None,
        fp8_note=note,
        layers=layers,
        micro_batch=micro_batch,
        accumulation=accumulation,
        flops=_token_flops(config, hf_config, model),
        weights={stored.get(name, name): tensor for name, tensor in layout_of(weights(model)).items()},
        weights_folder=folder,
        blocks=blocks,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens_added=hf_config.vocab_size - tokens,
        frozen=_frozen(model),
        head_frozen=isinstance(model, Decoder) and not model.head.weight.requires_grad,
        expert_ranks=_expert_ranks(model),
        frozen_of_block=min(map(_frozen, model.layers)) if isinstance(model, Decoder) else 0,
        fp8_head=_fp8_head(model, recipe) if use else False,
    )
    vars(plan).update(model_on_meta=model, spec=spec)  # they are built once
    _ = plan.muon  # raises for matrices that cannot be split
    return plan


def _steps_of_epochs(config: RunConfig) -> int | None:
    """Steps of `train.epochs` of data that is prepared already; else None."""
    prepared = prepared_or_none(config.data) if config.train.epochs is not None else None
    return None if prepared is None else steps_of_epochs(config, prepared)


def steps_of_epochs(config: RunConfig, prepared: PreparedData) -> int:
    """Steps of `train.epochs` passes over the training data, rounded up."""
    data, epochs = config.data, config.train.epochs
    assert epochs is not None
    length, packing, overlong = data.sequence_length, prepared.packing(data), data.overlong
    sequences = len(sequences_of(prepared, "train", sequence_length=length, packing=packing, overlong=overlong))
    return max(1, math.ceil(math.ceil(epochs * sequences) / config.train.global_batch))


def recipe_from_config(config: Fp8Config, name: str | None = None) -> Recipe:
    """The recipe of the [fp8] section; or the recipe `name`, with the settings of the section."""
    name = name or config.recipe
    fast = DelayedScaling.fast_accumulation if config.fast_accumulation is None else config.fast_accumulation
    if name == "delayed":
        return DelayedScaling(
            config.margin,
            Format[config.format],
            config.amax_history_len,
            config.amax_compute_algo,
            fast_accumulation=fast,
        )
    if name == "current":
        return CurrentScaling(Format[config.format], fast, config.use_power_2_scales)
    return RECIPES[name]()


def _with_native_defaults(config: RunConfig, spec: ModelSpec | None) -> RunConfig:
    """The run with its defaults resolved for the model, so that its run file records them."""
    fp8 = config.fp8
    if fp8.enabled is False:
        return config
    update: dict[str, Any] = {}
    if fp8.head is None:
        update["head"] = False if spec is None else FP8_HEAD
    if fp8.fast_accumulation is None and fp8.uses("fast_accumulation"):
        update["fast_accumulation"] = DelayedScaling.fast_accumulation
    return config.model_copy(update={"fp8": fp8.model_copy(update=update)})


def build_options(config: RunConfig, *, blocks: Literal["auto", "own"]) -> BuildOptions:
    """The build options of a run file's model; `blocks` may be those with which a continued run began."""
    fp8 = config.fp8
    return BuildOptions(
        dtype=torch_dtype(config.model.dtype),
        params_dtype=torch_dtype(config.model.params_dtype),
        buffer_dtype=torch_dtype(config.parallel.buffer_dtype),
        seed=config.train.seed,
        blocks=blocks,
        skip=fp8.skip,
        layers={p: None if name == "bf16" else recipe_from_config(fp8, name) for p, name in fp8.layers.items()},
        fp8_head=fp8.head,
        objective=Objective(label_smoothing=config.train.label_smoothing, z_loss=config.train.z_loss),
        recompute=config.train.recompute,
        mlp_chunks=config.train.mlp_chunks,
        offload=config.offloads,
        horizon=config.parallel.activation_loading_horizon,
        moe=config.moe,
        frozen=config.train.freeze,
        resize=config.model.resize,
        lora=config.lora.options,
    )


def _frozen(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)


def _layers(model: torch.nn.Module, recipe: Recipe) -> dict[str, Fp8Layer]:
    """The layers of a model that can run in FP8, without the head, which has a separate key."""
    layers = {}
    for name, state in states_of(model):
        if (weight := state.weight) is not None and not (isinstance(model, Decoder) and name == "head"):
            # For experts one matrix: together they have as many rows as a separate layer would.
            shape = weight.shape[0] // (state.experts or 1), weight.shape[1]
            visits = model.spec.top_k if isinstance(model, Decoder) and state.experts else 1
            layers[name] = Fp8Layer(shape, state.under(recipe), visits)
    return layers


def _fp8_head(model: torch.nn.Module, recipe: Recipe) -> bool | Literal["backward"]:
    """The decoder's head products in FP8; False if a pattern excludes the head."""
    state = vars(model.head).get("fp8_state") if isinstance(model, Decoder) else None
    return model.fp8_head if isinstance(model, Decoder) and state is not None and state.under(recipe) is not None else False


def _without_fp8_layers(model: torch.nn.Module, recipe: Recipe, hf_config: Any) -> str:
    """The reason why no matrix runs in FP8; empty if one does."""
    states = [state for _, state in states_of(model)]
    if any(state.under(recipe) is not None for state in states):
        return ""
    if not states:
        return (
            f"the model ({hf_config.model_type}) has no linear layer that Octavo replaces: only nn.Linear itself, GPT-2's "
            "Conv1D and Falcon's, not subclasses with custom code"
        )
    return f"fp8.skip and fp8.layers leave out all {len(states)} matrices that could run in FP8"


def choose_fp8(config: Fp8Config, recipe: Recipe, hardware: Device, *, native: bool) -> tuple[bool, str]:
    """(True if FP8 is used on this device, a note about it)."""
    scaling = f"{recipe.name} scaling" + (f", {config.format}" if "format" in KEYS_OF_RECIPES[config.recipe] else "")
    if config.enabled is False:
        return False, "FP8 is off (fp8.enabled = false)"
    if native:
        return True, f"FP8 on {hardware.name}: {scaling}"
    if hardware.kind == "cpu" and config.enabled == "auto" and not config.emulate:
        return False, (
            'no FP8: a CPU emulates FP8, which is never faster, and fp8.enabled = "auto" uses FP8 only where it is faster. '
            "Set fp8.enabled = true to emulate FP8"
        )
    if hardware.kind == "cpu":
        return True, f"FP8 emulated on the CPU, with the same numbers as on a GPU: {scaling}"
    if config.emulate:
        return True, f"FP8 emulated on {hardware.name} (fp8.emulate = true): {scaling}"
    capability = ".".join(map(str, hardware.capability or ()))
    return False, (
        f"{hardware.name} (compute capability {capability}) has no FP8 products, which need 8.9 or more: training without "
        "FP8. Set fp8.emulate = true to emulate FP8, slowly"
    )


def _world() -> int:
    """Number of ranks, from the launcher's environment."""
    adopt_ranks(meet=False)
    world, rank = rank_variable("WORLD_SIZE", 1), rank_variable("RANK", 0)
    if not 0 <= rank < world:
        stated = f"WORLD_SIZE = {world}" if "WORLD_SIZE" in os.environ else "WORLD_SIZE is not set"
        raise InputError(
            f"RANK = {rank} in the environment, but {stated}: ranks count from 0 to WORLD_SIZE - 1. Start the ranks with "
            "torchrun or srun, or unset RANK for one rank."
        )
    return world


def _check_settings(config: RunConfig) -> None:
    """Refuse float16 without float32 parameters, numbers out of range, validation without data, and compiled blocks."""
    sequences, length = config.train.global_batch, config.data.sequence_length
    if sequences * length >= 2**31:  # such a step would never end
        raise InputError(
            f"train.global_batch = {sequences} sequences of {length} tokens are more than 2**31 tokens in a step: use at most "
            f"{(2**31 - 1) // length}. Change train.global_batch."
        )
    if config.model.dtype == "float16" and config.model.params_dtype != "float32":
        raise InputError(
            f'model.params_dtype = "{config.model.params_dtype}": float16 trains float32 parameters. '
            'Set model.params_dtype = "float32", or model.dtype = "bfloat16".'
        )
    scale = config.train.loss_scale
    if scale != "dynamic" and not 0 < scale <= LARGEST_SCALE:
        raise InputError(
            f"train.loss_scale = {scale:g}: a loss scale must be above 0 and at most 2**{math.log2(LARGEST_SCALE):.0f}. Set "
            'train.loss_scale to a power of two such as 1024, or to "dynamic".'
        )
    if config.train.validate_every and not (config.data.validates or config.train.evaluations):
        raise InputError(  # a continued run may have set the fraction
            f"train.validate_every = {config.train.validate_every}, but data.validation_fraction = 0 holds nothing out. Set "
            "data.validation_fraction above 0, such as 0.05, name a data.validation_source, or set train.validate_every = 0."
        )
    if config.train.compile is True:  # `RunConfig` accepts it, for the run files of compiled runs
        raise InputError(
            "train.compile = true: blocks are not compiled, since their fused kernels are faster (1B on an H200: 175 ms a "
            'step, 191 compiled). Set train.compile = false, or "auto".'
        )


def _store_base(config: RunConfig, model: torch.nn.Module, recipe: Recipe, *, use: bool) -> None:
    """Store frozen weights in FP8 as the run will; refused without products in FP8, or with train.compare_bf16."""
    other = 'Set lora.base = "params_dtype".'
    if not use:
        raise InputError(f'lora.base = "fp8", but no product runs in FP8 here. {other}')
    if config.train.compare_bf16:
        raise InputError(f'lora.base = "fp8" with train.compare_bf16 = true: the run without FP8 has no such weights. {other}')
    store_in_fp8(model, recipe)


def _check_context(config: RunConfig, degrees: Degrees, model: torch.nn.Module) -> None:
    """Refuse a model whose sequences the ranks of a context group cannot share."""
    if degrees.context > 1 and not isinstance(model, Decoder):
        raise InputError(original_code_message(type(model).__name__, degrees.context))
    if isinstance(model, Decoder):
        spec = model.spec
        check_context(
            degrees.context,
            config.parallel.cp_comm_type,
            spec.heads,
            spec.kv_heads,
            windows=spec.windows,
            dropout=spec.attention_dropout,
        )


def _check_dispatch(config: RunConfig, model: torch.nn.Module, recipe: Recipe) -> None:
    """Refuse `expert_dispatch_fp8` if no expert multiplies tokens in FP8."""
    experts = [state for name, state in states_of(model) if name.endswith("experts.fc1")]
    if config.parallel.expert_dispatch_fp8 and all(state.under(recipe) is None for state in experts):
        raise InputError(
            "parallel.expert_dispatch_fp8 = true has no effect: fp8.skip and fp8.layers leave the first products of all "
            "experts in high precision. Set parallel.expert_dispatch_fp8 = false, or change the patterns."
        )


def _check_overflows(config: RunConfig, layers: Mapping[str, Fp8Layer]) -> None:
    """Refuse casts that would hide overflows of float16 gradients from the loss scale.

    A cast to FP8 saturates an infinity. Delayed scaling records it in its history, which the step reads.
    """
    if config.model.dtype != "float16":
        return
    remedy = 'Set model.dtype = "bfloat16", or fp8.enabled = false'
    for name, layer in layers.items():
        if layer.recipe is not None and not layer.recipe.casts[Operand.GRAD_OUTPUT].delayed:
            raise InputError(
                f'model.dtype = "float16" with {layer.recipe.name} scaling ({name}): an overflow of a gradient is saturated by '
                f'its cast to FP8, and the step would not be skipped. {remedy}, or fp8.recipe = "delayed".'
            )
    if config.parallel.expert_dispatch_fp8:
        raise InputError(
            'model.dtype = "float16" with parallel.expert_dispatch_fp8 = true: an overflow of a gradient is saturated by its '
            f"cast to FP8, and the step would not be skipped. {remedy}, or parallel.expert_dispatch_fp8 = false."
        )


def _expert_ranks(model: torch.nn.Module) -> tuple[int, int]:
    """The adapter ranks of both products of experts; 0 without adapters."""
    adapters = [one.adapters for one in model.modules() if isinstance(one, StackedExperts) and one.adapters]
    return (adapters[0][0].rank, adapters[0][1].rank) if adapters else (0, 0)


def _token_flops(config: RunConfig, hf_config: Any, model: torch.nn.Module) -> flops.TokenFlops | None:
    length = config.data.sequence_length
    how: dict[str, Any] = {}
    if config.lora.rank is not None and isinstance(model, Decoder):
        spec = model.spec
        adapters = sum(
            parameter.numel() * spec.top_k // spec.experts if ".experts." in name else parameter.numel()
            for name, parameter in model.named_parameters()
            if is_adapter(name)
        )
        how = {"adapters": adapters, "head_trained": model.head.weight.requires_grad}
    elif _frozen(model):
        return None
    try:
        return flops.model_flops(spec_of(hf_config), length, **how)
    except (InputError, AttributeError):  # an uncounted family gets no rate, rather than a guess
        return None


def inactive_parameters(hf_config: Any) -> int:
    """Parameters of MoE layers' experts to which a token is not sent; 0 for a model without."""
    try:
        return flops.matmul_parameters(spec_of(hf_config)).inactive
    except (InputError, AttributeError):  # an uncounted family
        return 0
