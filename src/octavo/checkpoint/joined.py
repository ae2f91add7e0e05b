"""Several optimizers as one, so that a checkpoint has the state of each parameter, whichever optimizer steps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from octavo.errors import InputError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None
"""One optimizer; several as a list, tuple or dict; or none."""


class JoinedOptimizer:
    """The groups and states of several optimizers of different parameters.

    Its name joins their class names, with their keys for a dict, which are sorted.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], *, keyed: bool) -> None:
        self.optimizers = list(optimizers.values())
        classes = [class_name(each) for each in self.optimizers]
        self.name = " + ".join(f"{key}: {name}" for key, name in zip(optimizers, classes, strict=True)) if keyed else ""
        self.name = self.name or " + ".join(classes)
        self.state = _States(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers in order; the dicts are the optimizers' objects, not copies."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class _States(MutableMapping[Any, Any]):
    """The states of all optimizers by parameter, stored in the optimizer that holds the parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: Any) -> Any:
        for optimizer in self._optimizers:
            if any(parameter is held for group in optimizer.param_groups for held in group["params"]):
                return optimizer.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Any) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Any, states: Any) -> None:
        self._of(parameter)[parameter] = states

    def __delitem__(self, parameter: Any) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[Any]:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def clear(self) -> None:
        """Empty the states of each optimizer."""
        for optimizer in self._optimizers:
            optimizer.state.clear()


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer's class, or of several classes, as stored in checkpoints."""
    several: object = optimizer
    return several.name if isinstance(several, JoinedOptimizer) else type(optimizer).__name__


def as_one(optimizer: Any, model: Any, call: str) -> torch.optim.Optimizer | None:
    """The optimizer of a model, or several as one; a list of one gives that one. call: for messages.

    Raises:
        InputError: `model` is not a module, or `optimizer` not one or more optimizers; an optimizer of another model; or a
            parameter in two optimizers.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{call}: model is of type {type(model).__name__}: give one module; several as torch.nn.ModuleList or ModuleDict."
        )
    if optimizer is None:
        return None
    keyed = isinstance(optimizer, Mapping)
    if not keyed and not isinstance(optimizer, list | tuple):
        _check(optimizer, "optimizer", call)
        _check_held(optimizer, "optimizer", model, call)
        return cast(torch.optim.Optimizer, optimizer)
    by_key = dict(sorted(optimizer.items(), key=lambda item: str(item[0]))) if keyed else dict(enumerate(optimizer))
    if not by_key:
        raise InputError(f"{call}: optimizer = {optimizer!r} names none: give optimizers, or leave it out.")
    for key, each in by_key.items():
        _check(each, f"optimizer[{key!r}]", call)
        _check_held(each, f"optimizer[{key!r}]", model, call)
    names = {parameter: name for name, parameter in model.named_parameters()}
    holder: dict[Any, Any] = {}
    for key, each in by_key.items():
        for parameter in (parameter for group in each.param_groups for parameter in group["params"]):
            if holder.setdefault(parameter, key) != key:
                raise InputError(
                    f"{call}: {names.get(parameter, 'a parameter')} is in optimizer[{holder[parameter]!r}] and in "
                    f"optimizer[{key!r}]: a checkpoint stores one state per parameter. Give it to one of them."
                )
    if len(by_key) == 1:
        return cast(torch.optim.Optimizer, next(iter(by_key.values())))
    return cast(torch.optim.Optimizer, JoinedOptimizer({str(key): each for key, each in by_key.items()}, keyed=keyed))


def _check(optimizer: Any, name: str, call: str) -> None:
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise InputError(
            f"{call}: {name} is of type {type(optimizer).__name__}, which is not an optimizer: give one of torch.optim, or "
            "several in a list or dict. The state of a scheduler is numbers: pass it under a separate name, which octavo.load "
            "returns."
        )


def _check_held(optimizer: torch.optim.Optimizer, name: str, model: nn.Module, call: str) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = set(model.parameters())
    if held and parameters.isdisjoint(held):
        raise InputError(
            f"{call}: {name} ({type(optimizer).__name__}) holds no parameter of this model: it trains another model, or was "
            "created before octavo.transform or sharding, which create new parameters. Create it from model.parameters() "
            "afterwards."
        )
