"""Gives the `octavo.nn` layers inside Transformer Engine's layers the attributes that libraries read.

A library walks `model.modules()` for layers with `fp8_meta`, or reads `use_bias` and `tp_size` of each. Numbers do not change.
"""

from __future__ import annotations

from torch import nn

from octavo.compat.te import parts
from octavo.compat.te.state import OneRank, Readable
from octavo.nn import linear as _linear
from octavo.nn import mlp as _mlp


class Linear(Readable, _linear.Linear):
    """`octavo.nn.Linear`."""


class LayerNormLinear(Readable, _linear.LayerNormLinear):
    """`octavo.nn.LayerNormLinear`."""


class LayerNormMLP(Readable, _mlp.LayerNormMLP):
    """`octavo.nn.LayerNormMLP`."""


class SeparateLinear(Readable, parts.Linear):
    """`octavo.compat.te.parts.Linear`."""


class SeparateLayerNormLinear(Readable, parts.LayerNormLinear):
    """`octavo.compat.te.parts.LayerNormLinear`."""


_READABLE: dict[type[nn.Module], type[nn.Module]] = {
    _linear.Linear: Linear,
    _linear.LayerNormLinear: LayerNormLinear,
    _mlp.LayerNormMLP: LayerNormMLP,
    parts.Linear: SeparateLinear,
    parts.LayerNormLinear: SeparateLayerNormLinear,
}


def make_readable(layer: nn.Module) -> None:
    """Give the layers inside `layer` the attributes that libraries read, in place."""
    for module in layer.modules():
        if module is layer:
            continue
        if type(module) in _READABLE:
            module.__class__ = _READABLE[type(module)]
            module.is_constructed = True  # type: ignore[assignment]
        elif "tp_size" not in vars(module):  # attention: its class selects the kernels, and stays
            module.tp_size, module.tp_group, module.sequence_parallel = OneRank.tp_size, None, False  # type: ignore[assignment]
