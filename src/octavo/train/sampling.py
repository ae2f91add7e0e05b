"""Samples of generated text in a training: they change no number of the run, and a failure never ends it."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import InputError, OctavoError, warn
from octavo.parallel.world import state
from octavo.run.sample import sample_text
from octavo.train.step import TrainContext


def sample_of(context: TrainContext, tokenizer: Path | None) -> str | None:
    """A prompt with its continuation by the model; None without a tokenizer, or if it cannot be made. All ranks call it."""
    train = context.plan.config.train
    if tokenizer is None or not train.sample_tokens:
        return None
    context.watch.phase("validation")
    try:
        return sample_text(context.model, tokenizer, train.sample_prompt, tokens=train.sample_tokens, seed=train.seed)
    except (InputError, OctavoError) as error:
        if state.rank == 0:
            warn(f"no sample of text: {error}")
        return None
