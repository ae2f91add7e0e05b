"""GPT-2's linear layer in FP8: Hugging Face's `Conv1D` with a weight of [in_features, out_features].

State dicts, checkpoints and exports use that layout. The casts read the transposed view, and autograd transposes the gradient.
Such a weight is gathered in its dtype, not in FP8: a shard's rows are columns of the product's operand.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor
from transformers.pytorch_utils import Conv1D as PlainConv1D

from octavo.fp8.quantizer import active_recipe
from octavo.fp8.scaling import ModuleState
from octavo.nn.linear import compute_dtype, product
from octavo.nn.norm import check_input


class Conv1D(PlainConv1D):
    """y = x · weight + bias, Hugging Face's outside of FP8. weight: [in_features, out_features]; bias: [out_features]."""

    @classmethod
    def from_conv1d(cls, layer: PlainConv1D) -> Conv1D:
        """Turn Hugging Face's layer into this class in place: parameters, ties, hooks and references stay valid."""
        layer.__class__ = cls
        new = cast(Conv1D, layer)
        new.fp8_state = ModuleState(new, "transposed_weight")
        return new

    @property
    def transposed_weight(self) -> Tensor:
        """The weight in the layout of products, a view [out_features, in_features]."""
        return self.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]."""
        if active_recipe(self.fp8_state, x.device) is None:
            y: Tensor = super().forward(x)
            return y
        check_input(self, x, size=self.weight.shape[0])
        return product(x, self.transposed_weight, self.bias, self.fp8_state, compute_dtype(x), None)
