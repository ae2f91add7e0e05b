"""Layers of the small model, and the run's patterns of names, renumbered for them.

The small model has two layers of each kind. Kinds differ by a window, by experts, and by the patterns that match the layer:
`fp8.skip = ["*.0.*", "*.31.*"]` selects layers 0, 1, 2 and 31, which become 0 to 3, and is replaced by the names of layers 0
and 3. A pattern that matches all layers of a kind alike is unchanged.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from octavo.build import build_model
from octavo.config.effects import with_values
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.fp8.scaling import states_of
from octavo.models.convert import conversion_of
from octavo.models.lora import adapted
from octavo.models.spec import ModelSpec
from octavo.nn.plain_names import stored_names
from octavo.plan.run import build_options
from octavo.verify.small import without_files

MOST = 12
"""Layers of the small model."""
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A number in a name: the first is a layer's, a second an expert's."""
Hits = Mapping[int | None, frozenset[str]]
"""Layer → names, with # for its number; None → names outside layers."""


def layers_of_each_kind(spec: ModelSpec, marks: Mapping[int, Any] | None = None) -> Sequence[int]:
    """Indices of two layers of each kind, in order; marks: layer → a further criterion of its kind."""
    kinds: dict[Any, list[int]] = {}
    for layer in range(spec.layers):
        kinds.setdefault((_kind(spec, layer), (marks or {}).get(layer)), []).append(layer)
    return sorted(layer for those in kinds.values() for layer in those[:2])


def with_few_layers(config: RunConfig, hf_config: Any, spec: ModelSpec, experts: int) -> tuple[RunConfig, Sequence[int]]:
    """The run with its patterns renumbered for the small model, and the indices of that model's layers in the full one.

    `optimizer.rates` makes no kinds of layers, since a factor changes only the rate: a pattern that matches none of the small
    model's layers is dropped.

    Args:
        config, hf_config, spec: the run and its model.
        experts: number of experts of a layer of the small model.

    Raises:
        InputError: patterns make too many kinds of layers, or one matches nothing.
    """
    targets = config.lora.targets if config.lora.rank is not None and not isinstance(config.lora.targets, str) else []
    named: dict[str, Sequence[str]] = {
        "train.freeze": config.train.freeze,
        "fp8.skip": config.fp8.skip,
        "fp8.layers": list(config.fp8.layers),
        "lora.targets": ["any of the targets"] if targets else [],
        "optimizer.rates": list(config.optimizer.rates),
    }
    if not any(named.values()):
        return config, layers_of_each_kind(spec)
    model = build_model(hf_config, build_options(without_files(config), blocks="auto"), device="meta")
    names = {"fp8": _of_fp8(model), "parameters": _of_parameters(model)}
    hits_of: dict[str, dict[str, Hits]] = {key: {} for key in named}
    for key, patterns in named.items():
        for pattern in patterns:
            if key == "lora.targets":
                chosen = adapted(model)
                hits = _by_layer(() if chosen is None else chosen.targets)
            else:
                # Stored names apply only to a pattern that matches no other name.
                each = ([name for name in those if fnmatch.fnmatchcase(name, pattern)] for those in names[_kind_of_names(key)])
                hits = _by_layer(_outermost(next((those for those in each if those), ())))
            if _tells_layers(hits, spec):
                hits_of[key][pattern] = hits
    marking = [hits for key, those in hits_of.items() if key != "optimizer.rates" for hits in those.values()]
    marks = {layer: tuple(hits.get(layer) for hits in marking) for layer in range(spec.layers)}
    layers = layers_of_each_kind(spec, marks)
    if len(layers) > MOST:
        keys = " and ".join(key for key, those in hits_of.items() if those and key != "optimizer.rates")
        raise InputError(
            f"{keys}: its patterns make so many kinds of layers that two of each are {len(layers)}, and octavo verify's small "
            f"model has {MOST} at most. Give patterns that name fewer layers after the run file."
        )

    def small(key: str, pattern: str) -> list[str]:
        hits = hits_of[key].get(pattern)
        return [pattern] if hits is None else _renumbered(hits, layers, experts)

    values: dict[str, Any] = {
        key: [name for pattern in named[key] for name in small(key, pattern)] for key in ("train.freeze", "fp8.skip")
    }
    for key, table in (("fp8.layers", config.fp8.layers), ("optimizer.rates", config.optimizer.rates)):
        values[key] = {}
        for pattern, value in table.items():
            for name in small(key, pattern):
                values[key].pop(name, None)  # later ones win
                values[key][name] = value
    if hits_of["lora.targets"]:
        values["lora.targets"] = small("lora.targets", named["lora.targets"][0])
    return with_values(config, values), layers


