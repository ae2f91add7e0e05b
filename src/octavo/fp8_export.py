"""Exports a run in FP8 for serving, in compressed-tensors' layout, which transformers and vLLM read.

A matrix that ran in FP8 is written as E4M3 bytes, with scales in the granularity of the run's recipe. A matrix that Octavo
fuses (query/key/value, gate/up) has one scale for all of its parts: vLLM fuses them too, and would recast parts with different
scales. Everything else has the run's compute dtype: head, embedding, routers, norms, and layers outside FP8. One file is in
memory at a time.

Matrices of experts are written one by one under their published names, for vLLM and transformers: gate and up of an expert
share a scale. Inputs of experts are cast by their amax: vLLM has one static scale for all experts of a layer, but the run has
one for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.build import build_model
from octavo.checkpoint.reader import begun_scales, recipe_of, stored_scales
from octavo.checkpoint.writer import weights
from octavo.config.run import RunConfig
from octavo.dtypes import torch_dtype
from octavo.errors import InputError, some, warn
from octavo.fp8.recipe import Granularity, Operand, Recipe
from octavo.fp8.scaling import state_records, states_of
from octavo.kernels import reference
from octavo.kernels.reference import BLOCK
from octavo.models.convert import check_decoder, conversion
from octavo.models.decoder import Decoder
from octavo.models.lora import adapted
from octavo.models.published import causal_lm_on_meta, published
from octavo.nn.plain_names import stored_names
from octavo.parallel.calls import together
from octavo.parallel.coordination import Ranks, writing_ranks
from octavo.plan.fp8_auto import read_choice
from octavo.plan.precision import PrecisionSchedule
from octavo.plan.run import build_options
from octavo.run.export import OpenRun, check_empty, check_target, open_run, run_config, write_gathered, write_run
from octavo.run.export import export as export_weights
from octavo.run.folder import RunFolder
from octavo.storage import local_path
from octavo.stored_names import record_name

_E4M3 = torch.float8_e4m3fn
_HALF_STEP = 16.0
"""Half a step of E4M3 around 448: a value clipped by less has no more than a rounding error."""
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


@dataclass(frozen=True)
class _Matrix:
    """A parameter that ran in FP8.

    Attributes:
        recipe: its layer's recipe.
        weight_scale: the run's delayed scale; None if scales are computed from the values.
        input_scale: scale of the cast of the layer's input.
        experts: number of matrices in a stack, with a scale each; None for one matrix.
    """

    recipe: Recipe
    weight_scale: Tensor | None
    input_scale: Tensor | None
    experts: int | None = None

    @property
    def scheme(self) -> dict[str, Any]:
        """compressed-tensors' `weights` and `input_activations`."""
        match self.recipe.casts[Operand.WEIGHT].granularity:
            case Granularity.BLOCK_128X128:
                weights = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
                inputs: dict[str, Any] = {"strategy": "group", "group_size": BLOCK, "dynamic": True}
            case Granularity.ROW:
                weights, inputs = {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
            case _:
                weights = {"strategy": "tensor"}
                fixed = self.input_scale is not None
                # For experts vLLM supports one scale a tensor of weights only with the same for inputs.
                inputs = {"strategy": "tensor" if fixed or self.experts else "token", "dynamic": not fixed}
        return {"weights": {**_FLOAT8, "dynamic": False, **weights}, "input_activations": {**_FLOAT8, **inputs}}


@dataclass
class _Encoder:
    """Returns the tensors of a file for each parameter."""

    matrices: Mapping[str, _Matrix]
    dtype: torch.dtype
    beyond: list[str] = field(default_factory=list)

    def __call__(self, name: str, weight: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bytes and scales of a matrix in FP8; other parts in the folder's dtype."""
        matrix = self.matrices.get(name)
        if matrix is None:
            return {theirs: part.to(self.dtype) if part.is_floating_point() else part for theirs, part in parts.items()}
        if weight.is_meta:
            return {key: one for theirs, part in parts.items() for key, one in self._shapes(matrix, theirs, part).items()}
        if not bool(weight.isfinite().all()):
            raise InputError(f"{name} has values that are not finite: export an earlier checkpoint (--checkpoint step-N).")
        how = matrix.recipe.casts[Operand.WEIGHT]
        scales = self._scales(name, weight, matrix) if how.granularity is Granularity.TENSOR else None
        tensors: dict[str, Tensor] = {}
        for theirs, part in parts.items():
            one = None if scales is None else scales[_expert(theirs) if matrix.experts else 0]
            if one is not None:
                data, scale = reference.cast(part, one, _E4M3, how.format.max), one.reshape(1)
            elif how.granularity is Granularity.ROW:
                data, scale = reference.cast_rows(part, _E4M3, how.format.max)
            else:
                data, scale = reference.cast_blocks(part, _E4M3, how.format.max, BLOCK)
            tensors |= {theirs: data, f"{theirs.removesuffix('weight')}weight_scale": reference.divide(1.0, scale)}
            if matrix.input_scale is not None:
                inverse = reference.divide(1.0, matrix.input_scale)
                tensors[f"{theirs.removesuffix('weight')}input_scale"] = inverse.reshape(1).clone()
        return tensors

    def say(self) -> None:
        """Warn about weights that were written with scales other than the run's."""
        if self.beyond:
            warn(
                f"{some(list(dict.fromkeys(self.beyond)))}: grown beyond the last step's delayed scale, which clips them in "
                "the run's evaluation: exported with a scale from the weight's amax."
            )

    def _scales(self, name: str, weight: Tensor, matrix: _Matrix) -> list[Tensor]:
        """The run's scale of each matrix; for one that has outgrown it, the scale of its amax."""
        how, recorded = matrix.recipe.casts[Operand.WEIGHT], matrix.weight_scale
        stack = weight.unflatten(0, (matrix.experts or 1, -1))
        of_each = [None] * len(stack) if recorded is None else list(recorded.reshape(-1))
        scales = []
        for one, scale in zip(stack, of_each, strict=True):
            largest = reference.amax(one)
            if scale is None or bool(largest * scale > how.format.max + _HALF_STEP):
                self.beyond += [] if scale is None else [name]
                scale = reference.scale_from_amax(largest, how.format.max, power_of_two=how.power_of_two)
            scales.append(scale.reshape(()))
        return scales

    def _shapes(self, matrix: _Matrix, theirs: str, part: Tensor) -> dict[str, Tensor]:
        rows, columns = part.shape
        match matrix.recipe.casts[Operand.WEIGHT].granularity:
            case Granularity.TENSOR:
                scales: tuple[int, ...] = (1,)
            case Granularity.ROW:
                scales = (rows, 1)
            case _:
                scales = (-(-rows // BLOCK), -(-columns // BLOCK))
        shapes = {
            theirs: torch.empty_like(part, dtype=_E4M3),
            f"{theirs.removesuffix('weight')}weight_scale": torch.empty(scales, dtype=torch.float32, device="meta"),
        }
        if matrix.input_scale is not None:
            shapes[f"{theirs.removesuffix('weight')}input_scale"] = torch.empty(1, dtype=torch.float32, device="meta")
        return shapes


def _expert(theirs: str) -> int:
    """The expert's number in the name of a published matrix."""
    match = re.search(r"\.experts\.(\d+)\.", theirs)
    assert match is not None, theirs
    return int(match[1])


def export_fp8(run: Path, to: Path, checkpoint: str | None = None, *, merge: bool = False) -> Path:
    """Write a checkpoint of `run` (`step-N`, or the newest complete one) in FP8 to the folder `to`; returns the checkpoint.

    Scales of activations are static if the run has delayed scales, which are those of its last steps; otherwise dynamic, one a
    token, or after block scaling one for each 128 columns of a token. merge: for a run with adapters; they are merged in
    float32 and cast once.

    Raises:
        InputError: as in `export_run`; a run without products in FP8, with adapters but without `merge`, or with a model that
            runs its original code; experts with one of their two matrices in FP8; or matrices with blocks that vLLM cannot
            read.
        OctavoError: no checkpoint is complete.
    """
    config = run_config(run)
    check_target(run, to)
    if (config.lora.rank is None) == merge:
        raise InputError(
            f"--merge: {run} has no adapters (lora.rank). Leave --merge out."
            if merge
            else f"--fp8: {run} has adapters (lora.rank), which cannot be served in FP8 alone: give --merge too, for the "
            "whole model with them; without --fp8 they are exported for PEFT."
        )
    opened = open_run(run, config, checkpoint, exact=True)
    model, recipe = _model(run, config, opened)
    matrices = _matrices(model, recipe, stored_scales(opened.checkpoint), opened.checkpoint, merged=merge)
    dtype = torch_dtype(config.model.dtype)
    encoder = _Encoder(matrices, dtype)
    write_run(opened, to, encoder, {"quantization_config": _quantization(model, matrices), "dtype": str(dtype)[6:]})
    encoder.say()
    return opened.checkpoint


def export(model_or_path: nn.Module | str | Path, folder: str | Path, *, fp8: bool = False) -> None:
    """Write a model, or the newest whole checkpoint of a run, for `AutoModelForCausalLM.from_pretrained`.

    For timm's vision transformer with Octavo's blocks, weights have timm's names, for `load_state_dict`.
    All ranks call it and rank 0 writes; the parameters of a sharded model are gathered one by one.

    Args:
        model_or_path: a transformed model, or the folder of a run, whose tokenizer is copied too.
        folder: a new or empty folder.
        fp8: write matrices that ran in FP8 in compressed-tensors' layout, as `octavo export --fp8` does for a run, by the
            recipe and the scales of the last forwards under `octavo.fp8_autocast`.

    Raises:
        InputError: the path is not a run, the folder is not empty or cannot be written, the model is not transformers', or some
            rank does not call this; with `fp8`, a model that never ran in FP8, has adapters or runs its original code.
        OctavoError: no checkpoint of the run is complete, or the disk is full; no folder is left.
    """
    if not fp8:
        export_weights(model_or_path, folder)
        return
    to = local_path(folder, "octavo.export: folder")
    with together("octavo.export"):
        ranks = writing_ranks()
        if isinstance(model_or_path, nn.Module):
            _export_model(model_or_path, to, ranks)
        else:
            path = local_path(model_or_path, "octavo.export: model_or_path")
            ranks.on_rank_0(lambda: export_fp8(path, to))


def _export_model(model: nn.Module, to: Path, ranks: Ranks) -> None:
    """Write a model in memory in FP8. Collective."""
    if not isinstance(model, Decoder):
        raise InputError(
            f"octavo.export(fp8=True): {type(model).__name__} is not Octavo's decoder, and only that is exported in FP8. Leave "
            "fp8 out."
        )
    if adapted(model) is not None:
        raise InputError(
            "octavo.export(fp8=True): the model has adapters (lora), which cannot be served in FP8 alone. octavo.export(model, "
            "folder) writes them for PEFT; octavo export RUN --merge --fp8 writes a run's whole model with them."
        )
    check_decoder(model)
    used = [state.history_recipe for _, state in states_of(model)] + [state.recipe for _, state in states_of(model)]
    recipe = next((recipe for recipe in used if recipe is not None), None)
    if recipe is None:
        raise InputError(
            "octavo.export(fp8=True): no product of the model ran in FP8. Train it under octavo.fp8_autocast, or leave fp8 out."
        )
    stored = stored_names(model)
    records = {record_name(name, stored): tensor for name, tensor in state_records(model).items()}
    matrices = _matrices(model, recipe, begun_scales(records), "the model", merged=False)
    own_names = {name: matrices[one] for name, one in stored.items() if one in matrices}
    encoder = _Encoder({**matrices, **own_names}, model.dtype)
    more = {"quantization_config": _quantization(model, matrices), "dtype": str(model.dtype)[6:]}
    ranks.on_rank_0(lambda: check_empty(to))
    generation = getattr(model, "generation_config", None)
    write_gathered(weights(model), model.config, conversion(model.spec), to, ranks, generation, encoder, more)
    encoder.say()


def _model(run: Path, config: RunConfig, opened: OpenRun) -> tuple[Decoder, Recipe]:
    """(the run's model without values, with the layers in FP8 at the checkpoint; the recipe of its products).

    Raises:
        InputError: nothing ran in FP8, or the model runs its original code.
    """
    recipe = recipe_of(opened.checkpoint)
    if recipe is None or config.fp8.enabled is False:
        raise InputError(
            f"--fp8: no product of {run} ran in FP8, so it has no scales, and in FP8 it would compute something else than "
            "in training. Export without --fp8; or train some steps with fp8.enabled = true."
        )
    options = build_options(config, blocks="auto")
    choices = RunFolder(run).choices
    excluded = read_choice(choices)["kept_out"] if config.fp8.enabled == "auto" and choices.is_file() else {}
    options = replace(options, lora=None, frozen=(), excluded=excluded)
    model = build_model(opened.config, options, device="meta")
    if not isinstance(model, Decoder) or config.model.blocks == "own":
        raise InputError(
            f"--fp8: {type(model).__name__} runs its original code (octavo.describe(model) says why), and only Octavo's "
            "decoder is exported in FP8. Export without --fp8."
        )
    if config.fp8.schedule:
        if config.train.steps is None:
            warn("fp8.schedule with train.epochs: layers that left FP8 in the last steps are written in FP8.")
        else:
            step = int(opened.checkpoint.name.rpartition("-")[2])
            PrecisionSchedule(model, config.fp8.schedule, config.train.steps).begin(step)
    return model, recipe


def _matrices(
    model: Decoder, recipe: Recipe, scales: Mapping[str, Tensor], source: object, *, merged: bool
) -> dict[str, _Matrix]:
    """Parameters in FP8 by their stored names.

    scales: delayed scales that have begun, by the source's `<module>.<operand>`. merged: weights' scales are the base's.

    Raises:
        InputError: block scaling of matrices with incomplete blocks, which vLLM refuses.
    """
    stored = stored_names(model)
    names = {id(parameter): stored.get(name, name) for name, parameter in model.named_parameters()}
    way = conversion(model.spec)
    matrices: dict[str, _Matrix] = {}
    for module, state in states_of(model):
        recipe_of_layer = state.under(recipe)
        if recipe_of_layer is None or state.weight is None or module == "head":
            continue
        name, key = names[id(state.weight)], stored.get(module, module)
        weight, inputs = (scales.get(f"{key}.{operand.value}") for operand in (Operand.WEIGHT, Operand.INPUT))
        delayed = recipe_of_layer.history is not None
        if delayed and inputs is None and state.experts is None:
            raise InputError(f"--fp8: {module} has no delayed scale in {source}: it never ran. Give a later checkpoint.")
        inputs = inputs if delayed and state.experts is None else None
        matrices[name] = _Matrix(recipe_of_layer, weight if delayed and not merged else None, inputs, state.experts)
        if recipe_of_layer.casts[Operand.WEIGHT].granularity is Granularity.BLOCK_128X128:
            for theirs, part in way.split(name, torch.empty(state.weight.shape, device="meta")).items():
                rows, columns = part.shape[-2:]
                gate_and_up = state.experts is not None and model.spec.gated and name.endswith("fc1_weight")
                if rows % (BLOCK * (1 + gate_and_up)) or columns % BLOCK:
                    raise InputError(
                        f"--fp8: {theirs} is {list(part.shape)}, and readers of block scales need multiples of {BLOCK}. "
                        'Export without --fp8, or train with fp8.recipe = "rowwise" (fp8.layers for single layers).'
                    )
    for name, matrix in matrices.items():
        if matrix.experts is not None:
            _check_experts(name, matrices)
            if matrix.recipe.casts[Operand.WEIGHT].granularity is Granularity.BLOCK_128X128:
                raise InputError(
                    f"--fp8: {name} has a scale for each block of 128 x 128, which transformers does not load for experts. "
                    'Export without --fp8, or train with fp8.recipe = "rowwise" (fp8.layers for experts alone).'
                )
    if not matrices:
        raise InputError("--fp8: every layer is out of FP8 (fp8.skip, fp8.layers, fp8.schedule). Export without --fp8.")
    return matrices


def _check_experts(name: str, matrices: Mapping[str, _Matrix]) -> None:
    """Raise an InputError for experts whose two matrices have different schemes: readers support one for both."""
    layer, _, leaf = name.rpartition(".")
    other = f"{layer}.{'fc2_weight' if leaf == 'fc1_weight' else 'fc1_weight'}"
    if other not in matrices or matrices[other].scheme != matrices[name].scheme:
        raise InputError(
            f"--fp8: {name} runs in FP8, and {other} {'by another recipe' if other in matrices else 'does not'}: readers have "
            "one scheme for both matrices of experts. Export without --fp8, or train both alike (fp8.skip, fp8.layers)."
        )


def _quantization(model: Decoder, matrices: Mapping[str, _Matrix]) -> dict[str, Any]:
    """compressed-tensors' quantization_config."""
    plain, way = causal_lm_on_meta(model.config), conversion(model.spec)
    linear = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    stacked = {name for name in matrices if matrices[name].experts is not None}
    in_fp8 = {theirs.removesuffix(".weight"): matrices[name] for name in matrices for theirs in way.names(name)}
    of_experts = {theirs for name in stacked for theirs in way.names(name)}
    left_out: dict[str, None] = {}
    routers = [name.removesuffix(".weight") for name, _ in plain.named_parameters() if name.endswith(".mlp.gate.weight")]
    for name in (*linear, *routers):
        if name not in in_fp8:  # under both names
            weight = {f"{name}.weight": torch.empty(1, device="meta")}
            left_out |= dict.fromkeys((name, *(theirs.removesuffix(".weight") for theirs in published(plain, weight))))
    for name, _ in plain.named_parameters():
        if name.endswith(".experts.down_proj") and name not in of_experts:
            layer = re.escape(name[: name.index(".mlp.")])
            left_out |= dict.fromkeys((name.rpartition(".")[0], f"re:{layer}\\..*experts.*"))
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, matrix in in_fp8.items():
        scheme = matrix.scheme
        for known, targets in groups:
            if known == scheme:
                targets.append(name)
                break
        else:
            groups.append((scheme, [name]))
    only = len(groups) == 1
    for _, targets in groups:
        if stacked and not of_experts.isdisjoint(targets):  # matched by the class of expert matrices, and by their names
            targets[:] = ["Linear", r"re:.*\.experts\..*", *(one for one in targets if one not in of_experts)]
    return {
        "config_groups": {
            f"group_{number}": {
                "targets": ["Linear"] if only else targets,
                **scheme,
                "output_activations": None,
                "format": "float-quantized",
            }
            for number, (scheme, targets) in enumerate(groups)
        },
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": list(left_out),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
