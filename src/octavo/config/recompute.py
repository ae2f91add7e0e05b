"""Activation recomputation, `train.recompute`: its levels, their order, and which model may use which.

Beside it stands `train.mlp_chunks`, which recomputes what "mlp" recomputes when it is above 1.
"""

from __future__ import annotations

from typing import Literal

from octavo.errors import InputError

Recompute = bool | Literal["mlp", "selective"]
"""The level. "mlp": each MLP's first product is recomputed; "selective": a block but for attention; True: a block."""

LEVELS: tuple[Recompute, ...] = (False, "mlp", "selective", True)
"""From the fastest step to the least memory."""


def recomputes_block(recompute: Recompute) -> bool:
    """True if a block saves its input alone, or its input and attention's result."""
    return recompute is True or recompute == "selective"


def levels_for(*, experts: bool = False, attention_dropout: float = 0.0) -> tuple[Recompute, ...]:
    """The levels that Octavo's blocks may use, in the order of `LEVELS`."""
    excluded = {"mlp"} if experts else set()
    if attention_dropout:
        excluded.add("selective")
    return tuple(level for level in LEVELS if level not in excluded)


def check_values(recompute: object, mlp_chunks: object) -> None:
    """Raise an InputError for anything but a level, and a number of chunks from 1."""
    if not isinstance(recompute, bool | str) or recompute not in LEVELS:
        raise InputError(f'recompute = {recompute!r} is not supported: use False, True, "selective", or "mlp".')
    if type(mlp_chunks) is not int or mlp_chunks < 1:
        raise InputError(f"mlp_chunks = {mlp_chunks!r} is not supported: use a whole number from 1, which is no chunks.")


def check_blocks(recompute: Recompute, mlp_chunks: int, *, experts: bool, attention_dropout: float) -> None:
    """Raise an InputError for what Octavo's blocks of this kind cannot do."""
    if experts and (recompute == "mlp" or mlp_chunks > 1):
        asked = 'train.recompute = "mlp"' if recompute == "mlp" else f"train.mlp_chunks = {mlp_chunks}"
        raise InputError(
            f'{asked}: experts are recomputed with their block alone. Set train.recompute = "selective", or true, and '
            "train.mlp_chunks = 1."
        )
    if attention_dropout and recompute == "selective":  # the rest of a block would not repeat the result
        raise InputError(
            f'train.recompute = "selective" with attention_dropout = {attention_dropout}: a result with dropout is computed '
            "again. Set train.recompute = true, or attention_dropout = 0.0."
        )


def check_own_code(recompute: Recompute, mlp_chunks: int, *, model: str, families: str, has_switch: bool) -> None:
    """Raise an InputError for what a model with its own code cannot do; `families` names those with Octavo's decoder.

    has_switch: it has Hugging Face's method that turns recomputation on.
    """
    if mlp_chunks > 1:
        raise InputError(
            f"train.mlp_chunks = {mlp_chunks}: {model} keeps its own code, and only the blocks of Octavo's decoder compute "
            f"their MLPs in chunks ({families}). Use train.mlp_chunks = 1."
        )
    if recompute in ("mlp", "selective"):
        raise InputError(
            f'train.recompute = "{recompute}": {model} keeps its own code, and only the blocks of Octavo\'s decoder are'
            f" recomputed in part ({families}). Use train.recompute = true instead."
        )
    if recompute and not has_switch:
        raise InputError(
            f"recompute = True: {model} keeps its own code and has no gradient_checkpointing_enable(), the switch of Hugging "
            "Face's models: use recompute = False, and torch.utils.checkpoint in the model's forward."
        )
