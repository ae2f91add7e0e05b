"""The feed-forward half of a block: norm, first product, activation, second product.

Gate and up are one matrix. Their rows are interleaved in blocks of `gate_up_block` (gate rows first), so that any slice of rows
that a tensor-parallel rank or a shard holds has the gates that belong to its ups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.errors import unknown
from octavo.fp8.scaling import ModuleState
from octavo.kernels import reference
from octavo.nn.linear import compute_dtype, init_linear_, product
from octavo.nn.norm import check_norm, normalize, reset_norm_

GATE_UP_BLOCK = 16
"""Rows: what FP8 products want of a shard anyway, so every shard that they take holds whole blocks."""


def gate_up_block(ffn_hidden_size: int) -> int:
    """Rows of gate that stand before as many rows of up: 16, or the largest power of two below that divides the size."""
    return math.gcd(ffn_hidden_size, GATE_UP_BLOCK)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """gate [F, ...] and up [F, ...] as one [2F, ...] in blocks of rows."""
    block = gate_up_block(gate.shape[0])
    return torch.stack([gate.unflatten(0, (-1, block)), up.unflatten(0, (-1, block))], 1).flatten(0, 2)


def deinterleave(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `interleave`: views of gate [F, ...] and up [F, ...] as far as strides allow."""
    blocks = gate_up.unflatten(0, (-1, 2, gate_up_block(gate_up.shape[0] // 2)))
    return blocks[:, 0].flatten(0, 1), blocks[:, 1].flatten(0, 1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x.float()),
    "swiglu": lambda x: reference.swiglu(x, gate_up_block(x.shape[-1] // 2)),
}
"""[..., rows of fc1] → [..., ffn_hidden_size] in float32, so that the second cast sees no rounding before it."""


class LayerNormMLP(nn.Module):
    """y = activation(norm(x) · fc1_weightᵀ + fc1_bias) · fc2_weightᵀ + fc2_bias.

    Parameters: layer_norm_weight, layer_norm_bias (LayerNorm only), fc1_weight [F or 2F, hidden_size] (gated activations have
    both halves), fc1_bias, fc2_weight [hidden_size, F], fc2_bias.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_norm(normalization)
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.eps, self.normalization, self.activation = eps, normalization, activation
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        fc1_rows = ffn_hidden_size * (2 if activation.endswith("glu") else 1)
        self.layer_norm_weight = nn.Parameter(torch.empty(hidden_size, **make))
        self.layer_norm_bias = nn.Parameter(torch.empty(hidden_size, **make)) if normalization == "LayerNorm" else None
        self.fc1_weight = nn.Parameter(torch.empty(fc1_rows, hidden_size, **make))
        self.fc1_bias = nn.Parameter(torch.empty(fc1_rows, **make)) if bias else None
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, **make))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size, **make)) if bias else None
        self.fc1_fp8_state = ModuleState(self, "fc1_weight")
        self.fc2_fp8_state = ModuleState(self, "fc2_weight")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: a norm that changes nothing, and PyTorch's for the matrices."""
        reset_norm_(self.layer_norm_weight, self.layer_norm_bias)
        init_linear_(self.fc1_weight, self.fc1_bias)
        init_linear_(self.fc2_weight, self.fc2_bias)

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """input [..., hidden_size] → the same shape, without the residual."""
        dtype = compute_dtype(input)
        normed = normalize(self.normalization, input, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        hidden = product(normed, self.fc1_weight, self.fc1_bias, self.fc1_fp8_state, dtype, is_first_microbatch)
        activated = ACTIVATIONS[self.activation](hidden)
        return product(activated, self.fc2_weight, self.fc2_bias, self.fc2_fp8_state, dtype, is_first_microbatch)

    def extra_repr(self) -> str:
        """Shape and activation, for `print(model)`."""
        return f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, activation={self.activation}"
