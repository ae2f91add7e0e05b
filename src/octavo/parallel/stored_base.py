"""Frozen weights are cast to FP8 one by one, as they get their values: none is in high precision beside another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8.recipe import Operand, Recipe
from octavo.fp8.scaling import ModuleState, states_of
from octavo.fp8.stored import Stored, refuse
from octavo.nn.plain_names import stored_names
from octavo.parallel.deferred_init import CounterInit, Load, Loaded, Values, counter_normal_


@dataclass(frozen=True)
class _Without:
    """A source of values without some names."""

    load: Load
    names: frozenset[str]

    def __call__(self, name: str, out: Tensor, start: int) -> None:
        self.load(name, out, start)


@dataclass(frozen=True)
class StoredInFp8:
    """The values of `base`, and FP8 of those of frozen weights; `note` gets each of these in high precision, by its name."""

    base: Loaded | CounterInit
    weights: Mapping[str, tuple[ModuleState, torch.dtype]]
    note: Callable[[str, Tensor], None]

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """As `base`; a stored weight has to be among its values."""
        if isinstance(self.base, Loaded) and (absent := [name for name in self.weights if name not in self.base.load.names]):
            raise InputError(f"{absent[0]} of {type(model).__name__} is not among the weights that are loaded.")
        self._others.check(model, self._left(names))

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill all other tensors, then one stored weight after the other."""
        self._others.fill(model, self._left(names))
        stored = stored_names(model)
        for name, (state, dtype) in self.weights.items():
            module, how = state.module, state.stored
            assert module is not None
            assert how is not None
            parameter = getattr(module, state.weight_name)
            weight = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            if isinstance(self.base, Loaded):
                self.base.load(name, weight, 0)
            else:
                key = stored.get(name, name)
                counter_normal_(weight, _numbers(weight), seed=self.base.seed, name=key, std=self.base.std)
            self.note(name, weight)
            how.fill(module, state.weight_name, weight)

    @property
    def _others(self) -> Values:
        if not isinstance(self.base, Loaded):
            return self.base
        left = frozenset(self.base.load.names) - self.weights.keys()
        return replace(self.base, load=_Without(self.base.load, left))

    def _left(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.weights and not name.endswith("weight_scale_bits")]


def _numbers(weight: Tensor) -> Callable[[int, int], Tensor]:
    return lambda start, stop: torch.arange(start, stop, device=weight.device)


def refuse_shards(ranks: int) -> None:
    """Raise an InputError for several ranks: what is stored in FP8 is not sharded."""
    if ranks > 1:
        raise InputError(
            f'lora.base = "fp8" on {ranks} ranks: weights that are stored in FP8 are not sharded. Run on one rank, or set '
            'lora.base = "params_dtype" and model.params_dtype = "bfloat16", whose shards are gathered in FP8.'
        )


def store_in_fp8(model: nn.Module, recipe: Recipe, base: Values, note: Callable[[str, Tensor], None]) -> StoredInFp8:
    """Let a model on the meta device store its frozen weights in FP8, and wrap the source of its values.

    Weights that are trained, or out of FP8, stay as they are; so do those of experts.

    Raises:
        InputError: a layer's recipe needs two layouts of its weight, or another first scale.
    """
    assert isinstance(base, Loaded | CounterInit)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[ModuleState, torch.dtype]] = {}
    for name, state in states_of(model):
        weight, module, own = state.weight, state.module, state.under(recipe)
        if weight is None or module is None or own is None or weight.requires_grad or state.experts or name == "head":
            continue
        refuse(own, name)
        parameter = names[weight]  # type: ignore[index]
        found[parameter] = state, weight.dtype
        state.stored = Stored(own.casts[Operand.WEIGHT])
        state.stored.allocate(module, state.weight_name)
    return StoredInFp8(base, found, note)
