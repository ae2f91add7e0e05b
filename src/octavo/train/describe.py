"""`octavo describe`: the matrices of a run in FP8 and the others with the reason, its recipe, parameters and memory.

The model is built on the meta device, so that neither weights nor a GPU are needed. A run's folder is read as its next start
would read it: its own run file, blocks and choices of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.build import build_model, describe
from octavo.checkpoint.reader import has_own_code
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.description import Description
from octavo.parallel.coordination import writing_ranks
from octavo.run.folder import RunFolder
from octavo.train import fp8_auto, memory
from octavo.train.plan import RunPlan, Target, check, model_options


def describe_run(run: Path, overrides: Sequence[str] = (), target: Target | None = None) -> tuple[dict[str, Any], list[str]]:
    """A run's folder or run file: as a dict for `--json`, and as lines of text.

    Raises:
        InputError: no run is there, keys are set over those of a folder, or the run file is wrong.
    """
    plan = _plan(run, overrides, target or Target())
    found, held = _description(plan), memory.memory_of(plan)
    recipe = None if plan.recipe is None else plan.recipe.name
    figures = {
        "run": str(run),
        "model": plan.config.model.source,
        "own_code": found.own_code or None,
        "device": plan.hardware.name,
        "fp8": plan.fp8_note,
        "recipe": recipe,
        "head": plan.fp8_head if plan.recipe is not None else False,
        "parameters": plan.parameters,
        "fp8_matrices": found.fp8_layers,
        "matrices": [dataclasses.asdict(layer) for layer in found.layers],
        "memory": memory.figures(plan, held),
    }
    head = {True: "logits and gradients in FP8", "backward": "gradients in FP8, logits in high precision"}
    text = [
        f"model       {plan.config.model.source}",
        f"device      {plan.hardware.name}",
        f"precision   {plan.fp8_note}",
        f"head        {head.get(plan.fp8_head, 'high precision') if plan.recipe is not None else 'high precision'}",
        f"parameters  {plan.parameters:,}",
        *memory.lines(plan, held),
        "",
        str(found),
    ]
    return figures, text


def _plan(run: Path, overrides: Sequence[str], target: Target) -> RunPlan:
    """The checked run, without its pretrained weights."""
    if not run.is_dir():
        return check(_without_weights(RunConfig.from_file(run, overrides)), target=target)
    folder = RunFolder(run)
    config = folder.config()
    if config is None:
        raise InputError(
            f"{str(run)!r} is not the folder of a run: it has no {folder.run_file.name}. Give a run's folder or run file."
        )
    if overrides:
        raise InputError(
            f"{overrides[0]} is set over the keys of {str(run)!r}, which its folder keeps. Give its run file: "
            f"{folder.run_file}."
        )
    plan = check(_without_weights(config), target=target)
    if folder.has_checkpoints and has_own_code(folder.checkpoints, plan.weights, writing_ranks()):
        plan = check(_without_weights(config), blocks="own", target=target)
    return fp8_auto.choose_layers(plan, folder, resumed=True) if folder.choices.is_file() else plan


def _without_weights(config: RunConfig) -> RunConfig:
    """The run from random weights: names and shapes are the same, and nothing is downloaded."""
    return config.model_copy(update={"model": config.model.model_copy(update={"load": False})})


def _description(plan: RunPlan) -> Description:
    """`octavo.describe` of the run's model, by the precision and on the device of the run."""
    model = build_model(
        plan.hf_config,
        dtype=plan.dtype,
        device=torch.device("meta"),
        excluded=plan.excluded,
        blocks=plan.blocks,
        **model_options(plan.config),
    )
    found = describe(model)
    layers = found.layers
    if plan.recipe is None:
        layers = tuple(
            dataclasses.replace(layer, fp8=False, reason=plan.fp8_note if layer.fp8 else layer.reason) for layer in layers
        )
    attention = f"scaled_dot_product_attention on {plan.hardware.name}"
    return dataclasses.replace(found, layers=layers, products=plan.fp8_note, attention=attention)
