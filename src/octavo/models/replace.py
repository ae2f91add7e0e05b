"""FP8 linears in a model's original code; per-layer recipes, or high precision, by patterns of names."""

from __future__ import annotations

import fnmatch
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D as PlainConv1D

from octavo.collectives.blocks import parameters_of, shape_of
from octavo.errors import InputError, nearest
from octavo.fp8.recipe import Recipe
from octavo.fp8.scaling import ModuleState, states_of
from octavo.models.conv1d import Conv1D
from octavo.models.convert import conversion_of
from octavo.models.structure import LINEARS, class_name
from octavo.nn.attention import DotProductAttention
from octavo.nn.linear import Linear
from octavo.nn.mlp import LayerNormMLP
from octavo.nn.moe import LayerNormMoE
from octavo.nn.plain_names import stored_names

_ABSENT = object()


def replace_linears(model: nn.Module) -> None:
    """Turn each module of `LINEARS`, and Hugging Face's `Conv1D`, into Octavo's, in place; an output head is left unchanged.

    Matrices of PEFT's adapters stay out of FP8, unless a pattern gives them a recipe.
    """
    find_head = getattr(model, "get_output_embeddings", None)  # of Hugging Face's models, and of PEFT's around them
    head = find_head() if callable(find_head) else None
    heads = set() if head is None else set(head.modules())  # an adapter on the head contains the matrix
    for module in model.modules():
        if isinstance(module, nn.Linear) and class_name(type(module)) in LINEARS and module not in heads:
            Linear.from_linear(module)
        elif type(module) is PlainConv1D:
            Conv1D.from_conv1d(module)
    for adapter in _adapters(model):
        for _, state in states_of(adapter):
            state.skipped = "a PEFT adapter, whose B grows quickly in early steps: delayed scales would clip it"


