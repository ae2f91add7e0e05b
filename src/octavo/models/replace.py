"""FP8 linears in a module that keeps its own code; layers with another recipe, or none, by patterns of their names."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D as PlainConv1D

from octavo.errors import InputError, nearest
from octavo.fp8.recipe import Recipe
from octavo.fp8.scaling import ModuleState, states_of
from octavo.models.conv1d import Conv1D
from octavo.models.convert import conversion_of
from octavo.models.structure import LINEARS
from octavo.nn.attention import DotProductAttention
from octavo.nn.linear import Linear
from octavo.nn.mlp import LayerNormMLP
from octavo.nn.moe import LayerNormMoE


def replace_linears(model: nn.Module) -> None:
    """Turn each module of `LINEARS`, and Hugging Face's `Conv1D`, into Octavo's, in place; an output head stays as it is."""
    find_head = getattr(model, "get_output_embeddings", None)  # of Hugging Face's models, and of PEFT's around them
    head = find_head() if callable(find_head) else None
    heads = set() if head is None else set(head.modules())  # an adapter on the head has the matrix inside
    for module in model.modules():
        if isinstance(module, nn.Linear) and _class(module) in LINEARS and module not in heads:
            Linear.from_linear(module)
        elif type(module) is PlainConv1D:
            Conv1D.from_conv1d(module)


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def keep_frozen(model: nn.Module, trains: Mapping[str, bool]) -> None:
    """Set `requires_grad` of a model with Octavo's blocks by that of its source's parameters, `trains`.

    Raises:
        InputError: of matrices that become one parameter some are frozen and some are not.
    """
    way = conversion_of(model)
    assert way is not None
    for name, parameter in model.named_parameters():
        parts = {part: trains.get(part, True) for part in way.names(name)}
        if len(set(parts.values())) > 1:
            frozen = [part for part, trained in parts.items() if not trained]
            raise InputError(
                f"{', '.join(frozen)} is frozen, but in Octavo's decoder {', '.join(parts)} are one parameter ({name}): "
                "set requires_grad of all of them to the same."
            )
        parameter.requires_grad_(all(parts.values()))


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train no parameter whose name, or that of a module around it, a pattern matches; names are Octavo's or the source's.

    Raises:
        InputError: a pattern matches no parameter, only some of the matrices that are one parameter, or more by Octavo's names
            than by the source's; or all are frozen.
    """
    way = conversion_of(model)
    names = {name: () if way is None else tuple(way.names(name)) for name, _ in model.named_parameters()}
    for pattern in patterns:
        _refuse_two_meanings(names, pattern)
    matched: set[str] = set()
    for name, parameter in model.named_parameters():
        theirs = names[name]
        found = {alias: [p for p in patterns if _names(alias, p)] for alias in (name, *theirs)}
        matched.update(pattern for hits in found.values() for pattern in hits)
        left = [part for part in theirs if not found[part]]
        if found[name] or (theirs and not left):
            parameter.requires_grad_(False)
        elif len(left) < len(theirs):
            some = next(pattern for part in theirs for pattern in found[part])
            raise InputError(
                f"train.freeze: {some!r} does not match {', '.join(left)}, but {', '.join(theirs)} are one parameter here "
                f"({name}): freeze all of them, or none."
            )
    for pattern in patterns:
        if pattern not in matched:
            known = [alias for name, theirs in names.items() for alias in (name, *theirs)]
            guess = nearest(pattern.replace("*", ""), known)
            hint = f" The nearest is {guess!r}." if guess else f" Names are such as {known[-1]!r}."
            raise InputError(
                f"train.freeze pattern {pattern!r} matches no parameter.{hint} octavo describe names all matrices."
            )
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"train.freeze = {list(patterns)!r} leaves no parameter to train. Leave a pattern out.")


