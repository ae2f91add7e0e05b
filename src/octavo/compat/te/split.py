"""Linear layers with several named parameters for one weight: `parameters_split` of Transformer Engine's linear layers.

Each forward concatenates them, as `octavo.compat.te.parts` does with query, key and value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.te.limits import split_sizes
from octavo.compat.te.parts import Parts, Product, State
from octavo.compat.te.signatures import refuse_fp8
from octavo.compat.te.state import Products
from octavo.errors import InputError
from octavo.nn import linear as _linear


class HighPrecisionResults:
    """Base: refuses results and gradients in FP8."""

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        **residual: Any,
    ) -> Any:
        """inp [..., in_features] → [..., out_features]."""
        refuse_fp8(fp8_output=fp8_output, fp8_grad=fp8_grad)
        return super().forward(inp, is_first_microbatch, **residual)  # type: ignore[misc]


class Split(HighPrecisionResults, Parts, Products):
    """Base: parameters NAME_weight and NAME_bias."""

    names: tuple[str, ...]
    way = "without parameters_split"

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialize each part, as `Resettable.reset_parameters` does for other layers."""
        if not defer_init:
            self.take_from_meta()
            Parts.reset_parameters(self)

    def _join(self, kind: str) -> Tensor | None:
        parts = self.parts(kind)
        return None if parts[0] is None else torch.cat(parts)


class SplitLinear(Split, Product):  # type: ignore[misc]
    """`Linear` of several parameters."""


class SplitLayerNormLinear(Split, _linear.LayerNormLinear):  # type: ignore[misc]
    """`LayerNormLinear` of several parameters."""


def split(layer: Any, parameters_split: Any) -> None:
    """Give a layer the parameters that `parameters_split` names, instead of `weight` and `bias`."""
    sizes = split_sizes(parameters_split, layer.out_features)
    whole = {kind: layer._parameters.pop(kind, None) for kind in ("weight", "bias")}
    for name in sizes:
        if f"{name}_weight" in layer._parameters or hasattr(type(layer), f"{name}_weight"):
            raise InputError(f"parameters_split={parameters_split!r}: the layer has another {name}_weight. Take another name.")
    layer.__class__ = SplitLayerNormLinear if isinstance(layer, _linear.LayerNormLinear) else SplitLinear
    layer.names, layer.joined = tuple(sizes), None
    for kind, parameter in whole.items():
        parts = [None] * len(sizes) if parameter is None else parameter.detach().split(list(sizes.values()))
        for name, part in zip(sizes, parts, strict=True):
            layer.register_parameter(f"{name}_{kind}", None if part is None else nn.Parameter(part.clone()))
    layer.fp8_state = State(layer)
    layer.reset_parameters()
