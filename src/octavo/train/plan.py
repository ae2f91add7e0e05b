"""Everything about a run that can be wrong and can be known before data, model or GPU work.

`check` reads the configuration against the machine and returns what the loop needs to build a run; it writes nothing, so a
mistake costs a second and leaves no trace. `--dry-run` shows what it returns. One thing it may have to fetch: weights that are
named by an id of the Hub come into Hugging Face's own cache, since their names and shapes are held against the model here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo.build import build_model, check_supported
from octavo.checkpoint.api import weights_layout
from octavo.checkpoint.shard_io import Layout
from octavo.config.fp8 import Fp8Config
from octavo.config.run import RunConfig
from octavo.data.corpus import check_sources, holds_text
from octavo.data.prepared import prepared_or_none
from octavo.data.tokenizer import local_vocab_size
from octavo.errors import InputError
from octavo.fp8.recipe import RECIPES, CurrentScaling, DelayedScaling, Format, Recipe
from octavo.fp8.scaling import states_of
from octavo.hardware import Device, describe_device, supports_fp8
from octavo.kernels.cross_entropy import Objective
from octavo.models.convert import check_names_and_shapes
from octavo.models.decoder import Decoder
from octavo.models.families import spec_of
from octavo.models.sources import load_config, weights_folder
from octavo.models.weight_files import WeightFiles
from octavo.parallel.mesh import Degrees, fit_batch, fit_degrees
from octavo.parallel.world import rank_variable
from octavo.plan import flops
from octavo.run.trackers import check_trackers
from octavo.train.loss_scale import LARGEST_SCALE

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DEGREES = {"hybrid_shard_degree", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"}


@dataclass(frozen=True)
class RunPlan:
    """A checked run.

    Attributes:
        hf_config: the Hugging Face config of the model.
        recipe: of FP8, or None.
        fp8_note: what runs in FP8, or why nothing does, in one line.
        micro_batch, accumulation: sequences in a forward, and forwards in a step.
        layers: the FP8 layers by name, with the shape and the recipe of each.
        excluded: those that stay out of FP8 all the same, and why.
        flops: of one token, or None for a family that is not counted.
        weights: names, shapes and dtypes of parameters and persistent buffers.
        weights_folder: the local folder of the weights that a run starts from; None for random ones.
    """

    config: RunConfig
    hf_config: Any
    device: torch.device
    hardware: Device
    degrees: Degrees
    recipe: Recipe | None
    fp8_note: str
    micro_batch: int
    accumulation: int
    layers: Mapping[str, Layer]
    flops: flops.TokenFlops | None
    weights: Layout
    weights_folder: Path | None
    excluded: Mapping[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return _DTYPES[self.config.model.dtype]

    @property
    def params_dtype(self) -> torch.dtype:
        """Of parameters, gradients and optimizer states."""
        return _DTYPES[self.config.model.params_dtype]

    @property
    def compile(self) -> bool:
        """Whether blocks are compiled."""
        return self.config.train.compile is True

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.config.train.global_batch * self.config.data.sequence_length

    def rates(self, tokens_per_second: float) -> tuple[float | None, float | None]:
        """(TFLOP/s, MFU) of a rank when all ranks do this many tokens a second; None where family or GPU is not known."""
        if self.flops is None:
            return None, None
        head = 2 / 3 if self.config.fp8.head == "backward" else float(self.config.fp8.head)
        fp8 = 0.0 if self.recipe is None else self.flops.layers * self._fp8_share + self.flops.head * head
        split = {"bf16": self.flops.total - fp8, "fp8": fp8}
        achieved = {precision: flop * tokens_per_second / self.degrees.world for precision, flop in split.items() if flop}
        # float16 products run at bfloat16's rate on every GPU of the table; float32 ones have a peak that it does not hold.
        known = self.config.model.dtype in ("bfloat16", "float16")
        return sum(achieved.values()) / 1e12, flops.mfu(achieved, self.hardware.gpu) if known else None

    @property
    def _fp8_share(self) -> float:
        """Of the operations in the layers that can run in FP8, those that do."""
        sizes = {name: math.prod(layer.shape) for name, layer in self.layers.items()}
        used = (size for name, size in sizes.items() if self.layers[name].recipe is not None and name not in self.excluded)
        return sum(used) / max(1, sum(sizes.values()))


@dataclass(frozen=True)
class Layer:
    """A matrix [N, K] that FP8 products can take, and its recipe; None where the run file keeps it out of FP8."""

    shape: tuple[int, int]
    recipe: Recipe | None


def check(config: RunConfig) -> RunPlan:
    """Check a run against this machine.

    Raises:
        InputError: what is wrong, the nearest value that works and the key to change.
    """
    world = _world()
    degrees = fit_degrees(**config.parallel.model_dump(include=_DEGREES), world_size=world)
    check_supported(degrees)
    micro_batch, accumulation = fit_batch(config.train.global_batch, config.train.micro_batch, degrees.data)
    _check_float16(config)
    check_trackers(config.log.trackers)
    recipe = recipe_from_config(config.fp8)
    check_sources(config.data)
    hf_config = load_config(config.model.source, config.model.config)
    _check_length(config, hf_config)
    _check_vocabulary(config, hf_config)
    model = _meta_model(config, hf_config)
    folder = weights_folder(config.model.source) if config.model.load else None
    if folder is not None:
        check_names_and_shapes(model, WeightFiles(folder))
    rank = rank_variable("LOCAL_RANK", 0)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    hardware = describe_device(device)
    use, note = choose_fp8(config.fp8, recipe, hardware, native=supports_fp8(device))
    return RunPlan(
        config=config,
        hf_config=hf_config,
        device=device,
        hardware=hardware,
        degrees=degrees,
        recipe=recipe if use else None,
        fp8_note=note,
        layers=_layers(model, recipe),
        micro_batch=micro_batch,
        accumulation=accumulation,
        flops=_token_flops(hf_config, config.data.sequence_length),
        weights=weights_layout(model),
        weights_folder=folder,
    )


def recipe_from_config(config: Fp8Config, name: str | None = None) -> Recipe:
    """The recipe that a run file's [fp8] section asks for; or another one of this name, with the settings of the section."""
    name = name or config.recipe
    if name == "delayed":
        return DelayedScaling(
            config.margin,
            Format[config.format],
            config.amax_history_len,
            config.amax_compute_algo,
            fast_accumulation=config.fast_accumulation,
        )
    if name == "current":
        return CurrentScaling(Format[config.format], config.fast_accumulation, config.use_power_2_scales)
    return RECIPES[name]()