def _refuse_two_meanings(names: Mapping[str, Sequence[str]], pattern: str) -> None:
    """Raise an InputError if Octavo's names would freeze more than the source's, which the pattern matches too.

    "*norm*" is every norm of a Hugging Face model, and here every matrix behind a norm (`layernorm_qkv.weight`).
    """
    by_source = [name for name, theirs in names.items() if any(_names(each, pattern) for each in theirs)]
    more = [name for name in names if _names(name, pattern) and name not in by_source]
    if not by_source or not more:
        return
    first = [each for name in by_source for each in names[name] if _names(each, pattern)]
    second = [each for name in more for each in names[name] or (name,)]
    shown = [", ".join(dict.fromkeys(repr(re.sub(r"\.\d+\.", ".*.", each)) for each in kind)) for kind in (first, second)]
    raise InputError(
        f"train.freeze pattern {pattern!r} has two meanings. By the source's names it is {shown[0]}; by Octavo's also "
        f"{shown[1]}, since it matches {more[0]!r}. Write those that you mean."
    )


def _names(name: str, pattern: str) -> bool:
    """True if a pattern matches the name of a parameter or of a module around it."""
    return any(fnmatch.fnmatchcase(each, pattern) for each in itertools.accumulate(name.split("."), "{}.{}".format))


def recompute_mlps(model: nn.Module, chunks: int = 1) -> None:
    """Let each MLP recompute its first product in backward and save the rest, in so many chunks of tokens."""
    for module in model.modules():
        if isinstance(module, LayerNormMLP):
            module.checkpoint, module.chunks = True, chunks


def refuse_part_of_experts(model: nn.Module, recompute: object, mlp_chunks: int) -> None:
    """Raise an InputError for experts, which are not recomputed or computed in parts."""
    if any(isinstance(layer, LayerNormMoE) for layer in model.modules()):
        asked = 'train.recompute = "mlp"' if recompute == "mlp" else f"train.mlp_chunks = {mlp_chunks}"
        raise InputError(
            f'{asked}: experts are recomputed with their block alone. Set train.recompute = "selective", or true, and '
            "train.mlp_chunks = 1."
        )


def refuse_dropout(model: nn.Module) -> None:
    """Raise an InputError for attention with dropout, whose result a recomputation of the rest would not repeat."""
    rates = {layer.attention_dropout for layer in model.modules() if isinstance(layer, DotProductAttention)}
    if any(rates):
        raise InputError(
            f'train.recompute = "selective" with attention_dropout = {max(rates)}: a result with dropout is computed again. '
            "Set train.recompute = true, or attention_dropout = 0.0."
        )


def choose_recipes(
    model: nn.Module,
    *,
    layers: Mapping[str, Recipe | None] | None = None,
    skip: Sequence[str] = (),
    excluded: Mapping[str, str] | None = None,
) -> None:
    """Give FP8 layers a recipe of their own, or none; arguments as in `build_model`.

    Raises:
        InputError: a pattern matches no FP8 layer.
    """
    states = dict(states_of(model))
    for pattern, recipe in (layers or {}).items():
        for state in _matched(model, states, pattern, "fp8.layers"):
            state.override, state.override_by = recipe, f"{recipe.name} scaling by pattern {pattern!r}" if recipe else ""
            state.skipped = "" if recipe else f"in high precision by pattern {pattern!r}"
    for pattern in skip:
        for state in _matched(model, states, pattern, "fp8.skip"):
            state.skipped = f"skipped by pattern {pattern!r}"
    for name, reason in (excluded or {}).items():
        states[name].skipped = states[name].skipped or reason


def _matched(model: nn.Module, states: Mapping[str, ModuleState], pattern: str, key: str) -> list[ModuleState]:
    way, known = conversion_of(model), {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def aliases(name: str) -> Iterator[str]:
        """Octavo's name of a layer and the modules around it, and the same by the source's names."""
        parameters = {f"{name}.weight", f"{name}_weight"} & known
        theirs = [] if way is None else [theirs for parameter in parameters for theirs in way.names(parameter)]
        for alias in (name, *(weight.removesuffix(".weight") for weight in theirs)):
            yield from itertools.accumulate(alias.split("."), "{}.{}".format)

    matched = [state for name, state in states.items() if any(fnmatch.fnmatchcase(alias, pattern) for alias in aliases(name))]
    if not matched:
        guess = nearest(pattern.replace("*", ""), states)
        hint = f" The nearest layer is {guess!r}." if guess else ""
        raise InputError(f"{key} pattern {pattern!r} matches no FP8 layer.{hint} octavo.describe(model) names them all.")
    return matched
