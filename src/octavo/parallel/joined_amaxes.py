"""Reduces the amaxes of all tensor-parallel weights by one collective at the start of the model's forward.

Current scaling casts a weight by its amax. Without this each cast would wait for the other ranks; the weights do not change
within a forward. Amaxes of weights that FSDP2 gathers in FP8 are reduced with those of their shards (`fsdp2.fp8_gather`).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.fp8 import autocast, checkpoints
from octavo.fp8.quantizer import has_one_scale
from octavo.fp8.recipe import Operand, Recipe
from octavo.fp8.scaling import ModuleState, states_of
from octavo.kernels.experts.cast import cast_stacked
from octavo.kernels.quantize.cast_scaled import amax
from octavo.kernels.quantize.quantized import Quantizer


def join_weights(model: nn.Module) -> None:
    """Register hooks that reduce the weights' amaxes over tensor ranks before each forward that casts with them."""
    weights = _Weights(model)
    model.register_forward_pre_hook(weights.join, prepend=True, with_kwargs=True)
    model.register_forward_hook(weights.forget, always_call=True)


class _Weights:
    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._states = [state for _, state in states_of(model)]

    @torch.no_grad()
    def join(self, model: nn.Module, _: Any, options: dict[str, Any]) -> None:
        if self._model() is not model or checkpoints.graph_task() != -1:  # a copy; a recomputation
            return
        first = options.get("is_first_microbatch")
        first = autocast.first_microbatch() if first is None else first
        cached = first is False and checkpoints.trains()
        around: dict[torch.device, Recipe | None] = {}
        weights: dict[torch.device, list[tuple[ModuleState, Tensor, Recipe]]] = {}
        for state in self._states:
            if (weight := _plain(state)) is None or (cached and state.weight_cache is not None):
                continue
            device = weight.device
            if device not in around:
                around[device] = autocast.gathering_recipe(device)
            recipe = state.under(around[device])
            if recipe is not None and has_one_scale(recipe) and not recipe.casts[Operand.WEIGHT].delayed:
                weights.setdefault(device, []).append((state, weight, recipe))
        for of_device in weights.values():
            _join(of_device)

    def forget(self, *_: Any) -> None:
        for state in self._states:
            state.joined_amax = None


def _plain(state: ModuleState) -> Tensor | None:
    """A tensor-parallel weight, if this rank holds its unsharded part and casts it."""
    if state.tensor_group_of(Operand.WEIGHT) is None or state.stored is not None or state.gathered is not None:
        return None
    weight = state.weight
    return None if weight is None or weight.is_meta or isinstance(weight, DTensor) else weight


def _join(weights: list[tuple[ModuleState, Tensor, Recipe]]) -> None:
    sizes = [1 if state.experts is None else state.experts for state, _, _ in weights]
    joined = torch.zeros(sum(sizes), dtype=torch.float32, device=weights[0][1].device)
    for (state, weight, recipe), largest in zip(weights, joined.split(sizes), strict=True):
        if state.experts is None:
            state.joined_amax = amax(weight, out=largest[0])
        else:
            kind = recipe.casts[Operand.WEIGHT].format
            cast_stacked(weight.unflatten(0, (state.experts, -1)), Quantizer(kind.dtype, kind.max, amax=largest, rowwise=False))
            state.joined_amax = largest
    state, _, _ = weights[0]
    group = state.tensor_group_of(Operand.WEIGHT)
    assert group is not None
    state.buffers.joins.largest_(joined, group)
