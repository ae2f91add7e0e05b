"""Query, key and value as three parameters: Transformer Engine's layers have them without `fuse_qkv_params`, its default.

Scripts fill them by name, as from a Hugging Face model. A layer of `octavo.nn` reads one matrix grouped by key-value head:
each forward joins it from the three, a copy that stays until backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from octavo.compat.missing import MissingName, way_of
from octavo.fp8.scaling import ModuleState
from octavo.nn import linear as _linear
from octavo.nn.attention import merge_qkv, split_qkv
from octavo.nn.linear import init_linear_
from octavo.nn.norm import reset_norm_
from octavo.nn.te_arguments import Init

PARTS = ("query", "key", "value")
_WAYS: dict[tuple[str, ...], str] = {PARTS: "with fuse_qkv_params=True"}


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
    """Base of layers with query_weight, key_weight, value_weight, and biases; `weight` and `bias` are there in a forward."""

    names: tuple[str, ...] = PARTS
    groups: int
    init_method: Init | None
    joined: tuple[Tensor, Tensor | None] | None
    """Weight and bias during a forward."""

    def parts(self, kind: str) -> list[Any]:
        """Query, key and value of a kind, "weight" or "bias": parameters, under FSDP1 tensors, None for absent biases."""
        return [getattr(self, f"{part}_{kind}") for part in self.names]

    def _join(self, kind: str) -> Tensor | None:
        query, key, value = self.parts(kind)
        return None if query is None else merge_qkv(query, key, value, self.groups)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            joined = vars(self).get("joined")
            if joined is None:  # what a script wrote there would be lost
                there = ", ".join(f"{part}_{name}" for part in self.names)
                way = f"The layer has {there}; {_WAYS.get(self.names, 'without parameters_split')} it has {name}."
                raise MissingName(way_of(f"{type(self).__name__}.{name}", {name: way}))
            return joined[name == "bias"]
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own, with its parameters joined once."""
        self.joined = self._join("weight"), self._join("bias")  # type: ignore[assignment]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.joined = None

    def reset_parameters(self) -> None:
        """Initial values for each part by itself."""
        if isinstance(self, LayerNormLinear):
            reset_norm_(self.layer_norm_weight, self.layer_norm_bias, zero_centered=self.zero_centered_gamma)
        with self.draws():
            for weight, bias in zip(self.parts("weight"), self.parts("bias"), strict=True):
                init_linear_(weight, bias, self.init_method)


class Product(nn.Module):
    """The forward of `octavo.nn.Linear`, without being an `nn.Linear`."""

    forward, unread = _linear.Linear.forward, _linear.Linear.unread

    def extra_repr(self) -> str:
        """Shape, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Linear(Parts, Product):
    """`octavo.nn.Linear` of three parameters; no `nn.Linear`, whose weight code for all of these would fill."""


class LayerNormLinear(Parts, _linear.LayerNormLinear):
    """`octavo.nn.LayerNormLinear` of three parameters."""


def separate(layer: Any, heads: int, groups: int, init_method: Init | None = None) -> None:
    """Give a layer with one joint parameter three, in place; `init_method` fills each anew."""
    own = {kind: layer._parameters.pop(kind, None) for kind in ("weight", "bias")}
    layer.__class__ = LayerNormLinear if isinstance(layer, _linear.LayerNormLinear) else Linear
    layer.groups, layer.joined = groups, None
    for kind, parameter in own.items():
        parts = [None] * 3 if parameter is None else split_qkv(parameter.detach(), heads, groups)
        for name, part in zip(PARTS, parts, strict=True):
            layer.register_parameter(f"{name}_{kind}", None if part is None else nn.Parameter(part.clone()))
    layer.fp8_state = State(layer)
    if init_method is not None:
        layer.reset_parameters()


def rejoined(state: dict[str, Any], at: str, layer: Any, heads: int, groups: int) -> None:
    """Convert query, key and value of a state dict, in place, to the one or three parameters of `layer`. at: its prefix."""
    for kind in ("weight", "bias"):
        names, joint = [f"{at}{part}_{kind}" for part in PARTS], f"{at}{kind}"
        if isinstance(layer, Parts):
            rows = getattr(state.get(joint), "shape", ())[:1]
            if rows and rows[0] % (heads + 2 * groups) == 0:
                state |= zip(names, split_qkv(state.pop(joint), heads, groups), strict=True)
        elif all(isinstance(state.get(name), Tensor) and state[name].shape[0] % groups == 0 for name in names):
            query, key, value = (state.pop(name) for name in names)
            state[joint] = merge_qkv(query, key, value, groups)