def model_options(config: RunConfig) -> dict[str, Any]:
    """What of a run file decides by which recipe a layer runs, and what is minimised, as `build_model` takes it."""
    return {
        "skip": config.fp8.skip,
        "layers": {
            p: None if name == "bf16" else recipe_from_config(config.fp8, name) for p, name in config.fp8.layers.items()
        },
        "fp8_head": config.fp8.head,
        "objective": Objective(label_smoothing=config.train.label_smoothing, z_loss=config.train.z_loss),
    }


def _layers(model: torch.nn.Module, recipe: Recipe) -> dict[str, Layer]:
    """The FP8 layers of a model but its head, which is asked for by itself."""
    found = {}
    for name, state in states_of(model):
        if (weight := state.weight) is not None and not (isinstance(model, Decoder) and name == "head"):
            found[name] = Layer((weight.shape[0], weight.shape[1]), state.under(recipe))
    return found


def choose_fp8(config: Fp8Config, recipe: Recipe, hardware: Device, *, native: bool) -> tuple[bool, str]:
    """Whether this device trains in FP8, and the line that says so."""
    what = f"{recipe.name} scaling" + (f", {config.format}" if config.recipe in ("delayed", "current") else "")
    if config.enabled is False:
        return False, "FP8 is off (fp8.enabled = false)"
    if native:
        return True, f"FP8 on {hardware.name}: {what}"
    if hardware.kind == "cpu" and config.enabled == "auto" and not config.emulate:
        return False, (
            'no FP8: a CPU emulates it, which is never faster, and fp8.enabled = "auto" takes what is faster. '
            "Set fp8.enabled = true to compute FP8's numbers all the same"
        )
    if hardware.kind == "cpu":
        return True, f"FP8 emulated on the CPU, with the same numbers as on a GPU: {what}"
    if config.emulate:
        return True, f"FP8 emulated on {hardware.name} (fp8.emulate = true): {what}"
    capability = ".".join(map(str, hardware.capability or ()))
    return False, (
        f"{hardware.name} (compute capability {capability}) does not multiply FP8, which needs 8.9 or more: training without. "
        "Set fp8.emulate = true to compute FP8's numbers slowly."
    )


def _world() -> int:
    """How many ranks there are, as the launcher says."""
    world, rank = rank_variable("WORLD_SIZE", 1), rank_variable("RANK", 0)
    if not 0 <= rank < world:
        given = f"WORLD_SIZE = {world}" if "WORLD_SIZE" in os.environ else "WORLD_SIZE is not set"
        raise InputError(
            f"RANK = {rank} in the environment, but {given}: ranks count from 0 to WORLD_SIZE - 1. Start the ranks with "
            "torchrun, or unset RANK for one rank."
        )
    return world


def _check_float16(config: RunConfig) -> None:
    """float16 computes with float32 parameters, and with a loss scale that float32 can hold."""
    if config.model.dtype == "float16" and config.model.params_dtype != "float32":
        raise InputError(
            f'model.params_dtype = "{config.model.params_dtype}": float16 trains float32 parameters. '
            'Set model.params_dtype = "float32", or model.dtype = "bfloat16".'
        )
    scale = config.train.loss_scale
    if scale != "dynamic" and not 0 < scale <= LARGEST_SCALE:
        raise InputError(
            f"train.loss_scale = {scale:g}: a loss scale is more than 0 and at most 2**60. Set train.loss_scale to a power of "
            'two such as 1024, or to "dynamic".'
        )


