"""Weights of published folders, converted to and from transformers' models by transformers' conversions.

A published folder may have other names than the model (`LayerNorm.gamma`, a missing or an added `model.`), or the parts of a
tensor that is joined in the model (the matrices of experts). transformers has renamings and converters for each model:
`from_pretrained` applies them, and `save_pretrained` their reverse. Here they are applied to headers first, so that a folder is
refused before any weight is read, and then to the tensors of one converter at a time.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from octavo.errors import InputError, first_line, some
from octavo.models.fp8_folders import DEQUANTISE
from octavo.models.original_code import float32_names
from octavo.models.weight_files import LISTED, Fp8Source, InMemoryWeights, WeightFiles, Weights

_QUANTISED_NAME = re.compile(
    r"\.(weight_(scale\w*|packed|shape|global_scale)|weight\.(absmax|quant_\w+|quant_state\S*)|q(weight|zeros)|scales|SCB|input_scale)$"
)
"""Names of the scales and tables of quantised weights."""
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..*)")
"""A matrix of one expert: the name before the expert's number, the number, and the name after it."""
_ROWS = 1 << 14
"""Rows of a tied weight that are compared at a time."""


def causal_lm_on_meta(config: Any) -> PreTrainedModel:
    """Hugging Face's causal language model of a config, all of it on the meta device: for names and shapes."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    return model


def keep_float32_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast to float32 the buffers that `from_pretrained` leaves in float32 in a model of `dtype`: a router's correction."""
    names = float32_names(model, dtype) & model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in names and buffer.is_floating_point():
            buffer.data = buffer.data.float()


