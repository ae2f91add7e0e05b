"""LoRA adapters of a matrix, or of the matrices that Octavo holds as one: each has its own A and B, as in PEFT.

    y + scale · B · A · dropout(x)        x [..., K], A [r, K], B [N, r]

Products run in the dtype of x, never in FP8 by history: B grows each step by its own size, and last step's scale would clip it.
The input is that of the FP8 layer before its cast, which the norm's or the activation's kernel stores beside the FP8 operand.

Adapters of one parameter are computed as one pair of matrices (`Joint`): the As below each other, and the Bs side by side, each
in the rows of its matrix and with zeros in those of the others. So the input is read once for all of them, and a product of few
columns adds to the frozen one's result in place. Dropout, which each adapter draws for itself, and compiled code have a product
for each adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.kernels import gemm

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


class Joint(NamedTuple):
    """The adapters of a parameter [N, K] as one pair, in the dtype of products. a: [R, K]; b: [N, R], times the scale."""

    a: Tensor
    b: Tensor

    def reduced(self, x: Tensor) -> Tensor:
        """x [M, K] · aᵀ, [M, R]."""
        return gemm.high_precision_mm(x, self.a.t(), x.dtype)

    def add_(self, y: Tensor, reduced: Tensor) -> None:
        """Add reduced · bᵀ to y [M, N]."""
        gemm.add_mm_(y, reduced, self.b.t())

    def gradients(self, dy: Tensor, x: Tensor, reduced: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of `reduced` [M, R], of a [R, K] and of b [N, R]; those of both matrices in float32, or float64."""
        wide = torch.promote_types(x.dtype, torch.float32)
        d_reduced = gemm.high_precision_mm(dy, self.b, x.dtype)
        d_a = gemm.high_precision_mm(d_reduced.t(), x, wide)
        return d_reduced, d_a, gemm.high_precision_mm(dy.t(), reduced, wide)


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

    @property
    def trained(self) -> list[Tensor]:
        """A and B of each adapter, in the order of `parts`."""
        return [matrix for name in self.rows if name in self._modules for matrix in self._modules[name].parameters()]  # type: ignore[union-attr]

    def joins(self) -> bool:
        """True if this call computes the adapters as one pair."""
        return not (torch.compiler.is_compiling() or (self.dropout and self.training))

    def joint(self, dtype: torch.dtype) -> Joint:
        """One pair of all adapters, for products in `dtype`."""
        matrices = self.trained
        if len(matrices) == 2 and len(self.lengths) == 1:
            a, b = matrices
            return Joint(a.to(dtype), (b * self.scale).to(dtype))
        a = torch.cat(matrices[::2]).to(dtype)
        b = a.new_zeros(sum(self.rows.values()), a.shape[0])
        for number, start, view in self._blocks(b):
            part = matrices[2 * number + 1][start : start + view.shape[0] * view.shape[1]]
            torch.mul(part.view(view.shape), self.scale, out=view)
        return Joint(a, b)

    def split(self, d_a: Tensor, d_b: Tensor) -> list[Tensor]:
        """The gradients of `trained`, from those of a joint pair, which are overwritten."""
        d_b.mul_(self.scale)
        matrices = self.trained
        if len(matrices) == 2 and len(self.lengths) == 1:
            return [d_a, d_b]
        of_b: list[list[Tensor]] = [[] for _ in matrices[::2]]
        for number, _, view in self._blocks(d_b):
            of_b[number].append(view.flatten(0, 1))
        of_a = d_a.split([a.shape[0] for a in matrices[::2]])
        parts = zip(of_a, of_b, strict=True)
        return [one for a, blocks in parts for one in (a, blocks[0] if len(blocks) == 1 else torch.cat(blocks))]

    def _blocks(self, joint: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Of a matrix [N, R] as `Joint.b`: an adapter's number, first row in its B, and the view [repeats, length, r] of it."""
        lengths = self.lengths if len(self.lengths) > 1 else (joint.shape[0],)
        blocks = joint.view(-1, sum(lengths), joint.shape[1])
        names = list(self.rows) if len(self.rows) == len(lengths) else list(self.rows) * len(lengths)
        several = len(self.rows) < len(lengths)  # one matrix has the rows of all parts, one part after the other
        numbers = {name: number for number, name in enumerate(name for name in self.rows if name in self._modules)}
        ranks = [a.shape[0] for a in self.trained[::2]]
        columns = [sum(ranks[:number]) for number in range(len(ranks))]
        first = 0
        for name, length in zip(names, lengths, strict=True):
            if name in numbers:
                own = numbers[name]
                start = blocks.shape[0] * first if several else 0
                yield own, start, blocks[:, first : first + length, columns[own] : columns[own] + ranks[own]]
            first += length

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
