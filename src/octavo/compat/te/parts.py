"""Query, key and value as three parameters, as Transformer Engine's layers have them by default (`fuse_qkv_params=False`).

Scripts load them by name, for example from a Hugging Face model. A layer of `octavo.nn` reads one matrix grouped by key-value
head: each forward concatenates the three, a copy that is saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.missing import MissingName, way_of
from octavo.fp8.scaling import ModuleState
from octavo.nn import linear as _linear
from octavo.nn.arguments import Init
from octavo.nn.attention import merge_qkv, split_qkv
from octavo.nn.linear import init_linear_
from octavo.nn.norm import reset_norm_

PARTS = ("query", "key", "value")


class State(ModuleState):
    """FP8 state of the joint matrix, on the device of its parts."""

    @property
    def weight(self) -> Tensor | None:
        """The weight of the first part."""
        module = self._module()
        return getattr(module, self.parts[0], None) if isinstance(module, Parts) else None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the weights."""
        module = self._module()
        return tuple(f"{name}_weight" for name in module.names) if isinstance(module, Parts) else ()


class Parts(nn.Module):
    """Base of layers with query_weight, key_weight, value_weight, and biases; `weight` and `bias` exist during a forward.

    With other `names` the rows of the parts are concatenated in order.
    """

    names: tuple[str, ...] = PARTS
    way = "with fuse_qkv_params=True"
    """The argument that creates the layer with one parameter, for messages."""
    groups: int
    init_method: Init | None
    joined: tuple[Tensor, Tensor | None] | None
    """Weight and bias during a forward."""

    def parts(self, kind: str) -> list[Any]:
        """Weights or biases (`kind`) of the parts: parameters, tensors under FSDP1, None for absent biases."""
        return [getattr(self, f"{part}_{kind}") for part in self.names]

    def _join(self, kind: str) -> Tensor | None:
        parts = self.parts(kind)
        if parts[0] is None:
            return None
        if self.names != PARTS:
            return torch.cat(parts)
        query, key, value = parts
        return merge_qkv(query, key, value, self.groups)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            joined = vars(self).get("joined")
            if joined is None:  # outside of a forward: writes to a concatenated copy would be lost
                there = ", ".join(f"{part}_{name}" for part in self.names)
                way = f"The layer has {there}; {self.way} it has {name}."
                raise MissingName(way_of(f"{type(self).__name__}.{name}", {name: way}))
            return joined[name == "bias"]
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`Linear.forward`, with the parameters concatenated once."""
        self.joined = self._join("weight"), self._join("bias")  # type: ignore[assignment]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.joined = None

    def reset_parameters(self) -> None:
        """Initial values for each part separately."""
        if isinstance(self, _linear.LayerNormLinear):
            reset_norm_(self.layer_norm_weight, self.layer_norm_bias, zero_centered=self.zero_centered_gamma)
        with self.draws():
            for weight, bias in zip(self.parts("weight"), self.parts("bias"), strict=True):
                init_linear_(weight, bias, self.init_method)


class Product(nn.Module):
    """The forward of `octavo.nn.Linear`, without being an `nn.Linear`."""

    forward, skip_output, tensor = _linear.Linear.forward, _linear.Linear.skip_output, _linear.Linear.tensor

    def extra_repr(self) -> str:
        """Shape, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Linear(Parts, Product):
    """`octavo.nn.Linear` of three parameters. Not an `nn.Linear`: init functions fill the `weight` of every one."""


class LayerNormLinear(Parts, _linear.LayerNormLinear):
    """`octavo.nn.LayerNormLinear` of three parameters."""


def separate(layer: Any, heads: int, groups: int, init_method: Init | None = None) -> None:
    """Split a layer's fused parameter into three, in place; `init_method` reinitializes each."""

    def cut(whole: Tensor) -> tuple[Tensor, ...]:
        return split_qkv(whole, heads, groups)

    layer.groups = groups
    _into(layer, PARTS, cut)
    if init_method is not None:
        layer.reset_parameters()


def separate_rows(layer: Any, names: tuple[str, ...]) -> None:
    """Split a layer's parameter into several with equally many rows, in place, each with initial values."""
    _into(layer, names, lambda whole: whole.chunk(len(names)))
    layer.reset_parameters()


def _into(layer: Any, names: tuple[str, ...], cut: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    whole = {kind: layer._parameters.pop(kind, None) for kind in ("weight", "bias")}
    layer.__class__ = LayerNormLinear if isinstance(layer, _linear.LayerNormLinear) else Linear
    layer.names, layer.joined = names, None
    for kind, parameter in whole.items():
        parts = [None] * len(names) if parameter is None else cut(parameter.detach())
        for name, part in zip(names, parts, strict=True):
            layer.register_parameter(f"{name}_{kind}", None if part is None else nn.Parameter(part.clone()))
    layer.fp8_state = State(layer)


def rejoined(state: dict[str, Any], at: str, layer: Any, counts: Mapping[str, int], *, grouped: bool) -> None:
    """Convert entries of a state dict, in place, between one fused parameter and several, to the form of `layer`.

    at: the layer's prefix. counts: part → its heads. grouped: a fused parameter is grouped by key-value head, the heads of the
    last part; else the parts follow one another.
    """
    groups = list(counts.values())[-1] if grouped else 1
    shares = [count // groups for count in counts.values()]
    for kind in ("weight", "bias"):
        names, joint = [f"{at}{part}_{kind}" for part in counts], f"{at}{kind}"
        if isinstance(layer, Parts):
            whole = state.get(joint)
            if isinstance(whole, Tensor) and whole.dim() and whole.shape[0] % (groups * sum(shares)) == 0:
                size = whole.shape[0] // (groups * sum(shares))
                parts = state.pop(joint).unflatten(0, (groups, -1)).split([share * size for share in shares], 1)
                state |= {name: part.flatten(0, 1) for name, part in zip(names, parts, strict=True)}
        elif all(isinstance(state.get(name), Tensor) and state[name].shape[0] % groups == 0 for name in names):
            state[joint] = torch.cat([state.pop(name).unflatten(0, (groups, -1)) for name in names], 1).flatten(0, 1)
