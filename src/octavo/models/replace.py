"""FP8 linears in a module that keeps its own code, and patterns of layers that stay out of FP8."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from octavo.errors import InputError, nearest
from octavo.fp8.scaling import states_of
from octavo.models.decoder import Decoder
from octavo.nn import Linear


def replace_linears(model: nn.Module) -> nn.Module:
    """Octavo's Linear in place of each plain `nn.Linear`, with the same parameters; an output head stays as it is."""
    if type(model) is nn.Linear:
        return Linear.from_linear(model)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, Linear.from_linear(child))
    return model


def skip_modules(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the layers that the patterns name out of FP8.

    Raises:
        InputError: a pattern matches no FP8 layer.
    """
    states = dict(states_of(model))
    for pattern in patterns:
        matched = [name for name in states if any(fnmatch.fnmatchcase(alias, pattern) for alias in _aliases(model, name))]
        if not matched:
            guess = nearest(pattern.replace("*", ""), states)
            hint = f" The nearest layer is {guess!r}." if guess else ""
            raise InputError(f"fp8.skip pattern {pattern!r} matches no FP8 layer.{hint} octavo.describe(model) names them all.")
        for name in matched:
            states[name].skipped = f"skipped by pattern {pattern!r}"


def _aliases(model: nn.Module, name: str) -> Iterator[str]:
    """The names of a layer that a pattern may mean: Octavo's, its parents, and those of Hugging Face's modules."""
    parts = name.split(".")
    yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    if isinstance(model, Decoder):
        prefix = f"{model.family.block_prefix}.{parts[1]}"
        yield prefix
        for ours, theirs in model.family.block_names.items():
            if f"layers.{parts[1]}.{ours}".replace("_weight", ".weight") == f"{name}.weight":
                yield from (
                    f"{prefix}.{part.removesuffix('.weight')}" for part in ([theirs] if isinstance(theirs, str) else theirs)
                )
