"""The feed-forward half of a block: norm, first product, activation, second product.

Gate and up are one matrix. Their rows are interleaved in blocks of `gate_up_block` (gate rows first), so that any slice of rows
that a tensor-parallel rank or a shard holds has the gates that belong to its ups.
"""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8.scaling import ModuleState
from octavo.kernels import reference
from octavo.kernels.activation import is_gated
from octavo.nn import fused
from octavo.nn.fused import Stream
from octavo.nn.linear import compute_dtype, init_linear_, product, recipe_of
from octavo.nn.norm import check_norm, normalize, reset_norm_
from octavo.nn.products import Products
from octavo.nn.te_arguments import Draws, Init, Tracker, activation_of, check, init_with_, results

GATE_UP_BLOCK = 32
"""Rows: as FP8 columns of the product they fill a sector of memory, 32 bytes, and any degree that divides F by 32 cuts none."""


def gate_up_block(ffn_hidden_size: int) -> int:
    """Rows of gate that stand before as many rows of up: 32, or the largest power of two below that divides the size."""
    return math.gcd(ffn_hidden_size, GATE_UP_BLOCK)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """gate [F, ...] and up [F, ...] as one [2F, ...] in blocks of rows."""
    block = gate_up_block(gate.shape[0])
    return torch.stack([gate.unflatten(0, (-1, block)), up.unflatten(0, (-1, block))], 1).flatten(0, 2)


def deinterleave(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `interleave`: views of gate [F, ...] and up [F, ...] as far as strides allow."""
    blocks = gate_up.unflatten(0, (-1, 2, gate_up_block(gate_up.shape[0] // 2)))
    return blocks[:, 0].flatten(0, 1), blocks[:, 1].flatten(0, 1)


class LayerNormMLP(nn.Module):
    """y = activation(norm(x) · fc1_weightᵀ + fc1_bias) · fc2_weightᵀ + fc2_bias.

    Parameters: layer_norm_weight, layer_norm_bias (LayerNorm only), fc1_weight [F or 2F, hidden_size] (gated activations have
    both halves), fc1_bias, fc2_weight [hidden_size, F], fc2_bias. activation: a name of `octavo.nn.te_arguments.ACTIVATIONS`,
    where "gelu" is Transformer Engine's, with the tanh. `return_bias` (of fc2) and `return_layernorm_output` are as in
    `LayerNormLinear`, and `output_layer_init_method` is the `init_method` of fc2. `checkpoint`: the first product is not kept
    for backward but made again, to the same bits; where `torch.compile` reads the layer, it decides what is kept.

    Raises:
        InputError: an argument or a value that this layer does not take, or `checkpoint` with `return_layernorm_output`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        checkpoint: bool = False,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        get_rng_state_tracker: Tracker | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **te_arguments: Any,
    ) -> None:
        super().__init__()
        check("LayerNormMLP", te_arguments, LayerNormMLP.__init__)
        check_norm(normalization)
        if checkpoint and return_layernorm_output:
            raise InputError(
                "LayerNormMLP(checkpoint=True, return_layernorm_output=True): the parts of the layer run one by one then. "
                "Leave one out, or wrap the layer in torch.utils.checkpoint."
            )
        activation = activation_of(activation)
        self.return_bias, self.return_layernorm_output, self.checkpoint = return_bias, return_layernorm_output, checkpoint
        self.init_methods, self.draws = (init_method, output_layer_init_method), Draws(get_rng_state_tracker)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.eps, self.normalization, self.activation = eps, normalization, activation
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        fc1_rows = ffn_hidden_size * (2 if is_gated(activation) else 1)
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
        matrices = ((self.fc1_weight, self.fc1_bias), (self.fc2_weight, self.fc2_bias))
        with self.draws():
            for (weight, bias), init_method in zip(matrices, self.init_methods, strict=True):
                if init_method is None:
                    init_linear_(weight, bias)
                else:
                    init_with_(init_method, weight, bias)

    @overload
    def forward(self, input: Tensor, is_first_microbatch: bool | None = ...) -> Tensor: ...

    @overload
    def forward(self, input: Stream, is_first_microbatch: bool | None = ...) -> tuple[Tensor, Tensor]: ...

    def forward(self, input: Tensor | Stream, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """input [..., hidden_size] → the same shape, without the residual.

        Of a `Stream` the residual stream with nothing left to be added, and that.
        """
        if not isinstance(input, Tensor):
            return self._of(*input, is_first_microbatch)
        normed = None
        if self.return_layernorm_output:
            normed = normalize(self.normalization, input, self.layer_norm_weight, self.layer_norm_bias, self.eps)
            normed = normed.to(compute_dtype(input))
            y = self._composed(normed, normed.dtype, is_first_microbatch)
        else:
            y = self._of(input, None, is_first_microbatch)[1]
        out: Tensor | tuple[Tensor, Tensor] = results(y, self.fc2_bias, normed, return_bias=self.return_bias)
        return out

    def _composed(self, normed: Tensor, dtype: torch.dtype, is_first_microbatch: bool | None) -> Tensor:
        """The two products and the activation between them, as separate operations."""
        hidden = product(normed, self.fc1_weight, self.fc1_bias, self.fc1_fp8_state, dtype, is_first_microbatch)
        activated = reference.activation(self.activation, hidden, gate_up_block(self.ffn_hidden_size))
        bias = None if self.return_bias else self.fc2_bias
        return product(activated, self.fc2_weight, bias, self.fc2_fp8_state, dtype, is_first_microbatch)

    def _of(self, input: Tensor, pending: Tensor | None, is_first_microbatch: bool | None) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(input)
        if torch.compiler.is_compiling():
            h = input if pending is None else input + pending
            normed = normalize(self.normalization, h, self.layer_norm_weight, self.layer_norm_bias, self.eps)
            return h, self._composed(normed, dtype, is_first_microbatch)
        fc1, fc2 = (
            fused.Linear(weight, bias, Products(state, weight, recipe_of(state, input.device), dtype, is_first_microbatch))
            for weight, bias, state in (
                (self.fc1_weight, self.fc1_bias, self.fc1_fp8_state),
                (self.fc2_weight, None if self.return_bias else self.fc2_bias, self.fc2_fp8_state),
            )
        )
        norm = fused.Norm(self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        block = gate_up_block(self.ffn_hidden_size)
        return fused.norm_mlp(input, pending, norm, fc1, fc2, self.activation, block, recompute=self.checkpoint)

    def extra_repr(self) -> str:
        """Shape and activation, for `print(model)`."""
        return f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, activation={self.activation}"
