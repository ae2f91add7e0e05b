"""`octavo train --dry-run` and `octavo describe`: a checked run as text; nothing is trained or written.

The dry run prints the resolved run file, the arithmetic of the run and its memory, for ranks and a GPU that need not be
present. The description lists the matrices in FP8, and the others with the reason; its model is built on the meta device, so no
weights are needed, and a run's folder is read as its next start would read it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.build import describe
from octavo.checkpoint.reader import has_own_code
from octavo.config.degrees import DEGREES, least_world
from octavo.config.run import RunConfig
from octavo.data.corpus import Corpus
from octavo.data.loader import passes, unused_sources
from octavo.data.prepared import prepared_or_none
from octavo.errors import InputError, unknown
from octavo.hardware import FP8_CAPABILITY, GPUS, lookup
from octavo.models.description import Description, kernels_on
from octavo.parallel.coordination import writing_ranks
from octavo.plan import advice, fp8_auto
from octavo.plan.graph import documents_kernel
from octavo.plan.muon import MuonWork
from octavo.plan.run import RunPlan, Target, check, inactive_parameters
from octavo.run.folder import RunFolder


def target(world_size: int | None, gpu: str | None) -> Target:
    """The ranks and the GPU of a planned run from the options; None for the present ones.

    Raises:
        InputError: less than one rank, or a GPU that is not in the table of `octavo.hardware`.
    """
    if world_size is not None and world_size < 1:
        raise InputError(f"--world-size {world_size}: a run has at least 1 rank.")
    known = None if gpu is None else lookup(gpu)
    if gpu is not None and known is None:
        several = [one.name for one in GPUS if gpu.strip() and one.name.casefold().startswith(gpu.strip().casefold())]
        if several:
            raise InputError(f"--gpu {gpu!r} is the beginning of several GPUs: {', '.join(several)}. Give one of them.")
        raise unknown("GPU", gpu, (one.name for one in GPUS), key="--gpu")
    return Target(world_size, known)


def dry_run(plan: RunPlan) -> tuple[dict[str, Any], list[str]]:
    """Tokens, epochs, parameters and memory of a checked run: as a dict for `--json`, and as lines of text."""
    config, train = plan.config, plan.config.train
    parameters = plan.parameters
    tokens_per_step = train.global_batch * config.data.sequence_length
    steps = train.steps  # None: train.epochs with data that is not prepared yet
    tokens = None if steps is None else tokens_per_step * steps
    epochs, text_of_epochs, by_source = None, "unknown until the data is prepared (octavo prepare)", {}
    if steps is None:
        text_of_epochs = f"{train.epochs:g}; the number of steps is {text_of_epochs}"
    prepared = prepared_or_none(config.data)
    samples = 0 if steps is None else steps * train.global_batch
    if prepared is not None and samples and (each_source := passes(prepared, config.data, samples)):
        epochs = samples / sum(each.sequences for each in each_source)
        text_of_epochs = "; ".join(f"{each.source}: {each}" if config.data.weights else str(each) for each in each_source)
        by_source = {each.source: each.epochs for each in each_source} if config.data.weights else {}
    unused = unused_sources(config.data, samples) if samples else ""
    notices = Corpus(config.data).notices
    memory = advice.memory_of(plan)
    active = parameters - inactive_parameters(plan.hf_config)
    figures = {
        "config": config.model_dump(mode="json"),
        "device": plan.hardware.name,
        "fp8": plan.fp8_note,
        "parameters": parameters,
        "active_parameters": active,
        "frozen": plan.frozen,
        **({"tokens_added": plan.tokens_added} if plan.tokens_added else {}),
        "memory": advice.figures(plan, memory),
        **({"muon": dataclasses.asdict(plan.muon)} if plan.muon is not None else {}),
        "batch": {
            "global_batch": train.global_batch,
            "data_parallel": plan.degrees.data,
            "micro_batch": plan.micro_batch,
            "accumulation": plan.accumulation,
            "tokens_per_step": tokens_per_step,
            "steps": steps,
            "tokens": tokens,
            "epochs": epochs,
            **({"epochs_by_source": by_source} if by_source else {}),
            **({"unused": unused} if unused else {}),
        },
        **({"data": notices} if notices else {}),
    }
    text = [
        config.to_toml(),
        f"device      {plan.hardware.name}",
        f"precision   {plan.fp8_note}",
        f"parameters  {parameters:,}" + (f", {active:,} active per token" if active < parameters else "") + _frozen(plan),
        *([f"vocabulary  {_grown(plan)}"] if plan.tokens_added else []),
        *([f"sequences   {plan.shared_sequences}"] if plan.shared_sequences else []),
        *([f"matrices    {plan.shared_matrices}"] if plan.shared_matrices else []),
        *([f"graph       {plan.graph_note}"] if plan.graph_note else []),
        f"batch       {train.global_batch} sequences = {plan.degrees.data} data-parallel x {plan.micro_batch} micro-batch "
        f"x {plan.accumulation} accumulation",
        f"tokens      {tokens_per_step:,} a step ({train.global_batch} x {config.data.sequence_length})"
        + ("" if steps is None else f" x {steps:,} steps = {tokens:,}"),
        f"epochs      {text_of_epochs}",
        *([f"unused      {unused}"] if unused else []),
        *(f"data        {notice}" for notice in notices),
        f"output      {config.output}",
        *([f"muon        {_of_muon(plan, plan.muon, tokens_per_step)}"] if plan.muon is not None else []),
        *advice.lines(plan, memory),
    ]
    return figures, text


def _of_muon(plan: RunPlan, work: MuonWork, tokens: int) -> str:
    """Matrices, and FLOPs in addition to those of the model."""
    share = f", {work.flops / (plan.flops.total * tokens):.2%} of the model's" if plan.flops is not None else ""
    over = "" if plan.degrees.world == 1 else f", distributed over {plan.degrees.world} ranks"
    return (
        f"{work.matrices:,} matrices of {work.elements:,} parameters; Newton-Schulz: {work.flops / 1e12:.3g} TFLOP a step"
        f"{share}{over}"
    )


def describe_run(run: Path, overrides: Sequence[str] = (), target: Target | None = None) -> tuple[dict[str, Any], list[str]]:
    """A run's folder or run file: as a dict for `--json`, and as lines of text.

    Raises:
        InputError: there is no run, overrides are given for a run's folder, or the run file is wrong.
    """
    plan = _plan(run, overrides, target or Target())
    description, held = _description(plan), advice.memory_of(plan)
    recipe = None if plan.recipe is None else plan.recipe.name
    figures = {
        "run": str(run),
        "model": plan.config.model.source,
        "own_code": description.own_code or None,
        "device": plan.hardware.name,
        "fp8": plan.fp8_note,
        "recipe": recipe,
        "head": plan.fp8_head if plan.recipe is not None else False,
        "parameters": plan.parameters,
        "frozen": plan.frozen,
        "fp8_matrices": description.fp8_layers,
        "matrices": [dataclasses.asdict(layer) for layer in description.layers],
        "memory": advice.figures(plan, held),
    }
    head = {True: "logits and gradients in FP8", "backward": "gradients in FP8, logits in high precision"}
    text = [
        f"model       {plan.config.model.source}",
        f"device      {plan.hardware.name}",
        f"precision   {plan.fp8_note}",
        f"head        {head.get(plan.fp8_head, 'high precision') if plan.recipe is not None else 'high precision'}",
        f"parameters  {plan.parameters:,}{_frozen(plan)}",
        *advice.lines(plan, held),
        "",
        str(description),
    ]
    return figures, text


def _frozen(plan: RunPlan) -> str:
    return f", {plan.frozen:,} of them frozen" if plan.frozen else ""


def _grown(plan: RunPlan) -> str:
    return f"{plan.hf_config.vocab_size:,} tokens, {plan.tokens_added:,} of them added by model.resize"


def _plan(run: Path, overrides: Sequence[str], target: Target) -> RunPlan:
    """The checked run, without its pretrained weights.

    For a folder: on the ranks of its last start; for a run file: on the fewest ranks that its degrees allow.
    """
    free = target.world_size is None and "WORLD_SIZE" not in os.environ
    if not run.is_dir():
        config = RunConfig.from_file(run, overrides)
        if free:
            target = dataclasses.replace(target, world_size=least_world(*(getattr(config.parallel, key) for key in DEGREES)))
        return check(_without_weights(config), target=target)
    folder = RunFolder(run)
    recorded = folder.config()
    if recorded is None:
        raise InputError(
            f"{str(run)!r} is not the folder of a run: it has no {folder.run_file.name}. Give a run's folder or run file."
        )
    if overrides:
        raise InputError(
            f"{overrides[0]} overrides a key of {str(run)!r}, whose keys are fixed. Give its run file: {folder.run_file}."
        )
    if free:
        target = dataclasses.replace(target, world_size=folder.ranks)
    plan = check(_without_weights(recorded), target=target)
    if folder.has_checkpoints and has_own_code(folder.checkpoints, plan.weights, writing_ranks()):
        plan = check(_without_weights(recorded), blocks="own", target=target)
    return fp8_auto.choose_layers(plan, folder, resumed=True) if folder.choices.is_file() else plan


def _without_weights(config: RunConfig) -> RunConfig:
    """The run with random weights: the same names and shapes, without downloads."""
    return config.model_copy(update={"model": config.model.model_copy(update={"load": False})})


def _description(plan: RunPlan) -> Description:
    """`octavo.describe` of the run's model, by the precision and on the device of the run."""
    model = plan.model_on_meta
    description = describe(model)
    layers = description.layers
    if plan.recipe is None:
        layers = tuple(
            dataclasses.replace(layer, fp8=False, reason=plan.fp8_note if layer.fp8 else layer.reason) for layer in layers
        )
    capability = plan.hardware.capability
    native = capability is not None and capability >= FP8_CAPABILITY
    shared, repeats = plan.shared_sequences, plan.config.train.deterministic
    kind = plan.hardware.kind
    recorded = documents_kernel(plan.config, model, plan.degrees.world, kind)
    attention, products, _ = kernels_on(
        kind, capability, model, native=native, shared=shared, repeats=repeats, recorded=recorded
    )
    products = products if plan.recipe is not None else plan.fp8_note
    return dataclasses.replace(description, layers=layers, products=products, attention=attention)
