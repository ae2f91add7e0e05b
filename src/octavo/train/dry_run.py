"""`octavo train --dry-run`: the resolved run file and the arithmetic of a checked run; nothing is built or written."""

from __future__ import annotations

import math
from typing import Any

from octavo.data.loader import passes
from octavo.data.prepared import prepared_or_none
from octavo.train.plan import RunPlan


def dry_run(plan: RunPlan) -> tuple[dict[str, Any], list[str]]:
    """Tokens, epochs and parameters of a checked run: as a dict for `--json`, and as lines of text."""
    config, train = plan.config, plan.config.train
    parameters = sum(math.prod(shape) for shape, _ in plan.weights.values())
    tokens_per_step = train.global_batch * config.data.sequence_length
    steps = train.steps  # None: train.epochs, of data that is not prepared yet
    tokens = None if steps is None else tokens_per_step * steps
    epochs, text_of_epochs, by_source = None, "unknown until the data is prepared (octavo prepare)", {}
    prepared = prepared_or_none(config.data)
    samples = 0 if steps is None else steps * train.global_batch
    if prepared is not None and samples and (found := passes(prepared, config.data, samples)):
        epochs = samples / sum(each.sequences for each in found)
        text_of_epochs = "; ".join(f"{each.source}: {each}" if config.data.weights else str(each) for each in found)
        by_source = {each.source: each.epochs for each in found} if config.data.weights else {}
    figures = {
        "config": config.model_dump(mode="json"),
        "device": plan.hardware.name,
        "fp8": plan.fp8_note,
        "parameters": parameters,
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
    ]
    return figures, text
