"""LoRA adapters of a matrix, or of the matrices that Octavo holds as one: each has its own A and B, as in PEFT.

    y + scale · B · A · dropout(x)        x [..., K], A [r, K], B [N, r]

Products run in the dtype of x, never in FP8 by history: B grows each step by its own size, and last step's scale would clip it.
The input is that of the FP8 layer before its cast, which the norm's or the activation's kernel stores beside the FP8 operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

SUFFIXES = (".lora_A", ".lora_B")
"""The ends of the names of adapters' parameters."""


def is_adapter(name: str) -> bool:
    """True for the name of a parameter of an `Adapter`."""
    return name.endswith(SUFFIXES)


class Adapter(nn.Module):
    """A and B of one matrix [out_features, in_features]: `lora_A` [rank, in_features], `lora_B` [out_features, rank]."""

    def __init__(self, in_features: int, out_features: int, rank: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(out_features, rank, dtype=dtype, device=device))

    def extra_repr(self) -> str:
        """Shapes, for `print(model)`."""
        return f"rank={self.lora_A.shape[0]}, in_features={self.lora_A.shape[1]}, out_features={self.lora_B.shape[0]}"


class Adapters(nn.Module):
    """The adapters of one parameter, by the names of the source's matrices in it.

    Args:
        parts: name → rows of each matrix of the parameter, in the order of their rows, with and without adapter.
        adapted: the names of those with one.
        lengths: rows of each part in one repetition of the parameter's rows. As many as parts, or more where one matrix of the
            source has all parts one after the other.
        scale, dropout: as in `octavo.LoRA`.
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        adapted: Sequence[str],
        lengths: Sequence[int],
        *,
        in_features: int,
        rank: int,
        scale: float,
        dropout: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.rows, self.lengths, self.scale, self.dropout = dict(parts), tuple(lengths), scale, dropout
        for name in adapted:
            self.add_module(name, Adapter(in_features, parts[name], rank, dtype, device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] → what is added to the product [..., N], in the layout of its rows and the dtype of x."""
        deltas = [self._delta(name, rows, x) for name, rows in self.rows.items()]
        if len(self.lengths) == 1:
            return deltas[0]
        if len(deltas) == 1:
            repeated = deltas[0].shape[-1] // sum(self.lengths)
            deltas = list(deltas[0].split([length * repeated for length in self.lengths], -1))
        blocks = [delta.unflatten(-1, (-1, length)) for delta, length in zip(deltas, self.lengths, strict=True)]
        return torch.cat(blocks, -1).flatten(-2)

    def _delta(self, name: str, rows: int, x: Tensor) -> Tensor:
        adapter = self._modules.get(name)
        if adapter is None:
            return x.new_zeros(*x.shape[:-1], rows)
        assert isinstance(adapter, Adapter)
        a, b = adapter.lora_A.to(x.dtype), adapter.lora_B.to(x.dtype)
        return functional.linear(functional.linear(functional.dropout(x, self.dropout, self.training), a), b) * self.scale

    def extra_repr(self) -> str:
        """The scale, for `print(model)`."""
        return f"scale={self.scale:g}, dropout={self.dropout:g}"


def added(y: Tensor, layer: nn.Module, x: Tensor, name: str = "lora") -> Tensor:
    """The product y [..., N] of the input x [..., K] with the layer's adapters of this name, if any, in the dtype of y."""
    adapters = layer._modules.get(name)
    return y if adapters is None else y + adapters(x).to(y.dtype)
