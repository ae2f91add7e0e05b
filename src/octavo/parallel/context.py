"""Checks that context-parallel ranks can share a model's sequences, before a GPU is touched and when the model is built."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.collectives.attention import check_heads
from octavo.errors import InputError


def check_context(
    degree: int, strategy: str, heads: int, groups: int, *, windows: Sequence[int | None], dropout: float
) -> None:
    """Raise an InputError for a decoder whose sequences `degree` ranks cannot share by this exchange.

    heads, groups: query heads and key-value heads. windows: of each layer, None without one. dropout: of attention.
    """
    if degree == 1:
        return
    if strategy == "own":
        raise InputError('cp_comm_type = "own" is for a model that keeps its code, and this one becomes Octavo\'s decoder.')
    window = next((window for window in windows if window is not None), None)
    if strategy == "p2p" and window is not None:
        raise InputError(
            f'parallel.cp_comm_type = "p2p" does not compute a sliding window (of {window} keys): set parallel.cp_comm_type = '
            '"all_gather" or "a2a".'
        )
    if strategy == "a2a":
        check_heads(heads, groups, degree)
    if dropout:
        raise InputError(
            f"model.config.attention_dropout = {dropout} with parallel.context_parallel_degree = {degree}: the ranks draw no "
            "common mask. Set model.config.attention_dropout = 0.0 (for pretrained weights, in config.json), or "
            "parallel.context_parallel_degree = 1."
        )


def original_code_message(name: str, degree: int) -> str:
    """The message for a model whose code Octavo cannot split."""
    return (
        f"parallel.context_parallel_degree = {degree} splits the sequences of Octavo's decoder, and {name} runs its original "
        "code. Set parallel.context_parallel_degree = 1; in your loop the model may split its sequences itself, "
        "through "
        'octavo.context_parallel, under octavo.transform(model, cp_comm_type="own").'
    )
