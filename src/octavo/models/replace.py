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
    """Turn each plain `nn.Linear` into Octavo's, where it stands; an output head stays as it is."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            Linear.from_linear(module)
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
        for ours, theirs in model.family.block_names.items():
            if f"layers.{parts[1]}.{ours}".replace("_weight", ".weight") == f"{name}.weight":
                for matrix in [theirs] if isinstance(theirs, str) else theirs:
                    module = f"{prefix}.{matrix.removesuffix('.weight')}".split(".")
                    yield from (".".join(module[:n]) for n in range(1, len(module) + 1))