def _check_length(config: RunConfig, hf_config: Any) -> None:
    limit = getattr(hf_config, "max_position_embeddings", None)
    length = config.data.sequence_length
    if isinstance(limit, int) and length > limit:
        key = "data.sequence_length" + ("" if config.model.load else ", or raise model.config.max_position_embeddings")
        raise InputError(
            f"data.sequence_length = {length} is longer than the model's {limit} positions: use at most {limit}. Change {key}."
        )


def _check_vocabulary(config: RunConfig, hf_config: Any) -> None:
    """Refuse a tokenizer with more ids than the model has, where that is known before tokenising.

    A trained tokenizer may end up with fewer ids than were asked for, and a corpus of token ids trains none.
    """
    data, limit = config.data, hf_config.vocab_size
    size = data.vocab_size if data.tokenizer == "train" else local_vocab_size(data.tokenizer)
    if size is None or size <= limit:
        return
    prepared = prepared_or_none(data)
    if data.tokenizer == "train" and ((prepared is not None and prepared.vocab_size <= limit) or not holds_text(data)):
        return
    what, change = (
        (f"data.vocab_size = {size} is more than", f"data.vocab_size to at most {limit}")
        if data.tokenizer == "train"
        else (f"data.tokenizer = {data.tokenizer!r} has token ids up to {size - 1}, which is beyond", "data.tokenizer")
    )
    raise InputError(
        f"{what} the model's vocabulary of {limit} (model.config.vocab_size). Set {change}, or model.config.vocab_size to at "
        f"least {size}."
    )


def _token_flops(hf_config: Any, sequence_length: int) -> flops.TokenFlops | None:
    try:
        return flops.model_flops(spec_of(hf_config), sequence_length)
    except (InputError, AttributeError):  # a family that is not counted has no rate, and no guess
        return None


def _meta_model(config: RunConfig, hf_config: Any) -> torch.nn.Module:
    """The model without memory, for the names and shapes of its weights; this also tries the patterns of layers."""
    params_dtype = _DTYPES[config.model.params_dtype]
    return build_model(
        hf_config,
        dtype=params_dtype,
        params_dtype=params_dtype,
        device=torch.device("meta"),
        seed=config.train.seed,
        recompute=config.train.recompute,
        offload=config.train.offload,
        **model_options(config),
    )


@dataclass(frozen=True)
class DryRun:
    """A run in numbers, before it exists."""

    plan: RunPlan
    parameters: int
    sequences: int | None
    """In the training split; None while the data is not prepared."""

    @property
    def epochs(self) -> float | None:
        """How often each sequence is seen."""
        train = self.plan.config.train
        return train.steps * train.global_batch / self.sequences if self.sequences else None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        plan, train = self.plan, self.plan.config.train
        return {
            "config": plan.config.model_dump(mode="json"),
            "device": plan.hardware.name,
            "fp8": plan.fp8_note,
            "parameters": self.parameters,
            "batch": {
                "global_batch": train.global_batch,
                "data_parallel": plan.degrees.data,
                "micro_batch": plan.micro_batch,
                "accumulation": plan.accumulation,
                "tokens_per_step": plan.tokens_per_step,
                "steps": train.steps,
                "tokens": plan.tokens_per_step * train.steps,
                "epochs": self.epochs,
            },
        }

    def lines(self) -> list[str]:
        """The resolved run file and the arithmetic."""
        plan, train = self.plan, self.plan.config.train
        return [
            plan.config.to_toml(),
            f"device      {plan.hardware.name}",
            f"precision   {plan.fp8_note}",
            f"parameters  {self.parameters:,}",
            f"batch       {train.global_batch} sequences = {plan.degrees.data} data-parallel x {plan.micro_batch} micro-batch "
            f"x {plan.accumulation} accumulation",
            f"tokens      {plan.tokens_per_step:,} a step ({train.global_batch} x {plan.config.data.sequence_length}) "
            f"x {train.steps:,} steps = {plan.tokens_per_step * train.steps:,}",
            f"epochs      {self.epochs:.2f} of {self.sequences:,} sequences"
            if self.epochs is not None
            else "epochs      unknown until the data is prepared (octavo prepare)",
            f"output      {plan.config.output}",
        ]


def dry_run(plan: RunPlan) -> DryRun:
    """Count what a checked run would train, without building or writing any of it."""
    data = prepared_or_none(plan.config.data)
    sequences = len(data.sequences("train")) if data is not None else None
    return DryRun(plan, sum(math.prod(shape) for shape, _ in plan.weights.values()), sequences)
