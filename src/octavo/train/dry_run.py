"""`octavo train --dry-run`: the resolved run file, the arithmetic of a checked run and its memory; nothing is built or written.

Ranks and GPU may be others than those at hand, so that a run is planned on a laptop.
"""

from __future__ import annotations

import math
from typing import Any

from octavo.data.loader import passes
from octavo.data.prepared import prepared_or_none
from octavo.errors import InputError, unknown
from octavo.hardware import GPUS, lookup
from octavo.train import memory
from octavo.train.plan import RunPlan, Target


def target(world_size: int | None, gpu: str | None) -> Target:
    """The ranks and the GPU of a planned run by their options; None for those at hand.

    Raises:
        InputError: less than one rank, or a GPU that is not in the table of `octavo.hardware`.
    """
    if world_size is not None and world_size < 1:
        raise InputError(f"--world-size {world_size}: a run has at least 1 rank.")
    found = None if gpu is None else lookup(gpu)
    if gpu is not None and found is None:
        several = [one.name for one in GPUS if gpu.strip() and one.name.casefold().startswith(gpu.strip().casefold())]
        if several:
            raise InputError(f"--gpu {gpu!r} is the beginning of several GPUs: {', '.join(several)}. Give one of them.")
        raise unknown("GPU", gpu, (one.name for one in GPUS), key="--gpu")
    return Target(world_size, found)


def dry_run(plan: RunPlan) -> tuple[dict[str, Any], list[str]]:
    """Tokens, epochs, parameters and memory of a checked run: as a dict for `--json`, and as lines of text."""
    config, train = plan.config, plan.config.train
    parameters = sum(math.prod(shape) for shape, _ in plan.weights.values())
    tokens_per_step = train.global_batch * config.data.sequence_length
    steps = train.steps  # None: train.epochs, of data that is not prepared yet
    tokens = None if steps is None else tokens_per_step * steps
    epochs, text_of_epochs, by_source = None, "unknown until the data is prepared (octavo prepare)", {}
    prepared = prepared_or_none(config.data)
    samples = 0 if steps is None else steps * train.global_batch
    if prepared is not None and samples and (each_source := passes(prepared, config.data, samples)):
        epochs = samples / sum(each.sequences for each in each_source)
        text_of_epochs = "; ".join(f"{each.source}: {each}" if config.data.weights else str(each) for each in each_source)
        by_source = {each.source: each.epochs for each in each_source} if config.data.weights else {}
    found = memory.memory_of(plan)
    figures = {
        "config": config.model_dump(mode="json"),
        "device": plan.hardware.name,
        "fp8": plan.fp8_note,
        "parameters": parameters,
        "memory": memory.figures(plan, found),
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
        },
    }
    text = [
        config.to_toml(),
        f"device      {plan.hardware.name}",
        f"precision   {plan.fp8_note}",
        f"parameters  {parameters:,}",
        f"batch       {train.global_batch} sequences = {plan.degrees.data} data-parallel x {plan.micro_batch} micro-batch "
        f"x {plan.accumulation} accumulation",
        f"tokens      {tokens_per_step:,} a step ({train.global_batch} x {config.data.sequence_length}) "
        + ("" if steps is None else f"x {steps:,} steps = {tokens:,}"),
        f"epochs      {text_of_epochs}",
        f"output      {config.output}",
        *memory.lines(plan, found),
    ]
    return figures, text