class PublishedWeights(Weights):
    """The weights of a folder under the names of a model, as transformers' `from_pretrained` would load them.

    Tied tensors have an entry under each name.

    Attributes:
        unused: tensors of modules outside of the model, such as the head of another task.

    Raises:
        InputError: a tensor is quantised, unknown in its block of the model, a second tensor of one weight, or cannot be
            converted; or tied weights differ.
    """

    def __init__(self, files: WeightFiles | InMemoryWeights, model: nn.Module) -> None:
        self._files, self._model = files, model
        state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        self._sources: dict[str, str] = {}  # name → tensor in the files
        self._parts: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}  # first result → its converter and tensors
        self._converted_by: dict[str, str] = {}  # name → first result of its converter
        self._last: tuple[str, dict[str, Tensor]] = ("", {})  # a converter's results are read one after the other
        unused = self._match(state)
        shapes = {name: files.shapes[theirs] for name, theirs in self._sources.items()}
        kinds = {name: files.kinds[theirs] for name, theirs in self._sources.items()}
        for first, (converter, parts) in self._parts.items():
            self._refuse_experts(first, converter.source_patterns, parts, len(state[first]))
            sources = [theirs for names in parts.values() for theirs in names]
            kind = next((kind for kind in map(files.kinds.__getitem__, sources) if kind != "float"), "float")
            on_meta = self._convert(first, lambda theirs: torch.empty(files.shapes[theirs], device="meta"))
            for name, tensor in on_meta.items():
                shapes[name], kinds[name], self._converted_by[name] = tuple(tensor.shape), kind, first
        super().__init__(shapes, kinds, files.owner, "a checkpoint of this model")
        self._tie(state)
        info = SimpleNamespace(missing_keys=state.keys() - self.shapes.keys(), unexpected_keys=set(unused))
        missing = frozenset(info.missing_keys)
        if isinstance(model, PreTrainedModel):
            model._adjust_missing_and_unexpected_keys(info)
        self.optional = missing - info.missing_keys
        computed = {name for name, _ in model.named_buffers()}  # earlier versions stored them in files
        lost = {name: theirs for name, theirs in unused.items() if name in info.unexpected_keys - computed}
        self._refuse_parts(state, lost, sorted(info.missing_keys))
        self.unused = sorted(lost.values())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, on the CPU; of a converted one all parts are read."""
        shape = self.shape(name)  # raises the error of a missing weight
        if name in self._sources:
            return self._files.read(self._sources[name], start, stop)
        first = self._converted_by[name]
        if self._last[0] != first:
            self._last = ("", {})  # first, so that only one result set is in memory
            self._last = (first, self._convert(first, self._files.read))
        tensor = self._last[1][name]
        return tensor[start:stop] if shape else tensor

    def fp8(self, name: str) -> Fp8Source | None:
        """The bytes and scales of a tensor stored in FP8 that no converter changes."""
        return self._files.fp8(self._sources[name]) if name in self._sources else None

    def in_fp8(self, name: str) -> bool:
        """True if a tensor, or one that it is converted from, is stored in FP8."""
        if name in self._sources:
            return self._files.in_fp8(self._sources[name])
        parts = self._parts[name][1].values() if name in self._parts else ()
        return any(self._files.in_fp8(theirs) for names in parts for theirs in names)

    def _match(self, state: dict[str, Tensor]) -> dict[str, str]:
        """Match the files' tensors with the model's, in transformers' order; returns the unmatched ones."""
        model, unused = self._model, {}
        transforms = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = getattr(model, "base_model_prefix", None) or None
        for theirs in sorted(self._files.shapes, key=dot_natural_key):
            name, pattern = rename_source_key(theirs, renamings, converters, prefix, state)
            if name not in state and theirs in state:
                name, pattern = rename_source_key(theirs, [], [], prefix, state)
            if name not in state:
                unused[name] = theirs
                continue
            if name in self._sources or (name in self._parts and pattern is None):
                other = self._sources.get(name) or next(iter(self._parts[name][1].values()))[0]
                raise InputError(f"{self._files.owner}: {other} and {theirs} are both the weight {name}. Remove one of them.")
            if pattern is None:
                self._sources[name] = theirs
            else:
                _, parts = self._parts.setdefault(name, (converter_of[pattern], {}))
                parts.setdefault(pattern, []).append(theirs)
        return unused

    def _refuse_experts(self, first: str, patterns: Sequence[str], parts: Mapping[str, list[str]], count: int) -> None:
        """Raise an InputError for experts that are missing, surplus, or of another shape than the others of their matrix.

        first: the parameter of `count` experts. patterns: names of the matrices that are joined to it. parts: their tensors.
        """
        kinds: dict[tuple[str, str], dict[int, str]] = {}
        for theirs in itertools.chain.from_iterable(parts.values()):
            if match := _EXPERT.fullmatch(theirs):
                before, number, behind = match.groups()
                kinds.setdefault((before, behind), {})[int(number)] = theirs
        for before, pattern in itertools.product({before for before, _ in kinds}, patterns):
            if pattern not in parts and "experts.*" in pattern:
                kinds[before, re.sub(r"[\\$]", "", pattern.partition("experts.*")[2])] = {}
        missing = [f"{a}{i}{b}" for (a, b), by_expert in kinds.items() for i in range(count) if i not in by_expert]
        surplus = [theirs for by_expert in kinds.values() for i, theirs in by_expert.items() if i >= count]
        if missing or surplus:
            said = [f"{some(missing, LISTED)} missing ({len(missing)})"] if missing else []
            said += [f"{some(surplus, LISTED)} surplus ({len(surplus)})"] if surplus else []
            raise InputError(
                f"{self._files.owner}: {'; '.join(said)}: {first} has {count} experts in the config. "
                "Give the config that belongs to the weights, or the whole folder."
            )
        for by_expert in kinds.values():
            shapes = {theirs: self._files.shapes[theirs] for theirs in by_expert.values()}
            usual = max(shapes.values(), key=list(shapes.values()).count)
            odd = [f"{theirs} {shape}" for theirs, shape in shapes.items() if shape != usual]
            if odd:
                raise InputError(
                    f"{self._files.owner}: {some(odd, LISTED)}: the same matrix of the other experts is {usual}. "
                    "Give the folder as it was published."
                )

    def _convert(self, first: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The results of one converter."""
        converter, parts = self._parts[first]
        converter = copy.deepcopy(converter)
        for pattern, names in parts.items():
            for theirs in names:
                converter.add_tensor(first, theirs, pattern, read(theirs))
        try:
            converted = converter.convert(first, model=self._model, config=self._model.config)
        except Exception as error:  # transformers' operations raise torch's exceptions
            named = some([theirs for names in parts.values() for theirs in names])
            raise InputError(f"{self._files.owner}: {named} cannot be joined to {first}: {first_line(error)}.") from None
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def _tie(self, state: Mapping[str, Tensor]) -> None:
        """Enter a tied weight under each of its names."""
        tied: dict[int, list[str]] = {}
        for name, tensor in state.items():
            tied.setdefault(id(tensor), []).append(name)
        shapes, kinds = dict(self.shapes), dict(self.kinds)
        for names in tied.values():
            there = [name for name in names if name in self.shapes]
            for name in there[1:]:
                self._check_equal(there[0], name)
            for name in names if there else ():
                if name not in there:
                    shapes[name], kinds[name] = self.shapes[there[0]], self.kinds[there[0]]
                    where = self._sources if there[0] in self._sources else self._converted_by
                    where[name] = where[there[0]]
        self.shapes, self.kinds = shapes, kinds

    def _check_equal(self, one: str, other: str) -> None:
        """Raise an InputError if two tied weights differ in shape, dtype or any value."""
        rows = max([1, *self.shape(one)[:1]])
        equal = self.shape(one) == self.shape(other)
        for start in range(0, rows, _ROWS) if equal else ():
            parts = [self.read(name, start, start + _ROWS) for name in (one, other)]
            equal = equal and parts[0].dtype == parts[1].dtype and torch.equal(*parts)
        if not equal:
            raise InputError(
                f"{self.owner}: {one} and {other} differ, but the model ties them. If the head has separate weights, set"
                " tie_word_embeddings = false (config.json); else remove one of the two tensors."
            )

    def _refuse_parts(self, state: Mapping[str, Tensor], unused: Mapping[str, str], missing: list[str]) -> None:
        """Raise an InputError for scales of quantised weights, and for unknown tensors in a block of the model."""
        quantised = [theirs for theirs in unused.values() if _QUANTISED_NAME.search(theirs)]
        if quantised:
            raise InputError(f"{self.owner}: {some(quantised)}: the weights are quantised. {DEQUANTISE}")
        modules = {prefix for name in state for prefix in _prefixes(name)}
        base = getattr(self._model, "base_model_prefix", "")
        # A mask or a number of an earlier version has no effect on the model; a matrix does.
        small = {t for t in unused.values() if self._files.kinds[t] == "integer" or self._files.shapes[t] in ((), (1,))}
        lost = [
            theirs
            for name, theirs in unused.items()
            if theirs not in small and any(_belongs(full, modules) for full in (name, f"{base}.{name}"))
        ]
        if lost:
            surplus, which = ("is", "it") if len(lost) == 1 else (f"({len(lost)} weights) are", "them")
            lacking = f" It lacks {some(missing, LISTED)}, of the model." if missing else ""
            raise InputError(
                f"{self.owner}: {some(lost, LISTED)} {surplus} not part of the model that the config describes, but the modules"
                f" around {which} are: the values would be lost.{lacking} Correct the config; or, if this is intended, drop"
                f" {which} with transformers (from_pretrained, then save_pretrained) and give the new folder."
            )


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))


def _belongs(name: str, modules: set[str]) -> bool:
    """True for a tensor in one of the modules, in a numbered block of them, or in a further block."""
    around = max((prefix for prefix in _prefixes(name) if prefix in modules), key=len, default="")
    rest = name.removeprefix(f"{around}.")
    if not around:
        return rest.split(".")[0].isdigit() and any(module.isdigit() for module in modules)
    return "." not in rest or any(part.isdigit() for part in [*around.split("."), rest.split(".")[0]])


def published(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model under the names and in the parts of `save_pretrained`; `tensors` are of whole groups of `groups`."""
    return dict(revert_weight_conversion(model, dict(tensors)))


def groups(model: PreTrainedModel, shapes: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """The names of a model's tensors, grouped by the converter that saves them. shapes: the tensors, on the meta device."""
    transforms = getattr(model, "_weight_conversions", None)  # from_pretrained leaves the conversions that it used
    if transforms is None:
        transforms = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
    reverse = [transform.reverse_transform() for transform in transforms[::-1]]
    converters = [transform for transform in reverse if isinstance(transform, WeightConverter)]
    together: dict[str, list[str]] = {}
    for name in shapes:
        first, pattern = rename_source_key(name, [], converters)
        together.setdefault(name if pattern is None else first, []).append(name)
    grouped = [tuple(names) for names in together.values()]
    separately = [published(model, {name: shapes[name] for name in names}) for names in grouped]
    merged = {name: tensor.shape for tensors in separately for name, tensor in tensors.items()}
    whole = {name: tensor.shape for name, tensor in published(model, shapes).items()}
    # Some renamings depend on other names: such a model is written from memory.
    return grouped if merged == whole and sum(map(len, separately)) == len(whole) else [tuple(shapes)]
