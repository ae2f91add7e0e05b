"""LoRA adapters of stacked experts, one A and B per expert, and of the router.

    y = (W + scale · B · A) · x, for each expert        A [r, K], B [N, r]

As PEFT's for a stacked parameter (`target_parameters`), without dropout. Their input is the rows before the cast to FP8, in the
activations' dtype: one grouped product by A, then one by B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from octavo.collectives.tensor import TensorGroup
from octavo.kernels import gemm
from octavo.kernels.experts.gemm import grouped_mm, grouped_weight_mm
from octavo.kernels.experts.routes import TILE, Routes
from octavo.nn.lora import Adapter


class StackedAdapter(Adapter):
    """Adapters of stacked matrices [E · N, K], stacked alike: `lora_A` [E · r, K], `lora_B` [E · N, r]."""

    def __init__(
        self, count: int, in_features: int, rows: int, rank: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        nn.Module.__init__(self)
        self.lora_A = nn.Parameter(torch.empty(count * rank, in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(rows, rank, dtype=dtype, device=device))


class Pairs(NamedTuple):
    """The adapters of a stack in the dtype of products. a: [E, R, K]; b: [E, N, R], times the scale."""

    a: Tensor
    b: Tensor

    def reduced(self, x: Tensor, routes: Routes) -> Tensor:
        """x of each row [rows, K] · aᵀ of its expert, [rows, R]."""
        return grouped_mm((x, None), (self.a, None), routes, x.dtype)

    def add_(self, y: Tensor, reduced: Tensor, routes: Routes) -> None:
        """Add reduced · bᵀ of each row's expert to y [rows, N]."""
        y += grouped_mm((reduced, None), (self.b, None), routes, y.dtype)

    def of_result(self, dy: Tensor, reduced: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        """The gradients of `reduced` [rows, R] and, in float32 or float64, of b [E, N, R]."""
        d_reduced = grouped_mm((dy, None), (self.b.transpose(1, 2), None), routes, dy.dtype)
        return d_reduced, grouped_weight_mm((dy, None), (reduced, None), routes, _wide(dy))

    def of_a(self, d_reduced: Tensor, x: Tensor, routes: Routes) -> Tensor:
        """The gradient of a [E, R, K], in float32 or float64."""
        return grouped_weight_mm((d_reduced, None), (x, None), routes, _wide(x))

    def add_of_input_(self, dx: Tensor, d_reduced: Tensor, routes: Routes) -> None:
        """Add the gradient of the input to dx [rows, K]."""
        dx += grouped_mm((d_reduced, None), (self.a.transpose(1, 2), None), routes, dx.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class StackedAdapters(nn.Module):
    """The adapters of one stacked parameter; the module is named like the source's parameter.

    A rank holds the adapters of its experts. If ranks hold slices of every expert, a rank has rows of the first product's B and
    all of its A, and columns of the second product's A and all of its B.
    """

    tensor: TensorGroup | None = None
    """The ranks that hold other slices of every expert."""
    by_columns = False
    """True if this rank holds columns of the adapted weight."""

    def __init__(
        self, leaf: str, count: int, in_features: int, rows: int, rank: int, scale: float,
        *, dtype: torch.dtype, device: torch.device | str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank, self.scale, self._leaf = rank, scale, leaf
        self.add_module(leaf, StackedAdapter(count, in_features, rows, rank, dtype, device))

    @property
    def adapter(self) -> StackedAdapter:
        """The matrices."""
        adapter = self._modules[self._leaf]
        assert isinstance(adapter, StackedAdapter)
        return adapter

    @property
    def trained(self) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B of all experts."""
        return self.adapter.lora_A, self.adapter.lora_B

    def operands(self) -> tuple[Tensor, Tensor]:
        """A [E·r, K] and B [E·N, r] of this rank's E experts; gradients of replicated matrices are summed over tensor ranks."""
        a, b = (matrix.to_local() if isinstance(matrix, DTensor) else matrix for matrix in self.trained)
        if self.tensor is not None:
            whole = self.tensor.replicated(b if self.by_columns else a)
            assert whole is not None
            a, b = (a, whole) if self.by_columns else (whole, b)
        return a, b

    def pairs(self, a: Tensor, b: Tensor, dtype: torch.dtype, routes: Routes) -> Pairs:
        """A [E, r, K] and scale · B [E, N, r] of `operands` in `dtype`, with r padded by zeros for grouped products."""
        count, more = len(routes.ends), -self.rank % gemm.ALIGNMENT if routes.tile == TILE else 0
        a, b = a.to(dtype).unflatten(0, (count, -1)), (b * self.scale).to(dtype).unflatten(0, (count, -1))
        return Pairs(functional.pad(a, (0, 0, 0, more)), functional.pad(b, (0, more))) if more else Pairs(a, b)

    def gradients(self, d_a: Tensor, d_b: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `operands`, [E·r, K] and [E·N, r], from d_a [E, r, K] and d_b [E, N, r] of `pairs`, with r padded."""
        return d_a[:, : self.rank].flatten(0, 1), d_b[..., : self.rank].flatten(0, 1) * self.scale

    def extra_repr(self) -> str:
        """The scale, for `print(model)`."""
        return f"scale={self.scale:g}"


class RouterAdapters(nn.Module):
    """The adapter of a router's matrix [E, H]; the module is named as in the source."""

    tensor: TensorGroup | None = None
    """The ranks that route other tokens by the same adapter."""

    def __init__(
        self, leaf: str, in_features: int, rows: int, rank: int, scale: float,
        *, dtype: torch.dtype, device: torch.device | str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale, self._leaf = scale, leaf
        self.add_module(leaf, Adapter(in_features, rows, rank, dtype, device))

    @property
    def adapter(self) -> Adapter:
        """The matrices."""
        adapter = self._modules[self._leaf]
        assert isinstance(adapter, Adapter)
        return adapter

    def added(self, weight: Tensor) -> Tensor:
        """weight + scale · B · A [E, H], in the wider dtype of both: routers run in float32."""
        matrices: tuple[Tensor | None, ...] = self.adapter.lora_A, self.adapter.lora_B
        if self.tensor is not None:
            matrices = tuple(map(self.tensor.replicated, matrices))
        a, b = matrices
        assert a is not None
        assert b is not None
        with torch.autocast(weight.device.type, enabled=False):
            return weight + self.scale * (b @ a)

    def extra_repr(self) -> str:
        """The scale, for `print(model)`."""
        return f"scale={self.scale:g}"
