"""Factors of the learning rate by parameter: by patterns of names, and falling from block to block.

Both are multiplied. A parameter joined from several of the source's matrices has one factor: patterns that give its parts
different ones are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from octavo.errors import InputError
from octavo.models.replace import matches


def rate_factors(
    model: nn.Module, rates: Mapping[str, float], layer_decay: float, *, keys: tuple[str, str]
) -> dict[str, float]:
    """The factor of each trained parameter, by name.

    Args:
        rates: pattern (`fnmatch`) of names, Octavo's or the source's → factor; the last match applies, 1 without a match.
        layer_decay: d. Of L blocks the first has d^L, the last d; parameters registered before them, such as embeddings, d^(L +
            1); those after them, such as a final norm and a head, 1.
        keys: names of both in messages.

    Raises:
        InputError: a factor out of range, a pattern that matches no trained parameter, or matrices of one parameter with
            different factors; `layer_decay` for a model without one stack of blocks.
    """
    check_rates(rates, layer_decay, keys=keys)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    by_name = dict.fromkeys(trained, 1.0)
    unused = dict.fromkeys(rates)
    for name, parts in matches(model, rates, key=keys[0]).items():
        if name not in trained:
            continue
        for hits in parts.values():
            for pattern in hits:
                unused.pop(pattern, None)
        factors = {part: float(rates[hits[-1]]) if hits else 1.0 for part, hits in parts.items()}
        if len(set(factors.values())) > 1:
            shown = ", ".join(f"{part} {factor:g}" for part, factor in factors.items())
            raise InputError(
                f"{keys[0]} gives {shown}, but they are one parameter here ({name}): give all of them one factor, such as by "
                f"the pattern {name!r}."
            )
        by_name[name] = next(iter(factors.values()))
    if unused:
        pattern = next(iter(unused))
        raise InputError(f"{keys[0]} pattern {pattern!r} matches only frozen parameters, which have no rate. Remove it.")
    if layer_decay != 1:
        depths, blocks = _depths(model, keys[1])
        by_name = {name: factor * layer_decay ** (blocks + 1 - depths[name]) for name, factor in by_name.items()}
    return by_name


def check_rates(rates: Any, layer_decay: Any, *, keys: tuple[str, str]) -> None:
    """Refuse values out of range."""
    if not isinstance(rates, Mapping):
        raise InputError(f'{keys[0]} = {rates!r}: give a table of pattern and factor, such as {{ "*embed*" = 0.1 }}.')
    for pattern, factor in rates.items():
        if not isinstance(pattern, str) or not pattern:
            raise InputError(f"{keys[0]}: the pattern {pattern!r} is not a string: write one such as '*embed*'.")
        if not _is_number(factor) or not 0 < factor <= 1000:
            frozen = " To freeze parameters: train.freeze, or requires_grad = False." if factor == 0 else ""
            raise InputError(
                f"{keys[0]}: {pattern!r} = {factor!r}: a factor is a number above 0, at most 1000, such as 0.1.{frozen}"
            )
    if not _is_number(layer_decay) or not 0 < layer_decay <= 1:
        raise InputError(f"{keys[1]} = {layer_decay!r}: give a number above 0, at most 1, such as 0.9; 1 is no decay.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _depths(model: nn.Module, key: str) -> tuple[dict[str, int], int]:
    """Depth of each parameter, from 0 before the blocks to L + 1 after them, and L."""
    stacks = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(any(True for _ in one.parameters()) for one in module)
    }
    outer = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    if len(outer) != 1:
        present = f"{len(outer)} stacks of blocks ({', '.join(outer)})" if outer else "no stack of blocks"
        raise InputError(f"{key}: {type(model).__name__} has {present}, but needs exactly one: give rates by pattern instead.")
    stack, blocks = outer[0], stacks[outer[0]]
    prefix = f"{stack}." if stack else ""
    depths: dict[str, int] = {}
    behind = False
    for name, _ in model.named_parameters():
        inside = name.startswith(prefix)
        behind |= inside
        depths[name] = int(name.removeprefix(prefix).partition(".")[0]) + 1 if inside else blocks + 1 if behind else 0
    return depths, blocks