def _kind(spec: ModelSpec, layer: int) -> tuple[bool, bool]:
    """(windowed, dense in a model with experts)."""
    return bool(spec.windows) and spec.windows[layer] is not None, layer in spec.dense


def _kind_of_names(key: str) -> str:
    return "fp8" if key.startswith("fp8.") else "parameters"


def _of_parameters(model: nn.Module) -> tuple[set[str], set[str]]:
    """The names of parameters and of the modules around them, Octavo's and the source's; and the stored ones."""
    way, names = conversion_of(model), [name for name, _ in model.named_parameters()]
    known = [alias for name in names for alias in (name, *(() if way is None else way.names(name)))]
    return _with_modules(known), _stored(model, names)


def _of_fp8(model: nn.Module) -> tuple[set[str], set[str]]:
    """The same for layers with FP8 products."""
    way, names = conversion_of(model), [name for name, _ in states_of(model)]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    weights = [weight for name in names for weight in (f"{name}.weight", f"{name}_weight") if weight in parameters]
    theirs = [] if way is None else [each.removesuffix(".weight") for weight in weights for each in way.names(weight)]
    return _with_modules([*names, *theirs]), _stored(model, names)


def _stored(model: nn.Module, names: Iterable[str]) -> set[str]:
    stored = stored_names(model)
    return _with_modules(stored.get(name, name) for name in names)


def _with_modules(names: Iterable[str]) -> set[str]:
    return {each for name in names for each in (name, *_modules(name))}


def _outermost(names: Iterable[str]) -> set[str]:
    """The names without those inside a module that is also in `names`."""
    every = set(names)
    return {name for name in every if not any(around in every for around in _modules(name))}


def _modules(name: str) -> Iterator[str]:
    """The modules around a name."""
    return itertools.accumulate(name.split(".")[:-1], "{}.{}".format)


def _by_layer(names: Iterable[str]) -> Hits:
    by_layer: dict[int | None, set[str]] = {}
    for name in names:
        number = _LAYER.search(name)
        layer = None if number is None else int(number[0])
        by_layer.setdefault(layer, set()).add(name if number is None else f"{name[: number.start()]}#{name[number.end() :]}")
    return {layer: frozenset(those) for layer, those in by_layer.items()}


def _tells_layers(hits: Hits, spec: ModelSpec) -> bool:
    """True if layers of one kind have different names among these."""
    kinds: dict[tuple[bool, bool], set[frozenset[str] | None]] = {}
    for layer in range(spec.layers):
        kinds.setdefault(_kind(spec, layer), set()).add(hits.get(layer))
    return any(len(those) > 1 for those in kinds.values())


def _renumbered(hits: Hits, layers: Sequence[int], experts: int) -> list[str]:
    """The names of these layers, renumbered, without experts that the small model does not have."""
    renumbered = list(hits.get(None, ()))
    for number, layer in enumerate(layers):
        renumbered += [name.replace("#", str(number), 1) for name in hits.get(layer, ())]
    return sorted(name for name in renumbered if not any(int(each) >= experts for each in _LAYER.findall(name)[1:]))
