"""Activation recomputation, `train.recompute`: its levels, their order, and the models that support them.

`train.mlp_chunks` above 1 recomputes the same as "mlp".
"""

from __future__ import annotations

from typing import Literal

from octavo.errors import InputError

Recompute = bool | Literal["mlp", "selective"]
"""The level. "mlp": recompute each MLP's first product; "selective": a block except attention; True: the whole block."""

LEVELS: tuple[Recompute, ...] = (False, "mlp", "selective", True)
"""From the fastest step to the least memory."""


def recomputes_block(recompute: Recompute) -> bool:
    """True if a block saves only its input, or its input and attention's result."""
    return recompute is True or recompute == "selective"


def levels_for(*, experts: bool = False, attention_dropout: float = 0.0) -> tuple[Recompute, ...]:
    """The levels that Octavo's blocks support, in the order of `LEVELS`."""
    excluded = {"mlp"} if experts else set()
    if attention_dropout:
        excluded.add("selective")
    return tuple(level for level in LEVELS if level not in excluded)


def check_values(recompute: object, mlp_chunks: object) -> None:
    """Raise an InputError for anything but a level, and a number of chunks from 1."""
    if not isinstance(recompute, bool | str) or recompute not in LEVELS:
        raise InputError(f'recompute = {recompute!r} is not supported: use False, True, "selective", or "mlp".')
    if type(mlp_chunks) is not int or mlp_chunks < 1:
        raise InputError(f"mlp_chunks = {mlp_chunks!r} is not supported: use a whole number from 1 (no chunks).")


def check_blocks(recompute: Recompute, mlp_chunks: int, *, experts: bool, attention_dropout: float) -> None:
    """Raise an InputError for levels that Octavo's blocks of this kind cannot run."""
    if experts and (recompute == "mlp" or mlp_chunks > 1):
        asked = 'train.recompute = "mlp"' if recompute == "mlp" else f"train.mlp_chunks = {mlp_chunks}"
        raise InputError(
            f'{asked}: experts are recomputed only with their whole block. Set train.recompute = "selective", or true, and '
            "train.mlp_chunks = 1."
        )
    if attention_dropout and recompute == "selective":  # the recomputed rest would not match the saved result
        raise InputError(
            f'train.recompute = "selective" with attention_dropout = {attention_dropout}: a result with dropout would be '
            "recomputed. Set train.recompute = true, or attention_dropout = 0.0."
        )


def check_own_code(recompute: Recompute, mlp_chunks: int, *, model: str, families: str, has_switch: bool) -> None:
    """Raise an InputError for levels that a model with its original code cannot run; `families` lists Octavo's decoders.

    has_switch: it has Hugging Face's method that turns recomputation on.
    """
    if mlp_chunks > 1:
        raise InputError(
            f"train.mlp_chunks = {mlp_chunks}: {model} runs its original code, and only the blocks of Octavo's decoder compute "
            f"their MLPs in chunks ({families}). Use train.mlp_chunks = 1."
        )
    if recompute in ("mlp", "selective"):
        raise InputError(
            f'train.recompute = "{recompute}": {model} runs its original code, and only the blocks of Octavo\'s decoder are'
            f" recomputed in part ({families}). Use train.recompute = true instead."
        )
    if recompute and not has_switch:
        raise InputError(
            f"recompute = True: {model} runs its original code and has no gradient_checkpointing_enable(), the switch of "
            "Hugging Face's models: use recompute = False, and torch.utils.checkpoint in the model's forward."
        )