def _adapters(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of PEFT's adapters, without the layers that they adapt."""
    if (peft := sys.modules.get("peft")) is None:
        return
    for layer in model.modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            frozen = set(layer.get_base_layer().modules())
            yield from (module for module in layer.modules() if module is not layer and module not in frozen)


def keep_frozen(model: nn.Module, trains: Mapping[str, bool]) -> None:
    """Set `requires_grad` of a model with Octavo's blocks from its source's parameters, `trains`.

    Raises:
        InputError: some, not all, of the matrices that become one parameter are frozen.
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


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes that a user has set on the parameters of a model, by their names; a tied one under each."""
    return {name: dict(vars(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)}


def carry_attributes(model: nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy the attributes of the source's parameters, `attributes`, to the parameters of a model with Octavo's blocks.

    Attributes with a leading underscore belong to libraries: one that differs between a parameter's matrices is dropped.

    Raises:
        InputError: matrices that become one parameter differ in an attribute; or an attribute is a tensor, which would need
            another layout.
    """
    way = conversion_of(model)
    assert way is not None
    for name, parameter in model.named_parameters():
        parts = [part for part in way.names(name) if part in attributes]
        for key in dict.fromkeys(key for part in parts for key in attributes[part]):
            values = [attributes[part].get(key, _ABSENT) for part in parts]
            private = key.startswith("_")
            if any(isinstance(value, Tensor) for value in values):
                if private:
                    continue
                raise InputError(
                    f"{parts[0]} has the attribute {key}, a tensor, but becomes a part of another parameter ({name}): set it "
                    "after octavo.transform."
                )
            if all(value is values[0] or bool(value == values[0]) for value in values):
                vars(parameter).setdefault(key, values[0])
            elif not private:
                shown = ", ".join(
                    f"{part}: {'none' if value is _ABSENT else repr(value)}" for part, value in zip(parts, values, strict=True)
                )
                raise InputError(
                    f"the attribute {key} differs ({shown}), but in Octavo's blocks these are one parameter ({name}): give all "
                    "of them the same, or set it after octavo.transform."
                )


def restore_attributes(model: nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the attributes of parameters that sharding has replaced, by name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for key, value in attributes.get(name, {}).items():
            vars(parameter).setdefault(key, value)


def refuse_blocks(model: nn.Module) -> None:
    """Raise an InputError for a model with values whose ranks hold ranges; on meta such a model runs its original code."""
    blocks = parameters_of(model)
    for name, parameter in model.named_parameters():
        if blocks[parameter] is not None and not parameter.is_meta:
            raise InputError(
                f"{name} is a rank's ranges of {list(shape_of(parameter, blocks))}, and octavo.transform takes whole models, "
                "or models on the meta device: share parameters out after it."
            )


def refuse_hooks(model: nn.Module, prefix: str = "", *, meta: bool = False) -> None:
    """Raise an InputError for a hook of a parameter that will be replaced: the hook would never run.

    prefix: prefix of the parameters' names. meta: only those on the meta device.
    """
    for name, parameter in model.named_parameters():
        if not name.startswith(prefix) or (meta and not parameter.is_meta):
            continue
        for kind in ("backward_hooks", "post_accumulate_grad_hooks"):
            if hooks := getattr(parameter, f"_{kind}", None):
                method = "register_hook" if kind == "backward_hooks" else "register_post_accumulate_grad_hook"
                hook = next(iter(hooks.values()))
                raise InputError(
                    f"{name} has a hook ({getattr(hook, '__qualname__', hook)}, by {method}), but another tensor will replace "
                    "the parameter, and the hook would never run. Register it on the parameters of the trained model: after "
                    "octavo.transform, or after sharding."
                )


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name, or whose module's name, matches a pattern; names are Octavo's or the source's.

    Raises:
        InputError: a pattern matches no parameter, only some of the matrices that are one parameter, or more by Octavo's names
            than by the source's; or all are frozen.
    """
    parameters = dict(model.named_parameters())
    for name, parts in matches(model, patterns, key="train.freeze").items():
        left = [part for part, hits in parts.items() if not hits]
        if not left:
            parameters[name].requires_grad_(False)
        elif len(left) < len(parts):
            some = next(pattern for hits in parts.values() for pattern in hits)
            raise InputError(
                f"train.freeze: {some!r} does not match {', '.join(left)}, but {', '.join(parts)} are one parameter here "
                f"({name}): freeze all of them, or none."
            )
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"train.freeze = {list(patterns)!r} leaves no parameter to train. Leave a pattern out.")


def matches(model: nn.Module, patterns: Iterable[str], *, key: str) -> dict[str, dict[str, list[str]]]:
    """For each parameter its parts under the source's names (its name in the model without any), with the patterns of each.

    A pattern (`fnmatch`) matches the name of a parameter or of a module around it, Octavo's or the source's.

    key: the patterns' key, for messages.

    Raises:
        InputError: a pattern matches no parameter, or more by Octavo's names than by the source's.
    """
    patterns = list(patterns)
    way, stored = conversion_of(model), stored_names(model)
    names = {name: () if way is None else tuple(way.names(name)) for name, _ in model.named_parameters()}
    for pattern in patterns:
        _refuse_two_meanings(names, pattern, key)
    known = [alias for name, theirs in names.items() for alias in (name, *theirs)]
    former = {pattern for pattern in patterns if not any(_names(alias, pattern) for alias in known)}
    """Matches of stored names, from older files; used only if no other name matches."""
    by_parameter: dict[str, dict[str, list[str]]] = {}
    for name, theirs in names.items():
        whole = {p for p in patterns if _names(name, p) or (p in former and _names(stored.get(name, name), p))}
        by_parameter[name] = {part: [p for p in patterns if p in whole or _names(part, p)] for part in theirs or (name,)}
    matched = {pattern for parts in by_parameter.values() for hits in parts.values() for pattern in hits}
    for pattern in patterns:
        if pattern not in matched:
            guess = nearest(pattern.replace("*", ""), known)
            hint = f" The nearest is {guess!r}." if guess else f" Names are such as {known[-1]!r}."
            raise InputError(f"{key} pattern {pattern!r} matches no parameter.{hint} octavo describe names all matrices.")
    return by_parameter


def _refuse_two_meanings(names: Mapping[str, Sequence[str]], pattern: str, key: str) -> None:
    """Raise an InputError if Octavo's names would match more than the source's, which the pattern matches too.

    "*attention*" matches one norm of a Hugging Face Llama, `post_attention_layernorm`, and here everything in `self_attention`.
    """
    by_source = [name for name, theirs in names.items() if any(_names(each, pattern) for each in theirs)]
    more = [name for name in names if _names(name, pattern) and name not in by_source]
    if not by_source or not more:
        return
    first = [each for name in by_source for each in names[name] if _names(each, pattern)]
    second = [each for name in more for each in names[name] or (name,)]
    shown = [", ".join(dict.fromkeys(repr(re.sub(r"\.\d+\.", ".*.", each)) for each in kind)) for kind in (first, second)]
    raise InputError(
        f"{key} pattern {pattern!r} has two meanings. By the source's names it is {shown[0]}; by Octavo's also "
        f"{shown[1]}, since it matches {more[0]!r}. Write out the names."
    )


def _names(name: str, pattern: str) -> bool:
    """True if a pattern matches the name of a parameter or of a module around it."""
    return any(fnmatch.fnmatchcase(each, pattern) for each in itertools.accumulate(name.split("."), "{}.{}".format))


def recompute_mlps(model: nn.Module, chunks: int = 1) -> None:
    """Let each MLP recompute its first product in backward and save the rest, in `chunks` chunks of tokens."""
    for module in model.modules():
        if isinstance(module, LayerNormMLP):
            module.checkpoint, module.chunks = True, chunks


def has_experts(model: nn.Module) -> bool:
    """True if some of a model's layers are mixture of experts (MoE)."""
    return any(isinstance(layer, LayerNormMoE) for layer in model.modules())


def attention_dropout(model: nn.Module) -> float:
    """The highest dropout rate of a model's attention."""
    return max((layer.attention_dropout for layer in model.modules() if isinstance(layer, DotProductAttention)), default=0.0)


def choose_recipes(
    model: nn.Module,
    *,
    layers: Mapping[str, Recipe | None] | None = None,
    skip: Sequence[str] = (),
    excluded: Mapping[str, str] | None = None,
) -> None:
    """Give FP8 layers a separate recipe, or none; arguments as in `build_model`.

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


def matched_layers(model: nn.Module, pattern: str, key: str) -> list[ModuleState]:
    """The FP8 layers whose names a pattern of a run file's key matches.

    Raises:
        InputError: there is none.
    """
    return _matched(model, dict(states_of(model)), pattern, key)


def _matched(model: nn.Module, states: Mapping[str, ModuleState], pattern: str, key: str) -> list[ModuleState]:
    way, known = conversion_of(model), {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def aliases(name: str) -> Iterator[str]:
        """Octavo's name of a layer and the modules around it, and the same by the source's names."""
        parameters = {f"{name}.weight", f"{name}_weight"} & known
        theirs = [] if way is None else [theirs for parameter in parameters for theirs in way.names(parameter)]
        for alias in (name, *(weight.removesuffix(".weight") for weight in theirs)):
            yield from itertools.accumulate(alias.split("."), "{}.{}".format)

    matched = [state for name, state in states.items() if any(fnmatch.fnmatchcase(alias, pattern) for alias in aliases(name))]
    if not matched:  # patterns of older files, by stored names
        stored = stored_names(model)
        former = {name: itertools.accumulate(stored.get(name, name).split("."), "{}.{}".format) for name in states}
        matched = [states[name] for name, each in former.items() if any(fnmatch.fnmatchcase(one, pattern) for one in each)]
    if not matched:
        guess = nearest(pattern.replace("*", ""), states)
        hint = f" The nearest layer is {guess!r}." if guess else ""
        raise InputError(f"{key} pattern {pattern!r} matches no FP8 layer.{hint} octavo.describe(model) names them all.")
    return matched
