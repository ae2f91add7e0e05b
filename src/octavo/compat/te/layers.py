"""Transformer Engine's linear layers and norms: `octavo.nn`'s, constructed by Transformer Engine's arguments and defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.te import parts
from octavo.compat.te.signatures import SIGNATURES, bound, refuse_fp8
from octavo.compat.te.split import HighPrecisionResults, SplitLinear, split
from octavo.compat.te.state import Products, Stateless
from octavo.nn import grouped as _grouped
from octavo.nn import linear as _linear
from octavo.nn import mlp as _mlp
from octavo.nn import norm as _norm


class Kind(type):
    """Metaclass of the layers: `isinstance` is True for layers of `octavo.nn` too, which other layers contain."""

    octavo: type[nn.Module] | tuple[type[nn.Module], ...] | None = None

    def __instancecheck__(cls, instance: Any) -> bool:
        octavo_class = vars(cls).get("octavo")
        return super().__instancecheck__(instance) or (octavo_class is not None and isinstance(instance, octavo_class))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the layer; afterwards `reset_parameters` moves parameters off the meta device."""
        layer = super().__call__(*args, **kwargs)
        layer.is_constructed = True
        return layer


def in_autocast(x: Tensor) -> Tensor:
    """`x` in the dtype of `torch.autocast` where that is on: Transformer Engine's norms run in it, PyTorch's in float32."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.is_floating_point() else x


class Linear(Products, _linear.Linear, metaclass=Kind):
    """y = x · weightᵀ + bias."""

    __module__ = "transformer_engine.pytorch.module.linear"  # libraries recognise the class by it
    octavo = (_linear.Linear, parts.Linear, SplitLinear)
    __signature__ = SIGNATURES["Linear"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = bound("Linear", args, kwargs)
        names = values.pop("parameters_split")
        super().__init__(**values)
        if names is not None:
            split(self, names)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """inp [..., in_features] → [..., out_features]."""
        refuse_fp8(fp8_output=fp8_output, fp8_grad=fp8_grad)
        return super().forward(inp, is_first_microbatch)


class LayerNormLinear(HighPrecisionResults, Products, _linear.LayerNormLinear, metaclass=Kind):  # type: ignore[misc]
    """y = norm(x) · weightᵀ + bias."""

    __module__ = "transformer_engine.pytorch.module.layernorm_linear"  # libraries recognise the class by it
    octavo = _linear.LayerNormLinear
    __signature__ = SIGNATURES["LayerNormLinear"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = bound("LayerNormLinear", args, kwargs)
        names = values.pop("parameters_split")
        super().__init__(**values)
        if names is not None:
            split(self, names)


class LayerNormMLP(Products, _mlp.LayerNormMLP, metaclass=Kind):
    """y = activation(norm(x) · fc1_weightᵀ + fc1_bias) · fc2_weightᵀ + fc2_bias."""

    __module__ = "transformer_engine.pytorch.module.layernorm_mlp"  # libraries recognise the class by it
    octavo = _mlp.LayerNormMLP
    __signature__ = SIGNATURES["LayerNormMLP"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**bound("LayerNormMLP", args, kwargs))
        self.gate_rows = self.ffn_hidden_size  # all of gate before all of up

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **residual: Any) -> Any:
        """inp [..., hidden_size] → the same shape."""
        return super().forward(inp, is_first_microbatch, **residual)


class GroupedLinear(Products, _grouped.GroupedLinear, metaclass=Kind):
    """One linear layer for each of several experts."""

    __module__ = "transformer_engine.pytorch.module.grouped_linear"  # libraries recognise the class by it
    octavo = _grouped.GroupedLinear
    __signature__ = SIGNATURES["GroupedLinear"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**bound("GroupedLinear", args, kwargs))


class LayerNorm(Stateless, _norm.LayerNorm, metaclass=Kind):  # type: ignore[misc]
    """(x − mean) / √(variance + eps) · weight + bias."""

    __module__ = "transformer_engine.pytorch.module.layernorm"  # libraries recognise the class by it
    octavo = _norm.LayerNorm
    __signature__ = SIGNATURES["LayerNorm"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**bound("LayerNorm", args, kwargs))

    def forward(self, x: Tensor) -> Tensor:
        """The norm of `x` [..., features]; under `torch.autocast` computed and returned in its dtype."""
        return super().forward(in_autocast(x))


class RMSNorm(Stateless, _norm.RMSNorm, metaclass=Kind):
    """x / √(mean(x²) + eps) · weight."""

    __module__ = "transformer_engine.pytorch.module.rmsnorm"  # libraries recognise the class by it
    octavo = _norm.RMSNorm
    __signature__ = SIGNATURES["RMSNorm"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**bound("RMSNorm", args, kwargs))

    def forward(self, x: Tensor) -> Tensor:
        """The norm of `x` [..., features]; under `torch.autocast` computed and returned in its dtype."""
        return super().forward(in_autocast(x))
