"""LoRA adapters of one matrix, or of several that are fused in one parameter: each has a separate A and B, as in PEFT.

    y + scale · B · A · dropout(x)        x [..., K], A [r, K], B [N, r]

Products run in the dtype of x, never in FP8 with a delayed scale: B begins at 0, and early steps change it by about its
magnitude, so that the previous step's scale would clip it.
The input is that of the FP8 layer before its cast, which the norm's or the activation's kernel stores beside the FP8 operand.

Adapters of one parameter are computed as one pair of matrices (`Joint`): the As stacked, and the Bs side by side, each in its
matrix's rows and zero in other rows. The input is read once for all of them, and a product of few columns adds to the frozen
product's result in place. Under dropout, drawn for each adapter separately, and in compiled code each adapter has separate
products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.collectives.tensor import TensorGroup, sum_dtype
from octavo.kernels import gemm, low_rank
from octavo.nn.unrounded import unrounded_linear

SUFFIXES = (".lora_A", ".lora_B")
"""Suffixes of adapters' parameter names."""


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


class Joint(NamedTuple):
    """The adapters of a parameter [N, K] as one pair, in the dtype of products. a: [R, K]; b: [N, R], times the scale."""

    a: Tensor
    b: Tensor

    def reduced(self, x: Tensor) -> Tensor:
        """x [M, K] · aᵀ, [M, R]."""
        return _narrow_mm(x, self.a.t(), x.dtype)

    def add_(self, y: Tensor, reduced: Tensor) -> None:
        """Add reduced · bᵀ to y [M, N]."""
        gemm.add_mm_(y, reduced, self.b.t())

    def gradients(self, dy: Tensor, x: Tensor, reduced: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `reduced` [M, R], a [R, K] and b [N, R] from dy [M, N], x [M, K]; of a and b in float32 (float64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        d_reduced = _narrow_mm(dy, self.b, x.dtype)
        return d_reduced, _narrow_mm(d_reduced.t(), x, wide), _narrow_mm(dy.t(), reduced, wide)


def _narrow_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A memory-bound product: trials of algorithms would cost more at the start than they save."""
    return gemm.high_precision_mm(a, b, dtype, recurring=False)


class Adapters(nn.Module):
    """The adapters of one parameter, by the names of the source's matrices in it.

    Tensor-parallel ranks that hold rows of the parameter hold the same rows of each B, and each whole A; ranks that hold
    columns hold the same columns of A, and each whole B. Between the two products A · x [B, T, r] is gathered or reduced.

    Args:
        parts: name → rows of each matrix of the parameter, in the order of their rows, adapted or not.
        adapted: the names with an adapter.
        lengths: rows of each part in one repetition of the parameter's rows. As many as parts, or more where one matrix of the
            source has all parts one after the other.
        scale, dropout: as in `octavo.LoRA`.
    """

    tensor: TensorGroup | None = None
    """The ranks that hold other rows or columns of the parameter."""
    by_columns = False
    """True if those ranks hold columns."""
    shared_rows: Mapping[str, int] = {}
    """Name → rows of a B, the last, that other ranks of the group hold too."""

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
        self._adapted = [name for name in parts if name in adapted]
        length = sum(self.lengths)
        self._shape = sum(parts.values()) // length, length, [rank * number for number in range(len(self._adapted) + 1)]
        self._blocks = self._places()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] → the summand of the product [..., N], in the layout of its rows and the dtype of x."""
        reduced = self._reduced(x)
        leading = next(iter(reduced.values())).shape[:-1]
        deltas = [
            self._delta(name, reduced[name], x.dtype) if name in reduced else x.new_zeros(*leading, rows)
            for name, rows in self.rows.items()
        ]
        if len(self.lengths) == 1:
            return deltas[0]
        if len(deltas) == 1:
            repeated = deltas[0].shape[-1] // sum(self.lengths)
            deltas = list(deltas[0].split([length * repeated for length in self.lengths], -1))
        blocks = [delta.unflatten(-1, (-1, length)) for delta, length in zip(deltas, self.lengths, strict=True)]
        return torch.cat(blocks, -1).flatten(-2)

    @property
    def trained(self) -> list[Tensor]:
        """A and B of each adapter, in the order of `parts`."""
        found: list[Any] = []
        for name in self._adapted:
            parameters: Any = self._modules[name]._parameters  # type: ignore[union-attr]
            found += parameters["lora_A"], parameters["lora_B"]
        return found

    def joins(self) -> bool:
        """True if this call computes the adapters as one pair."""
        return self.tensor is None and not (torch.compiler.is_compiling() or (self.dropout and self.training))

    def joint(self, matrices: Sequence[Tensor], dtype: torch.dtype) -> Joint:
        """One pair of all adapters, for products in `dtype`; matrices: `trained`."""
        repeats, length, ends = self._shape
        rows = repeats * length
        runs = self._blocks or [low_rank.Run(0, 0, 0, rows)]
        if low_rank.packs(matrices, runs):
            return Joint(*low_rank.launch_pack(matrices, runs, rows, length if self._blocks else rows, self.scale, dtype))
        if self._blocks is None:
            a, b = matrices
            return Joint(a.to(dtype), (b * self.scale).to(dtype))
        a = torch.cat(list(matrices[::2])).to(dtype)
        b = a.new_zeros(repeats, length, ends[-1])
        for number, start, first, count in self._blocks:
            part = matrices[2 * number + 1][start : start + repeats * count]
            view = b[:, first : first + count, ends[number] : ends[number + 1]]
            torch.mul(part.view(view.shape), self.scale, out=view)
        return Joint(a, b.flatten(0, 1))

    def split(self, d_a: Tensor, d_b: Tensor) -> list[Tensor]:
        """The gradients of `trained`, from those of a joint pair, which are overwritten."""
        repeats, length, ends = self._shape
        if self._blocks is not None and low_rank.packs([d_b], self._blocks):
            of_each = low_rank.launch_unpack(d_b, len(self._adapted), self._blocks, length, self.scale)
            return [part for number, d_own in enumerate(of_each) for part in (d_a[ends[number] : ends[number + 1]], d_own)]
        d_b.mul_(self.scale)
        if self._blocks is None:
            return [d_a, d_b]
        of_b: list[list[Tensor]] = [[] for _ in self._adapted]
        blocks = d_b.view(repeats, length, ends[-1])
        for number, _, first, count in self._blocks:
            of_b[number].append(blocks[:, first : first + count, ends[number] : ends[number + 1]].reshape(repeats * count, -1))
        found: list[Tensor] = []
        for number, parts in enumerate(of_b):
            found += d_a[ends[number] : ends[number + 1]], parts[0] if len(parts) == 1 else torch.cat(parts)
        return found

    def _places(self) -> list[low_rank.Run] | None:
        """Blocks of `Joint.b` with a B, as runs of rows.

        None if one adapter covers all rows in order.
        """
        if len(self.lengths) == 1:
            return None
        several = len(self.rows) == 1  # one matrix has the rows of all parts, one part after the other
        names = list(self.rows) * (len(self.lengths) if several else 1)
        numbers, repeats = {name: number for number, name in enumerate(self._adapted)}, self._shape[0]
        found, first = [], 0
        for name, count in zip(names, self.lengths, strict=True):
            if name in numbers:
                found.append(low_rank.Run(numbers[name], repeats * first if several else 0, first, count))
            first += count
        return found

    def _reduced(self, x: Tensor) -> dict[str, Tensor]:
        """Name → A · dropout(x), of the tokens of the product's result."""
        found = {}
        for name in self.rows:
            adapter = self._modules.get(name)
            if isinstance(adapter, Adapter):
                a = adapter.lora_A if self.tensor is None or self.by_columns else self.tensor.replicated(adapter.lora_A)
                assert a is not None
                summand = self.tensor is not None and self.by_columns
                found[name] = _linear(self._dropped(x), a.to(x.dtype), sum_dtype(x.dtype) if summand else x.dtype)
        if self.tensor is None:
            return found
        every = torch.cat([*found.values()], -1)
        exchanged = self.tensor.scattered(every, x.dtype) if self.by_columns else self.tensor.gathered(every)
        parts = exchanged.split([part.shape[-1] for part in found.values()], -1)
        return dict(zip(found, parts, strict=True))

    def _dropped(self, x: Tensor) -> Tensor:
        if self.tensor is None or not self.training:
            return functional.dropout(x, self.dropout, self.training)
        return (self.tensor.dropped_columns if self.by_columns else self.tensor.dropped)(x, self.dropout)

    def _delta(self, name: str, reduced: Tensor, dtype: torch.dtype) -> Tensor:
        adapter = self._modules[name]
        assert isinstance(adapter, Adapter)
        b: Tensor | None = adapter.lora_B
        if self.tensor is not None:
            rows = self.shared_rows.get(name, 0)
            b = self.tensor.replicated(b) if self.by_columns else self.tensor.shared(adapter.lora_B, rows)
        assert b is not None
        return _linear(reduced, b.to(dtype), dtype) * self.scale

    def extra_repr(self) -> str:
        """The scale, for `print(model)`."""
        return f"scale={self.scale:g}, dropout={self.dropout:g}"


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ in `dtype`, a summand over ranks if the dtypes differ."""
    if x.dtype == weight.dtype == dtype:
        return functional.linear(x, weight)
    return unrounded_linear(x, weight, dtype)


def added(y: Tensor, layer: nn.Module, x: Tensor, name: str = "lora") -> Tensor:
    """The product y [..., N] of the input x [..., K] with the layer's adapters of this name, if any, in the dtype of y."""
    adapters = layer._modules.get(name)
    return y if adapters is None else y + adapters(x).to(y.dtype)
